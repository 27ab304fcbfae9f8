"""Guesses in the engine: whatever is guessed, what is decoded is what plain decoding gives, and nothing is left."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guesses import Noise, Rivals, Told, Wrong, guessing
from tiny import EOS, idle, tiny_llm, tiny_model

from treewise import (
    BeamSearchParams,
    Grammar,
    SamplingParams,
    Speculation,
    call,
    decoding,
    gather,
    generate,
    keep,
    limit,
    stream,
)
from treewise.awaitables import decode, score
from treewise.choices import Choices
from treewise.controller import BeamSearch, Greedy, Replay
from treewise.llm import LLM
from treewise.replay import Schedule
from treewise.speculate.pace import Pace
from treewise.speculate.trees import EMPTY

MODEL = tiny_model()
DRAW = random.Random(0)
PROMPTS = [
    [7],
    [5] * 20,
    list(range(1, 30)),
    *([DRAW.randrange(1, 100) for _ in range(DRAW.randrange(1, 40))] for _ in range(5)),
]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def told(outputs: Any) -> list[Any]:
    return [
        [(b.token_ids, b.text, b.finish_reason, b.stop_reason, b.logprobs and [*b.logprobs]) for b in output.outputs]
        for output in outputs
    ]


def same(left: Any, right: Any) -> None:
    """Compare outputs; log-probs may differ in their last bits, as steps have other rows."""
    for one, other in zip(left, right, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
                b.token_ids, b.text, b.finish_reason, b.stop_reason,
            )  # fmt: skip
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
            for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
                assert {token: value.rank for token, value in x.items()} == {t: value.rank for t, value in y.items()}
                assert all(value.logprob == pytest.approx(y[token].logprob, abs=1e-3) for token, value in x.items())


def paths(outputs: Any) -> list[list[int]]:
    """Return the whole paths of completions."""
    return [output.prompt_token_ids + branch.token_ids for output in outputs for branch in output.outputs]


SAMPLED = [
    GREEDY,
    SamplingParams(n=3, max_tokens=30, temperature=0.5),
    SamplingParams(n=2, max_tokens=25, temperature=1.2, top_p=0.8, min_p=0.01, stop_token_ids=[17, 33, 64]),
    SamplingParams(n=2, max_tokens=25, temperature=0.8, top_k=7, frequency_penalty=0.3, repetition_penalty=1.1),
    SamplingParams(
        max_tokens=25, temperature=0.6, presence_penalty=0.4, logprobs=3, min_tokens=9, logit_bias={EOS: 4.0}
    ),
    SamplingParams(n=2, max_tokens=30, temperature=0.9, stop=["e", "<", "ab"], min_tokens=3),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=2, temperature=0),
]
OPTIONS: list[dict[str, Any]] = [
    {"page_size": 1},
    {"looks_ahead": True},
    {"num_kv_slots": 160},
    {"page_size": 64},
    {"num_kv_slots": 96, "page_size": 1},
    {"max_num_rows": 3},
    {"max_num_rows": 40},
    {"enable_prefix_caching": False},
    {"attention": "deft:flatten"},
    {"attention": "medusa"},
    {"attention": "specinfer"},
]


@pytest.fixture(scope="module")
def plain() -> Callable[[SamplingParams], Any]:
    """What plain decoding makes of all prompts."""
    known: dict[str, Any] = {}

    def outputs(params: SamplingParams) -> Any:
        if repr(params) not in known:
            known[repr(params)] = tiny_llm(MODEL).generate(PROMPTS, params)
        return known[repr(params)]

    return outputs


DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "told": lambda outputs: Told(paths(outputs)),
    "deep": lambda outputs: Told(paths(outputs), depth=40, decoys=0),
    "wrong": lambda outputs: Wrong(Told(paths(outputs), decoys=0)),
    "noise": lambda outputs: Noise(),
}


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        *((drafter, {}) for drafter in [*DRAFTERS, "ngram"]),
        *((drafter, options) for drafter in ("told", "ngram") for options in OPTIONS),
        *((drafter, options) for drafter in ("deep", "noise") for options in OPTIONS[:3]),
    ],
    ids=str,
)
def test_what_is_decoded_is_what_plain_decoding_gives(drafter, options, plain):
    for each in SAMPLED[::3] if options else SAMPLED:
        expected = plain(each)
        if drafter == "ngram":
            llm = tiny_llm(MODEL, speculate=Speculation("ngram", 16, adaptive=False), **options)
        else:
            llm = guessing(MODEL, DRAFTERS[drafter](expected), **options)
        outputs = llm.generate(PROMPTS, each)
        same(outputs, expected)
        usages = [output.tree.usage for output in outputs]
        if drafter in ("told", "deep") and options.get("max_num_rows", 1024) > 40 and "num_kv_slots" not in options:
            longest = max(len(branch.token_ids) for output in expected for branch in output.outputs)
            assert max(usage.steps for usage in usages) < longest or longest < 4
        if drafter == "wrong" and each.n == 1:
            assert not any(usage.accepted_tokens for usage in usages)
        idle(llm)


@pytest.mark.parametrize("page_size", [1, 16])
def test_right_guesses_through_any_child_leave_keys_that_are_right(page_size, plain):
    """What was guessed right is never computed again, and what is decoded afterwards sees it."""
    expected = plain(GREEDY)
    llm = guessing(MODEL, Told(paths(expected), decoys=3), page_size=page_size)
    outputs = llm.generate(PROMPTS, GREEDY)
    same(outputs, expected)
    for output in outputs:
        usage = output.tree.usage
        computed = usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1 - usage.accepted_tokens
        assert usage.rows <= computed + usage.drafted_tokens
        assert usage.accepted_length > 3 or usage.completion_tokens < 8
    idle(llm)


def test_guesses_take_as_few_steps_as_they_can():
    [expected] = tiny_llm(MODEL).generate([PROMPTS[2]], SamplingParams(temperature=0, max_tokens=31, ignore_eos=True))
    llm = guessing(MODEL, Told(paths([expected]), depth=9, decoys=0))
    [output] = llm.generate([PROMPTS[2]], SamplingParams(temperature=0, max_tokens=31, ignore_eos=True))
    usage = output.tree.usage
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    # Ten tokens in the step of the prompt, ten in each of the next two, then the last, for which nothing is guessed.
    assert (usage.steps, usage.drafts, usage.accepted_tokens, usage.drafted_tokens) == (4, 3, 27, 27)
    assert usage.accepted_length == 10 and "27 of 27 guesses right, 10.00 tokens" in usage.summary()


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_drafters_get_the_hidden_states_that_have_chosen_the_newest_tokens(looks_ahead):
    expected = tiny_llm(MODEL).generate(PROMPTS, GREEDY)
    seen: list[int] = []

    class Watching(Told):
        wants_hidden = True

        def draft(self, stems, size, step):
            for stem in stems:
                if stem.hidden is not None:
                    chosen = MODEL.logits(stem.hidden).argmax(-1).tolist()
                    assert chosen == stem.tokens[-len(chosen) :]
                    seen.append(len(chosen))
            return super().draft(stems, size, step)

    llm = guessing(MODEL, Watching(paths(expected)), looks_ahead=looks_ahead)
    same(llm.generate(PROMPTS, GREEDY), expected)
    assert max(seen) == 6  # five right guesses, and the token behind them
    idle(llm)


def test_trees_of_256_guesses_for_three_requests_in_one_step():
    expected = tiny_llm(MODEL).generate(PROMPTS[:3], GREEDY)
    llm = guessing(MODEL, Noise(5), tree_size=256)
    seen: list[int] = []
    forward = llm.engine.runner.forward
    llm.engine.runner.forward = lambda batch, *rest: (seen.append(batch.num_rows), forward(batch, *rest))[1]
    same(llm.generate(PROMPTS[:3], GREEDY), expected)
    assert max(seen) >= 512
    idle(llm)


# ------------------------------------------------------------------ ends in the middle of right guesses


def test_end_of_text_among_right_guesses():
    params = SamplingParams(temperature=0, max_tokens=30, logit_bias={EOS: 2.5})
    expected = tiny_llm(MODEL).generate(PROMPTS, params)
    ended = [output for output in expected if output.outputs[0].finish_reason == "stop"]
    assert any(1 < len(output.outputs[0].token_ids) < 25 for output in ended)
    beyond = [[*path, *[9] * 20] for path in paths(expected)]  # guesses go on where the text has ended
    llm = guessing(MODEL, Told(beyond, depth=12))
    same(llm.generate(PROMPTS, params), expected)
    idle(llm)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_stop_strings_and_limits_among_right_guesses(size):
    free = tiny_llm(MODEL).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    texts = [output.outputs[0].text for output in free]
    stops = [text[7 : 7 + size] for text in texts if len(text) > 20]
    for params in (
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stops),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stops, include_stop_str_in_output=True),
        SamplingParams(temperature=0, max_tokens=5 + size, ignore_eos=True),
        SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[path[-30] for path in paths(free)]
        ),
    ):
        expected = tiny_llm(MODEL).generate(PROMPTS, params)
        llm = guessing(MODEL, Told(paths(free), depth=12))
        outputs = llm.generate(PROMPTS, params)
        same(outputs, expected)
        assert "".join(llm.stream(PROMPTS[2], params)) == expected[2].outputs[0].text
        idle(llm)


def test_the_context_ends_among_right_guesses():
    params = SamplingParams(temperature=0, ignore_eos=True)
    expected = tiny_llm(MODEL, max_model_len=50).generate(PROMPTS, params)
    free = tiny_llm(MODEL).generate(PROMPTS, SamplingParams(temperature=0, ignore_eos=True, max_tokens=80))
    llm = guessing(MODEL, Told(paths(free), depth=12), max_model_len=50)
    same(llm.generate(PROMPTS, params), expected)
    idle(llm)


@pytest.mark.parametrize("drafter", ["told", "noise"])
def test_grammars_hold_among_guesses(drafter):
    pytest.importorskip("llguidance")
    for grammar in (
        Grammar.regex(r"[a-c]{3}(xy|z)+[0-9]{2,6}"),
        Grammar.choice(["abcdef", "abcxyz", "qrs"]),
        Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    ):
        for params in (
            SamplingParams(temperature=0, max_tokens=30, grammar=grammar),
            SamplingParams(temperature=1.0, max_tokens=30, n=2, grammar=grammar, min_tokens=8),
        ):
            expected = tiny_llm(MODEL).generate(PROMPTS[:6], params)
            llm = guessing(
                MODEL, Told([[*p, 50, 51] for p in paths(expected)], depth=8) if drafter == "told" else Noise()
            )
            outputs = llm.generate(PROMPTS[:6], params)
            same(outputs, expected)
            if drafter == "told":
                assert sum(output.tree.usage.accepted_tokens for output in outputs) > 6
            idle(llm)


# ------------------------------------------------------------------ trees, other requests, faults


async def _wild(root: Any, seen: list[Any]) -> list[list[int]]:
    """Fork, prune, append, score, search, stream and cut what is being decoded."""
    wide = SamplingParams(max_tokens=14, temperature=0.7, ignore_eos=True)
    branches = await generate(root.fork(5), wide)
    branches = keep(branches, [round(branch.logprob, 1) for branch in branches], 3)
    twins = [twin for branch in branches for twin in branch.fork(2)]
    first = [branches[0].fork(at=branches[0].num_tokens - 4)[0].append([3, 4])]

    async def reader(branch: Any) -> None:
        params = SamplingParams(max_tokens=20, temperature=0, stop=["e"])
        seen.append("".join([piece async for piece in stream(branch, params)]))

    async def scorer(branch: Any) -> None:
        seen.append([[round(value, 2) for value in row] for row in await score([branch], [5, 6], ["ab", "c"])])

    await gather(
        generate(twins[:4], wide),
        decode([twins[4]], Greedy(SamplingParams(max_tokens=9))),
        decode(twins[5].fork(), BeamSearch(BeamSearchParams(3, max_tokens=5))),
        generate(first, SamplingParams(temperature=0, max_tokens=11)),
        reader(root.fork()[0]),
        scorer(branches[1]),
    )
    await call(int)
    twins[1].prune()
    await generate([branch for branch in twins[:4] if branch.alive], SamplingParams(max_tokens=6, temperature=0))
    return [branch.token_ids for branch in [*twins[:5], *first] if branch.alive]


def wild(llm: LLM) -> Any:
    seen: list[Any] = []
    requests = [llm.engine.add(lambda root: _wild(root, seen), prompt, seed=i) for i, prompt in enumerate(PROMPTS[:5])]
    while llm.engine.requests:
        llm.engine.step()
        llm.engine.check_integrity()
    idle(llm)
    return [request.result for request in requests], [request.error for request in requests], sorted(map(str, seen))


@pytest.mark.parametrize("options", [{}, {"page_size": 1}, {"num_kv_slots": 320}, {"looks_ahead": True}], ids=str)
def test_every_live_branch_of_a_program_may_have_guesses(options):
    expected = wild(tiny_llm(MODEL))
    for llm in (
        guessing(MODEL, Noise(3), **options),
        tiny_llm(MODEL, speculate=Speculation("ngram", 12, adaptive=False), **options),
        tiny_llm(MODEL, speculate=Speculation("ngram:shared", 12, adaptive=False), **options),
        tiny_llm(MODEL, speculate="ngram", **options),
    ):
        assert wild(llm) == expected


def test_a_tree_that_was_preempted_goes_on_with_guesses():
    """Interior keys are lost and computed again, several rows of one node at once, guesses beside them."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[i, *range(1, 40)] for i in range(5)]
    expected = tiny_llm(MODEL).generate(prompts, params)
    llm = guessing(MODEL, Told(paths(expected), depth=6), num_kv_slots=16 * 17)
    same(llm.generate(prompts, params), expected)
    assert llm.engine.scheduler.num_preemptions > 0
    idle(llm)


