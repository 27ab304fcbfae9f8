"""The engine on several ranks decodes what it decodes on one, whatever it is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ranks_here import save_model, shared_out
from tiny import Bytes, idle

from treewise import BeamSearchParams, SamplingParams, Speculation, generate
from treewise.attention import METHODS
from treewise.llm import LLM
from treewise.models import load_decoder
from treewise.parallel import LeadingRunner, ParallelLM, everywhere
from treewise.sparsity.policy import KVSparsity
from treewise.stems import StemPlanner

HEADS = {2: (6, 2), 3: (9, 3), 4: (8, 2)}
PROMPTS = [[7, 1, 9], [5] * 20, list(range(1, 40))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(n=3, temperature=1.2, top_p=0.9, max_tokens=8, seed=5)


@pytest.fixture(scope="module", params=HEADS)
def models(request, tmp_path_factory):
    """The whole model, and the share of rank 0 of several."""
    heads, kv_heads = HEADS[request.param]
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, num_attention_heads=heads, num_key_value_heads=kv_heads)
    with shared_out(folder, request.param) as share:
        yield load_decoder(folder), share


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Likewise, with two ranks and every second layer with a window."""
    folder = tmp_path_factory.mktemp("model")
    windows = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 16, "query_pre_attn_scalar": 8}
    save_model(folder, **windows)
    with shared_out(folder, 2) as share:
        yield load_decoder(folder), share


class Letters(Bytes):
    vocab_size = 131


def engine(model: Any, **options: Any) -> LLM:
    return LLM(model, **{"tokenizer": Letters(), "num_kv_slots": 4096, "device": "cpu", "capture_rows": 0} | options)


def told(outputs: Any) -> list[Any]:
    return [[(branch.token_ids, branch.finish_reason) for branch in output.outputs] for output in outputs]


def same(models: Any, work: Any, **options: Any) -> tuple[LLM, LLM]:
    """Check that both engines come to the same, and return them."""
    one, several = (engine(model, **options) for model in models)
    assert isinstance(several.engine.runner, LeadingRunner)
    assert work(one) == work(several)
    idle(several)
    return one, several


def test_greedy_sampled_and_searched_tokens_are_those_of_one_rank(models):
    def work(llm):
        beams = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=8))
        return told(llm.generate(PROMPTS, GREEDY)), told(llm.generate(PROMPTS, SAMPLED)), told(beams)

    same(models, work)


@pytest.mark.parametrize("pool", ["paged", "contiguous"])
@pytest.mark.parametrize("method", [*METHODS, "auto", "reference"])
def test_every_method_of_attention_works_on_ranks(two, method, pool):
    same(two, lambda llm: told(llm.generate(PROMPTS, SAMPLED)), attention=method, pool=pool)


@pytest.mark.parametrize("options", [{"max_num_rows": 7}, {"kv_cache_dtype": "fp8_e4m3"}, {"page_size": 1}])
def test_chunks_of_prompts_narrow_keys_and_single_slots(two, options):
    same(two, lambda llm: told(llm.generate(PROMPTS, GREEDY)), **options)


@pytest.mark.parametrize("pool", ["paged", "contiguous"])
def test_requests_that_give_way_come_back(two, pool):
    prompts = [[i + 1, *range(40, 60), i + 5] for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    _, several = same(two, lambda llm: told(llm.generate(prompts, params)), num_kv_slots=160, pool=pool)
    assert several.engine.scheduler.num_preemptions > 0


def test_a_cached_prefix_is_the_same_on_all_ranks(models):
    def work(llm):
        llm.generate([list(range(1, 60))], GREEDY)
        [output] = llm.generate([[*range(1, 60), 3, 4]], GREEDY)
        return told([output]), output.tree.usage.cached_tokens

    one, _ = same(models, work)
    assert one.cache_statistics.hit_tokens > 0


def test_programs_fork_prune_and_go_on(models):
    async def program(root):
        first = root.fork(4)
        await generate(first, SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True))
        for branch in first[:2]:
            branch.prune()
        first[2].append("and then")
        second = [*first[2].fork(2), first[3]]
        await generate(second, GREEDY)
        return [branch.token_ids for branch in second]

    same(models, lambda llm: [output.value for output in llm.run(program, PROMPTS, seed=3)])


def test_wide_searches_in_arrays(two):
    params = BeamSearchParams(beam_width=80, max_tokens=6)
    same(two, lambda llm: told(llm.beam_search([PROMPTS[2]], params)))


@pytest.mark.parametrize("drafter", ["ngram", "ngram:shared"])
def test_drafted_trees(models, drafter):
    params = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
    prompts = [[1, 2, 3, 4, 5, 6] * 5, [9, 8, 7] * 8]

    def work(llm):
        outputs = [llm.generate(prompts, params) for _ in range(2)]
        return [told(each) for each in outputs], outputs[1][0].tree.usage.accepted_tokens

    _, several = same(models, work, speculate=Speculation(drafter, tree_size=8, adaptive=False))
    if drafter == "ngram:shared":  # the second time all is known
        assert work(several)[1] > 5


def test_tokens_that_the_host_does_not_know_yet(models):
    one, several = map(engine, models)
    several.engine.looks_ahead = True
    for params in (GREEDY, SAMPLED):
        assert told(one.generate(PROMPTS, params)) == told(several.generate(PROMPTS, params))
    idle(several)


