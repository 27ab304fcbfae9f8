"""The KV manager: which nodes keep their keys and values, and for how long."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import numpy as np

from treewise.kv.contiguous import ContiguousPool
from treewise.kv.kept import Count, Kept, num_pages
from treewise.kv.paged import PagedPool
from treewise.kv.pool import Copy, OutOfSlots, SlotPool, Slots
from treewise.kv.usage import KVUsage
from treewise.tree import Forest, Node, common_prefix

Taken = TypeVar("Taken")

POOLS = ("paged", "contiguous")
SEALED = "\0"
"""Stands between a namespace and what decides on the keys that its sealed nodes keep."""


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


@dataclass
class CacheStatistics:
    """What the prefix cache was asked for and what it had.

    Attributes
    ----------
    queries, hits : int
        Prompts that were looked up, and those of which at least one token was known.
    query_tokens, hit_tokens : int
        Tokens of these prompts, and those of them that were known.
    evicted_tokens : int
        Cached tokens that gave way to others.
    """

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evicted_tokens: int = 0


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
    num_heads : int
        KV heads of each slot, which matters only where they keep different numbers of tokens.

    Attributes
    ----------
    statistics : CacheStatistics
    kept : dict of Node to Kept
        Sealed nodes whose layers hold some of their tokens only; the other nodes have a slot a token, in all layers.
    peak_slots : int
        The most slots in use so far, or since somebody set it to 0.
    """

    def __init__(self, forest: Forest, pool: SlotPool, enable_prefix_caching: bool = True, num_heads: int = 1) -> None:
        self.forest = forest
        self.pool = pool
        self.enable_prefix_caching = enable_prefix_caching
        self.num_heads = num_heads
        self.statistics = CacheStatistics()
        self.kept: dict[Node, Kept] = {}
        self.peak_slots = 0
        self._clock = count(1)

    @property
    def num_slots(self) -> int:
        """Slots that tokens can have: the pool's without its scratch page."""
        return self.pool.num_slots - self.pool.page_size

    def num_evictable(self) -> int:
        """Return how many tokens of cached prefixes would make room (their last pages may be larger)."""
        return sum(self._held(node) for node in self._evictable())

    def num_held(self, tips: Iterable[Node]) -> int:
        """Return how many slots lie on pages that the paths to `tips` have tokens in."""
        return self._num_held(self._above(tips))

    def usage(self, bytes_per_slot: int, bytes_beside: int = 0) -> KVUsage:
        """Tell what is in use, and what live branches need of it."""
        live = self._above(node for node in self.forest if node.holders)
        slots = self.num_slots - self.pool.num_free
        return KVUsage(slots, self._num_held(live), self._num_dense(live), bytes_per_slot, bytes_beside)

    def slots(self, node: Node, layer: int = 0, head: int | None = None) -> Slots:
        """Return the slots of the tokens of `node` that `layer` holds, int32 [tokens]; see `Kept.slots_from`.

        Those of all KV heads together or, given a `head`, of that one; see `heads`.
        """
        kept = self.kept.get(node)
        if kept is None:
            return self.numbered(self.pool.slots(node), layer, head)
        slots = kept.slots_from(layer)
        if head is not None and len(slots) > 1:
            return slots[head]
        assert len(slots) == 1, f"heads of layer {layer} of {node} have slots of their own"
        return self.numbered(slots[0], head=head)

    def numbered(self, slots: Slots, layer: int = 0, head: int | None = None) -> Slots:
        """Return where slots of a layer come among those of all layers or, given a head, of the single heads of all."""
        if layer:
            slots = slots + np.int32(layer * self.pool.num_slots)
        return slots if head is None else slots * np.int32(self.num_heads) + np.int32(head)

    def heads(self, kept: Iterable[Kept], layer: int) -> tuple[int | None, ...]:
        """Return which KV heads of `layer` are to be looked at by themselves, as in some of `kept` they differ.

        None, which stands for all of them together, if they do not.
        """
        return tuple(range(self.num_heads)) if any(each.heads_differ(layer) for each in kept) else (None,)

    def path_slots(self, tip: Node) -> Slots:
        """Return the slots of all tokens on the path to `tip`, int32; each layer holds all of them."""
        path = self.forest.path(tip)
        assert not self.kept or path[0] not in self.kept, f"{path[0]} has given up keys"
        return np.concatenate([self.pool.slots(node) for node in path])

    def hold(self, node: Node) -> Node:
        """Count one more branch that ends in `node`."""
        node.holders += 1
        return node

    def match(self, tokens: Sequence[int], namespace: str = "", most: int | None = None) -> Node | None:
        """Return the node where the longest known prefix of `tokens` ends, cutting one if need be.

        A prefix may be matched at any token and while its keys are still being computed, `most` tokens of it at most.
        None when caching is off or nothing is known in `namespace`.
        """
        if not self.enable_prefix_caching:
            return None
        node, inside, matched = self.forest.match(tokens[:most], namespace)
        self.statistics.queries += 1
        self.statistics.hits += matched > 0
        self.statistics.query_tokens += len(tokens)
        self.statistics.hit_tokens += matched
        return None if node is None else self.cut(node, inside)

    def match_whole(self, tokens: Sequence[int], namespace: str, key: str) -> Node | None:
        """Return the node that holds what was kept of just these tokens, see `seal`, if there is one.

        Only what it finds counts as a query of the cache: else the same tokens will be looked for by `match`.
        """
        if not self.enable_prefix_caching:
            return None
        node, _, matched = self.forest.match(tokens, namespace + SEALED + key)
        if node not in self.kept or not matched == len(tokens) == node.end:
            return None
        self.statistics.queries += 1
        self.statistics.hits += 1
        self.statistics.query_tokens += matched
        self.statistics.hit_tokens += matched
        return node

    def cut(self, node: Node, at: int) -> Node:
        """Return a node that ends after the first `at` tokens of `node`; splits it unless `at` is its length."""
        if at == len(node.tokens):
            return node
        upper = self.forest.split(node, at)
        self.pool.split(upper, node)
        return upper

    def prefix(self, tip: Node, length: int) -> Node:
        """Return the node in which the first `length` tokens of the path to `tip` end, cutting one if need be.

        A sealed node is not cut: what ends inside it begins a node of its own, with keys of its own, below the same
        one, or a path of its own where there is none above.
        """
        node = tip
        while node.start >= length:
            assert node.parent is not None, "a path starts at 0"
            node = node.parent
        if node.sealed and length < node.end and node.parent is not None:
            tokens = node.tokens[: length - node.start]
            for other in node.parent.children:
                if not other.sealed and other.tokens[: len(tokens)] == tokens:
                    return self.cut(other, len(tokens))
            return self.forest.add(node.parent, tokens)
        if node.sealed and length < node.end:
            tokens, namespace = node.tokens[:length], node.namespace.partition(SEALED)[0]
            known = self.match(tokens, namespace)
            start = 0 if known is None else known.end
            return known if known and start == length else self.forest.add(known, tokens[start:], namespace)
        return self.cut(node, length - node.start)

    def seal(self, tokens: Sequence[int], namespace: str, key: str = "", parent: Node | None = None) -> Node:
        """Return a new node for the whole path `tokens`, which will keep some of its keys only; see `keep`.

        Others find it by `match_whole` if there is a `key`, which says all else that what it keeps depends on; and only
        then it stays as a cached prefix. Given a `parent`, which is sealed, it stands for the part of a path below.
        """
        node = self.forest.add(parent, tokens, namespace + SEALED + key)
        node.sealed = True
        return node

    def keep(self, node: Node, counts: Sequence[Count], at_least: int = 0) -> Kept | None:
        """Give a sealed node slots for as many tokens as each layer keeps, in the place of those it has.

        Parameters
        ----------
        node : Node
        counts : sequence of Count
        at_least : int
            Slots that it gets even if it needs fewer.

        Returns
        -------
        Kept or None
            None if there is no room even without its own slots and cached prefixes: it has no keys at all then.
        """
        self.pool.shrink(node, 0)
        node.computed = 0
        self.forest.version += 1
        size = self.pool.page_size
        wanted = num_pages(counts, size) * size
        try:
            lent = self.lend(max(wanted, at_least))
        except OutOfSlots:
            return None
        kept = self.kept[node] = Kept.within(lent, counts, self.pool.num_slots, size)
        node.computed = len(node.tokens)
        return kept

    def release(self, node: Node) -> None:
        """Take back what a sealed node has kept."""
        self.take_back(self.kept.pop(node).lent)
        node.computed = 0
        self.forest.version += 1

    def extend(self, node: Node, length: int) -> None:
        """Give the first `length` tokens of `node` slots, evicting idle cached prefixes if need be.

        Raises
        ------
        OutOfSlots
            If even an empty cache leaves too little room.
        """
        self._with_room(lambda: self.pool.extend(node, length), length - len(self.pool.slots(node)))

    def append(self, nodes: Sequence[Node]) -> Slots:
        """Return the slot of the last token of each of `nodes`, int32 [nodes]; they may lack that one.

        Raises
        ------
        OutOfSlots
            If even an empty cache leaves too little room; some of the nodes may have got theirs.
        """
        return self._with_room(lambda: self.pool.append(nodes), len(nodes))

    def lend(self, num_slots: int) -> Slots:
        """Return at least `num_slots` slots that no node owns; see `SlotPool.lend`.

        Raises
        ------
        OutOfSlots
            If even an empty cache leaves too little room.
        """
        return self._with_room(lambda: self.pool.lend(num_slots), num_slots)

    def take_back(self, slots: Slots) -> None:
        """Take back what one call of `lend` gave."""
        self.pool.take_back(slots)

    def origins(self, slots: Slots) -> Slots:
        """Return where the keys of `slots` lie until the next forward; -1 stays."""
        return self.pool.origins(slots)

    def adopt(self, node: Node, keys: Slots) -> None:
        """Give the first tokens of `node` that have no keys those that lie at `keys`, see `SlotPool.origins`.

        Raises
        ------
        OutOfSlots
            If even an empty cache leaves too little room; nothing was changed then.
        """
        start, stop = node.computed, node.computed + len(keys)
        self.extend(node, stop)
        self.pool.move(keys, self.pool.slots(node)[start:stop])
        node.computed = stop

    def drop(self, tips: Sequence[Node], keep: int) -> None:
        """Undo one `hold` of each of `tips`, and let go of what nobody needs any more.

        A node that leads into a single other one from now on becomes one with it, so that a branch whose siblings were
        pruned stays one run of keys.

        Parameters
        ----------
        tips : sequence of Node
        keep : int
            What lies within the first `keep` tokens of a path stays as a cached prefix; what lies behind them is free
            at once.
        """
        for tip in tips:
            tip.holders -= 1
        gone: set[Node] = set()
        left: dict[Node, None] = {}  # what may have lost a holder or a child, in a fixed order
        for tip in tips:
            node: Node | None = tip
            while node is not None and node not in gone and node.idle and not self._keeps(node, keep):
                gone.add(node)
                left.pop(node, None)
                self._remove(node)
                node = node.parent
            if node is not None and node not in gone:
                left[node] = None
        for node in left:
            lone = not node.holders and len(node.children) == 1 and not node.sealed
            if lone and self.pool.join(node, node.children[0]):
                self.forest.join(node)

    def shorten(self, node: Node, length: int) -> None:
        """Take the tokens of `node` behind the first `length`, of which there is one at least, and free their slots."""
        self.pool.shrink(node, min(length, len(self.pool.slots(node))))
        del node.tokens[length:]
        node.computed = min(node.computed, length)
        self.forest.version += 1

    def forget(self, nodes: Iterable[Node]) -> None:
        """Take back the keys of `nodes` and of all below, none of which are sealed; they will be computed again."""
        stack = list(nodes)
        while stack:
            node = stack.pop()
            self.pool.shrink(node, 0)
            node.computed = 0
            stack += node.children
        self.forest.version += 1

    def preempt(self, tips: Iterable[Node]) -> bool:
        """Free what only the branches ending in `tips` need; their nodes stay, to be computed again.

        Parameters
        ----------
        tips : iterable of Node
            Where branches end, each as often as branches end there.

        Returns
        -------
        bool
            Whether there is more room now.
        """
        preemption = Preemption(self)
        for tip in tips:
            preemption.add(tip)
        return preemption.free(self.num_slots)

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
            if node.sealed:
                assert node.parent is None or node.parent.sealed, f"{node} has given up keys, and {node.parent} has not"
            if node in self.kept:
                assert node.sealed and not length and node.computed == len(node.tokens), f"{node} keeps too much"
                continue
            assert node.computed <= length <= len(node.tokens), f"{node} has {length} slots"
            assert not node.idle or node.computed == len(node.tokens), f"{node} is idle and not a cached prefix"
        assert self.kept.keys() <= set(self.forest), "a node that left the forest still keeps tokens"

    def _with_room(self, take: Callable[[], Taken], num_slots: int) -> Taken:
        """Return what `take` takes from the pool, evicting idle cached prefixes if need be."""
        while True:
            try:
                taken = take()
            except OutOfSlots:
                if not self._evict(num_slots):
                    raise
            else:
                self.peak_slots = max(self.peak_slots, self.num_slots - self.pool.num_free)
                return taken

    def _keeps(self, node: Node, keep: int) -> bool:
        """Make a cached prefix of the idle `node`, if that lies within the first `keep` tokens and has keys."""
        if not self.enable_prefix_caching:
            return False
        if node.sealed or self.kept:
            root = self.forest.path(node)[0]
            if root.sealed:  # what was computed behind keys that were given up is of no use to others
                return node in self.kept and node.end <= keep and not node.namespace.endswith(SEALED)
        if node.end > keep:
            if node.start < keep:
                self.cut(node, keep - node.start)  # its first part is looked at next
            return False
        if node.computed:
            self.pool.shrink(node, node.computed)
            del node.tokens[node.computed :]  # what has no keys yet is worth nothing to others
            node.last_used = next(self._clock)
        return node.computed > 0

    def _remove(self, node: Node) -> None:
        if node in self.kept:
            self.release(node)
        self.pool.shrink(node, 0)
        self.forest.remove(node)

    def _held(self, node: Node) -> int:
        """Return how many slots `node` holds, those of its last page that it does not use not always included."""
        kept = self.kept.get(node)
        return len(self.pool.slots(node) if kept is None else kept.lent)

    def _above(self, tips: Iterable[Node]) -> set[Node]:
        """Return the nodes on the paths to `tips`."""
        above: set[Node] = set()
        for tip in tips:
            node: Node | None = tip
            while node is not None and node not in above:
                above.add(node)
                node = node.parent
        return above

    def _num_held(self, nodes: set[Node]) -> int:
        return self.pool.num_held(nodes) + sum(len(self.kept[node].lent) for node in nodes & self.kept.keys())

    def _num_dense(self, live: set[Node]) -> int:
        """Return of how many tokens `live` nodes would have keys had none been given up.

        A sealed root stands for a whole path, which a dense cache would share with other paths as far as they agree.
        """
        roots = (node for node in live & self.kept.keys() if node.parent is None)
        sealed = sorted((node.namespace.partition(SEALED)[0], node.tokens) for node in roots)
        total = sum(node.computed for node in live if node not in self.kept or node.parent is not None)
        before: dict[str, list[int]] = {}
        for namespace, tokens in sealed:
            node, _, shared = self.forest.match(tokens, namespace)
            while node is not None and node not in live:
                shared = node.start
                node = node.parent
            if namespace in before:  # of those so far the last agrees with this one the longest
                shared = max(shared, common_prefix(before[namespace], tokens, 0))
            total += len(tokens) - shared
            before[namespace] = tokens
        return total

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
            self.statistics.evicted_tokens += len(node.tokens)
            self._remove(node)
            if (parent := node.parent) is not None and parent.idle:
                parent.last_used = max(parent.last_used, node.last_used)  # whoever read the child read it as well
                heapq.heappush(idle, (parent.last_used, parent.id, parent))
        return freed