def test_without_room_a_step_goes_without_guesses():
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    [expected] = tiny_llm(MODEL).generate([PROMPTS[0]], params)
    llm = guessing(MODEL, Told(paths([expected])), num_kv_slots=16 * 4)
    same(llm.generate([PROMPTS[0]], params), [expected])
    idle(llm)


def test_requests_that_only_draw_beside_those_that_do_not():
    """Beam search, scores and a long prompt in chunks in the same steps."""

    async def program(root):
        return [branch.token_ids for branch in await decode(root.fork(), BeamSearch(BeamSearchParams(4, max_tokens=9)))]

    def story(llm):
        llm.engine.scheduler.max_num_rows = 24
        requests = [llm.engine.add(program, PROMPTS[1]), llm.engine.add(program, list(range(1, 100)))]

        async def plain(root):
            return [branch.token_ids for branch in await generate([root], GREEDY)]

        requests += [llm.engine.add(plain, prompt) for prompt in PROMPTS[2:5]]
        while llm.engine.requests:
            llm.engine.step()
        idle(llm)
        return [request.result for request in requests]

    expected = story(tiny_llm(MODEL))
    assert story(guessing(MODEL, Noise(2))) == expected
    assert story(tiny_llm(MODEL, speculate=Speculation("ngram", 8, adaptive=False))) == expected


