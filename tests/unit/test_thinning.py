"""Prompts whose keys are thinned out: what follows is what attention to the keys that stay says, whatever else runs."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from guesses import Noise, Rivals
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import dense_logits, greedy, idle, tiny_llm, tiny_model

from treewise import SamplingParams, engine, generate, score, thinning
from treewise.attention import METHODS
from treewise.branch import DeadBranchError
from treewise.kv import KVManager
from treewise.kv.kept import Kept, lay_out, num_pages
from treewise.ops import rotate
from treewise.scheduler import KeysGivenUp, PoolTooSmall
from treewise.sparsity.allocators import Ada, Table
from treewise.sparsity.evidence import Evidence
from treewise.sparsity.policy import KVSparsity
from treewise.sparsity.scorers import SnapKV
from treewise.speculate.ngram import NgramDrafter
from treewise.speculate.speculator import Speculator

sys.path.insert(0, str(Path(__file__).parent))
from test_engine_fuzz import TOLERANCE, Mischief, Script, operations, small, step_to_the_end

MODEL = tiny_model(windows=(None, 11, None, None), max_positions=160)
PROMPTS = [list(range(1, 60)), [7, 5, 3] * 20, [*range(1, 30), 9, 9, 4, *range(60, 90)]]
POLICIES = {
    "snapkv": KVSparsity.named("snapkv", budget=16, window=4, sinks=2),
    "pyramid": KVSparsity.named("pyramidkv", budget=20, window=4, sinks=1),
    "first_full": KVSparsity.named("novita", budget=14, window=5, first_full=1),
    "adakv": KVSparsity.named("adakv", budget=16, window=4, sinks=2),
    "table": KVSparsity(allocator=Table(((9, 31), None, (20, 8))), window=4, sinks=1),
}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@torch.inference_mode()
def thinned_logits(tokens, num_given, policy):
    """Return the logits at every position: rows behind the prompt see of it what the policy keeps, others all."""
    config, n = MODEL.config, len(tokens)
    windows = config.layer_windows
    budgets = iter(policy.budgets(num_given, windows.count(None)))

    def attend(layer, heads):
        q, k, v = rotate(heads, config.num_kv_heads)
        group = config.num_heads // config.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * config.attention_scale
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        hidden = (distance < 0).expand(config.num_heads, n, n).clone()
        if windows[layer] is not None:
            hidden |= distance >= windows[layer]
        elif (budget := next(budgets)) < num_given:
            lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1).T
            first = 0 if policy.num_queries is None else max(0, num_given - max(1, policy.num_queries))
            evidence = Evidence(
                sum(window is None for window in windows[:layer]),
                windows.count(None),
                *(k[:num_given], v[:num_given], torch.arange(num_given)),
                *(q[first:num_given], torch.arange(first, num_given), lse[first:num_given]),
                *(config.attention_scale, None, config.layer_ropes[layer]),
            )
            kept = policy.keep_heads([evidence], budget) if policy.per_head else policy.keep(evidence, budget)
            gone = torch.ones(config.num_kv_heads, num_given, dtype=torch.bool)
            for head, own in zip(gone, kept, strict=True):
                head[own] = False
            hidden[:, num_given:, :num_given] |= gone.repeat_interleave(group, 0)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))

    return MODEL.logits(MODEL(torch.tensor(tokens), torch.arange(n), attend))


def thinned_greedy(prompt, count, policy):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(thinned_logits(tokens, len(prompt), policy)[-1].argmax()))
    return tokens[len(prompt) :]


def told(outputs):
    return [[(b.token_ids, b.text) for b in output.outputs] for output in outputs]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("options", [{}, {"max_num_rows": 7}, {"num_kv_slots": 128}, {"looks_ahead": True}], ids=str)
def test_tokens_are_those_of_attention_to_what_stays(policy, options):
    llm = tiny_llm(MODEL, kv_sparsity=policy, **options)
    expected = [thinned_greedy(prompt, GREEDY.max_tokens, policy) for prompt in PROMPTS]
    assert expected != [greedy(MODEL, prompt, GREEDY.max_tokens) for prompt in PROMPTS], "nothing is lost: no test"
    for _ in range(2):  # the second time, what was kept is there
        assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)] == expected
        llm.engine.check_integrity()
    idle(llm)


@pytest.mark.parametrize("policy", ["pyramid", "table"])
@pytest.mark.parametrize("attention", METHODS)
def test_every_method_of_attention(attention, policy):
    policy, prompt = POLICIES[policy], PROMPTS[2]
    llm = tiny_llm(MODEL, kv_sparsity=policy, attention=attention)
    [out] = llm.generate([prompt], GREEDY)
    assert out.outputs[0].token_ids == thinned_greedy(prompt, GREEDY.max_tokens, policy)


@pytest.mark.parametrize("budget", [59, 1000, 1.0])
def test_a_budget_that_holds_everything_changes_no_bit(budget):
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, logprobs=2, ignore_eos=True)
    dense, sparse = (
        tiny_llm(MODEL, kv_sparsity=name, kv_budget=budget).generate([PROMPTS[0]], params)[0].outputs[0]
        for name in (None, "snapkv")
    )
    assert dense.token_ids == sparse.token_ids and dense.logprobs == sparse.logprobs


@pytest.mark.parametrize("name", ["novita", "adakv"])
def test_memory_is_freed_and_counted(name):
    policy = KVSparsity.named(name, budget=16, window=4, sinks=0, first_full=1)
    llm = tiny_llm(MODEL, page_size=1, kv_sparsity=policy, enable_prefix_caching=False)
    taken = []

    async def program(root):
        await generate([root], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        root.append([5])
        await generate([root], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        pool = root.tree.kv.pool
        [kept] = root.tree.kv.kept.values()
        taken.append((llm.engine.kv.num_slots - pool.num_free, len(kept.lent), kept.counts))

    llm.run(program, [PROMPTS[0]])
    [(slots, lent, counts)] = taken
    heads = [count if isinstance(count, tuple) else (count, count) for count in counts]
    assert [sum(each) / 2 for each in heads] == [59, 59, 16, 16]  # the second layer has a window of its own
    assert (name == "adakv") == any(one != other for one, other in heads)
    assert lent == -(-sum(map(sum, heads)) // 8), "strips of layers, or heads, fill the pages"
    assert slots == lent + 2, "two tokens have followed that have keys"
    idle(llm)


def test_dense_requests_never_meet_what_was_thinned_out():
    policy, prompt = POLICIES["snapkv"], PROMPTS[0]
    llm = tiny_llm(MODEL)
    sparse = thinned_greedy(prompt, GREEDY.max_tokens, policy)
    dense = greedy(MODEL, [*prompt, 3], GREEDY.max_tokens)
    for _ in range(2):
        outputs = llm.generate([prompt, [*prompt, 3]], GREEDY, kv_sparsity=[policy, "full"])
        assert [out.outputs[0].token_ids[: len(dense)] for out in outputs] == [sparse, dense]
    other = POLICIES["first_full"]
    [out] = llm.generate([prompt], GREEDY, kv_sparsity=other)
    assert out.outputs[0].token_ids == thinned_greedy(prompt, GREEDY.max_tokens, other)
    idle(llm)


def test_the_same_prompt_again_is_known_whole():
    llm = tiny_llm(MODEL, kv_sparsity=POLICIES["snapkv"])
    llm.generate([PROMPTS[0]], GREEDY)
    steps, hits = llm.engine.num_steps, llm.cache_statistics.hit_tokens
    llm.generate([PROMPTS[0]], GREEDY)
    assert llm.engine.num_steps - steps == GREEDY.max_tokens
    assert llm.cache_statistics.hit_tokens - hits == len(PROMPTS[0])


def test_a_prompt_that_is_known_in_full_is_looked_at_again():
    policy, prompt = POLICIES["snapkv"], PROMPTS[1]
    llm = tiny_llm(MODEL)
    llm.generate([prompt], GREEDY)
    [out] = llm.generate([prompt], GREEDY, kv_sparsity=policy)
    assert out.outputs[0].token_ids == thinned_greedy(prompt, GREEDY.max_tokens, policy)
    assert llm.cache_statistics.hit_tokens == len(prompt) - policy.window


@pytest.mark.parametrize("policy", ["first_full", "adakv"])
def test_branches_share_what_is_kept(policy):
    policy, prompt = POLICIES[policy], PROMPTS[2]
    llm = tiny_llm(MODEL, kv_sparsity=policy)

    async def program(root):
        early = root.fork(1, at=20)[0]
        first = root.fork(3)
        for number, branch in enumerate(first):
            branch.append([30 + number])
        await generate([*first, early], GREEDY)
        late = root.fork(1)[0]
        deep = first[0].fork(2, at=len(prompt) + 5)
        await generate([late, *deep], GREEDY)
        values = await score([first[1]], [4], ["ab", "c"])
        return [branch.path_tokens for branch in (*first, late, *deep)], early.path_tokens, values

    [output] = llm.run(program, [prompt])
    paths, early, [values] = output.value
    for tokens in paths:
        begun = tokens[: len(tokens) - GREEDY.max_tokens]
        logits = thinned_logits(tokens, len(prompt), policy)
        assert logits[len(begun) - 1 : -1].argmax(-1).tolist() == tokens[len(begun) :]
    assert dense_logits(MODEL, early)[19:-1].argmax(-1).tolist() == early[20:]
    row = thinned_logits([*paths[1], 4], len(prompt), policy)[-1].log_softmax(-1)
    assert values[1] == pytest.approx(float(row[ord("c")]), abs=TOLERANCE)
    idle(llm)


@pytest.mark.parametrize("options", [{"max_num_rows": 9}, {"num_kv_slots": 144}, {"looks_ahead": True}], ids=str)
@pytest.mark.parametrize("policy", ["snapkv", "first_full", "adakv"])
def test_lone_branches_stay_within_their_budget(policy, options):
    name = "adakv" if policy == "adakv" else "snapkv"
    policy = KVSparsity.named(name, budget=16, window=4, every=8, first_full=2 * (policy == "first_full"))
    params = SamplingParams(max_tokens=45, temperature=0, ignore_eos=True)
    alone = []
    for prompt in PROMPTS:
        llm = tiny_llm(MODEL, kv_sparsity=policy, page_size=1)
        most = [0]
        keep = llm.engine.kv.keep

        def watched(node, counts, *rest, most=most, keep=keep):
            most.append(max(min(np.mean(count) for count in counts), *most))
            return keep(node, counts, *rest)

        llm.engine.kv.keep = watched
        alone += told(llm.generate([prompt], params))
        assert len(most) > 5 and most[-1] == 16, "it was thinned out again and again, to its budget"
        idle(llm)
    llm = tiny_llm(MODEL, kv_sparsity=policy, page_size=1, **options)
    assert told(llm.generate(PROMPTS, params)) == alone
    idle(llm)


@pytest.mark.parametrize("name", ["snapkv", "adakv", "keydiff", "pyramidinfer"])
def test_steady_decoding_leaves_the_queries_that_a_stage_looks_at(name, monkeypatch):
    policy = KVSparsity.named(name, budget=16, window=4, sinks=1, every=7)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(thinning, "AHEAD", 0)
        expected = tiny_llm(MODEL, kv_sparsity=policy).generate(PROMPTS, params)
    llm = tiny_llm(MODEL, kv_sparsity=policy)
    runner, sizes = llm.engine.runner, []
    compute = runner._compute

    def computed(tokens, positions, slots, plans, wanted=None, seen=()):
        sizes.append((len(tokens), len(seen)))
        return compute(tokens, positions, slots, plans, wanted, seen)

    monkeypatch.setattr(runner, "_compute", computed)
    outputs = llm.generate(PROMPTS, params)
    assert told(outputs) == told(expected)
    decoding = sizes[-39:]
    assert max(decoding) == (len(PROMPTS), 0), "no row is computed again, and nobody looks into a forward"
    idle(llm)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_queries_are_those_of_the_path_that_comes_to_the_stage(looks_ahead, monkeypatch):
    policy, seen = KVSparsity.named("snapkv", budget=16, window=6, sinks=1, every=12), []
    one, two, three = (SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (8, 2, 25))

    async def program(root):
        await generate([root], one)  # some of the queries that the next stage looks at
        branches = root.fork(2)
        for number, branch in enumerate(branches):
            branch.append([40 + number])
        await generate(branches, two)
        branches[seen[-1][0]].prune()
        last = branches[1 - seen[-1][0]]
        await generate([last], three)
        seen[-1].append(last.path_tokens)

    for pruned in (0, 1):
        for ahead in (0, 64):
            monkeypatch.setattr(thinning, "AHEAD", ahead)
            seen.append([pruned])
            llm = tiny_llm(MODEL, kv_sparsity=policy, looks_ahead=looks_ahead)
            llm.run(program, [PROMPTS[0]])
            idle(llm)
    assert seen[0] == seen[1] and seen[2] == seen[3] and seen[0] != seen[2]


@pytest.mark.parametrize("every", [None, 8])
def test_heads_by_themselves_are_heads_together(every, monkeypatch):
    policy = KVSparsity("snapkv", Ada(floor=1.0), budget=16, window=4, first_full=1, every=every)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    together = told(tiny_llm(MODEL, kv_sparsity=policy).generate(PROMPTS, params))
    monkeypatch.setattr(KVManager, "heads", lambda kv, kept, layer: tuple(range(kv.num_heads)))
    llm = tiny_llm(MODEL, kv_sparsity=policy)
    keep, counted = llm.engine.kv.keep, []
    llm.engine.kv.keep = lambda node, counts, *rest: (counted.append(counts), keep(node, counts, *rest))[1]
    assert told(llm.generate(PROMPTS, params)) == together
    assert all(isinstance(count, tuple) and count[0] == count[1] for counts in counted for count in counts)
    idle(llm)


def test_heads_lose_different_tokens_stage_by_stage(monkeypatch):
    policy, prompt = KVSparsity.named("adakv", budget=14, window=3, sinks=1, every=6), PROMPTS[2]
    config, choose = MODEL.config, thinning.choose
    ends, held = [len(prompt) + 6 * stage for stage in range(5)], []  # by stage, layer and head

    def chosen_of(runner, policy, observations, end, budgets, places):
        stage, chosen = [], choose(runner, policy, observations, end, budgets, places)
        begin = (0, *ends)[len(held)]
        assert end == ends[len(held)]
        for layer, which in enumerate(chosen):
            before = held[-1][layer] if held else [[]] * config.num_kv_heads
            there = [[*own, *range(begin, end)] for own in before]
            rows = (
                [range(len(own)) for own in there] if which is None else [row.tolist() for own in which for row in own]
            )
            stage.append([[own[i] for i in row] for own, row in zip(there, rows, strict=True)])
        held.append(stage)
        return chosen

    monkeypatch.setattr(thinning, "choose", chosen_of)
    llm = tiny_llm(MODEL, kv_sparsity=policy)
    [out] = llm.generate([prompt], SamplingParams(max_tokens=28, temperature=0, ignore_eos=True))
    tokens = [*prompt, *out.outputs[0].token_ids]
    assert len(held) == len(ends)
    for stage in held:
        assert [sum(map(len, heads)) for heads in (stage[0], *stage[2:])] == [2 * 14] * 3
        assert all(set(head) >= {0} for heads in stage for head in heads)
    assert sum(len(one) != len(other) for stage in held for one, other in stage) > 10
    n, group = len(tokens), config.num_heads // config.num_kv_heads
    bounds = [*ends, n]

    def attend(layer, heads):
        q, k, v = rotate(heads, config.num_kv_heads)
        seen = torch.ones(config.num_kv_heads, n, n, dtype=torch.bool).tril()
        if config.layer_windows[layer] is not None:
            seen &= torch.ones(n, n, dtype=torch.bool).triu(1 - config.layer_windows[layer])
        for stage, begin, end in zip(held, bounds, bounds[1:], strict=False):
            for head, own in zip(seen, stage[layer], strict=True):
                head[begin:end, :begin] &= torch.zeros(begin, dtype=torch.bool).index_fill(0, torch.tensor(own), True)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * config.attention_scale
        weights = scores.masked_fill(~seen.repeat_interleave(group, 0), -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))

    with torch.inference_mode():
        logits = MODEL.logits(MODEL(torch.tensor(tokens), torch.arange(n), attend))
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens[len(prompt) :]
    idle(llm)


def asks(questions, seen):
    """Return a program that asks several questions about its prompt, and tells the path of each answer."""

    async def program(root):
        branches = root.fork(len(questions))
        for branch, question in zip(branches, questions, strict=True):
            branch.append(question)
        await generate(branches, GREEDY)
        late = root.fork(1)[0]
        await generate([late.append([7])], GREEDY)
        seen.append([branch.path_tokens for branch in [*branches, late]])

    return program


@torch.inference_mode()
def jointly_kept(prompt, questions, policy):
    """Return the tokens that each layer and KV head keeps of a prompt by the last queries of all questions about it."""
    config, num_given = MODEL.config, len(prompt)
    each = []  # by question: of each layer keys and values of the prompt, and the last queries with positions and LSE
    for question in questions:
        tokens, layers, n = [*prompt, *question], [], len(prompt) + len(question)

        def attend(layer, heads, n=n, layers=layers):
            q, k, v = rotate(heads, config.num_kv_heads)
            group, last = config.num_heads // config.num_kv_heads, slice(n - policy.num_queries, n)
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * config.attention_scale
            hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
            if config.layer_windows[layer] is not None:
                hidden |= torch.ones(n, n, dtype=torch.bool).tril(-config.layer_windows[layer])
            scores.masked_fill_(hidden, -torch.inf)
            layers.append((k[:num_given], v[:num_given], q[last], torch.arange(n)[last], scores.logsumexp(-1).T[last]))
            return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))

        MODEL(torch.tensor(tokens), torch.arange(len(tokens)), attend)
        each.append(layers)
    full = config.layer_windows.count(None)
    kept, budgets = [], iter(policy.budgets(num_given, full))
    for layer, window in enumerate(config.layer_windows):
        if window is not None:
            kept.append(None)
            continue
        scores = 0
        for keys, values, *asked in (layers[layer] for layers in each):
            scores = scores + SnapKV(policy.window).scores(
                Evidence(
                    *(sum(other is None for other in config.layer_windows[:layer]), full),
                    *(keys, values, torch.arange(num_given), *asked),
                    *(config.attention_scale, None, config.layer_ropes[layer]),
                )
            )
        scores[:, : policy.sinks] = scores[:, num_given - policy.window :] = torch.inf
        kept.append(scores.sort(descending=True, stable=True).indices[:, : next(budgets)])
    return kept


@torch.inference_mode()
def logits_over(kept, tokens, num_given):
    """Return the logits at every position: rows behind the prompt see what was kept of it."""
    config, n = MODEL.config, len(tokens)

    def attend(layer, heads):
        q, k, v = rotate(heads, config.num_kv_heads)
        group = config.num_heads // config.num_kv_heads
        hidden = torch.ones(config.num_kv_heads, n, n, dtype=torch.bool).triu(1)
        if kept[layer] is None:
            hidden |= torch.ones(n, n, dtype=torch.bool).tril(-config.layer_windows[layer])
        else:
            gone = torch.ones(config.num_kv_heads, num_given, dtype=torch.bool).scatter_(1, kept[layer], False)
            hidden[:, num_given:, :num_given] |= gone[:, None]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * config.attention_scale
        weights = scores.masked_fill(hidden.repeat_interleave(group, 0), -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))

    return MODEL.logits(MODEL(torch.tensor(tokens), torch.arange(n), attend))


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_rows": 7}, {"num_kv_slots": 176}, {"looks_ahead": True}, {"enable_prefix_caching": False}],
    ids=str,
)
def test_branches_choose_together_what_is_kept_of_their_prompt(options):
    policy = KVSparsity("snapkv", budget=16, window=4, sinks=2, joint=True)
    questions = [[30, 31, 32, 33, 34], [], [40], [50, 51, 52, 53, 54, 55, 56], []]
    llm, seen = tiny_llm(MODEL, kv_sparsity=policy, **options), []
    others = [PROMPTS[1], PROMPTS[2]]
    llm.run(asks(questions, seen), [PROMPTS[0], *others])
    idle(llm)
    for prompt, paths in zip([PROMPTS[0], *others], sorted(seen, key=lambda own: own[0] != PROMPTS[0]), strict=False):
        if paths[0][: len(prompt)] != prompt:
            continue
        kept = jointly_kept(prompt, questions[:-1], policy)  # branches that end at one place look from it once
        for fewer in ([[]], questions[:1], questions[-2:-1]):
            alone = jointly_kept(prompt, fewer, policy)
            assert any(own is not None and (own != one).any() for own, one in zip(kept, alone, strict=True))
        for number, path in enumerate(paths):
            given = len(prompt) + len([*questions, [7]][number])
            # The first token is drawn from all keys where the question had its say, and else from those that stay.
            first = dense_logits(MODEL, path[:given])[-1] if number < len(questions) else None
            logits = logits_over(kept, path, len(prompt))
            expected = logits[given - 1 : -1].argmax(-1)
            if first is not None:
                expected[0] = first.argmax()
            assert expected.tolist() == path[given:]


@pytest.mark.parametrize("options", [{}, {"max_num_rows": 5}, {"num_kv_slots": 96}, {"looks_ahead": True}], ids=str)
def test_short_prompts_are_kept_whole_until_the_path_is_too_long(options):
    policy = KVSparsity.named("rkv", budget=24, window=4, sinks=1, every=8)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [[7, 1, 9], [5, 2] * 6, list(range(1, 20))]
    alone = []
    for prompt in prompts:
        llm, lengths = tiny_llm(MODEL, kv_sparsity=policy), []
        keep = llm.engine.kv.keep
        llm.engine.kv.keep = lambda node, counts, *rest, lengths=lengths, keep=keep: (
            lengths.append((node.end, counts)),
            keep(node, counts, *rest),
        )[1]
        alone += told(llm.generate([prompt], params))
        first = next(length for length in range(len(prompt), 999, 8) if length > 24)
        assert [length for length, _ in lengths] == list(range(first, len(prompt) + 40, 8))
        assert all(counts[0] == counts[2] == counts[3] == 24 < counts[1] == length for length, counts in lengths)
        begun = alone[-1][0][0][: first - len(prompt) + 1]  # up to the token drawn where the first stage lies
        assert begun == greedy(MODEL, prompt, len(begun))
        idle(llm)
    llm = tiny_llm(MODEL, kv_sparsity=policy, **options)
    assert told(llm.generate(prompts, params)) == alone
    idle(llm)


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("name", ["snapkv", "adakv"])
def test_a_pool_that_is_short_is_relieved_before_anybody_gives_way(name, looks_ahead):
    policy = KVSparsity.named(name, budget=16, window=4, sinks=1, trigger="pressure", every=16)
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    dense = told(tiny_llm(MODEL).generate(PROMPTS, params))
    ample = tiny_llm(MODEL, kv_sparsity=policy)
    assert told(ample.generate(PROMPTS, params)) == dense, "nobody is in need"
    options = {"num_kv_slots": 320, "enable_prefix_caching": False, "looks_ahead": looks_ahead}
    crowded = tiny_llm(MODEL, **options)
    assert told(crowded.generate(PROMPTS, params)) == dense and crowded.engine.scheduler.num_preemptions
    llm, kept = tiny_llm(MODEL, kv_sparsity=policy, **options), []
    keep = llm.engine.kv.keep
    llm.engine.kv.keep = lambda node, *given: (kept.append((node.tokens[0], node.end)), keep(node, *given))[1]
    outputs = told(llm.generate(PROMPTS, params))
    assert kept and not llm.engine.scheduler.num_preemptions
    assert [len(own[0][0]) for own in outputs] == [60] * 3
    for prompt, [(tokens, _)], [(exact, _)] in zip(PROMPTS, outputs, dense, strict=True):
        first = min((end for token, end in kept if token == prompt[0]), default=999)
        assert tokens[: first - len(prompt)] == exact[: first - len(prompt)], "up to there it has all its keys"
    idle(llm)


def test_what_is_hidden_is_not_freed():
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    told_of, held = [], []
    for action in ("evict", "hide"):
        policy = KVSparsity.named("snapkv", budget=16, window=4, sinks=1, every=8, action=action)
        llm = tiny_llm(MODEL, page_size=1, kv_sparsity=policy, enable_prefix_caching=False)

        async def program(root, llm=llm):
            await generate([root], params)
            held.append((llm.kv_usage.live_slots, llm.kv_usage.live_tokens))
            return root.path_tokens

        [output] = llm.run(program, [PROMPTS[0]])
        told_of.append(output.value)
        idle(llm)
    assert told_of[0] == told_of[1]
    (few, tokens), (all_of_them, as_many) = held
    assert as_many == tokens == all_of_them > few


@torch.inference_mode()
def kept_by_second_pass(prompt, again, policy):
    """Return the tokens that each layer and KV head keeps of a prompt by what a repetition of it looks at."""
    config, num_given, layers = MODEL.config, len(prompt), []
    tokens = [*prompt, *again]
    n = len(tokens)

    def attend(layer, heads):
        q, k, v = rotate(heads, config.num_kv_heads)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(3, 1)) * config.attention_scale
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        if config.layer_windows[layer] is not None:
            hidden |= torch.ones(n, n, dtype=torch.bool).tril(-config.layer_windows[layer])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        layers.append(weights[:, -num_given:, :num_given].unflatten(0, (config.num_kv_heads, -1)).amax((1, 2)))
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(3, 1))

    MODEL(torch.tensor(tokens), torch.arange(n), attend)
    kept, budgets = [], iter(policy.budgets(num_given, config.layer_windows.count(None)))
    for window, most in zip(config.layer_windows, layers, strict=True):
        if window is not None:
            kept.append(None)
            continue
        most[:, : policy.sinks] = most[:, num_given - policy.window :] = torch.inf
        kept.append(most.sort(descending=True, stable=True).indices[:, : next(budgets)])
    return kept


@pytest.mark.parametrize(
    "options", [{}, {"max_num_rows": 7}, {"num_kv_slots": 208}, {"looks_ahead": True}, {"page_size": 1}], ids=str
)
def test_a_prompt_is_read_twice_for_kvzip(options, monkeypatch):
    monkeypatch.setattr(engine, "REPEAT", "Say:")
    policy = KVSparsity("kvzip", budget=16, window=4, sinks=2)
    llm = tiny_llm(MODEL, kv_sparsity=policy, **options)
    llm.generate([PROMPTS[0]], GREEDY, kv_sparsity="full")  # its keys are there
    outputs = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        kept = kept_by_second_pass(prompt, [*b"Say:", *prompt], policy)
        tokens = [*prompt, *output.outputs[0].token_ids]
        logits = logits_over(kept, tokens, len(prompt))
        assert logits[len(prompt) : -1].argmax(-1).tolist() == tokens[len(prompt) + 1 :]
        assert tokens[len(prompt)] == int(dense_logits(MODEL, prompt)[-1].argmax()), "the first is drawn from all keys"
    short = llm.generate([[7, 1, 9]], GREEDY)[0].outputs[0].token_ids
    assert short == greedy(MODEL, [7, 1, 9], 12), "nothing is lost, and nothing is read twice"
    idle(llm)
    with pytest.raises(ValueError, match="reads the prompt twice, which makes 165 tokens"):
        llm.generate([[5] * 80], GREEDY)
    with pytest.raises(ValueError, match="every"):
        llm.generate([[5] * 70], GREEDY, kv_sparsity=KVSparsity("kvzip", budget=16, window=4, sinks=2, every=8))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_tokens_on_a_gpu(policy, cuda_graphs):
    model = tiny_model(windows=(None, 11, None, None), max_positions=160).to("cuda")
    llm = tiny_llm(model, device="cuda", cuda_graphs=cuda_graphs, kv_sparsity=policy)
    expected = [thinned_greedy(prompt, GREEDY.max_tokens, policy) for prompt in PROMPTS]
    for _ in range(2):
        assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)] == expected
    idle(llm)


@pytest.mark.parametrize("policy", ["snapkv", "adakv"])
def test_guesses_see_what_stays(policy):
    policy, prompt = POLICIES[policy], PROMPTS[1]
    llm = tiny_llm(MODEL, kv_sparsity=policy)
    llm.engine.speculator = Speculator(Rivals([Noise(), NgramDrafter()]), llm.engine.kv, tree_size=9, adaptive=False)
    [out] = llm.generate([prompt], GREEDY)
    assert out.outputs[0].token_ids == thinned_greedy(prompt, GREEDY.max_tokens, policy)
    idle(llm)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_sparsity": "snapcv"}, "choose one of"),
        ({"kv_sparsity": 5}, "kv_sparsity"),
        ({"kv_sparsity": "snapkv", "kv_budget": 10}, "budget"),
        ({"kv_sparsity": "snapkv", "pool": "contiguous"}, "paged"),
        ({"kv_sparsity": KVSparsity.named("snapkv", first_full=3)}, "first_full"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_the_start(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_llm(MODEL, **settings)


def test_log_probabilities_of_the_prompt_are_refused():
    llm = tiny_llm(MODEL, kv_sparsity=POLICIES["snapkv"])
    with pytest.raises(ValueError, match="kv_sparsity"):
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=2, prompt_logprobs=1))
    idle(llm)


RESTLESS = {
    "pressure": KVSparsity.named("snapkv", budget=16, window=4, sinks=2, every=6, trigger="pressure"),
    "hidden heads": KVSparsity.named("adakv", budget=14, window=3, sinks=1, every=9, action="hide"),
    "stages": KVSparsity.named("snapkv", budget=16, window=4, sinks=2, every=6),
    "stages of heads": KVSparsity.named("adakv", budget=14, window=3, sinks=1, every=5),
    "joint": KVSparsity("snapkv", budget=16, window=4, sinks=2, joint=True),
    "joint heads": KVSparsity("snapkv", allocator="ada", budget=14, window=3, sinks=1, joint=True, every=6),
}


class ThinScript(Script):
    """Asks for no log-probabilities inside the prompt, and is checked by what its policy keeps of it."""

    def __init__(self, script, policy):
        super().__init__(script)
        self.policy = policy

    async def observe(self, branches, which, at):
        branch = branches[which % len(branches)]
        given, here = len(branch.tree.prompt_tokens), branch.num_tokens
        if branch.lineage()[-1].path_tokens[:given] == branch.tree.prompt_tokens and here > given:
            await super().observe(branches, which, given - 1 + at % (here - given))

    def check(self, tree):
        if self.policy in RESTLESS.values():
            return  # what is kept depends on more than the prompt: other tests know it
        given = len(tree.prompt_tokens)
        for branch in tree.branches():
            tokens = branch.path_tokens
            whole = all(each.start >= given for each in branch.lineage()[1:])
            logits = thinned_logits(tokens, given, self.policy) if whole else dense_logits(MODEL, tokens)
            exact = logits.log_softmax(-1)
            for position, logprob in enumerate(branch.logprobs, branch.start):
                if logprob is not None:
                    assert logprob == pytest.approx(float(exact[position - 1, tokens[position]]), abs=TOLERANCE)


@settings(max_examples=40, deadline=None)
@given(
    scripts=st.lists(
        st.tuples(
            st.sampled_from([*PROMPTS, [3, 1], [5] * 20]),
            operations,
            st.sampled_from(["snapkv", "adakv", "table", *RESTLESS]),
        ),
        min_size=1,
        max_size=3,
    ),
    page_size=st.sampled_from([1, 16]),
    num_kv_slots=st.sampled_from([112, 144, 192, 4096]),
    max_num_rows=st.sampled_from([3, 5, 17, 256]),
    caching=st.booleans(),
    looks_ahead=st.booleans(),
    guesses=st.booleans(),
    aborted=st.tuples(small, small),
)
def test_random_programs(scripts, page_size, num_kv_slots, max_num_rows, caching, looks_ahead, guesses, aborted):
    llm = tiny_llm(
        MODEL,
        page_size=page_size,
        num_kv_slots=num_kv_slots,
        max_num_rows=max_num_rows,
        enable_prefix_caching=caching,
        looks_ahead=looks_ahead,
    )
    engine = llm.engine
    if guesses:
        engine.speculator = Speculator(Rivals([Noise(), NgramDrafter()]), engine.kv, tree_size=9, adaptive=False)
    programs = [ThinScript(script, (POLICIES | RESTLESS)[policy]) for _, script, policy in scripts]
    requests = [
        engine.add(program.run, prompt, seed=i, sparsity=program.policy)
        for i, (program, (prompt, _, _)) in enumerate(zip(programs, scripts, strict=True))
    ]
    step_to_the_end(engine, requests, aborted)
    for program, request in zip(programs, requests, strict=True):
        program.check(request.tree)
        if request.error is not None and "aborted" not in str(request.error):
            usual = isinstance(request.error, Mischief | DeadBranchError | PoolTooSmall)
            assert usual or (isinstance(request.error, KeysGivenUp) and program.policy.every), repr(request.error)
    engine.kv.clear_cache()
    engine.check_integrity()
    assert engine.kv.pool.num_free == engine.kv.num_slots


@settings(max_examples=200, deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.integers(1, 300) | st.tuples(*[st.integers(0, 300)] * 3), st.integers(1, 6)),
        min_size=1,
        max_size=12,
    ),
    page_size=st.sampled_from([1, 16, 32]),
)
def test_strips_of_pages_never_overlap(runs, page_size):
    counts = [count for count, layers in runs for _ in range(layers)]
    differ = any(isinstance(count, tuple) for count in counts)
    columns = [own for count in counts for own in (count if isinstance(count, tuple) else [count] * (1 + 2 * differ))]
    strips, pages = lay_out(counts, page_size)
    taken = np.zeros((pages, len(columns)), int)
    for strip in strips:
        assert len(strip.pages) == -(-columns[strip.first] // page_size)
        assert strip.width == 1 or not (strip.columns % (len(columns) // len(counts))).any()
        for page, column in zip(strip.pages, strip.columns, strict=True):
            taken[page, column : column + strip.width] += 1
    assert taken.max(initial=0) <= 1
    assert taken.sum() == sum(-(-count // page_size) for count in columns)
    assert [first for strip in strips for first in range(strip.first, strip.first + strip.width)] == [
        *range(len(columns))
    ]


@settings(max_examples=50, deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.integers(1, 40) | st.tuples(*[st.integers(0, 40)] * 3), st.integers(1, 3)), min_size=1, max_size=6
    ),
    page_size=st.sampled_from([1, 4]),
)
def test_no_two_keys_share_a_place(runs, page_size):
    counts = [count for count, layers in runs for _ in range(layers)]
    heads = 3 if any(isinstance(count, tuple) for count in counts) else 1
    num_slots = 2000
    lent = np.random.default_rng(0).permutation(num_slots // page_size)[: num_pages(counts, page_size)]
    lent = (lent[:, None] * page_size + np.arange(page_size)).ravel().astype(np.int32)
    kept = Kept.within(lent, counts, num_slots, page_size)
    places = []  # of each key of a head among those of all layers
    for layer, count in enumerate(counts):
        slots = kept.slots_from(layer)
        assert kept.heads_differ(layer) == isinstance(count, tuple) == (len(slots) > 1)
        assert [len(own) for own in slots] == (list(count) if isinstance(count, tuple) else [count])
        places += [
            own if len(slots) > 1 else own * heads + head for own in slots for head in range(heads // len(slots))
        ]
    places = np.concatenate(places)
    assert len(np.unique(places)) == len(places) and set(places // heads % num_slots) <= set(lent.tolist())
    assert places.max(initial=0) < num_slots * heads * len(counts)
