"""Policies: their settings, and which tokens they keep."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from evidence import make_evidence
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from treewise.sparsity import PRESETS, Ada, Evidence, KVSparsity, Pyramid, Table
from treewise.sparsity.scorers import Oracle, SnapKV


@dataclass(frozen=True)
class Given:
    """Scores of each head and token."""

    rows: tuple[tuple[float, ...], ...]
    num_queries = 0

    def scores(self, evidence: Evidence) -> torch.Tensor:
        return torch.tensor(self.rows)


def reference(scores, budgets, window, sinks):
    """Which tokens to keep, head by head, in numpy."""
    kept = []
    for row, budget in zip(np.array(scores, np.float64), budgets, strict=True):
        tokens = len(row)
        always = set(range(min(sinks, tokens))) | set(range(max(0, tokens - window), tokens))
        others = [token for token in np.lexsort((np.arange(tokens), -row)) if token not in always]
        kept.append(sorted([*always, *others[: budget - len(always)]]))
    return kept


# ------------------------------------------------------------------ what is kept


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 30), st.integers(0, 8), st.integers(0, 8))
def test_selection_is_that_of_numpy_ties_included(data, kv_heads, tokens, window, sinks):
    number = st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0, 3e38])
    row = st.lists(number, min_size=tokens, max_size=tokens).map(tuple)
    rows = data.draw(st.lists(row, min_size=kv_heads, max_size=kv_heads).map(tuple))
    policy = KVSparsity(Given(rows), budget=1.0, window=window, sinks=sinks)
    budget = data.draw(st.integers(policy.least(tokens), tokens))
    evidence = make_evidence(tokens, kv_heads=kv_heads)
    kept = policy.keep(evidence, budget)
    assert kept.dtype == torch.int64 and kept.shape == (kv_heads, budget)
    assert kept.tolist() == reference(rows, [budget] * kv_heads, window, sinks)
    for floor in (0.0, 0.2):
        by_head = replace(policy, allocator=Ada(floor)).keep_heads([evidence], budget)
        counts = [len(row) for row in by_head]
        assert sum(counts) == kv_heads * budget and min(counts) >= min(tokens, window + sinks)
        assert [row.tolist() for row in by_head] == reference(rows, counts, window, sinks)


@pytest.mark.parametrize("name", PRESETS)
def test_a_budget_of_all_tokens_keeps_them_in_order(name):
    policy = KVSparsity.named(name)
    evidence = make_evidence(50)
    for budget in (50, 51, 10**9):
        assert policy.keep(evidence, budget).tolist() == [list(range(50))] * 2
        assert [row.tolist() for row in policy.keep_heads([evidence], budget)] == [list(range(50))] * 2


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tokens", [1, 5, 36, 37, 90])
def test_presets_keep_what_is_protected_and_as_many_as_they_say(name, tokens):
    policy = KVSparsity.named(name, budget=40)
    evidence = make_evidence(tokens)
    for layer, budget in enumerate(policy.budgets(tokens, 4)):
        evidence = evidence._replace(layer=layer)
        kept = policy.keep(evidence, budget)
        assert kept.shape == (2, budget) and (kept.diff() > 0).all()
        always = {*range(tokens)[: policy.sinks], *range(tokens)[-policy.window :]}
        assert all(always <= set(row) for row in kept.tolist())
        by_head = policy.keep_heads([evidence], budget)
        assert sum(map(len, by_head)) == 2 * budget
        assert all((row.diff() > 0).all() and always <= set(row.tolist()) for row in by_head)
        assert policy.per_head or all(map(torch.equal, by_head, kept))
        assert torch.equal(kept, policy.keep(evidence, budget))  # nothing is remembered


def test_heads_keep_tokens_of_their_own():
    kept = KVSparsity.named("snapkv", budget=45).keep(make_evidence(90), 45)
    assert kept[0].tolist() != kept[1].tolist()


def test_there_is_room_for_what_is_protected():
    with pytest.raises(ValueError, match="budget must be at least the 36 tokens that always stay, not 35"):
        KVSparsity().keep(make_evidence(90), 35)


def test_tables_say_how_many_each_head_of_a_layer_keeps():
    policy = KVSparsity(allocator=Table((None, (40, 60), 50)), first_full=1)
    assert policy.budgets(90, 4) == [90, 90, 50, 50]
    evidence = make_evidence(90)
    lengths = [[*map(len, policy.keep_heads([evidence._replace(layer=layer)], 50))] for layer in range(4)]
    assert lengths == [[50, 50], [50, 50], [40, 60], [50, 50]]


# ------------------------------------------------------------------ settings


def test_an_observation_window_is_as_large_as_the_recent_one():
    assert KVSparsity(window=16).scoring == SnapKV(num_queries=16)
    assert KVSparsity(window=0).scoring == SnapKV(num_queries=1)
    assert KVSparsity(SnapKV(64), window=16).num_queries == 64
    assert (KVSparsity("h2o").num_queries, KVSparsity("keydiff").num_queries) == (None, 0)


def test_names_stand_for_settings():
    assert KVSparsity.named("pyramidkv", budget=512) == KVSparsity("snapkv", "pyramid", budget=512)
    assert KVSparsity.named("novita").first_full == 3
    assert KVSparsity.named("adakv").per_head and not KVSparsity.named("snapkv").per_head


def test_keys_tell_policies_apart():
    policies = [KVSparsity.named(name) for name in PRESETS]
    policies += [replace(KVSparsity(), **change) for change in (
        {"budget": 512}, {"budget": 1.0}, {"window": 16}, {"sinks": 0}, {"first_full": 1}, {"every": 8},
        {"trigger": "pressure"}, {"action": "hide"}, {"joint": True},
        {"scorer": SnapKV(32, 7)}, {"scorer": Oracle.of({3})}, {"allocator": Pyramid(10)}, {"allocator": Table((9,))},
    )]  # fmt: skip
    assert len({policy.key for policy in policies}) == len(policies)
    assert KVSparsity.named("snapkv").key == KVSparsity(SnapKV(32), budget=1024).key


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scorer": "snapkw"}, "scorer is 'snapkw'; choose one of expected_attention, full, h2o"),
        ({"allocator": "table"}, "allocator is 'table'; choose one of ada, full, pyramid, uniform"),
        ({"scorer": type("Mine", (), {"num_queries": 0})()}, "scorer must say by its repr"),
        ({"allocator": object()}, "allocator must say by its repr"),
        ({"budget": 36}, r"budget must be an integer of at least 37, more than window \(32\) and sinks \(4\) together"),
        ({"budget": 0.0}, "budget must be a number in"),
        ({"budget": 1.5}, "budget must be a number in"),
        ({"budget": True}, "budget"),
        ({"budget": "512"}, "budget"),
        ({"window": -1}, "window"),
        ({"sinks": 1.5}, "sinks"),
        ({"first_full": -1}, "first_full"),
        ({"every": 0}, "every must be an integer of at least 1 or None"),
        ({"trigger": "chunk"}, "trigger is 'chunk'; choose one of pressure, prompt"),
        ({"action": "offload"}, "action is 'offload'; choose one of evict, hide"),
        ({"trigger": "pressure", "joint": True}, "joint"),
    ],
)
def test_settings_are_checked(values, message):
    with pytest.raises(ValueError, match=message):
        KVSparsity(**values)


def test_unknown_names_are_refused_with_the_choices():
    with pytest.raises(ValueError, match="policy is 'snap'; choose one of adakv, expected_attention, full, h2o"):
        KVSparsity.named("snap")


@pytest.mark.parametrize(
    ("values", "windows", "reasons"),
    [
        ({}, (None, None, None), []),
        ({"allocator": "ada", "first_full": 2}, (None, None, None), []),
        ({}, (64, None, 64), []),
        ({}, (64, 64, 64), ["every layer of the model has a sliding window, so that there is nothing to evict"]),
        ({"first_full": 3}, (None,) * 3, ["first_full must be less than the 3 layers there are, not 3"]),
        ({"first_full": 1}, (None, 64, 64), ["first_full must be less than the 1 layers there are, not 1"]),
        ({"allocator": Table((50, 50))}, (None,) * 3, ["rows must be 3, one for each layer, not 2"]),
        ({"allocator": Table((50, 50)), "first_full": 1}, (None,) * 3, []),
        ({"allocator": Table((50, 50))}, (None, 64, None), []),
        ({"allocator": Ada(over=Table((50,)))}, (None,) * 2, ["rows must be 2, one for each layer, not 1"]),
        ({"allocator": Table((50, (40, 60)))}, (None,) * 2, []),
        (
            {"allocator": Table((50, (40, 50, 60)))},
            (None,) * 2,
            ["rows[1] must have 2 numbers, one for each KV head, not 3"],
        ),
    ],
)
def test_models_that_a_policy_does_not_fit(values, windows, reasons):
    assert KVSparsity(**values).refusals(tiny_model(windows=windows).config) == reasons