def test_aborted_and_failing_requests_leave_nothing():
    class Mischief(Exception):
        pass

    class Failing(Noise):
        def draft(self, stems, size, step):
            step.lend(20)
            raise Mischief

    llm = guessing(MODEL, Noise(4))

    async def program(root):
        await generate(root.fork(3), SamplingParams(max_tokens=100, ignore_eos=True))

    requests = [llm.engine.add(program, prompt) for prompt in PROMPTS[:4]]
    for step in range(8):
        llm.engine.step()
        if step == 3:
            llm.engine.abort(requests[1])
        llm.engine.check_integrity()
    drafter, llm.engine.speculator.drafter = llm.engine.speculator.drafter, Failing()
    with pytest.raises(Mischief):
        llm.engine.step()
    llm.engine.check_integrity()
    llm.engine.speculator.drafter = drafter
    llm.engine.step()
    for request in requests:
        llm.engine.abort(request)
    idle(llm)


@pytest.mark.parametrize("where", ["forward", "read", "choose"])
def test_steps_that_fail_leave_no_guess_behind(where, monkeypatch):
    expected = tiny_llm(MODEL).generate(PROMPTS[:3], GREEDY)
    llm = guessing(MODEL, Told(paths(expected)))
    broken = iter([False, False, True, False, False, True])

    def failing(function):
        def run(*given):
            if next(broken, False):
                raise KeyboardInterrupt
            return function(*given)

        return run

    async def program(root):
        return [branch.token_ids for branch in await generate([root], GREEDY)]

    if where == "forward":
        llm.engine.runner.forward = failing(llm.engine.runner.forward)
    elif where == "read":
        monkeypatch.setattr(Choices, "read", failing(Choices.read))
    else:
        monkeypatch.setattr(decoding, "choose", failing(decoding.choose))
    requests = [llm.engine.add(program, prompt) for prompt in PROMPTS[:3]]
    interrupts = 0
    while llm.engine.requests:
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        llm.engine.check_integrity()
    assert interrupts == 2
    assert [request.result for request in requests] == [[output.outputs[0].token_ids] for output in expected]
    idle(llm)


