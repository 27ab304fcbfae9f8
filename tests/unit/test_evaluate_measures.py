"""Measures against numpy, and intervals of pairs."""

import numpy as np
import pytest
import torch
from tiny import tiny_model

from treewise.evaluate.cache import OfflineCache
from treewise.evaluate.measures import (
    bootstrap,
    jaccard,
    kl_divergence,
    nll,
    output_errors,
    parts_right,
    retention,
    top1_agreement,
    union,
)
from treewise.evaluate.summary import difference, mean, ratio


def log_probs(seed, shape=(5, 40)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(3).log_softmax(-1)


def sets(*layers):
    return [None if layer is None else [torch.tensor(head) for head in layer] for layer in layers]


def test_divergence_and_costs_are_those_of_numpy():
    dense, sparse = log_probs(0), log_probs(1)
    p, q = (part.double().exp().numpy() for part in (dense, sparse))
    np.testing.assert_allclose(kl_divergence(dense, sparse), (p * np.log(p / q)).sum(-1), rtol=1e-4)
    assert kl_divergence(dense, dense).abs().max() == 0
    tokens = [3, 1, 39, 0, 7]
    np.testing.assert_allclose(nll(dense, tokens), -np.log(p[np.arange(5), tokens]), rtol=1e-4)
    np.testing.assert_array_equal(top1_agreement(dense, sparse), p.argmax(-1) == q.argmax(-1))


def test_a_part_is_right_if_all_its_tokens_are():
    expected = torch.full((5, 9), -5.0)
    for place, token in enumerate([1, 2, 3, 4, 5]):
        expected[place, token] = 0
    assert parts_right(expected, [1, 2, 3, 4, 5], [0, 0, 1, 1, 2]) == [True, True, True]
    assert parts_right(expected, [1, 2, 3, 8, 5], [0, 0, 1, 1, 2]) == [True, False, True]


def test_retention_is_a_share_for_each_layer_and_head():
    chosen = sets([[0, 4, 5], [1, 2, 3]], None, [[4], [4, 5, 6, 7]])
    shares = retention(chosen, [4, 5, 6, 7], kv_heads=2)
    assert shares.tolist() == [[0.5, 0], [1, 1], [0.25, 1]]


def test_what_branches_keep_together_and_alike():
    one, other = sets([[0, 1, 2], [3, 4]], None), sets([[1, 2, 5], [6]], None)
    [first, second], whole = union([one, other])
    assert whole is None and first.tolist() == [0, 1, 2, 5] and second.tolist() == [3, 4, 6]
    assert jaccard([one, other]) == pytest.approx((2 / 4 + 0) / 2)
    assert jaccard([one, one, other]) == pytest.approx((1 + 1 + 2 * 0.5) / 6)


def test_errors_of_outputs_are_each_layers_own():
    model = tiny_model()
    cache = OfflineCache(model)
    cache.read(list(range(1, 41)))
    dense = cache.copy()
    dense.read([7, 8, 9])
    assert output_errors(dense, cache).abs().max() < 1e-6
    everything = torch.arange(40)
    half = cache.only([[everything, everything], [torch.arange(0, 40, 2), torch.arange(20, 40)]])
    first, second = output_errors(dense, half).tolist()
    assert first < 1e-6 < 0.05 < second
    # Against attention written out: the second layer's queries over what is left and their own three tokens.
    rows, held = dense.asked[1][-1], dense.held[1]
    wrong = []
    for head in range(6):
        left = (list(range(0, 40, 2)), list(range(20, 40)))[head // 3] + [40, 41, 42]
        keys, values = (part[head // 3, left].double() for part in held[:2])
        scores = rows.queries[:, head].double() @ keys.T * model.config.attention_scale
        scores[torch.tensor(left)[None] > torch.arange(40, 43)[:, None]] = -torch.inf
        wrong.append(scores.softmax(-1) @ values - rows.outputs[:, head])
    expected = torch.linalg.vector_norm(torch.stack(wrong)) / torch.linalg.vector_norm(rows.outputs.double())
    assert second == pytest.approx(float(expected), rel=1e-4)


def test_intervals_hold_the_mean_and_those_of_pairs_are_narrow():
    draw = np.random.default_rng(3)
    level = draw.normal(size=(2, 40))
    values, others = level + 1 + 0.01 * draw.normal(size=(2, 40)), level
    low, high = bootstrap([values], mean)
    assert low < mean(values) < high and 0.1 < high - low < 1
    low, high = bootstrap([values, others], difference)
    assert low < 1 < high and high - low < 0.02
    assert bootstrap([values], mean) == bootstrap([values], mean)
    assert bootstrap([values, values], difference) == (0, 0)


def test_a_ratio_of_sums_weighs_by_what_there_is():
    right, of = np.array([[1.0, 0.0, 3.0]]), np.array([[1.0, 2.0, 3.0]])
    assert float(ratio(right, of)) == pytest.approx(4 / 6)
    assert np.isnan(ratio(right * 0, of * 0))
    low, high = bootstrap([right, of], ratio)
    assert 0 <= low < 4 / 6 < high <= 1
