"""Pools and the KV manager, on a pretended key tensor that remembers which token was stored in which slot."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from treewise.kv import ContiguousPool, KVManager, OutOfSlots, PagedPool, Preemption, make_pool
from treewise.tree import Forest, Node

POOLS = [("paged", 1), ("paged", 16), ("paged", 32), ("contiguous", 1)]


class Keys:
    """Stands in for the key tensor: slot -> (token, position)."""

    def __init__(self, kv: KVManager) -> None:
        self.kv = kv
        self.stored = np.full((kv.pool.num_slots, 2), -1)

    def compute(self, node: Node) -> None:
        self.kv.extend(node, len(node.tokens))
        self.copy()
        new = np.arange(node.computed, len(node.tokens))
        if isinstance(self.kv.pool, PagedPool):
            pages = self.kv.slots(node)[new] // self.kv.pool.page_size
            assert (self.kv.pool.holders_of_page(pages) == 1).all(), "a page with two holders is written"
        assert not np.isin(self.kv.slots(node)[new], self.kv.pool.scratch_slot).any()
        self.stored[self.kv.slots(node)[new], 0] = np.asarray(node.tokens)[new]
        self.stored[self.kv.slots(node)[new], 1] = node.start + new
        node.computed = len(node.tokens)

    def copy(self) -> None:
        for copy in self.kv.take_copies():
            self.stored[copy.target] = self.stored[copy.source]

    def check(self) -> None:
        self.copy()
        for node in self.kv.forest:
            held = self.stored[self.kv.slots(node)[: node.computed]]
            assert held[:, 0].tolist() == node.tokens[: node.computed]
            assert held[:, 1].tolist() == list(range(node.start, node.start + node.computed))


def manager(pool: str, page_size: int, num_slots: int, **options: bool) -> KVManager:
    return KVManager(Forest(), make_pool(pool, num_slots, page_size), **options)


@pytest.mark.parametrize(("pool", "page_size"), POOLS)
class TestPools:
    def test_fork_in_mid_page_leaves_every_branch_its_own_keys(self, pool, page_size):
        """Four branches from a torn page, growing at different speeds, and a fifth that takes the trunk on."""
        kv = manager(pool, page_size, 1024)
        keys = Keys(kv)
        trunk = kv.hold(kv.forest.add(None, list(range(page_size + 3))))
        keys.compute(trunk)
        branches = [kv.hold(kv.forest.add(trunk, [100 * i])) for i in range(1, 5)]
        for step in range(40):
            for i, branch in enumerate(branches):
                if step % (i + 1) == 0:
                    branch.tokens.append(1000 * i + step)
                    keys.compute(branch)
            keys.check()
            kv.check_integrity()
        for node in [*branches, trunk]:
            kv.drop([node], keep=0)
        assert kv.pool.num_free == kv.num_slots and not list(kv.forest)

    def test_cut_inside_a_page_copies_less_than_a_page_when_the_lower_half_grows(self, pool, page_size):
        kv = manager(pool, page_size, 1024)
        keys = Keys(kv)
        node = kv.hold(kv.forest.add(None, list(range(40))))
        keys.compute(node)
        upper = kv.cut(node, 35)
        kv.check_integrity()
        other = kv.hold(kv.forest.add(upper, [7, 8, 9]))
        keys.compute(other)
        node.tokens += [50, 51, 52]
        before = kv.pool.slots(node).copy()
        kv.extend(node, len(node.tokens))
        moved = int((kv.pool.slots(node)[: len(before)] != before).sum())
        assert moved < max(page_size, len(before) + 1)
        keys.compute(node)
        keys.check()
        kv.check_integrity()

    def test_out_of_slots_changes_nothing(self, pool, page_size):
        kv = manager(pool, page_size, 5 * page_size + 60)
        keys = Keys(kv)
        node = kv.hold(kv.forest.add(None, list(range(40))))
        keys.compute(node)
        free = kv.pool.num_free
        big = kv.hold(kv.forest.add(None, list(range(100, 100 + free + 1))))
        with pytest.raises(OutOfSlots):
            kv.extend(big, len(big.tokens))
        assert kv.pool.num_free == free and len(kv.slots(big)) == 0
        kv.check_integrity()
        keys.check()

    def test_a_full_pool_can_be_filled_to_the_last_slot(self, pool, page_size):
        kv = manager(pool, page_size, 8 * page_size + 32)
        keys = Keys(kv)
        first = kv.hold(kv.forest.add(None, [1] * page_size))
        keys.compute(first)
        second = kv.hold(kv.forest.add(None, [2] * page_size))
        keys.compute(second)
        kv.drop([first], keep=0)
        second.tokens += [3] * kv.pool.num_free
        keys.compute(second)
        assert kv.pool.num_free == 0
        keys.check()
        kv.check_integrity()

    def test_the_first_of_two_nodes_can_grow_into_all_that_is_left(self, pool, page_size):
        kv = manager(pool, page_size, 8 * page_size + 32)
        keys = Keys(kv)
        first, second = (kv.hold(kv.forest.add(None, [i] * page_size)) for i in (1, 2))
        keys.compute(first)
        keys.compute(second)
        first.tokens += [3] * kv.pool.num_free
        keys.compute(first)
        assert kv.pool.num_free == 0
        keys.check()
        kv.check_integrity()

    def test_cached_prefix_is_found_at_any_token_and_evicted_when_room_is_needed(self, pool, page_size):
        kv = manager(pool, page_size, 10 * page_size + 100)
        keys = Keys(kv)
        node = kv.hold(kv.forest.add(None, list(range(50))))
        keys.compute(node)
        node.tokens += [98, 99]  # decoded, but never computed
        kv.drop([node], keep=node.end)
        assert node.tokens == list(range(50)), "what has no keys is not cached"
        found = kv.match([*range(33), 77])
        assert found is not None and found.end == 33 and found.computed == 33
        kv.check_integrity()
        big = kv.hold(kv.forest.add(None, list(range(1000, 1000 + kv.num_slots))))
        keys.compute(big)
        assert list(kv.forest) == [big]
        kv.check_integrity()

    def test_siblings_end_and_the_last_goes_on_where_they_forked(self, pool, page_size):
        """Sixteen times one of two forks ends after three tokens: what is left is one node and wastes no page."""
        kv = manager(pool, page_size, 1024)
        keys = Keys(kv)
        tip = kv.hold(kv.forest.add(None, list(range(10))))
        keys.compute(tip)
        for step in range(16):
            left, right = (kv.hold(kv.forest.add(tip, [100 + step, i, i])) for i in (1, 2))
            for node in (left, right):
                keys.compute(node)
            kv.drop([tip], keep=tip.end)
            kv.drop([left], keep=left.start)
            tip = right
            keys.check()
            kv.check_integrity()
        if pool == "paged":
            assert list(kv.forest) == [tip] and tip.computed == 10 + 16 * 3
            assert kv.num_slots - kv.pool.num_free == -(-tip.end // page_size) * page_size
        assert kv.forest.path_tokens(tip)[:16] == [*range(10), 100, 2, 2, 101, 2, 2]

    def test_the_halves_of_a_cut_node_become_one_again_without_a_copy(self, pool, page_size):
        kv = manager(pool, page_size, 1024)
        keys = Keys(kv)
        node = kv.hold(kv.forest.add(None, list(range(100))))
        keys.compute(node)
        before = kv.slots(node).copy()
        upper = kv.hold(kv.cut(node, 37))
        fork = kv.hold(kv.forest.add(upper, [7]))
        keys.compute(fork)
        kv.drop([upper], keep=upper.end)
        kv.drop([fork], keep=upper.end)
        assert list(kv.forest) == [node] and np.array_equal(kv.slots(node), before) and not kv.take_copies()
        kv.check_integrity()
        keys.check()

    def test_nodes_stay_apart_where_joining_would_write_a_shared_page_or_move_much(self, pool, page_size):
        kv = manager(pool, page_size, 1024)
        keys = Keys(kv)
        trunk = kv.hold(kv.forest.add(None, list(range(40))))
        keys.compute(trunk)
        upper = kv.hold(kv.cut(trunk, 35))
        long = kv.hold(kv.forest.add(upper, [9] * 100))
        keys.compute(long)
        kv.drop([upper], keep=upper.end)
        kv.drop([trunk], keep=upper.end)
        keys.check()
        kv.check_integrity()
        assert kv.forest.path_tokens(long) == [*range(35), *[9] * 100]
        assert (upper in list(kv.forest)) == (page_size > 1 or pool == "contiguous")

    def test_a_branch_gives_up_its_last_keys_and_only_what_is_wanted(self, pool, page_size):
        kv = manager(pool, page_size, 2048)
        keys = Keys(kv)
        trunk = kv.forest.add(None, list(range(100)))
        left, right = (kv.hold(kv.forest.add(trunk, [i] * 200)) for i in (1, 2))
        for node in (trunk, left, right):
            keys.compute(node)
        preemption = Preemption(kv)
        preemption.add(left)
        free = kv.pool.num_free
        assert preemption.free(50)
        assert 50 <= kv.pool.num_free - free <= 50 + 2 * page_size
        assert 200 - 50 - 2 * page_size <= left.computed <= 150 and (trunk.computed, right.computed) == (100, 200)
        assert preemption.free(500) and left.computed == 0 and trunk.computed == 100
        assert not preemption.free(1), "the other branch needs the rest"
        preemption.add(right)
        assert preemption.free(2048) and kv.pool.num_free == kv.num_slots
        kv.check_integrity()
        for node in (trunk, left, right):
            keys.compute(node)
        keys.check()

    def test_preempted_tree_keeps_its_nodes_and_what_others_share(self, pool, page_size):
        kv = manager(pool, page_size, 1024)
        keys = Keys(kv)
        trunk = kv.forest.add(None, list(range(20)))
        mine, theirs = kv.hold(kv.forest.add(trunk, [1, 2])), kv.hold(kv.forest.add(trunk, [3]))
        for node in (trunk, mine, theirs):
            keys.compute(node)
        kv.preempt([mine])
        assert (trunk.computed, mine.computed, theirs.computed) == (20, 0, 1)
        kv.check_integrity()
        keys.compute(mine)
        keys.check()


def test_pruned_keys_are_free_at_once_and_never_cached():
    kv = manager("paged", 16, 512)
    keys = Keys(kv)
    trunk = kv.hold(kv.forest.add(None, list(range(20))))
    keys.compute(trunk)
    leaf = kv.hold(kv.forest.add(trunk, [1, 2, 3]))
    keys.compute(leaf)
    kv.drop([leaf], keep=0)
    assert kv.match([*range(20), 1, 2]) is trunk
    kv.drop([trunk], keep=trunk.end)
    kv.clear_cache()
    assert kv.pool.num_free == kv.num_slots


def test_without_prefix_caching_nothing_is_matched_or_kept():
    kv = manager("paged", 16, 512, enable_prefix_caching=False)
    node = kv.hold(kv.forest.add(None, [1, 2, 3]))
    Keys(kv).compute(node)
    assert kv.match([1, 2, 3]) is None
    kv.drop([node], keep=node.end)
    assert kv.pool.num_free == kv.num_slots and not list(kv.forest)


def test_bad_pools_are_refused():
    with pytest.raises(ValueError, match="pool: 'heap' is not one of paged, contiguous"):
        make_pool("heap", 100, 16)
    with pytest.raises(ValueError, match="page_size: 7"):
        PagedPool(100, 7)
    with pytest.raises(ValueError, match="num_kv_slots"):
        PagedPool(16, 16)
    with pytest.raises(ValueError, match="num_kv_slots"):
        ContiguousPool(1)


class ForestMachine(RuleBasedStateMachine):
    """Fork, append, prune, finish, match and preempt in any order, the keys checked after each step."""

    @initialize(kind=st.sampled_from(POOLS), pages=st.integers(4, 12), caching=st.booleans())
    def start(self, kind, pages, caching):
        pool, page_size = kind
        self.kv = manager(pool, page_size, pages * max(page_size, 8), enable_prefix_caching=caching)
        self.keys = Keys(self.kv)
        self.tips: list[Node] = []
        self.forks: dict[Node, int] = {}

    def compute_path(self, tip: Node) -> None:
        try:
            for node in self.kv.forest.path(tip):
                if node.computed < len(node.tokens):
                    self.keys.compute(node)
        except OutOfSlots:
            pass

    def pick(self, index: int) -> int:
        return index % len(self.tips)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40), compute=st.booleans())
    def begin(self, tokens, compute):
        known = self.kv.match(tokens)
        rest = tokens[known.end if known else 0 :]
        if known is not None:
            self.kv.hold(known)
        if rest:
            tip = self.kv.hold(self.kv.forest.extend(known, rest))
            if known is tip:
                tip.holders -= 1
            elif known is not None:
                known.holders -= 1
        else:
            tip = known
        self.tips.append(tip)
        if compute:
            self.compute_path(tip)

    @precondition(lambda self: getattr(self, "tips", None))
    @rule(index=st.integers(0, 50), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20))
    def append(self, index, tokens):
        index = self.pick(index)
        old = self.tips[index]
        tip = self.kv.forest.extend(old, tokens)
        if tip is not old:
            self.kv.hold(tip)
            old.holders -= 1
            self.tips[index] = tip
        self.compute_path(tip)

    @precondition(lambda self: getattr(self, "tips", None))
    @rule(index=st.integers(0, 50), at=st.integers(1, 100))
    def fork(self, index, at):
        tip = self.tips[self.pick(index)]
        at = 1 + at % tip.end
        node = next(node for node in self.kv.forest.path(tip) if at <= node.end)
        self.tips.append(self.kv.hold(self.kv.cut(node, at - node.start)))

    @precondition(lambda self: getattr(self, "tips", None))
    @rule(index=st.integers(0, 50), keep=st.booleans())
    def end(self, index, keep):
        tip = self.tips.pop(self.pick(index))
        self.kv.drop([tip], keep=tip.end if keep else 0)

    @precondition(lambda self: getattr(self, "tips", None))
    @rule(indices=st.lists(st.integers(0, 50), min_size=1, max_size=4), num_slots=st.integers(1, 40))
    def give_way(self, indices, num_slots):
        preemption = Preemption(self.kv)
        for index in {self.pick(index) for index in indices}:
            preemption.add(self.tips[index])
            before = self.kv.pool.num_free
            assert preemption.free(num_slots) == (self.kv.pool.num_free > before)

    @precondition(lambda self: getattr(self, "tips", None))
    @rule(index=st.integers(0, 50))
    def preempt(self, index):
        index = self.pick(index)
        self.kv.preempt([self.tips[index]])

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "kv"):
            self.kv.check_integrity()
            self.keys.check()
            assert sum(node.holders for node in self.kv.forest) == len(self.tips)

    def teardown(self):
        if hasattr(self, "kv"):
            for tip in self.tips:
                self.kv.drop([tip], keep=tip.end)
            self.kv.check_integrity()
            self.kv.clear_cache()
            assert self.kv.pool.num_free == self.kv.num_slots and not list(self.kv.forest)


TestForestMachine = ForestMachine.TestCase
TestForestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
