"""Steps whose forward starts before the host knows the tokens of the step before: what comes of them is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import EOS, idle, tiny_llm, tiny_model

from treewise import BeamSearchParams, SamplingParams, call, decoding, gather, generate, stream
from treewise.awaitables import decode
from treewise.choices import Choices
from treewise.controller import BeamSearch, Replay, Sample
from treewise.operations import InvalidLogits
from treewise.replay import Schedule
from treewise.sampler import row_key

MODEL = tiny_model()
PROMPTS = [[7, 1, 9], [5] * 20, list(range(1, 30))]
SAMPLED = [
    SamplingParams(n=4, max_tokens=20, temperature=1.5),
    SamplingParams(n=3, max_tokens=15, temperature=2.0, stop=["e", "<"], min_tokens=3),
    SamplingParams(n=2, max_tokens=12, temperature=1.2, top_p=0.9, stop_token_ids=[17, 33]),
    SamplingParams(n=2, max_tokens=12, temperature=1.2, frequency_penalty=0.5, logprobs=3),
    SamplingParams(max_tokens=1),
    SamplingParams(temperature=0, max_tokens=9, logit_bias={EOS: 3.0}),
]


def told(outputs):
    return [[(b.token_ids, b.finish_reason, b.logprobs, b.text) for b in output.outputs] for output in outputs]


@pytest.mark.parametrize("options", [{}, {"num_kv_slots": 112}, {"max_num_rows": 3}, {"pool": "contiguous"}])
def test_what_is_decoded_is_the_same(options):
    jobs = [(prompt, params) for params in SAMPLED for prompt in PROMPTS]
    prompts, params = map(list, zip(*jobs, strict=True))
    expected = told(tiny_llm(MODEL).generate(prompts, params))
    llm = tiny_llm(MODEL, looks_ahead=True, **options)
    for (tokens, *rest), (wanted, *others) in zip(
        (each for one in told(llm.generate(prompts, params)) for each in one),
        (each for one in expected for each in one),
        strict=True,
    ):
        assert tokens == wanted and rest[0] == others[0] and rest[2] == others[2]
    idle(llm)


def test_the_device_has_the_next_step_before_the_host_has_the_tokens(monkeypatch):
    llm, order = tiny_llm(MODEL, looks_ahead=True), []
    forward, read = llm.engine.runner.forward, Choices.read
    monkeypatch.setattr(llm.engine.runner, "forward", lambda *given: (order.append("forward"), forward(*given))[1])
    monkeypatch.setattr(Choices, "read", lambda self: (order.append("read"), read(self))[1])
    llm.generate([PROMPTS[0]], SamplingParams(n=3, max_tokens=5, ignore_eos=True))
    assert order == ["forward"] + ["forward", "read"] * 4 + ["read"]  # nothing is computed after the last tokens
    order.clear()
    llm.generate([PROMPTS[1]], SamplingParams(n=3, max_tokens=5, ignore_eos=True, presence_penalty=0.1))
    assert order == ["forward", "read"] * 5  # what is drawn depends on the tokens before


def test_a_recorded_tree_is_foreseen_between_its_branchings(monkeypatch):
    spans = [[-2, 0, [1, 2, 3]], [1, 3, []], [1, 5, [4, 5]], [1, 9, []], [6, 8, []], [6, 12, []]]
    controller = Replay(Schedule.from_json(spans))

    async def program(root):
        return await decode([root], controller)

    def tree(llm):
        [output] = llm.run(program, [PROMPTS[0]])
        return [(branch.path, branch.token_ids, branch.logprobs) for branch in output.value]

    expected = tree(tiny_llm(MODEL))
    llm, order = tiny_llm(MODEL, looks_ahead=True), []
    forward, read = llm.engine.runner.forward, Choices.read
    monkeypatch.setattr(llm.engine.runner, "forward", lambda *given: (order.append("f"), forward(*given))[1])
    monkeypatch.setattr(Choices, "read", lambda self: (order.append("r"), read(self))[1])
    assert tree(llm) == expected
    # The prompt, then a forward a step, up to the branchings after steps 3, 5, 8 and 9, which wait for their logits.
    assert "".join(order) == "f" + "ffrfr" + "ffr" + "ffrfr" + "f" + "ffrfr"
    idle(llm)


def test_programs_may_do_as_they_like_in_between():
    """Prune, fork, append to and stream what is being decoded, beside beams and functions."""

    def story(looks_ahead):
        llm, seen = tiny_llm(MODEL, looks_ahead=looks_ahead), []

        async def meddler(branches):
            for _ in range(3):
                await call(int)
            branches[1].prune()
            [fork] = branches[2].fork()
            seen.append([branch.token_ids for branch in await generate([fork], SamplingParams(max_tokens=3))])

        async def reader(branch):
            pieces = [piece async for piece in stream(branch, SamplingParams(max_tokens=20, stop=["e"]))]
            seen.append(pieces)
            branch.append([3, 4])
            return await generate([branch], SamplingParams(max_tokens=4))

        async def program(root):
            branches = root.fork(6)
            wide = SamplingParams(max_tokens=30, ignore_eos=True)
            await gather(
                generate(branches[:2] + branches[3:4], wide),
                decode([branches[4]], BeamSearch(BeamSearchParams(3, max_tokens=5))),
                reader(branches[5]),
            )
            await meddler(branches)
            return [branch.token_ids for branch in branches if branch.alive]

        requests = [llm.engine.add(program, prompt, seed=i) for i, prompt in enumerate(PROMPTS)]
        while llm.engine.requests:
            llm.engine.step()
            llm.engine.check_integrity()
        idle(llm)
        return [request.result for request in requests], [request.error for request in requests], sorted(map(str, seen))

    assert story(True) == story(False)


def test_a_branch_that_is_pruned_while_it_is_ahead_leaves_nothing():
    llm = tiny_llm(MODEL, looks_ahead=True)

    async def stop(branches):
        while branches[0].num_tokens < 9:
            await call(int)
        branches[0].prune()
        branches[1].prune()

    async def program(root):
        branches = root.fork(2)
        await gather(generate(branches, SamplingParams(max_tokens=50, ignore_eos=True)), stop(branches))

    request = llm.engine.add(program, PROMPTS[0])
    while llm.engine.requests:
        llm.engine.step()
        llm.engine.check_integrity()
    assert request.error is None and request.usage().completion_tokens < 100
    idle(llm)


def test_logits_that_are_no_numbers_fail_their_request_alone_and_leave_no_token():
    model = tiny_model()
    llm, spoilt, steps = tiny_llm(model, looks_ahead=True), {}, []

    def forward(*given, **options):
        logits = type(model).forward(model, *given, **options)
        if len(steps) == 6:  # the first rows are those of the first request
            logits[:2] = torch.nan
        steps.append(None)
        return logits

    async def program(root):
        branches = root.fork(2)
        kept = branches[0].fork()
        try:
            await generate(branches, SamplingParams(max_tokens=12, ignore_eos=True))
        except InvalidLogits:
            llm.engine.check_integrity()
            spoilt["tokens"] = [len(branch.tokens) for branch in branches]
            branches += kept
        again = await generate(branches, SamplingParams(max_tokens=12, ignore_eos=True))
        return [branch.path_tokens for branch in again]

    model.forward = forward
    requests = [llm.engine.add(program, prompt, seed=i) for i, prompt in enumerate(PROMPTS[:2])]
    while llm.engine.requests:
        llm.engine.step()
        llm.engine.check_integrity()
    assert [request.error for request in requests] == [None, None]
    assert spoilt["tokens"] == [6, 6]  # as many as there were good logits
    assert all(token >= 0 for request in requests for path in request.result for token in path)
    del model.forward
    idle(llm)


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize(("owner", "name"), [(decoding, "choose"), (Choices, "read")])
def test_a_step_that_is_interrupted_costs_nobody_a_token(looks_ahead, owner, name, monkeypatch):
    expected = told(tiny_llm(MODEL).generate(PROMPTS, SAMPLED[0]))
    llm, calls, real = tiny_llm(MODEL, looks_ahead=looks_ahead), [], getattr(owner, name)

    def interrupted_once(*given):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*given)

    async def program(root):
        return await generate(root.fork(4), replace(SAMPLED[0], n=1))

    monkeypatch.setattr(owner, name, interrupted_once)
    requests = [llm.engine.add(program, prompt, seed=row_key(0, (i,))) for i, prompt in enumerate(PROMPTS)]
    interrupted = 0
    while llm.engine.requests:
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            interrupted += 1
        llm.engine.check_integrity()
    assert interrupted == 1
    found = [[branch.token_ids for branch in request.result] for request in requests]
    assert found == [[tokens for tokens, *_ in one] for one in expected]
    idle(llm)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_an_error_in_reading_leaves_known_tokens_only(looks_ahead):
    class Failing(Sample):
        seen = 0

        def observe(self, path, certainty):
            self.seen += 1
            if self.seen == 8:  # the second branch of three, in the third step
                raise ArithmeticError

    async def program(root):
        branches = root.fork(3)
        with pytest.raises(ArithmeticError):
            await decode(branches, Failing(SamplingParams(max_tokens=9, ignore_eos=True)))
        llm.engine.check_integrity()
        lengths = [len(branch.tokens) for branch in branches]
        await generate(branches, SamplingParams(max_tokens=4, ignore_eos=True))
        return lengths, [branch.path_tokens for branch in branches]

    llm = tiny_llm(MODEL, looks_ahead=looks_ahead)
    [output] = llm.run(program, [PROMPTS[0]])
    lengths, paths = output.value
    assert lengths == [3, 2, 2] and all(token >= 0 for path in paths for token in path)
    idle(llm)
