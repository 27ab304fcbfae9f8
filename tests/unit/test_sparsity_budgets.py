"""How many tokens layers and heads keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from treewise.sparsity import ALLOCATORS, Ada, FirstFull, KVSparsity, Pyramid, Table, Uniform
from treewise.sparsity.allocators import round_to, spread

COUNTS = st.integers(1, 5000)


# ------------------------------------------------------------------ rounding


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1000), min_size=1, max_size=40))
def test_rounded_shares_sum_to_the_total_and_move_by_less_than_one(shares):
    total = round(sum(shares))
    shares = [share * total / sum(shares) for share in shares] if sum(shares) else shares
    whole = round_to(total, shares)
    assert sum(whole) == total and all(abs(x - y) < 1 for x, y in zip(whole, shares, strict=True))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.integers(1, 1000), min_size=1, max_size=16), st.integers(0, 20), st.integers(0, 500))
def test_spread_shares_stay_within_bounds_and_in_proportion(data, weights, low, above):
    high = max(1, low + above)
    total = data.draw(st.integers(low * len(weights), high * len(weights)))
    shares = spread(total, weights, [low] * len(weights), [high] * len(weights))
    assert sum(shares) == total and all(low <= share <= high for share in shares)
    free = [share / weight for share, weight in zip(shares, weights, strict=True) if low + 1 < share < high - 1]
    one = [1 / weight for share, weight in zip(shares, weights, strict=True) if low + 1 < share < high - 1]
    assert not free or max(free) - min(free) <= 2 * max(one)


# ------------------------------------------------------------------ layers


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*ALLOCATORS.keys() - {"full"}, "table"]), COUNTS, COUNTS, st.integers(2, 80), COUNTS)
def test_budgets_sum_exactly(name, tokens, budget, num_layers, least):
    least = min(least, tokens, budget)
    # A table that says the same as the budget.
    allocator = Table((budget,) * num_layers) if name == "table" else ALLOCATORS[name]()
    kept = allocator.layers(tokens, budget, num_layers, least)
    assert sum(kept) == num_layers * min(budget, tokens)
    assert len(kept) == num_layers and all(least <= count <= tokens for count in kept)


@settings(max_examples=300, deadline=None)
@given(COUNTS, COUNTS, st.integers(2, 80), st.integers(1, 300), st.floats(1, 200))
def test_a_pyramid_is_a_straight_line_that_goes_down(tokens, budget, num_layers, least, beta):
    least = min(least, tokens, budget)
    kept = Pyramid(beta, stairs=None).layers(tokens, budget, num_layers, least)
    assert sum(kept) == num_layers * min(budget, tokens)
    assert kept == sorted(kept, reverse=True) and kept[-1] >= least and kept[0] <= tokens
    assert np.abs(np.diff(kept, 2)).max(initial=0) <= 2
    mean = budget - least
    if tokens > budget:
        first = min(2 * mean - mean / beta, tokens - least)
        assert abs(kept[0] - least - first) <= 1 and abs(kept[-1] - least - (2 * mean - first)) <= 1


@settings(max_examples=300, deadline=None)
@given(COUNTS, COUNTS, st.integers(2, 80), st.integers(1, 300), st.integers(1, 90))
def test_the_stairs_of_a_pyramid_follow_its_line(tokens, budget, num_layers, least, stairs):
    least = min(least, tokens, budget)
    line = Pyramid(stairs=None).layers(tokens, budget, num_layers, least)
    kept = Pyramid(stairs=stairs).layers(tokens, budget, num_layers, least)
    assert sum(kept) == sum(line) and kept == sorted(kept, reverse=True)
    assert least <= kept[-1] and kept[0] <= tokens
    assert len(set(kept)) <= stairs + 1, "one of them may be in two halves"
    longest = -(-num_layers // min(stairs, num_layers))
    slope = np.abs(np.diff(line)).max()
    assert np.abs(np.array(kept) - line).max() <= slope * longest / 2 + 2


@pytest.mark.parametrize(("budget", "num_layers"), [(64, 32), (96, 32), (128, 32), (64, 30), (2048, 32)])
def test_small_pyramids_are_not_overspent(budget, num_layers):
    # With a step that is rounded down, a budget of 64 in 32 layers would have spent 11.7 % too much.
    kept = KVSparsity.named("pyramidkv", budget=budget, window=8, sinks=0).budgets(4000, num_layers)
    assert sum(kept) == num_layers * budget
    step = (2 * (budget - 8) - 2 * ((budget - 8) // 20)) // (num_layers - 1)
    floored = [2 * (budget - 8) - (budget - 8) // 20 - layer * step + 8 for layer in range(num_layers)]
    assert sum(floored) > sum(kept)


@pytest.mark.parametrize("share", [0.5, 0.25, 0.1, 0.02])
def test_a_pyramid_stays_one_at_high_ratios(share):
    kept = KVSparsity.named("pyramidkv", budget=share).budgets(4096, 32)
    assert kept[0] > 1.5 * kept[-1] and sum(kept) == 32 * round(share * 4096)


def test_a_pyramid_that_is_cut_off_at_the_top():
    # M = 2 C - m = 137 of 100: the first layer keeps all, and the last what that leaves.
    assert Pyramid().layers(100, 70, 4) == [100, 80, 60, 40]


@pytest.mark.parametrize("name", ALLOCATORS)
def test_nothing_is_compressed_that_fits(name):
    for tokens in (1, 7, 64):
        assert KVSparsity(allocator=name, budget=64).budgets(tokens, 5) == [tokens] * 5


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["uniform", "pyramid", "ada"]),
    st.one_of(st.integers(100, 3000), st.floats(1e-6, 1.0)),
    COUNTS,
    st.integers(2, 60),
    st.integers(0, 60),
    st.integers(0, 8),
    st.integers(0, 70),
)
def test_policies_keep_their_budget(allocator, budget, tokens, num_layers, window, sinks, first_full):
    assume(first_full < num_layers)
    policy = KVSparsity(allocator=allocator, budget=budget, window=window, sinks=sinks, first_full=first_full)
    kept = policy.budgets(tokens, num_layers)
    asked = round(budget * tokens) if isinstance(budget, float) else budget
    asked = min(tokens, max(asked, window + sinks, 1))
    assert kept[:first_full] == [tokens] * first_full
    assert sum(kept[first_full:]) == (num_layers - first_full) * asked
    assert all(min(tokens, max(1, window + sinks)) <= count <= tokens for count in kept)


def test_small_shares_are_not_rounded_to_nothing():
    assert KVSparsity(budget=0.01, window=0, sinks=0).budgets(10, 3) == [1, 1, 1]


def test_the_budget_is_that_of_the_layers_behind_the_full_ones():
    assert KVSparsity.named("novita", budget=100).budgets(1000, 5) == [1000, 1000, 1000, 100, 100]


def test_the_full_policy_keeps_everything_whatever_the_budget():
    assert KVSparsity.named("full", budget=64).budgets(1000, 3) == [1000] * 3
    assert KVSparsity.named("full", budget=0.5).budgets(1000, 3) == [1000] * 3


def test_tables():
    table = Table((None, 300, (100, 300), 20))
    assert table.per_head and not Table((1, None)).per_head
    assert table.layers(1000, 5, 4, least=40) == [1000, 300, 200, 40]
    assert table.layers(150, 5, 4, least=40) == [150, 150, 150, 40]
    scores = torch.zeros((2, 1000))
    assert table.heads(scores, 200, 2) == [100, 300] and table.heads(scores, 300, 1) == [300, 300]
    assert table.heads(scores[:, :250], 200, 2) == [150, 250]  # one head has no more than 250
    scores[:, :150] = torch.inf
    assert table.heads(scores, 200, 2) == [150, 250]  # and none fewer than what is protected
    assert FirstFull(1, Table(table.rows[1:])).heads(scores[:, 200:], 200, 2) == [100, 300]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Table((3, 0)), r"rows\[1\] must be an integer of at least 1 or None"),
        (lambda: Table((None, (3, 4))), r"rows\[1\] must have a whole number as its mean, not \(3, 4\)"),
        (lambda: Table(((),)), r"rows\[0\]"),
        (lambda: Table((1, 2)).layers(10, 5, 3), "rows must be 3, one for each layer, not 2"),
        (lambda: Table(((1, 3),)).heads(torch.zeros(3, 9), 2, 0), r"rows\[0\] must have 3 numbers"),
        (
            lambda: FirstFull(3, Uniform()).layers(10, 5, 3),
            "first_full must be less than the 3 layers there are, not 3",
        ),
        (lambda: Pyramid(0.5), "beta"),
        (lambda: Pyramid(stairs=0), "stairs must be an integer of at least 1 or None"),
        (lambda: Ada(1.2), "floor"),
    ],
)
def test_what_allocators_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ------------------------------------------------------------------ heads


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(1, 60), st.floats(0, 1), st.integers(0, 10**6))
def test_heads_share_a_layer_by_their_best_scores(data, kv_heads, tokens, floor, seed):
    budget = data.draw(st.integers(1, tokens))
    scores = np.random.default_rng(seed).integers(0, 5, (kv_heads, tokens)).astype(np.float32)  # with ties
    counts = Ada(floor).heads(torch.from_numpy(scores), budget, 0)
    order = sorted((-scores[head, token], token, head) for head in range(kv_heads) for token in range(tokens))
    best = np.bincount([head for _, _, head in order[: kv_heads * budget]], minlength=kv_heads)
    wanted = (1 - floor) * best + floor * budget
    assert sum(counts) == kv_heads * budget and all(0 <= count <= tokens for count in counts)
    assert np.abs(np.array(counts) - wanted).max() < 1 + 1e-6


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.integers(1, 60), min_size=1, max_size=8), st.floats(0, 1), st.integers(0, 10**6))
def test_heads_may_have_different_numbers_of_tokens(data, lengths, floor, seed):
    budget = data.draw(st.integers(1, sum(lengths) // len(lengths)))
    draw = np.random.default_rng(seed)
    scores = [torch.from_numpy(draw.normal(size=length).astype(np.float32)) for length in lengths]
    for row in scores:
        row[-1] = torch.inf
    numbers = draw.integers(1, 9, len(lengths))
    numbers[0] += -numbers.sum() % len(lengths)
    for allocator in (Ada(floor), Table((tuple(numbers.tolist()),))):
        counts = allocator.heads(scores, budget, 0)
        assert sum(counts) == len(lengths) * budget
        assert all(0 <= count <= length for count, length in zip(counts, lengths, strict=True))
    assert min(counts) >= 1, "the table leaves each head what is protected"
    order = sorted((-score, head) for head, row in enumerate(scores) for score in row.tolist())
    best = np.bincount([head for _, head in order[: len(lengths) * budget]], minlength=len(lengths))
    assert Ada(0.0).heads(scores, budget, 0) == best.tolist()


def test_the_floor_shares_out_evenly():
    scores = torch.tensor([[9.0] * 10, [1.0] * 10])
    assert Ada(0.0).heads(scores, 5, 0) == [10, 0]
    assert Ada(0.2).heads(scores, 5, 0) == [9, 1]
    assert Ada(1.0).heads(scores, 5, 0) == [5, 5]


def test_heads_may_share_what_a_pyramid_leaves():
    assert Ada(over=Pyramid()).layers(1000, 100, 4) == Pyramid().layers(1000, 100, 4)