class Preemption:
    """Takes keys from one branch after another, as many as are wanted: only those that no other branch needs.

    A branch loses the keys of its last tokens first, so that what it has left is of use when its turn comes again. Of
    use between two changes of the forest.

    Parameters
    ----------
    kv : KVManager
    """

    def __init__(self, kv: KVManager) -> None:
        self.kv = kv
        self._needed: dict[Node, int] = {}  # by how many branches and children, where that has changed
        self._spare: deque[Node] = deque()  # nodes that are not needed any more, children first

    def add(self, tip: Node, branches: int = 1) -> None:
        """Let `branches` branches that end in `tip` do without their keys."""
        node: Node | None = tip
        while node is not None:
            needed = self._needed[node] = self._needed.get(node, node.holders + len(node.children)) - branches
            if needed:
                break
            self._spare.append(node)
            node, branches = node.parent, 1

    def free(self, num_slots: int) -> bool:
        """Free `num_slots` slots or a few more, of the branches that were added first; whether any was freed."""
        pool = self.kv.pool
        before = pool.num_free
        target = before + max(num_slots, self.kv.num_slots // 64)
        while self._spare and (missing := target - pool.num_free) > 0:
            node = self._spare[0]
            if node in self.kv.kept:
                self.kv.release(node)
            left = max(0, len(pool.slots(node)) - missing) // pool.page_size * pool.page_size
            pool.shrink(node, left)
            node.computed = min(node.computed, left)
            if not left:
                self._spare.popleft()
        freed = pool.num_free > before
        self.kv.forest.version += freed
        return freed
