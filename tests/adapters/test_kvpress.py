"""Scorers of kvpress: those made up here, and the package's own where it is installed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from evidence import make_evidence

from treewise.adapters.kvpress import PressScorer
from treewise.sparsity import KVSparsity
from treewise.sparsity.scorers import KeyDiff, KNorm


@dataclass
class ValuePress:
    """Long values stay."""

    compression_ratio: float = 0.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return values.norm(dim=-1) + module.layer_idx


class HiddenPress:
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return hidden_states.norm(dim=-1)


class WeightPress:
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return module.q_proj(keys)


class PositionPress:
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return kwargs["position_embeddings"][0]


def test_a_press_scores_keys_and_values():
    evidence = make_evidence(30, dtype=torch.bfloat16)
    scores = PressScorer(ValuePress()).scores(evidence)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, evidence.values.float().norm(dim=-1).T + 1)
    policy = KVSparsity(PressScorer(ValuePress()), budget=12, window=4, sinks=2)
    assert policy.keep(evidence, 12).shape == (2, 12) and "ValuePress(compression_ratio=0.0)" in policy.key


@pytest.mark.parametrize("press", [HiddenPress(), WeightPress(), PositionPress()])
def test_presses_that_need_more_are_refused(press):
    with pytest.raises(ValueError, match=f"{type(press).__name__} needs more than keys and values"):
        PressScorer(press)


def test_what_is_no_press_is_refused():
    with pytest.raises(ValueError, match="press must have a method score"):
        PressScorer("knorm")


@pytest.mark.parametrize(("name", "ours"), [("KnormPress", KNorm()), ("KeyDiffPress", KeyDiff())])
def test_presses_of_the_package_score_as_ours_do(name, ours):
    kvpress = pytest.importorskip("kvpress")
    evidence = make_evidence(60)
    torch.testing.assert_close(PressScorer(getattr(kvpress, name)()).scores(evidence), ours.scores(evidence))


def test_the_packages_streaming_keeps_what_ours_does():
    kvpress = pytest.importorskip("kvpress")
    evidence = make_evidence(60)
    press = PressScorer(kvpress.StreamingLLMPress(compression_ratio=0.75, n_sink=4))
    theirs, ours = (KVSparsity(scorer, budget=15, window=0, sinks=0) for scorer in (press, "streaming"))
    assert theirs.keep(evidence, 15).tolist() == [[0, 1, 2, 3, *range(49, 60)]] * 2
    assert ours.keep(evidence, 15).tolist() == [[*range(45, 60)]] * 2


@pytest.mark.parametrize("name", ["RandomPress", "LagKVPress", "CURPress"])
def test_other_presses_of_the_package_run(name):
    kvpress = pytest.importorskip("kvpress")
    press = getattr(kvpress, name)
    scorer = PressScorer(press(seed=1) if name == "RandomPress" else press())
    evidence = make_evidence(60)
    scores = scorer.scores(evidence)
    assert scores.shape == (2, 60) and scores.isfinite().all() and torch.equal(scores, scorer.scores(evidence))


@pytest.mark.parametrize("name", ["SnapKVPress", "ExpectedAttentionPress", "TOVAPress"])
def test_presses_of_the_package_that_need_the_model_are_refused(name):
    kvpress = pytest.importorskip("kvpress")
    with pytest.raises(ValueError, match="needs more than keys and values"):
        PressScorer(getattr(kvpress, name)())
