"""Whole engines on the Triton kernels, on a CPU, steps replayed from fixed arrays as CUDA graphs replay them.

Collected by `test_triton.py` in a process of its own, under TRITON_INTERPRET=1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import greedy, idle, tiny_llm, tiny_model

from treewise import SamplingParams, Speculation, attention, decode, generate, layers, runner, warmup
from treewise.graphs import GraphCache, padded
from treewise.ops import linear
from treewise.sparsity.policy import KVSparsity
from treewise.speculate import sprouts
from treewise.speculate.eagle import EagleDrafter
from treewise.speculate.eagle_heads import Eagle1Head, Eagle3Head
from treewise.speculate.model import ModelDrafter
from treewise.speculate.speculator import Speculator
from treewise.speculate.trees import TokenTree
from treewise.stems import StemPlanner

MODEL = tiny_model()
WINDOWS = tiny_model(windows=(None, 9))


@pytest.fixture(autouse=True)
def kernels_on_the_cpu(monkeypatch):
    """Run the CPU's plans on the Triton backend."""
    chosen = attention.get_backend

    def get_backend(name, device):
        return chosen(name or "triton", device)

    monkeypatch.setattr(attention, "get_backend", get_backend)
    monkeypatch.setattr(runner, "get_backend", get_backend)


def capture(function):
    """Replay by running the function again: on the same arrays, into the same result."""
    result = function()
    return (lambda: result.copy_(function())), result


def with_graphs(model, room, **options):
    """Return an engine whose decoding steps run from captures, its plans made with room."""
    llm = tiny_llm(model, **options)
    runner = llm.engine.runner
    runner.graphs = GraphCache(runner._compute, spare_slot=0, capture=capture)
    runner.room = room
    return llm


