"""The model guesses over a part of its own keys: what is decoded stays what it is, whatever that part is."""

import numpy as np
import pytest
import torch
from guesses import guessing
from test_speculate_engine import GREEDY, MODEL, PROMPTS, same, wild
from tiny import dense_logits, idle, tiny_llm, tiny_model

from treewise import SamplingParams, Speculation, generate
from treewise.ops import rotate
from treewise.sparsity.policy import KVSparsity
from treewise.speculate import sparse, sprouts
from treewise.speculate.model import ModelDrafter
from treewise.speculate.sparse import SparseDrafter
from treewise.speculate.sprouts import DEPTH

SAMPLED = [GREEDY, SamplingParams(n=2, max_tokens=15, temperature=0.8, frequency_penalty=0.3, logprobs=2)]
SMALL = {"budget": 16, "window": 4, "sinks": 2}


def drafting(policy, chunk=None, tree_size=16, **options):
    llm = guessing(MODEL, None, tree_size, **options)
    engine = llm.engine
    engine.speculator.drafter = SparseDrafter(policy, engine.runner, chunk or engine.scheduler.max_num_rows)
    return llm


@pytest.mark.parametrize("name", ["snapkv", "streaming", "h2o", "tova"])
def test_what_is_decoded_is_what_plain_decoding_gives(name):
    for params in SAMPLED:
        llm = drafting(KVSparsity.named(name, **SMALL))
        same(llm.generate(PROMPTS[2:5], params), tiny_llm(MODEL).generate(PROMPTS[2:5], params))
        idle(llm)


@pytest.mark.parametrize(
    "options",
    [{"page_size": 1}, {"num_kv_slots": 240}, {"max_num_rows": 9}, {"chunk": 3}, {"looks_ahead": True}],
    ids=str,
)
def test_so_it_is_with_any_options(options, monkeypatch):
    monkeypatch.setattr(sparse, "EVERY", 7)
    for params in SAMPLED:
        llm = drafting(KVSparsity.named("snapkv", **SMALL), **options)
        same(llm.generate(PROMPTS[2:5], params), tiny_llm(MODEL).generate(PROMPTS[2:5], params))
        idle(llm)


def test_who_sees_everything_guesses_right(monkeypatch):
    monkeypatch.setattr(sprouts, "WORTH", 0.0)
    llm = drafting(KVSparsity.named("snapkv", budget=1.0), tree_size=64)
    [output] = llm.generate([PROMPTS[2]], SamplingParams(temperature=0, max_tokens=46, ignore_eos=True))
    usage = output.tree.usage
    assert usage.steps == -(-46 // (DEPTH + 1))
    idle(llm)


def test_forks_and_prunes():
    async def program(root):
        branches = await generate(root.fork(3), SamplingParams(max_tokens=9, temperature=0.9, ignore_eos=True))
        branches[0].prune()
        twins = [twin for branch in branches[1:] for twin in branch.fork(2)]
        await generate(twins, SamplingParams(max_tokens=20, temperature=0.9, ignore_eos=True))
        return [twin.path_tokens for twin in twins]

    llm = drafting(KVSparsity.named("snapkv", **SMALL))
    [output], [expected] = (some.run(program, [list(range(1, 60))], seed=3) for some in (llm, tiny_llm(MODEL)))
    assert output.value == expected.value
    idle(llm)


def test_guesses_see_what_the_scores_of_all_layers_choose(monkeypatch):
    """The logits that guesses come from are those of a model that sees the chosen tokens of the path only."""
    llm, seen = drafting(KVSparsity.named("snapkv", **SMALL)), []
    drafter = llm.engine.speculator.drafter
    read, prompt = drafter._read, list(range(1, 60))

    def watched(own, growths):
        logits = read(own, growths)
        if not growths:
            [sprout] = own
            [view] = drafter._views.values()
            seen.append((sprout.stem.tokens, view.chosen, len(view.slots), logits))
        return logits

    monkeypatch.setattr(drafter, "_read", watched)
    llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    tokens, chosen, end, logits = seen[0]
    assert end == 59 and len(chosen) == 16 and set(chosen.tolist()) >= {0, 1, 55, 56, 57, 58}
    config, n = MODEL.config, len(tokens)

    def attend(layer, heads):
        q, k, v = rotate(heads, config.num_kv_heads)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(3, 1)) * config.attention_scale
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        hidden[end:, np.setdiff1d(np.arange(end), chosen)] = True
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(3, 1))

    with torch.inference_mode():
        expected = MODEL.logits(MODEL(torch.tensor(tokens), torch.arange(n), attend))[-1]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(expected, dense_logits(MODEL, tokens)[-1], atol=1e-2)


@pytest.mark.parametrize("drafter", ["self", "model"])
def test_paths_that_have_given_up_keys_have_no_guesses(drafter):
    policy = KVSparsity.named("snapkv", budget=16, window=4, sinks=2, every=8)
    params = SamplingParams(max_tokens=25, temperature=0, ignore_eos=True)
    prompts = [list(range(1, 60)), [7, 5, 3] * 20]
    expected = tiny_llm(MODEL).generate(prompts, params, kv_sparsity=[policy, "full"])
    llm = drafting(KVSparsity.named("streaming", **SMALL))
    engine = llm.engine
    if drafter == "model":
        engine.speculator.drafter = ModelDrafter(tiny_model(seed=0), engine.runner, engine.scheduler.max_num_rows)
    outputs = llm.generate(prompts, params, kv_sparsity=[policy, "full"])
    same(outputs, expected)
    assert not outputs[0].tree.usage.drafted_tokens and outputs[1].tree.usage.drafted_tokens
    idle(llm)


def test_by_name():
    llm = tiny_llm(MODEL, speculate=Speculation("self:snapkv:64", adaptive=False))
    assert llm.engine.speculator.drafter.policy == KVSparsity.named("snapkv", budget=64)
    same(llm.generate(PROMPTS[:3], GREEDY), tiny_llm(MODEL).generate(PROMPTS[:3], GREEDY))
    assert tiny_llm(MODEL, speculate="self").engine.speculator.drafter.policy.budget == 512
    for name, message in (("self:snap", "as self:snapkv:512"), ("self:snapkv:x", "as self:snapkv:512")):
        with pytest.raises(ValueError, match=message):
            tiny_llm(MODEL, speculate=name)
    with pytest.raises(ValueError, match="sliding windows"):
        tiny_llm(tiny_model(windows=(None, 9)), speculate="self")


def test_programs_that_do_everything(monkeypatch):
    monkeypatch.setattr(sparse, "EVERY", 5)
    llm = drafting(KVSparsity.named("snapkv", **SMALL), num_kv_slots=320)
    assert wild(llm) == wild(tiny_llm(MODEL))
