"""Sampling parameters: what is accepted, and that a refusal names the field."""

from __future__ import annotations

import math

import numpy as np
import pytest

from treewise.config import MAX_SEQUENCES, BeamSearchParams, SamplingParams


@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 0), ("n", -1), ("n", MAX_SEQUENCES + 1), ("n", 10**6), ("n", 1.0), ("n", True), ("n", None),
        ("temperature", -1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("temperature", None), ("temperature", True),
        ("top_k", 0.5), ("top_k", -2), ("top_k", "5"), ("top_k", math.nan),
        ("top_p", 0), ("top_p", 1.5), ("top_p", -1), ("top_p", math.nan), ("top_p", [0.5]),
        ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan),
        ("presence_penalty", 2.1), ("presence_penalty", math.nan), ("frequency_penalty", -2.1),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.inf),
        ("seed", 1.5), ("seed", "42"), ("seed", False),
        ("max_tokens", -1), ("max_tokens", 2.0), ("max_tokens", "9"),
        ("min_tokens", -1), ("min_tokens", None),
        ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 7), ("stop", b"a"), ("stop", {"a": 1}),
        ("stop_token_ids", 3), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", "12"),
        ("ignore_eos", 1), ("ignore_eos", "yes"), ("include_stop_str_in_output", None),
        ("logprobs", -1), ("logprobs", True), ("prompt_logprobs", 1.5),
        ("logit_bias", [1, 2]), ("logit_bias", {"1": 1.0}), ("logit_bias", {1: math.nan}), ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101}), ("logit_bias", {1: "x"}),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_messages_name_what_is_accepted():
    with pytest.raises(ValueError, match=r"top_p must be a number in \(0, 1\], not 1.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match=r"top_k must be an integer of at least -1 \(0 or -1: off\), not 0.5 of type"):
        SamplingParams(top_k=0.5)
    with pytest.raises(ValueError, match=rf"n must be an integer in \[1, {MAX_SEQUENCES}\], not 1000000"):
        SamplingParams(n=10**6)
    with pytest.raises(ValueError, match=r"min_tokens must be at most max_tokens \(3\), not 4"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_good_values_are_taken_and_put_in_one_form():
    params = SamplingParams(
        n=np.int64(3), temperature=np.float32(0.5), top_k=2**30, seed=-(10**30), max_tokens=0, stop="ab",
        stop_token_ids=[1, 2], logit_bias={np.int32(4): -100}, logprobs=0,
    )  # fmt: skip
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("ab",), (1, 2), {4: -100})
    empty = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)
    assert (empty.stop, empty.stop_token_ids, empty.logit_bias) == ((), (), {})
    assert empty == SamplingParams()
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_logit_bias_is_the_params_own():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 9.0
    assert params.logit_bias == {1: 2.0}


def test_greedy_at_and_below_the_threshold():
    assert [SamplingParams(temperature=t).is_greedy for t in (0, 1e-6, 1e-3, 1.1e-3, 1)] == [True] * 3 + [False] * 2


def test_end_token_ids():
    assert SamplingParams(stop_token_ids=[5]).end_token_ids([2, 3]) == {2, 3, 5}
    assert SamplingParams(stop_token_ids=[5], ignore_eos=True).end_token_ids([2, 3]) == {5}


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": [10]}, {"logit_bias": {10: 1}}, {"logprobs": 11}, {"prompt_logprobs": 11}]
)
def test_what_the_vocabulary_lacks_is_refused_by_name(fields):
    params = SamplingParams(**fields)
    params.check_vocabulary(20)
    with pytest.raises(ValueError, match=next(iter(fields))):
        params.check_vocabulary(10)


@pytest.mark.parametrize(
    "field, value",
    [("beam_width", 0), ("beam_width", 2.0), ("max_tokens", 0), ("length_penalty", math.nan), ("length_penalty", 11),
     ("early_stopping", "always"), ("early_stopping", 1), ("stop", ""), ("stop_token_ids", [-1]), ("ignore_eos", 0)],
)  # fmt: skip
def test_wrong_beam_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        BeamSearchParams(**{"beam_width": 4, field: value})


def test_beam_params_say_what_ends_a_hypothesis():
    params = BeamSearchParams(4, max_tokens=7, stop="x", stop_token_ids=[3], ignore_eos=True, min_tokens=2)
    stopping = params.stopping
    assert (stopping.max_tokens, stopping.stop, stopping.stop_token_ids) == (7, ("x",), (3,))
    assert (stopping.ignore_eos, stopping.min_tokens, params.stop) == (True, 2, ("x",))