def test_plans_with_room_are_told_once_and_then_grow(two):
    one, several = map(engine, two)
    runner = several.engine.runner
    runner.room = 32
    whole, messages = [], []
    tell, say = runner._plan_teller.tell, runner.ranks.group.say

    def counted(plans):
        news = tell(plans)
        whole.append(all(isinstance(each, dict) for each in news.values()))
        return news

    runner._plan_teller.tell = counted
    runner.ranks.group.say = lambda message: (messages.append(len(message)), say(message))[1]
    try:
        params = SamplingParams(n=3, temperature=1.0, max_tokens=40, ignore_eos=True, seed=2)
        assert told(several.generate(PROMPTS[2:], params)) == told(one.generate(PROMPTS[2:], params))
    finally:
        runner.ranks.group.say = say
    assert sum(whole) <= 5 < 35 < len(whole)
    assert np.median(messages) < 1500 < max(messages)


@pytest.mark.parametrize("models", [2], indirect=True)
def test_plans_with_open_tokens_for_guesses(models):
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    prompts = [[1, 2, 3, 4, 5, 6] * 5, [9, 8, 7] * 8]
    one, several = engine(models[0]), engine(models[1], speculate=Speculation("ngram", tree_size=8, adaptive=False))
    runner = several.engine.runner
    filled: list[Any] = []
    tell = runner._plan_teller.tell

    def plan(spec, slots, open_tokens):
        return runner._plan(spec, slots, open_tokens, room=0)

    def counted(plans):
        news = tell(plans)
        filled.extend(each for each in news.values() if not isinstance(each, dict) and each.filled is not None)
        return news

    runner.stems, runner._plan_teller.tell = StemPlanner(plan), counted
    assert told(several.generate(prompts, params)) == told(one.generate(prompts, params))
    assert filled
    idle(several)


def test_several_engines_share_the_ranks_of_a_model(two):
    whole, share = two
    expected = told(engine(whole).generate(PROMPTS, GREEDY))
    first, second = engine(share), engine(share, attention="radix", page_size=1)
    assert told(first.generate(PROMPTS, GREEDY)) == expected
    assert told(second.generate(PROMPTS, GREEDY)) == expected
    del first
    assert told(second.generate(PROMPTS, GREEDY)) == expected


def test_what_it_takes_is_told_for_all_ranks(models):
    one, several = map(engine, models)
    whole, share = models
    size, config = share.num_ranks, share.config
    mine, theirs = one.describe(), several.describe()
    assert theirs["tensor_parallel_size"] == size and mine["tensor_parallel_size"] == 1
    # KV heads that two ranks have count twice.
    heads = config.num_kv_heads * size
    assert theirs["kv_bytes_per_token"] == mine["kv_bytes_per_token"] * heads // whole.config.num_kv_heads
    extra = (sum(weight.nbytes for weight in share.parameters()) * size - mine["weight_bytes"]) / mine["weight_bytes"]
    assert theirs["weight_bytes"] == sum(weight.nbytes for weight in share.parameters()) * size
    assert 0 <= extra < 0.3


def test_the_pool_has_room_for_what_fits_on_each_rank(two):
    whole, share = two
    options = {"num_kv_slots": None, "max_num_rows": 64}
    one, several = engine(whole, **options), engine(share, **options)
    assert several.engine.kv.num_slots == pytest.approx(2 * one.engine.kv.num_slots, rel=1e-3)  # of half the bytes each


def test_what_each_rank_returns_comes_together(two):
    whole, share = two
    assert everywhere(whole, _rank) == 0 and everywhere(share, _rank) == 5


def _rank(model: Any) -> int:
    return 7 - 2 * model.group.rank if isinstance(model, ParallelLM) else 0


def test_16_bits(tmp_path):
    """Sums over ranks are rounded to the type of the weights: close, not the same."""
    save_model(tmp_path)
    one = engine(load_decoder(tmp_path, dtype="bfloat16"))
    with shared_out(tmp_path, 2, "bfloat16") as share:
        several = engine(share)
        wanted, got = (
            llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, logprobs=0)) for llm in (one, several)
        )
    for a, b in zip(wanted, got, strict=True):
        assert b.outputs[0].cumulative_logprob == pytest.approx(a.outputs[0].cumulative_logprob, abs=0.2)


# ---------------------------------------------------------------------- refusals and failures


@pytest.mark.parametrize("drafter", ["draft:smollm2-135m", "medusa:heads", "eagle:head"])
def test_drafters_that_compute_are_refused(two, drafter):
    with pytest.raises(ValueError, match=r"speculate: .* choose 'ngram' or 'ngram:shared'"):
        engine(two[1], speculate=drafter)


def test_sparsity_that_compares_heads_is_refused(two):
    with pytest.raises(ValueError, match=r"kv_sparsity: .* compares heads, which ranks share out"):
        engine(two[1], kv_sparsity="adakv", kv_budget=64)
    llm = engine(two[1])
    with pytest.raises(ValueError, match=r"kv_sparsity: .* compares heads, which ranks share out"):
        llm.generate([PROMPTS[2]], GREEDY, kv_sparsity=KVSparsity.named("adakv", budget=64))
    assert told(llm.generate(PROMPTS, GREEDY)) == told(engine(two[0]).generate(PROMPTS, GREEDY))


def test_a_model_in_memory_has_the_ranks_that_it_has(two):
    for model in two:
        with pytest.raises(ValueError, match=r"tensor_parallel_size is 4; the model in memory has [12] ranks"):
            engine(model, tensor_parallel_size=4)
    engine(two[1], tensor_parallel_size=2)