def test_logits_that_are_no_numbers_fail_their_own_request_only():
    expected = tiny_llm(MODEL).generate(PROMPTS[:3], GREEDY)
    llm = guessing(MODEL, Told(paths(expected)))
    forward = llm.engine.runner.forward
    victim = llm.engine.add(lambda root: _greedy(root), PROMPTS[1])
    others = [llm.engine.add(lambda root: _greedy(root), PROMPTS[i]) for i in (0, 2)]

    def poisoned(batch, *rest):
        logits = forward(batch, *rest).clone()
        for growth, rows in batch.growths:
            if growth.tenant is victim.tree and victim.tree.num_decoded > 8:
                logits[growth.first : growth.first + len(rows)] = torch.nan
        return logits

    llm.engine.runner.forward = poisoned
    while llm.engine.requests:
        llm.engine.step()
        llm.engine.check_integrity()
    assert "not numbers" in str(victim.error) and victim.tree.num_decoded < 40
    assert [request.result for request in others] == [expected[i].outputs[0].token_ids for i in (0, 2)]
    idle(llm)


async def _greedy(root: Any) -> list[int]:
    [branch] = await generate([root], GREEDY)
    return branch.token_ids


def test_budgets_count_every_token():
    async def program(root):
        await limit(generate([root], SamplingParams(temperature=0, ignore_eos=True, max_tokens=100)), tokens=30)

    [expected] = tiny_llm(MODEL).generate([PROMPTS[0]], SamplingParams(temperature=0, ignore_eos=True, max_tokens=60))
    llm = guessing(MODEL, Told(paths([expected]), depth=7))
    request = llm.engine.add(program, PROMPTS[0])
    while llm.engine.requests:
        llm.engine.step()
    assert "has used 30 of its 30" in str(request.error) and request.tree.num_decoded == 30
    assert request.steps < 6
    idle(llm)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_nothing_is_guessed_where_all_leaves_are_to_go_on_in_step(looks_ahead):
    expected = tiny_llm(MODEL).generate([PROMPTS[0]], GREEDY)
    llm = guessing(MODEL, Told(paths(expected)), looks_ahead=looks_ahead)

    async def program(root):
        return [branch.token_ids for branch in await generate([root], GREEDY, in_step=True)]

    request = llm.engine.add(program, PROMPTS[0])
    while llm.engine.requests:
        llm.engine.step()
    assert request.result == [expected[0].outputs[0].token_ids] and not request.usage().drafts
    idle(llm)


