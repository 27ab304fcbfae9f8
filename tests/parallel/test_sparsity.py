"""Each rank gives up keys of its own heads: where none is pooled with others, those that one device gives up."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from ranks_here import save_model, shared_out
from tiny import Bytes, idle

from treewise import SamplingParams, generate
from treewise.llm import LLM
from treewise.models import load_decoder
from treewise.sparsity.policy import KVSparsity

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPT = [(7 * i * i + 3 * i) % 120 + 1 for i in range(150)]
OTHER = [(5 * i * i + i) % 120 + 1 for i in range(90)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"))
    with shared_out(folder, 2) as share:
        yield load_decoder(folder), share


def engine(model: Any, **options: Any) -> LLM:
    return LLM(model, **{"tokenizer": Bytes(), "num_kv_slots": 2048, "device": "cpu"} | options)


def policy(scorer: str = "snapkv", **settings: Any) -> KVSparsity:
    return KVSparsity(scorer, **{"budget": 30, "window": 8, "sinks": 2} | settings)


def told(outputs: Any) -> list[Any]:
    return [[branch.token_ids for branch in output.outputs] for output in outputs]


def same(models: Any, work: Any, **options: Any) -> None:
    """Check that both engines come to the same, keep as many bytes, and not what they would keep without a policy."""
    one, several = (engine(model, **options) for model in models)
    assert work(one) == work(several)
    assert one.kv_usage.bytes_held == several.kv_usage.bytes_held
    idle(several)
    if "kv_sparsity" in options:
        assert work(engine(models[0], **{**options, "kv_sparsity": None})) != work(one)


@pytest.mark.parametrize("scorer", ["snapkv", "h2o", "knorm", "keydiff", "streaming"])
def test_ranks_keep_what_one_device_keeps(two, scorer):
    same(two, lambda llm: told(llm.generate([PROMPT, OTHER], GREEDY)), kv_sparsity=policy(scorer))


@pytest.mark.parametrize("allocator", ["pyramid", "uniform"])
def test_again_as_branches_grow(two, allocator):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    same(two, lambda llm: told(llm.generate([PROMPT], params)), kv_sparsity=policy(allocator=allocator, every=16))


def test_chunks_and_prompts_that_come_again(two):
    """What is left of a prompt serves the next request, the logits of its last token too."""

    def work(llm):
        return [told(llm.generate([PROMPT], GREEDY)) for _ in range(2)]

    same(two, work, kv_sparsity=policy(), max_num_rows=40)


def test_branches_choose_together(two):
    async def program(root):
        branches = root.fork(3)
        for number, branch in enumerate(branches):
            branch.append(f"question {number}")
        await generate(branches, GREEDY)
        return [branch.token_ids for branch in branches]

    def work(llm):
        return [output.value for output in llm.run(program, [PROMPT])]

    same(two, work, kv_sparsity=policy(joint=True))


def test_tails_of_branches(two):
    """How many tokens each node keeps follows from the first rank's heads: one device may keep others."""

    async def program(root):
        branches = root.fork(3)
        for number, branch in enumerate(branches):
            branch.append(f"question {number}")
        await generate(branches, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        return [branch.token_ids for branch in branches], [len(node.tokens) for node in root.tree.stages]

    found = []
    for options in ({}, {"max_num_rows": 40}, {"num_kv_slots": 1024, "page_size": 1}):
        llm = engine(two[1], kv_sparsity=policy(every=16), **options)
        [output] = llm.run(program, [PROMPT])
        found.append(output.value)
        idle(llm)
    assert found[0] == found[1] == found[2] and len(found[0][1]) == 4


def test_a_prompt_that_is_read_twice(two):
    same(two, lambda llm: told(llm.generate([OTHER], GREEDY)), kv_sparsity=policy("kvzip"))


def test_requests_that_give_way(two):
    def work(llm):
        prompts = [PROMPT, OTHER, PROMPT[50:], OTHER[20:], OTHER[40:]]
        outputs = told(llm.generate(prompts, SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)))
        return outputs, llm.engine.scheduler.num_preemptions > 0

    one, several = (engine(model, kv_sparsity=policy(), num_kv_slots=224) for model in two)
    wanted, got = work(one), work(several)
    assert wanted == got and got[1]
    idle(several)


def test_what_pools_over_heads_pools_over_those_of_a_rank(two):
    llm = engine(two[1], kv_sparsity=policy("tova"))
    assert len(told(llm.generate([PROMPT], GREEDY))[0][0]) == 10
    idle(llm)


def test_a_kv_head_that_two_ranks_have(tmp_path):
    """Each keeps what its own queries look for."""
    save_model(tmp_path, num_attention_heads=8)
    with shared_out(tmp_path, 4) as share:
        llm = engine(share, kv_sparsity=policy(every=16))
        assert len(told(llm.generate([PROMPT], GREEDY))[0][0]) == 10
        idle(llm)


def test_nothing_is_kept_on_other_ranks_that_is_not_here_any_more(two):
    llm = engine(two[1], kv_sparsity=policy())
    ranks = two[1].ranks
    gc.collect()  # engines of other tests
    for _ in range(3):
        llm.generate([PROMPT], GREEDY)
        llm.engine.kv.clear_cache()
    assert len(ranks._numbers) < 5
