"""The KV manager: which nodes keep their keys and values, and for how long."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from treewise.kv.contiguous import ContiguousPool
from treewise.kv.paged import PagedPool
from treewise.kv.pool import Copy, OutOfSlots, SlotPool, Slots
from treewise.tree import Forest, Node

POOLS = ("paged", "contiguous")


def make_pool(kind: str, num_slots: int, page_size: int) -> SlotPool:
    """Return an empty pool by name.

    Raises
    ------
    ValueError
        If `kind` is not a pool's name or the sizes do not fit it.
    """
    if kind == "paged":
        return PagedPool(num_slots, page_size)
    if kind == "contiguous":
        return ContiguousPool(num_slots)
    raise ValueError(f"pool: {kind!r} is not one of {', '.join(POOLS)}")


class KVManager:
    """Holds the forest and its slots together.

    A branch *holds* the node it ends in. A node that nobody holds and nothing hangs below is *idle*: when its branch
    was pruned its slots are freed at once; when its request ended it stays as a cached prefix until the room is
    needed, least recently used first.

    Parameters
    ----------
    forest : Forest
    pool : SlotPool
    enable_prefix_caching : bool
        Whether `match` looks for known prefixes and finished requests leave theirs behind.

    Attributes
    ----------
    num_evicted : int
        Tokens of cached prefixes that gave way so far.
    """

    def __init__(self, forest: Forest, pool: SlotPool, enable_prefix_caching: bool = True) -> None:
        self.forest = forest
        self.pool = pool
        self.enable_prefix_caching = enable_prefix_caching
        self.num_evicted = 0

    @property
    def num_slots(self) -> int:
        """Slots that tokens can have: the pool's without its scratch page."""
        return self.pool.num_slots - self.pool.page_size

    def num_evictable(self) -> int:
        """Return how many tokens of cached prefixes would make room (their last pages may be larger)."""
        return sum(len(self.pool.slots(node)) for node in self._evictable())

    def slots(self, node: Node) -> Slots:
        """Return the slots of `node`'s tokens, int32 [tokens]."""
        return self.pool.slots(node)

    def hold(self, node: Node) -> Node:
        """Count one more branch that ends in `node`."""
        node.holders += 1
        return node

    def match(self, tokens: Sequence[int]) -> Node | None:
        """Return the node where the longest known prefix of `tokens` ends, cutting one if need be.

        A prefix may be matched at any token and while its keys are still being computed. None when caching is off or
        nothing is known.
        """
        if not self.enable_prefix_caching:
            return None
        node, inside, _ = self.forest.match(tokens)
        return None if node is None else self.cut(node, inside)

    def cut(self, node: Node, at: int) -> Node:
        """Return a node that ends after the first `at` tokens of `node`; splits it unless `at` is its length."""
        if at == len(node.tokens):
            return node
        upper = self.forest.split(node, at)
        self.pool.split(upper, node)
        return upper

    def extend(self, node: Node, length: int) -> None:
        """Give the first `length` tokens of `node` slots, evicting idle cached prefixes if need be.

        Raises
        ------
        OutOfSlots
            If even an empty cache leaves too little room.
        """
        while True:
            try:
                return self.pool.extend(node, length)
            except OutOfSlots:
                if not self._evict(length - len(self.pool.slots(node))):
                    raise

    def drop(self, node: Node, keep: bool) -> None:
        """Undo one `hold`; an idle node stays as a cached prefix when `keep` is true, else it is freed at once."""
        node.holders -= 1
        while node.idle:
            parent = node.parent
            if keep and self.enable_prefix_caching and node.computed == len(self.pool.slots(node)) > 0:
                del node.tokens[node.computed :]  # what has no keys yet is worth nothing to others
                return
            self._remove(node)
            if parent is None:
                return
            node, keep = parent, True  # nobody pruned the ancestors: they are prefixes of their own

    def preempt(self, tips: Iterable[Node]) -> bool:
        """Free what only the branches ending in `tips` need; their nodes stay, to be computed again.

        Parameters
        ----------
        tips : iterable of Node
            Where the branches of a tree end, each as often as branches end there.

        Returns
        -------
        bool
            Whether there is more room now.
        """
        before = self.pool.num_free
        ending = Counter(tips)
        doomed: set[Node] = set()
        path = {node for tip in ending for node in self.forest.path(tip)}
        for node in sorted(path, key=lambda node: node.start, reverse=True):  # children first
            if node.holders == ending[node] and doomed.issuperset(node.children):
                doomed.add(node)
                self.pool.release(node)
                node.computed = 0
        return self.pool.num_free > before

    def take_copies(self) -> list[Copy]:
        """Return the moves of keys and values that must happen before the next forward, in order."""
        return self.pool.take_copies()

    def clear_cache(self) -> None:
        """Evict every idle cached prefix."""
        self._evict(self.num_slots + 1)

    def check_integrity(self) -> None:
        """Verify the forest, the pool, and that they agree.

        Raises
        ------
        AssertionError
            If an invariant is broken; this is a fault of ours, never of the user's input.
        """
        self.forest.check_integrity()
        self.pool.check_integrity(self.forest)
        for node in self.forest:
            length = len(self.pool.slots(node))
            assert node.computed <= length <= len(node.tokens), f"{node} has {length} slots"
            assert not node.idle or node.computed == len(node.tokens), f"{node} is idle and not a cached prefix"

    def _remove(self, node: Node) -> None:
        self.pool.release(node)
        self.forest.remove(node)

    def _evictable(self) -> Iterable[Node]:
        """Yield the nodes that would become idle if idle nodes were removed bottom-up."""
        held: set[Node] = set()
        nodes = list(self.forest)
        for node in reversed(nodes):
            if node.holders or node in held:
                if node.parent is not None:
                    held.add(node.parent)
            else:
                yield node

    def _evict(self, num_slots: int) -> bool:
        """Free at least `num_slots` slots from the least recently used idle nodes; whether any was freed.

        It looks at the whole forest, so that it frees a little more than is wanted and is called the less often.
        """
        idle = [(node.last_used, node.id, node) for node in self.forest if node.idle]
        heapq.heapify(idle)
        target = self.pool.num_free + max(num_slots, self.num_slots // 64)
        freed = bool(idle)
        while idle and self.pool.num_free < target:
            node = heapq.heappop(idle)[2]
            self.num_evicted += len(node.tokens)
            self._remove(node)
            if (parent := node.parent) is not None and parent.idle:
                heapq.heappush(idle, (parent.last_used, parent.id, parent))
        return freed
