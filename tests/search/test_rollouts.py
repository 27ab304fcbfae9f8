"""Rollouts: what is shared, what is rewarded, and whether the numbers are the model's."""

from __future__ import annotations

import doctest
import json
from statistics import fmean, pstdev

import pytest
import torch
from tiny import EOS, dense_logits, tiny_llm, tiny_model

import treewise.search.trajectories
from treewise.awaitables import generate
from treewise.config import SamplingParams
from treewise.results import json_safe
from treewise.search import rollouts

MODEL = tiny_model()


def uneven(texts):
    return [sum((place + 1) * ord(letter) for place, letter in enumerate(text)) * 0.377 % 1 for text in texts]


def run(prompts=("two plus two",), seed=3, **settings):
    llm = tiny_llm(MODEL, enable_prefix_caching=False)
    settings = {"widths": (3, 2, 2), "at": (2, 5), "max_tokens": 9, "reward": uneven} | settings
    results = llm.run(rollouts, list(prompts), seed=seed, **settings)
    llm.engine.check_integrity()
    assert not llm.engine.kv.forest.roots, "something was left in the pool"
    return results


def test_log_probs_are_those_of_the_path_alone():
    [result] = run()
    for trajectory in result.value:
        tokens = trajectory.prompt_token_ids + trajectory.token_ids
        logprobs = torch.log_softmax(dense_logits(MODEL, tokens), dim=-1)
        given = len(trajectory.prompt_token_ids)
        expected = [float(logprobs[place - 1, tokens[place]]) for place in range(given, len(tokens))]
        assert trajectory.logprobs == pytest.approx(expected, abs=1e-4)
        assert trajectory.text == bytes(token for token in trajectory.token_ids if token != EOS).decode()


def test_samples_branch_where_they_are_told_to():
    [result] = run()
    assert len(result.value) == 3 * 2 * 2
    for trajectory in result.value:
        ends = [segment.end for segment in trajectory.segments]
        assert ends == [2, 5, 9] and trajectory.finish_reason == "length"
        assert [segment.start for segment in trajectory.segments] == [0, *ends[:-1]]
    assert [trajectory.shared for trajectory in result.value] == [0, 5, 2, 5] * 3
    assert [trajectory.parent for trajectory in result.value] == [None, 0, 1, 2, None, 4, 5, 6, None, 8, 9, 10]
    # Each token of the tree is in one trajectory only, behind what that one shares.
    own = sum(len(trajectory.token_ids) - trajectory.shared for trajectory in result.value)
    assert own == result.tree.usage.completion_tokens == 3 * 2 + 6 * 3 + 12 * 4
    for before, after in zip(result.value, result.value[1:], strict=False):
        assert before.token_ids[: after.shared] == after.token_ids[: after.shared]
        assert before.segments[0].node == after.segments[0].node or not after.shared


def test_advantages_are_relative_to_the_group():
    [result] = run()
    given = [trajectory.reward for trajectory in result.value]
    assert given == pytest.approx(uneven([trajectory.text for trajectory in result.value]))
    mean, deviation = fmean(given), pstdev(given)
    assert [t.advantage for t in result.value] == pytest.approx([(r - mean) / deviation for r in given])
    segments = {segment.node: segment for trajectory in result.value for segment in trajectory.segments}
    parents = {
        below.node: above.node
        for trajectory in result.value
        for above, below in zip(trajectory.segments, trajectory.segments[1:], strict=False)
    }
    for node, segment in segments.items():
        below = [segments[child].value for child, parent in parents.items() if parent == node]
        if below:
            assert segment.value == pytest.approx(fmean(below))
        siblings = [other.value for key, other in segments.items() if parents.get(key) == parents.get(node)]
        expected = (segment.value - fmean(siblings)) / pstdev(siblings)
        assert segment.advantage == pytest.approx(expected)
    assert all(trajectory.segments[-1].value == trajectory.reward for trajectory in result.value)


def test_an_ended_sample_does_not_branch():
    [result] = run(stop=list("abcdefghijklmnop"), widths=(6, 3), at=(3,), max_tokens=12)
    ended = [trajectory for trajectory in result.value if len(trajectory.segments) == 1]
    assert ended and len(ended) < 6
    assert all(trajectory.finish_reason == "stop" and len(trajectory.token_ids) <= 3 for trajectory in ended)
    assert len(result.value) == len(ended) + 3 * (6 - len(ended))


def test_trajectories_are_data():
    first, second = run(prompts=("two plus two", "seven"))
    [other] = run()
    assert [one.token_ids for one in first.value] == [one.token_ids for one in other.value], "alone or in a batch"
    assert run()[0].value == other.value
    assert first.value[0].token_ids != second.value[0].token_ids
    line = json.loads(json.dumps(json_safe(first.value[1])))
    assert line["token_ids"] == first.value[1].token_ids
    assert line["segments"][0] == {"node": 0, "start": 0, "end": 2} | {
        name: getattr(first.value[1].segments[0], name) for name in ("value", "advantage")
    }


def test_rollouts_may_start_at_any_branch_and_rate_by_themselves():
    async def program(root):
        [start, _] = await generate(root.fork(2), SamplingParams(max_tokens=2, ignore_eos=True))
        return start, await rollouts(start, widths=(2,), at=(), max_tokens=3)

    [result] = tiny_llm(MODEL).run(program, ["x"], seed=1)
    start, trajectories = result.value
    assert [trajectory.prompt_token_ids for trajectory in trajectories] == [start.path_tokens] * 2
    for trajectory in trajectories:
        assert trajectory.reward == pytest.approx(fmean(trajectory.logprobs))
        assert [segment.advantage for segment in trajectory.segments] == [trajectory.advantage]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_must_be_a_number(value):
    with pytest.raises(ValueError, match=r"reward: the value of .* must be a finite number"):
        run(reward=lambda texts: [value] * len(texts))
    with pytest.raises(ValueError, match="reward: the reward gave 1 values for 12 texts"):
        run(reward=lambda texts: [0.0])


def test_examples():
    assert doctest.testmod(treewise.search.trajectories).failed == 0