@pytest.mark.parametrize("model", [MODEL, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("room", [0, 3])
def test_captured_steps_are_eager_steps(model, room):
    prompts = [[7, 1, 9], list(range(1, 30)), [5] * 12]
    llm = with_graphs(model, room)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (8, 4, 6)]
    outputs = llm.generate(prompts, params)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy(model, prompt, own.max_tokens)
    graphs = llm.engine.runner.graphs
    assert 0 < graphs.num_captures < graphs.num_replays
    idle(llm)


@pytest.mark.parametrize(("name", "every"), [("novita", 5), ("adakv", 5)])
def test_steps_with_keys_that_were_thinned_out(name, every):
    policy = KVSparsity.named(name, budget=12, window=4, sinks=1, first_full=int(name == "novita"), every=every)
    prompts = [list(range(1, 30)), [3, 1]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = with_graphs(MODEL, 3)
    outputs, expected = (
        some.generate(prompts, params, kv_sparsity=[policy, "full"]) for some in (llm, tiny_llm(MODEL))
    )
    assert [output.outputs[0].token_ids for output in outputs] == [own.outputs[0].token_ids for own in expected]
    graphs = llm.engine.runner.graphs
    assert 0 < graphs.num_captures < graphs.num_replays
    idle(llm)


def test_branches_whose_tails_are_thinned_out():
    policy = KVSparsity.named("snapkv", budget=10, window=3, sinks=1, every=4)

    async def grow(root):
        branches = root.fork(2)
        for number, branch in enumerate(branches):
            branch.append([40 + number])
        await generate(branches, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
        return [branch.token_ids for branch in branches], len(root.tree.stages)

    llm = with_graphs(MODEL, 3, kv_sparsity=policy)
    [result], [expected] = (some.run(grow, [list(range(1, 20))]) for some in (llm, tiny_llm(MODEL, kv_sparsity=policy)))
    assert result.value == expected.value and result.value[1] == 3
    assert llm.engine.runner.queries is not None and llm.engine.runner.graphs.num_replays > 3
    idle(llm)


@pytest.mark.parametrize("method", ["deft:flatten", "radix"])
def test_trees_fork_and_are_pruned_between_replays(method):
    prompt = list(range(1, 20))

    async def grow(root):
        frontier = root.fork(3)
        for _ in range(2):
            await generate(frontier, SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True))
            frontier = [child for branch in frontier[:2] for child in branch.fork(2)]
        await generate(frontier, SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True))
        return [branch.token_ids for branch in frontier]

    llm = with_graphs(MODEL, 2, attention=method)
    [result], [expected] = (some.run(grow, [prompt], seed=1) for some in (llm, tiny_llm(MODEL)))
    assert result.value == expected.value
    assert llm.engine.runner.graphs.num_replays > 3
    idle(llm)


def test_drafted_trees_are_verified_by_replays():
    class Verify:
        """Keep the likeliest token behind each drafted one."""

        stopping = SamplingParams(temperature=0.0, ignore_eos=True)

        def __init__(self):
            self.seen = []

        def step(self, tree, logprobs):
            self.seen.append(logprobs.argmax(dim=-1).tolist())

    async def program(root):
        verify = Verify()
        await decode([root], verify)
        for accepted in (2, 0, 3, 1, 2, 1, 2, 2):
            drafted = []
            for token, above in ((3, -1), (5, 0), (9, 0), (4, -1), (6, 3), (7, 4)):
                drafted.append((root if above < 0 else drafted[above]).scratch())
                drafted[-1].append([token])
            await decode(drafted, verify)
            for branch in reversed(drafted):
                branch.prune()
            root.append([8] * accepted)
        return verify.seen

    llm = with_graphs(MODEL, 2)
    [result], [expected] = (some.run(program, [list(range(1, 20))]) for some in (llm, tiny_llm(MODEL)))
    assert result.value == expected.value
    assert llm.engine.runner.graphs.num_replays > 2
    idle(llm)


def test_one_plan_serves_guesses_of_any_shape_between_replays():
    class Guesser:
        """Five guesses a step, the first of which are right now and then."""

        wants_hidden = False

        def draft(self, stems, size, step):
            trees = []
            for stem in stems:
                ahead = next(own for own in expected if own[: len(stem.tokens)] == stem.tokens)[len(stem.tokens) :]
                right = ahead[: len(ahead) % 4]
                wrong = [(place % (len(right) + 1)) - 1 for place in range(5 - len(right))]
                tokens = [*right, *(90 + place for place in range(len(wrong)))]
                trees.append(TokenTree.of(tokens, [*range(-1, len(right) - 1), *wrong]))
            return trees

    prompts = [[7, 1, 9], list(range(1, 30))]
    expected = [prompt + greedy(MODEL, prompt, 16) for prompt in prompts]
    llm, made = with_graphs(MODEL, 2), []
    runner = llm.engine.runner
    make = partial(runner._plan, room=0)
    runner.stems = StemPlanner(lambda *given: (made.append(given), make(*given))[1])
    llm.engine.speculator = Speculator(Guesser(), llm.engine.kv, 64, adaptive=False)
    for prompt, own in zip(prompts, expected, strict=True):
        [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        assert prompt + output.outputs[0].token_ids == own
    assert len(made) < runner.graphs.num_replays
    idle(llm)


def test_a_replay_is_the_eager_step_whatever_came_before(monkeypatch):
    """B36: wide, narrow and wide again, one page more than was captured, requests that end between replays."""
    llm = with_graphs(MODEL, 2)
    runner = llm.engine.runner
    forward = runner.forward

    def twice(*given):
        graphs, runner.graphs = runner.graphs, None
        expected = forward(*given)
        pools = [pool[:, 1:].clone() for pool in (runner.k, runner.v)]  # slot 0 is for rows that a step does not have
        runner.graphs = graphs
        found = forward(*given)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for pool, before in zip((runner.k, runner.v), pools, strict=True):
            torch.testing.assert_close(pool[:, 1:], before, rtol=1e-4, atol=1e-5)
        return found

    monkeypatch.setattr(runner, "forward", twice)
    for count, length, longest in ((5, 29, 5), (1, 6, 6), (5, 47, 5), (2, 60, 6)):
        prompts = [[3 + i, *range(1, length)] for i in range(count)]
        params = [SamplingParams(temperature=0, max_tokens=longest - i % 3, ignore_eos=True) for i in range(count)]
        outputs = llm.generate(prompts, params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [own.max_tokens for own in params]
    assert runner.graphs.num_replays > runner.graphs.num_captures > 2
    idle(llm)


def test_common_steps_are_captured_before_the_first_request(monkeypatch):
    monkeypatch.setattr(warmup, "PROMPT", 40)
    monkeypatch.setattr(warmup, "CHUNK", 5)
    llm = with_graphs(MODEL, 2)
    runner, graphs = llm.engine.runner, llm.engine.runner.graphs
    pools = [pool.clone() for pool in (runner.k, runner.v)]
    warmup.warm_up(runner, 100, 4)
    for pool, before in zip((runner.k, runner.v), pools, strict=True):
        assert torch.equal(pool[:, 1:], before[:, 1:])  # slot 0 is nobody's
    captures = graphs.num_captures
    assert captures >= len(warmup.sizes(4)) and graphs.num_replays == 0
    prompts = [[7, 1, 9] * 6, list(range(1, 20))]
    params = SamplingParams(n=2, temperature=0, max_tokens=8, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        assert [each.token_ids for each in output.outputs] == [greedy(MODEL, prompt, 8)] * 2
    assert graphs.num_captures == captures and graphs.num_replays == 7  # all but the prompts' step
    idle(llm)


@pytest.mark.parametrize(("name", "every"), [("novita", 16), ("pyramidkv", None)])
def test_steps_behind_what_policies_keep_are_captured_too(name, every, monkeypatch):
    monkeypatch.setattr(warmup, "PROMPT", 40)
    monkeypatch.setattr(warmup, "TAIL", 16)
    monkeypatch.setattr(warmup, "CHUNK", 5)
    policy = KVSparsity.named(name, budget=12, window=4, sinks=1, first_full=int(name == "novita"), every=every)
    llm = with_graphs(MODEL, 2, kv_sparsity=policy)
    graphs, thinner = llm.engine.runner.graphs, llm.engine.thinner
    warmup.warm_up(llm.engine.runner, 100, 4, thinner.kept_of(policy, 40))
    assert thinner.kept_of(policy, 10) is None
    captures = graphs.num_captures
    for count, prompts in ((1, [list(range(1, 30))]), (2, [list(range(1, 40)), [5, 3, 3] * 9])):
        llm.generate(prompts, SamplingParams(n=count, temperature=0, max_tokens=5, ignore_eos=True))
    assert graphs.num_captures == captures and graphs.num_replays == 2 * 4  # all but the prompts' steps
    idle(llm)


def test_nothing_is_done_beforehand_where_nothing_is_to_be_captured(monkeypatch):
    llm = with_graphs(MODEL, 2)
    warmup.warm_up(llm.engine.runner, 100, 0)
    assert llm.engine.runner.graphs.num_captures == 0
    llm.engine.runner.graphs = None
    monkeypatch.setattr(llm.engine.runner, "rehearse", None)
    warmup.warm_up(llm.engine.runner, 100, 4)


def test_other_steps_are_not_captured():
    llm = with_graphs(MODEL, 2, attention="vanilla")
    llm.engine.runner.room = 0
    [output] = llm.generate([[7, 1, 9]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert output.outputs[0].token_ids == greedy(MODEL, [7, 1, 9], 5)
    assert llm.engine.runner.graphs.num_replays == 0


def test_the_graph_used_least_recently_makes_room():
    llm = with_graphs(MODEL, 0)
    graphs = llm.engine.runner.graphs
    graphs.max_graphs = 1
    for count in (1, 3, 1):
        llm.generate(
            [[7, 1, 9 + i] for i in range(count)], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        )
    assert len(graphs._graphs) == 1 and graphs.num_captures >= 3


def test_rows_are_padded_to_few_sizes():
    sizes = [padded(rows) for rows in range(1, 8193)]
    assert all(rows <= size <= 2 * rows for rows, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert len(set(sizes)) < 40


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_guesses_are_verified_from_captures(drafter):
    prompts = [[7, 1, 9] * 3, [5] * 12]
    llm = with_graphs(MODEL, 3, speculate=Speculation("ngram", 6, adaptive=False))
    if drafter == "model":
        graphs, llm.engine.runner.graphs = llm.engine.runner.graphs, None  # which it would capture on this device
        assistant = ModelDrafter(tiny_model(), llm.engine.runner, 256)
        llm.engine.runner.graphs = graphs
        assistant.runner.graphs = GraphCache(assistant.runner._compute, spare_slot=0, capture=capture)
        llm.engine.speculator.drafter = assistant
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy(MODEL, prompt, 12)
        assert output.tree.usage.accepted_tokens > 2
    graphs = (assistant.runner if drafter == "model" else llm.engine.runner).graphs
    assert graphs.num_replays > 0
    idle(llm)


def eagle_head(layout):
    """A random head of the model."""
    config = replace(MODEL.config, num_layers=1, layer_windows=(None,), layer_ropes=MODEL.config.layer_ropes[:1])
    if layout == "EAGLE-1":
        head = Eagle1Head(config, MODEL.embedding, MODEL, False)
    else:
        head = Eagle3Head(config, MODEL.embedding, MODEL, [0, 1, 1], torch.arange(5, 120), False)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in head.named_parameters():
        if not name.startswith("embedding."):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head.eval()


def in_parts(x, weight, bias=None):
    """Multiply as some GPUs do, which leave the sum to the norm that follows."""
    product = linear(x, weight, bias)
    return torch.stack([product * 0.25, product * 0.75])


@pytest.mark.parametrize("layout", ["EAGLE-1", "EAGLE-3"])
@torch.no_grad()
def test_heads_guess_from_captures_what_they_guess_without(layout, monkeypatch):
    """The states that the model's captured steps leave for the head, and those that the head's leave, are the same.

    Products that a norm follows come in parts there, as on some GPUs.
    """
    monkeypatch.setattr(sprouts, "WORTH", 0.0)
    monkeypatch.setattr(sprouts, "WIDTH", 2)
    monkeypatch.setattr(sprouts, "DEPTH", 3)
    prompts = [[7, 1, 9] * 3, [5] * 12]
    guessed = []
    for captures in (False, True):
        llm = tiny_llm(MODEL)
        drafter = EagleDrafter(eagle_head(layout), llm.engine.runner, 256)
        if captures:
            monkeypatch.setattr(layers, "linear_parts", in_parts)
            runner = llm.engine.runner
            runner.graphs = GraphCache(runner._compute, spare_slot=0, capture=capture)
            drafter.graphs = GraphCache(drafter._compute, spare_slot=0, capture=capture)
            graphs = [runner.graphs, drafter.graphs]
        draft, trees = drafter.draft, []
        drafter.draft = lambda *given, draft=draft, trees=trees: (trees.append(draft(*given)), trees[-1])[1]
        llm.engine.speculator = Speculator(drafter, llm.engine.kv, 6, adaptive=False)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == greedy(MODEL, prompt, 9)
        guessed.append([tree for step in trees for tree in step])
        idle(llm)
    assert all(each.num_replays > each.num_captures > 0 for each in graphs)
    for one, other in zip(*guessed, strict=True):
        assert one.depths.tolist() == other.depths.tolist() and one.tokens.tolist() == other.tokens.tolist()
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)
    assert max(tree.depths.max(initial=0) for tree in guessed[0]) == 3
