"""The forest: nodes, tokens, holders, fork, prune, paths; pure Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count


class Node:
    """A run of tokens that every path through it shares.

    A node grows only while it is a leaf with a single holder; a node that branches or is shared is frozen, and
    whoever goes on from it starts a child. So a node's tokens, once another path depends on them, never change.

    Attributes
    ----------
    id : int
        Unique within the forest, never reused.
    parent : Node or None
        ``None`` for a root.
    children : list of Node
        In order of creation.
    tokens : list of int
        Never empty.
    start : int
        Logical position of ``tokens[0]``: the number of tokens above this node.
    computed : int
        How many of the tokens, from the first, have their keys and values in the pool.
    holders : int
        How many live branches end here.
    last_used : int
        When a branch last let go of this node, counted in such events; the order of eviction.
    namespace : str
        Whose tree this is: prompts find prefixes of their own namespace only.
    sealed : bool
        Whether it stays as it is, though it may have a single holder: not all of its tokens have keys everywhere.
    """

    __slots__ = (
        "children",
        "computed",
        "holders",
        "id",
        "last_used",
        "namespace",
        "parent",
        "sealed",
        "start",
        "tokens",
    )

    def __init__(self, node_id: int, parent: Node | None, tokens: list[int], start: int, namespace: str) -> None:
        self.id = node_id
        self.parent = parent
        self.children: list[Node] = []
        self.tokens = tokens
        self.start = start
        self.computed = 0
        self.holders = 0
        self.last_used = 0
        self.namespace = namespace
        self.sealed = False

    @property
    def end(self) -> int:
        """Logical position after the last token."""
        return self.start + len(self.tokens)

    @property
    def idle(self) -> bool:
        """Whether nobody holds this node and nothing hangs below it."""
        return self.holders == 0 and not self.children

    def __repr__(self) -> str:
        return f"Node({self.id}, {self.start}:{self.end}, computed={self.computed}, holders={self.holders})"


class Forest:
    """All live trees and the prefix cache as one radix forest; a cached prefix is a node that nobody holds.

    Attributes
    ----------
    version : int
        Changes whenever a node comes, goes, is cut or joined, or loses its keys: everything but growth in place.

    Examples
    --------
    >>> forest = Forest()
    >>> root = forest.add(None, [1, 2, 3])
    >>> left, right = forest.add(root, [4]), forest.add(root, [5, 6])
    >>> forest.path_tokens(right)
    [1, 2, 3, 5, 6]
    >>> upper = forest.split(root, 2)
    >>> upper.tokens, root.tokens, forest.path_tokens(left)
    ([1, 2], [3], [1, 2, 3, 4])
    >>> forest.join(upper)
    >>> root.tokens
    [1, 2, 3]
    """

    def __init__(self) -> None:
        self.version = 0
        self._roots: dict[tuple[str, int], list[Node]] = {}  # by namespace and first token
        self._ids = count()

    @property
    def roots(self) -> list[Node]:
        """The nodes in which trees begin."""
        return list(chain.from_iterable(self._roots.values()))

    def add(self, parent: Node | None, tokens: Sequence[int], namespace: str = "") -> Node:
        """Start a new node below `parent`, or a new tree in `namespace` when `parent` is None.

        Raises
        ------
        ValueError
            If `tokens` is empty: a node is at least one token.
        """
        if not tokens:
            raise ValueError("tokens: a node holds at least one token")
        if parent is not None:
            namespace = parent.namespace
        node = Node(next(self._ids), parent, list(tokens), 0 if parent is None else parent.end, namespace)
        self._siblings(node).append(node)
        self.version += 1
        return node

    def extend(self, tip: Node | None, tokens: Sequence[int], namespace: str = "") -> Node:
        """Put `tokens` after `tip`: in place when its only holder asks, else in a new child.

        Returns
        -------
        Node
            The node that now ends in `tokens`. The caller moves its hold when this is not `tip`.
        """
        if tip is None or tip.children or tip.holders != 1 or tip.sealed:
            return self.add(tip, tokens, namespace)
        tip.tokens.extend(tokens)
        return tip

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` before its token `at`; the lower half stays `node`, with its children and holders.

        Returns
        -------
        Node
            The new upper half, the parent of `node` from now on.

        Raises
        ------
        ValueError
            If `at` does not lie strictly inside the node, or the node is sealed.
        """
        if not 0 < at < len(node.tokens):
            raise ValueError(f"at: a node of {len(node.tokens)} tokens cannot be cut before token {at}")
        if node.sealed:
            raise ValueError(f"node: {node} is sealed")
        upper = Node(next(self._ids), node.parent, node.tokens[:at], node.start, node.namespace)
        upper.computed = min(node.computed, at)
        upper.last_used = node.last_used
        siblings = self._siblings(node)
        siblings[siblings.index(node)] = upper
        upper.children.append(node)
        node.parent = upper
        node.tokens = node.tokens[at:]
        node.start += at
        node.computed -= upper.computed
        self.version += 1
        return upper

    def join(self, upper: Node) -> None:
        """Undo `split`: put the tokens of `upper`, which nobody holds, in front of its only child's.

        Raises
        ------
        ValueError
            If somebody holds the node, it has not exactly one child, or it is sealed.
        """
        if upper.holders or len(upper.children) != 1 or upper.sealed:
            raise ValueError(f"upper: {upper} does not end in its only child alone")
        [node] = upper.children
        siblings = self._siblings(upper)
        siblings[siblings.index(upper)] = node
        node.parent = upper.parent
        upper.tokens += node.tokens  # the upper part may be long, what follows it seldom is
        node.tokens = upper.tokens
        node.start = upper.start
        node.computed += upper.computed
        node.last_used = max(node.last_used, upper.last_used)
        self.version += 1

    def move(self, node: Node, parent: Node) -> None:
        """Let `node`, with all below it, hang below `parent` from now on.

        Raises
        ------
        ValueError
            If the path to `parent` is not as long as that to `node` was.
        """
        if parent.end != node.start:
            raise ValueError(f"parent: {node} cannot follow {parent}")
        self._take_out(node)
        node.parent = parent
        parent.children.append(node)
        below = [node]
        for each in below:
            each.namespace = parent.namespace
            below += each.children
        self.version += 1

    def remove(self, node: Node) -> None:
        """Take an idle node out of the forest.

        Raises
        ------
        ValueError
            If somebody holds the node or it has children.
        """
        if not node.idle:
            raise ValueError(f"node: {node} is still in use")
        self._take_out(node)
        self.version += 1

    def path(self, tip: Node | None) -> list[Node]:
        """Return the nodes from the root down to `tip`."""
        nodes = []
        while tip is not None:
            nodes.append(tip)
            tip = tip.parent
        return nodes[::-1]

    def path_tokens(self, tip: Node | None) -> list[int]:
        """Return all tokens from the root down to the end of `tip`."""
        return [token for node in self.path(tip) for token in node.tokens]

    def match(self, tokens: Sequence[int], namespace: str = "") -> tuple[Node | None, int, int]:
        """Walk down as far as `tokens` agree with the trees of `namespace`.

        Returns
        -------
        node : Node or None
            The last node reached, None when not even the first token is known.
        inside : int
            How many tokens of `node` agree (all of them, or the place to split at).
        matched : int
            How many of `tokens` agree in all.
        """
        node: Node | None = None
        inside = matched = 0
        siblings = self._roots.get((namespace, tokens[0]), []) if tokens else []
        while matched < len(tokens):
            # Two branches may have decoded the same token apart, so several children can agree: take the longest.
            best, common = None, 0
            for child in siblings:
                shared = common_prefix(child.tokens, tokens, matched)
                if shared > common:
                    best, common = child, shared
            if best is None:
                break
            node, inside, matched = best, common, matched + common
            if inside < len(best.tokens):
                break
            siblings = best.children
        return node, inside, matched

    def __iter__(self) -> Iterator[Node]:
        """Yield every node, parents first."""
        stack = self.roots[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def check_integrity(self) -> None:
        """Verify links, positions and counts of every node.

        Raises
        ------
        AssertionError
            If an invariant of the forest is broken; this is a fault of ours, never of the user's input.
        """
        seen: set[int] = set()
        for node in self:
            assert node.id not in seen, f"{node} is reached twice"
            seen.add(node.id)
            assert node.tokens, f"{node} is empty"
            assert 0 <= node.computed <= len(node.tokens), f"{node} has computed more than it holds"
            assert node.holders >= 0, f"{node} was dropped more often than held"
            assert node.start == (0 if node.parent is None else node.parent.end), f"{node} starts at a wrong position"
            for child in node.children:
                assert child.parent is node, f"{child} does not know its parent {node}"
                assert child.namespace == node.namespace, f"{child} left the namespace of {node}"
                assert child.computed == 0 or node.computed == len(node.tokens), f"{child} is computed before {node}"

    def _take_out(self, node: Node) -> None:
        siblings = self._siblings(node)
        siblings.remove(node)
        if not siblings and node.parent is None:
            del self._roots[node.namespace, node.tokens[0]]

    def _siblings(self, node: Node) -> list[Node]:
        if node.parent is not None:
            return node.parent.children
        return self._roots.setdefault((node.namespace, node.tokens[0]), [])


def common_prefix(run: Sequence[int], tokens: Sequence[int], offset: int) -> int:
    """Return how many tokens of `run`, from its first, are those of `tokens` from `offset` on."""
    if run[0] != tokens[offset]:  # nearly always, where one out of many siblings is looked for
        return 0
    limit = min(len(run), len(tokens) - offset)
    if run[:limit] == tokens[offset : offset + limit]:
        return limit
    return next(i for i in range(limit) if run[i] != tokens[offset + i])
