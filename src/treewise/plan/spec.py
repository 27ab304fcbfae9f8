"""What a plan is made for: a tree of tokens and the queries that look up it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[Any]  # of whole numbers


class TreeSpec:
    """A tree (or forest) of tokens and the queries that look up it.

    Parameters
    ----------
    parent : array_like of int, [nodes]
        Parent of each node, -1 for a root; parents come before their children.
    length : array_like of int, [nodes]
        Tokens that each node holds; 0 for a node that is still empty, such as the tip of a fresh fork.
    query_node : array_like of int, [queries]
        The node at which each query sits. It sees that node's tokens up to itself and all tokens of its ancestors.
    query_offset : array_like of int, [queries], optional
        The token of its node at which each query sits: a prompt chunk is one node with a query at each of its last
        tokens. -1 stands before the node's first token. Default: the node's last token.
    position : array_like of int, [tokens], optional
        Logical position of each token, nodes in order; only windows read it. Default: tokens above it on its path.
    below : array_like of int, [nodes], optional
        How many nodes stand below each, for nodes in depth-first order: these follow it at once. That spares plans the
        search for such an order. Default: nodes are in any order, parents before their children.

    Raises
    ------
    ValueError
        If an array has the wrong length or an entry that does not fit the others.

    Examples
    --------
    A prompt of 4,000 tokens with two branches of 200:

    >>> tree = TreeSpec(parent=[-1, 0, 0], length=[4000, 200, 200], query_node=[1, 2])
    >>> tree.num_tokens, tree.num_queries
    (4400, 2)
    """

    def __init__(
        self,
        parent: npt.ArrayLike,
        length: npt.ArrayLike,
        query_node: npt.ArrayLike,
        query_offset: npt.ArrayLike | None = None,
        position: npt.ArrayLike | None = None,
        below: npt.ArrayLike | None = None,
    ) -> None:
        self.parent = integers("parent", parent)
        self.num_nodes = len(self.parent)
        self.length = integers("length", length, self.num_nodes, "one a node")
        self.query_node = integers("query_node", query_node)
        self.num_queries = len(self.query_node)
        nodes = np.arange(self.num_nodes)
        if not self.num_nodes or not self.num_queries:
            raise ValueError("TreeSpec needs at least one node in parent and one query in query_node")
        check("parent", self.parent, (self.parent >= -1) & (self.parent < nodes), "be -1 or an earlier node")
        check("length", self.length, self.length >= 0, "be at least 0")
        check(
            "query_node",
            self.query_node,
            (self.query_node >= 0) & (self.query_node < self.num_nodes),
            f"be a node, 0 to {self.num_nodes - 1}",
        )
        own = self.length[self.query_node]
        if query_offset is None:
            self.query_offset = own - 1
        else:
            self.query_offset = integers("query_offset", query_offset, self.num_queries, "one a query")
            inside = (self.query_offset >= -1) & (self.query_offset < own)
            check("query_offset", self.query_offset, inside, "be a token of its node, or -1 for before its first")
        self.num_tokens = int(self.length.sum())
        self.position = None
        if position is not None:
            self.position = integers("position", position, self.num_tokens, "one a token")
            check("position", self.position, self.position >= 0, "be at least 0")
        self.below = None
        if below is not None:
            self.below = integers("below", below, self.num_nodes, "one a node")
            self._check_below(self.below, nodes)

    def _check_below(self, below: Ints, nodes: Ints) -> None:
        """Subtrees of these sizes lie within each other and hold what their sizes say: so they are whole ranges."""
        above = np.where(self.parent < 0, self.num_nodes, self.parent)
        held = np.bincount(above, weights=below + 1, minlength=self.num_nodes)[:-1]
        ends = np.append(nodes + below, self.num_nodes - 1)
        right = (below == held) & (ends[:-1] <= ends[above])
        check("below", below, right, "count the nodes below, and nodes must come depth first")


def integers(name: str, values: npt.ArrayLike, count: int | None = None, what: str = "") -> npt.NDArray[np.int64]:
    """Read a flat list of whole numbers, `count` of them."""
    return whole_numbers(name, values, count, what).astype(np.int64, copy=False)


def whole_numbers(name: str, values: npt.ArrayLike, count: int | None = None, what: str = "") -> Ints:
    """Read a flat list of whole numbers, `count` of them, of whatever type they are."""
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be a flat list of whole numbers, not {array.dtype} of shape {array.shape}")
    if count is not None and len(array) != count:
        raise ValueError(f"{name} must hold {count} entries, {what}; it holds {len(array)}")
    return array


def check(name: str, values: Ints, right: npt.NDArray[np.bool_], rule: str) -> None:
    """Raise ValueError at the first value that is not right."""
    if not right.all():
        wrong = int(np.argmin(right))
        raise ValueError(f"{name}[{wrong}] is {values[wrong]}; it must {rule}")