def test_a_stream_that_is_left_leaves_the_branch_as_long_as_it_is():
    async def program(root):
        async for piece in stream(root, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)):
            if root.num_tokens > 29:
                break
            assert piece
        return root.token_ids

    [expected] = tiny_llm(MODEL).run(program, [PROMPTS[1]])
    told = tiny_llm(MODEL).generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    llm = guessing(MODEL, Told(paths(told)))
    assert llm.run(program, [PROMPTS[1]])[0].value == expected.value and len(expected.value) == 10
    idle(llm)


def test_recorded_trees_are_replayed_as_recorded():
    """Their nodes branch at recorded steps, whatever could be guessed."""
    schedule = Schedule.from_json([[-19, 0, [1, 2]], [1, 8, [3, 4]], [1, 12, []], [9, 15, []], [9, 13, []]])

    def story(llm):
        request = llm.engine.add(lambda root: _replayed(root, schedule), PROMPTS[1])
        while llm.engine.requests:
            llm.engine.step()
        idle(llm)
        return request.result, request.steps

    assert story(guessing(MODEL, Noise(1))) == story(tiny_llm(MODEL))


async def _replayed(root: Any, schedule: Schedule) -> list[list[int]]:
    return [branch.token_ids for branch in await decode([root], Replay(schedule))]


