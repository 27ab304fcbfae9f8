"""Thousands of requests through a pool that is too small: nothing is lost, nothing is left, no token changes."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stress import KINDS, Load

from treewise.sparsity.policy import KVSparsity

POOLS = [("paged", 1), ("paged", 16), ("contiguous", 1)]
POLICIES = [
    KVSparsity.named("snapkv", budget=9, window=3, sinks=1, every=3),
    KVSparsity.named("snapkv", budget=12, window=3, sinks=1, every=5, joint=True),
    KVSparsity.named("adakv", budget=8, window=2, sinks=1, every=4),
]
"""Of which tails of branches are thinned out, together."""


class EngineMachine(RuleBasedStateMachine):
    """Add, step, abort and clear in any order."""

    @initialize(
        pool=st.sampled_from(POOLS),
        num_kv_slots=st.sampled_from([144, 256, 4096]),
        max_num_rows=st.sampled_from([4, 17, 256]),
        caching=st.booleans(),
        looks_ahead=st.booleans(),
        wide=st.sampled_from([1, 64]),
        guesses=st.booleans(),
        policies=st.sampled_from([(), POLICIES]),
    )
    def start(self, pool, num_kv_slots, max_num_rows, caching, looks_ahead, wide, guesses, policies):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("treewise.decoding.WIDE", wide)
        self.load = Load(
            guesses=guesses,
            policies=policies if pool[0] == "paged" else (),
            pool=pool[0],
            page_size=pool[1],
            num_kv_slots=num_kv_slots,
            max_num_rows=max_num_rows,
            enable_prefix_caching=caching,
            looks_ahead=looks_ahead,
        )

    @rule(kind=st.sampled_from(KINDS), seed=st.integers(0, 50))
    def add(self, kind, seed):
        self.load.add(kind, seed)

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            self.load.step()
            self.load.engine.check_integrity()

    @rule(index=st.integers(0, 20))
    def abort(self, index):
        self.load.abort(index)

    @rule()
    def clear(self):
        self.load.engine.kv.clear_cache()

    @invariant()
    def nothing_is_broken(self):
        if hasattr(self, "load"):
            self.load.engine.check_integrity()

    def teardown(self):
        if hasattr(self, "load"):
            self.load.finish()
            self.patch.undo()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)


@pytest.mark.stress
@pytest.mark.parametrize(("pool", "page_size"), POOLS)
def test_ten_thousand_requests(pool, page_size):
    """In three parts, one a kind of pool; some two hundred requests are aborted on the way."""
    draw = random.Random(page_size)
    load = Load(pool=pool, page_size=page_size, num_kv_slots=768, max_num_rows=96, looks_ahead=page_size == 16)
    started = 0
    while load.num_ended < 3400:
        while started < 3400 and len(load.running) < 24:
            load.add(draw.choice(KINDS), draw.randrange(200))
            started += 1
        load.step()
        if draw.random() < 0.01:
            load.abort(draw.randrange(100))
        if draw.random() < 0.05:
            load.engine.check_integrity()
    load.finish()
    assert load.engine.scheduler.num_preemptions > 0
    assert load.llm.cache_statistics.hits > 1000 and load.llm.cache_statistics.evicted_tokens > 0
