"""Token trees: what a drafter guesses, as arrays; pure NumPy."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from treewise.config import MAX_TREE_SIZE
from treewise.kv import Slots
from treewise.replay import drafted_parents

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Form:
    """What follows from the parents of a tree alone: worked out when it is asked for, once for all trees of one form.

    Parameters
    ----------
    parents : list of int
        An earlier node, or -1.
    """

    def __init__(self, parents: list[int]) -> None:
        self.parents = parents

    @cached_property
    def depths(self) -> Ints:
        """How many nodes lead to each, itself included."""
        depths: list[int] = []
        for above in self.parents:
            depths.append(1 if above < 0 else depths[above] + 1)
        return _fixed(depths)

    @cached_property
    def depth(self) -> int:
        """The largest of them."""
        return int(self.depths.max(initial=0))

    @cached_property
    def sizes(self) -> Ints:
        """How many nodes stand below each, itself included."""
        sizes = [1] * len(self.parents)
        for node in range(len(sizes) - 1, -1, -1):
            if (above := self.parents[node]) >= 0:
                sizes[above] += sizes[node]
        return _fixed(sizes)

    @cached_property
    def children(self) -> list[list[int]]:
        """The nodes at the top, then those right below each node."""
        children: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for node, above in enumerate(self.parents):
            children[1 + above].append(node)
        return children

    @cached_property
    def depth_first(self) -> Ints | None:
        """The nodes, each right before all that is below it; None if that is how they come."""
        order: list[int] = []
        stack = self.children[0][::-1]
        while stack:
            order.append(node := stack.pop())
            stack += self.children[1 + node][::-1]
        return None if order == list(range(len(order))) else _fixed(order)


def _fixed(numbers: list[int]) -> Ints:
    array = np.array(numbers, np.int64)
    array.flags.writeable = False  # many trees have it
    return array


@lru_cache(maxsize=1024)
def _form(parents: bytes) -> Form:
    """Return the form of a tree with these int64 parents."""
    return Form(np.frombuffer(parents, np.int64).tolist())


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Guesses of what follows a path: each node is a token, a path down from the top a text.

    Attributes
    ----------
    tokens : int64 [nodes]
    parents : int64 [nodes]
        An earlier node, or -1: right behind the path.
    probabilities : float64 [nodes]
        How likely the drafter thinks each token is, given that all above it are right.
    slots : int32 [nodes] or None
        Where the drafter has keys of its own for nodes, lent by `Step.lend`, where the model's go too; -1 is anywhere.

    Examples
    --------
    >>> tree = TokenTree.of([7, 8, 9], [-1, 0, -1], [0.5, 0.9, 0.25])
    >>> tree.depths.tolist(), tree.reach.tolist()
    ([1, 2, 1], [0.5, 0.45, 0.25])
    >>> tree.accepted([7, 8, 3, 5])  # the choice behind the path, then those behind each node
    [0, 1]
    """

    tokens: Ints
    parents: Ints
    probabilities: Floats
    slots: Slots | None = None

    @classmethod
    def of(
        cls, tokens: Sequence[int] | Ints, parents: Sequence[int] | Ints, probabilities: Sequence[float] | None = None
    ) -> TokenTree:
        """Return the tree of these nodes.

        Raises
        ------
        ValueError
            If the lengths differ or a node comes before its parent.
        """
        above = np.asarray(parents, np.int64).reshape(-1)
        own = np.asarray(tokens, np.int64).reshape(-1)
        if probabilities is None:
            probabilities = [1.0] * len(own)
        likely = np.asarray(probabilities, np.float64).reshape(-1)
        if not len(own) == len(above) == len(likely):
            raise ValueError(f"parents: {len(above)} parents and {len(likely)} probabilities for {len(own)} tokens")
        if ((above < -1) | (above >= np.arange(len(above)))).any():
            raise ValueError("parents: a node comes before its parent")
        return cls(own, above, likely)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def form(self) -> Form:
        """What follows from the parents alone."""
        return _form(self.parents.tobytes())

    @property
    def depths(self) -> Ints:
        """How many tokens lead to each node, itself included."""
        return self.form.depths

    @property
    def sizes(self) -> Ints:
        """How many nodes stand below each node, itself included."""
        return self.form.sizes

    @cached_property
    def reach(self) -> Floats:
        """How likely each node and all above it are right; never more than for its parent."""
        reach: list[float] = np.minimum(self.probabilities, 1.0).tolist()
        for node, above in enumerate(self.form.parents):
            if above >= 0:
                reach[node] *= reach[above]
        return np.array(reach)

    @cached_property
    def by_reach(self) -> Ints:
        """The nodes, those most likely to be right first; of equal ones the earlier, so that parents come first."""
        return np.argsort(-self.reach, kind="stable")

    def best(self, size: int, room: int | None = None) -> TokenTree:
        """Return the part of `size` nodes that is most likely right, no more than `room` tokens deep."""
        if len(self) <= size and (room is None or len(self) <= room or self.form.depth <= room):
            return self
        keep = np.ones(len(self), bool) if room is None else self.depths <= room
        order = self.by_reach
        return self.take(np.sort(order[keep[order]][:size]))

    def take(self, nodes: Ints) -> TokenTree:
        """Return the tree of some nodes, in ascending order, with all above them."""
        if len(nodes) == len(self):
            return self
        place = np.full(len(self) + 1, -1)  # the last is for the parent -1
        place[nodes] = np.arange(len(nodes))
        slots = None if self.slots is None else self.slots[nodes]
        return TokenTree(self.tokens[nodes], place[self.parents[nodes]], self.probabilities[nodes], slots)

    def depth_first(self) -> TokenTree:
        """Return the tree with each node right before all that is below it."""
        order = self.form.depth_first
        if order is None:
            return self
        place = np.full(len(self) + 1, -1)  # the last is for the parent -1
        place[order] = np.arange(len(self))
        slots = None if self.slots is None else self.slots[order]
        return TokenTree(self.tokens[order], place[self.parents[order]], self.probabilities[order], slots)

    def path(self, node: int) -> list[int]:
        """Return the tokens that lead to `node`, its own last."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return tokens[::-1]

    def accepted(self, choices: Sequence[int]) -> list[int]:
        """Return the nodes that agree with what was chosen, from the top.

        Parameters
        ----------
        choices : sequence of int, [1 + nodes]
            The token that follows the path, then the one that follows each node, as plain decoding chooses it.
        """
        tokens: list[int] = self.tokens.tolist()
        children = self.form.children
        nodes: list[int] = []
        here: int | None = -1
        while here is not None:
            nodes.append(here)
            chosen = choices[1 + here]
            here = next((node for node in children[1 + here] if tokens[node] == chosen), None)
        return nodes[1:]


EMPTY = TokenTree.of([], [])
"""No guess at all."""


@dataclass(frozen=True)
class Topology:
    """The shape of token trees: paths of ranks, such as ``(0, 2)``, the third-best token after the best one.

    Parameters
    ----------
    paths : sequence of sequences of int
        The rank of the token at each depth, for every node; one after the path that it extends by a rank.

    Raises
    ------
    ValueError
        If a path is empty, comes too early or twice, or there are more than `MAX_TREE_SIZE`.

    Examples
    --------
    >>> Topology([[0], [1], [0, 0]]).fill([[5, 6], [7, 8]]).tokens.tolist()
    [5, 6, 7]
    """

    paths: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if len(self.paths) > MAX_TREE_SIZE:
            raise ValueError(f"paths: {len(self.paths)} nodes are more than {MAX_TREE_SIZE}")
        if len(set(map(tuple, self.paths))) < len(self.paths):
            raise ValueError("paths: one is named twice")
        if any(rank < 0 for path in self.paths for rank in path):
            raise ValueError("paths: a rank is at least 0")
        self.parents  # noqa: B018  checks them

    @cached_property
    def parents(self) -> list[int]:
        """Parent of each node, -1 at the top."""
        return drafted_parents(self.paths)

    @property
    def depth(self) -> int:
        """How many tokens the longest path has."""
        return max(map(len, self.paths), default=0)

    @property
    def width(self) -> int:
        """How many tokens it wants at a place."""
        return 1 + max((rank for path in self.paths for rank in path), default=-1)

    def check(self, depth: int, width: int) -> None:
        """Refuse candidates that do not suffice.

        Raises
        ------
        ValueError
            If there are fewer than `depth` places or `width` tokens at each.
        """
        if self.depth > depth:
            raise ValueError(f"topology: its paths have {self.depth} tokens, but there are only {depth} heads")
        if self.width > width:
            raise ValueError(f"topology: it wants {self.width} tokens at a place, but there are only {width}")

    def fill(
        self,
        candidates: Sequence[Sequence[int]] | Ints,
        probabilities: Sequence[Sequence[float]] | Floats | None = None,
    ) -> TokenTree:
        """Return the tree with the tokens that stand at its ranks, where these do not depend on each other.

        Parameters
        ----------
        candidates : int [depth, width]
            The likeliest tokens at each depth, the best first.
        probabilities : float [depth, width], optional

        Raises
        ------
        ValueError
            See `check`.
        """
        tokens = np.asarray(candidates, np.int64)
        self.check(*tokens.shape)
        depths = [len(path) - 1 for path in self.paths]
        ranks = [path[-1] for path in self.paths]
        likely = None if probabilities is None else np.asarray(probabilities, np.float64)[depths, ranks]
        return TokenTree.of(tokens[depths, ranks], self.parents, None if likely is None else list(likely))


def best_first(
    candidates: Sequence[Sequence[int]] | Ints, probabilities: Sequence[Sequence[float]] | Floats, size: int
) -> TokenTree:
    """Return the `size` likeliest nodes where the tokens of a place do not depend on those before, as heads guess them.

    Parameters
    ----------
    candidates : int [depth, width]
        The likeliest tokens at each depth, the best first.
    probabilities : float [depth, width]
    size : int

    Notes
    -----
    The optimal tree of Sequoia (Chen et al., 2024) and OPT-Tree: with its parent, a node's rank and depth are all that
    its probability depends on, so the best of the open ones is next.

    Examples
    --------
    >>> best_first([[5, 6], [7, 8]], [[0.6, 0.3], [0.9, 0.1]], 4).tokens.tolist()
    [5, 7, 6, 7]
    """
    tokens = np.asarray(candidates, np.int64)
    likely = np.asarray(probabilities, np.float64)
    depth, width = likely.shape
    chosen: list[tuple[int, int, float]] = []  # token, parent, probability
    # The open ones: how likely, the parent, its depth, the rank.
    heap: list[tuple[float, int, int, int]] = [(-float(likely[0, 0]), -1, 0, 0)] if depth and width else []
    while heap and len(chosen) < size:
        cost, above, level, rank = heapq.heappop(heap)
        own = float(likely[level, rank])
        node = len(chosen)
        chosen.append((int(tokens[level, rank]), above, own))
        if rank + 1 < width and own > 0:
            heapq.heappush(heap, (cost / own * float(likely[level, rank + 1]), above, level, rank + 1))
        if level + 1 < depth:
            heapq.heappush(heap, (cost * float(likely[level + 1, 0]), node, level + 1, 0))
    if not chosen:
        return EMPTY
    own_tokens, parents, odds = zip(*chosen, strict=True)
    return TokenTree.of(own_tokens, parents, odds)