# ------------------------------------------------------------------ settings


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="speculate: 'psychic' is not one of ngram"):
        tiny_llm(MODEL, speculate="psychic")
    with pytest.raises(ValueError, match=r"speculate: 'ngram' looks in the request's tree.* none in 'moon'"):
        tiny_llm(MODEL, speculate="ngram:moon")
    with pytest.raises(ValueError, match="neither the name of a drafter nor a Speculation"):
        tiny_llm(MODEL, speculate=3)
    with pytest.raises(ValueError, match="'contiguous' does not lend"):
        tiny_llm(MODEL, speculate="ngram", pool="contiguous")


def test_a_store_is_shared_within_a_namespace():
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm = tiny_llm(MODEL, speculate=Speculation("ngram:shared", 16, adaptive=False), enable_prefix_caching=False)
    [first] = llm.generate([PROMPTS[2]], params, namespace="a")
    [again] = llm.generate([PROMPTS[2]], params, namespace="a")
    [other] = llm.generate([PROMPTS[2]], params, namespace="b")
    steps = [output.tree.usage.steps for output in (first, again, other)]
    assert steps[1] < 6 < steps[0] == steps[2]


def test_adaptive_guessing_changes_nothing_and_rests_where_it_does_not_pay():
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = tiny_llm(MODEL).generate(PROMPTS, params)
    llm = guessing(MODEL, Wrong(Told(paths(expected))), adaptive=True)
    outputs = llm.generate(PROMPTS, params)
    same(outputs, expected)
    assert llm.engine.speculator.pace.trust < 0.9
    idle(llm)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_whenever_guesses_rest_and_begin_again_the_tokens_are_the_same(looks_ahead, plain):
    class Moody(Pace):
        draw = random.Random(0)

        def choose(self, reach, num_leaves, num_rows):
            if self.draw.random() < 0.5:
                self._left = self.draw.choice([1, 2, 5])
            return self.draw.randrange(len(reach) + 1)

    for params in SAMPLED:
        expected = plain(params)
        llm = guessing(MODEL, Rivals([Noise(), Told(paths(expected))]), adaptive=True, looks_ahead=looks_ahead)
        llm.engine.speculator.pace = Moody()
        same(llm.generate(PROMPTS, params), expected)
        idle(llm)
    assert wild(guessing(MODEL, Noise(), adaptive=True, looks_ahead=looks_ahead)) == wild(tiny_llm(MODEL))


def test_a_drafter_that_has_nothing_to_say_is_seldom_asked():
    class Silent(Noise):
        asked = 0

        def draft(self, stems, size, step):
            self.asked += 1
            return [EMPTY for _ in stems]

    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    expected = tiny_llm(MODEL).generate([PROMPTS[0]], params)
    llm = guessing(MODEL, Silent(), adaptive=True, looks_ahead=True)
    same(llm.generate([PROMPTS[0]], params), expected)
    assert llm.engine.speculator.drafter.asked < 100
    idle(llm)
