"""Scorers of tokens, each against its formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evidence import attention, kept_only, make_evidence, numbers, rotated

from treewise.config import RopeConfig
from treewise.sparsity import SCORERS, KVSparsity
from treewise.sparsity.noise import uniform
from treewise.sparsity.scorers import (
    H2O,
    RKV,
    TOVA,
    ExpectedAttention,
    Induction,
    KeyDiff,
    Keyformer,
    KNorm,
    KVzip,
    Oracle,
    PyramidInfer,
    Random,
    SnapKV,
    Streaming,
)

EVERY = {name: make(8) for name, make in SCORERS.items()} | {"oracle": Oracle.of({1, 4})}


def evidence_for(scorer, tokens=40, **settings):
    """Evidence as the scorer asks for it."""
    behind = tokens if isinstance(scorer, KVzip) else 0
    num_queries = max(1, scorer.num_queries) if scorer.num_queries is not None else None
    return make_evidence(tokens, num_queries=num_queries, behind=behind, **settings)


def by_kv_head(x, kv_heads=2):
    """[heads, ...] as [kv_heads, group, ...]."""
    return x.reshape(kv_heads, -1, *x.shape[1:])


def close(scores, expected, tolerance=2e-5):
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(numbers(scores), expected, rtol=tolerance, atol=tolerance * 0.1)


# ------------------------------------------------------------------ what holds for all


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("tokens", "kv_heads", "group"), [(1, 2, 1), (3, 1, 8), (8, 3, 2), (9, 2, 4), (60, 2, 3)])
def test_scores_are_finite_for_any_length_and_group(name, tokens, kv_heads, group):
    evidence = evidence_for(EVERY[name], tokens, kv_heads=kv_heads, group=group)
    scores = EVERY[name].scores(evidence)
    assert scores.shape == (kv_heads, tokens) and scores.dtype == torch.float32 and scores.isfinite().all()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_types_are_scored_in_float32(name, dtype):
    evidence = evidence_for(EVERY[name], dtype=dtype)
    wide = evidence._replace(
        keys=evidence.keys.float(), values=evidence.values.float(), queries=evidence.queries.float()
    )
    assert torch.equal(EVERY[name].scores(evidence), EVERY[name].scores(wide))


@pytest.mark.parametrize("name", EVERY)
def test_scores_do_not_depend_on_what_was_scored_before(name):
    scorer = EVERY[name]
    evidence, other = evidence_for(scorer, seed=1), evidence_for(scorer, 70, seed=2)
    copies = [x.clone() for x in evidence if isinstance(x, torch.Tensor)]
    before = scorer.scores(evidence)
    scorer.scores(other)
    assert torch.equal(scorer.scores(evidence), before)
    assert all(map(torch.equal, copies, [x for x in evidence if isinstance(x, torch.Tensor)]))


@pytest.mark.parametrize("name", EVERY)
def test_keys_of_zeros_and_equal_keys_are_no_trouble(name):
    evidence = evidence_for(EVERY[name])
    evidence.keys[3] = 0
    evidence.keys[5:] = evidence.keys[4]
    assert EVERY[name].scores(evidence).isfinite().all()


@pytest.mark.parametrize("name", sorted(EVERY.keys() - {"random", "keyformer", "oracle"}))
def test_only_distances_between_positions_count(name):
    # The same vectors, turned to positions further on: whoever counts tokens instead of reading positions is found out.
    evidence, moved = (evidence_for(EVERY[name], start=start) for start in (0, 1000))
    np.testing.assert_allclose(EVERY[name].scores(moved), EVERY[name].scores(evidence), rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------ attention that was


@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize(("pooling", "kernel"), [("avg", 5), ("max", 7), ("avg", 1)])
def test_snapkv(reduce, pooling, kernel):
    evidence = make_evidence(300, num_queries=16)
    _, weights = attention(evidence)
    sums = getattr(np, reduce)(by_kv_head(weights.sum(1)), axis=1)  # heads become one before the pooling
    seen = sums[:, :-16]
    padded = np.pad(seen, ((0, 0), (kernel // 2, kernel // 2)))
    around = np.stack([padded[:, i : i + seen.shape[1]] for i in range(kernel)])
    pooled = around.mean(0) if pooling == "avg" else around.max(0)
    scores = SnapKV(16, kernel, pooling, reduce).scores(evidence)
    close(scores[:, :-16], pooled)
    close(scores[:, -16:], sums[:, -16:])


@pytest.mark.parametrize(("ahead", "behind"), [(5, 2), (0, 0), (400, 1)])
def test_induction(ahead, behind):
    evidence = make_evidence(300, num_queries=16)
    _, weights = attention(evidence)
    sums = by_kv_head(weights.sum(1)).mean(1)
    seen = sums[:, :-16]
    near = [seen[:, max(0, i - ahead) : i + behind + 1].sum(1) / (ahead + 1 + behind) for i in range(seen.shape[1])]
    looked_at = np.concatenate([np.stack(near, 1), sums[:, -16:]], 1)
    keys, values = numbers(evidence.keys), numbers(evidence.values)
    directions = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    middle = directions.mean(0) / np.linalg.norm(directions.mean(0), axis=-1, keepdims=True)
    expected = np.sqrt(looked_at) * (1 - (directions * middle).sum(-1)).T * np.linalg.norm(values, axis=-1).T
    close(Induction(16, ahead, behind).scores(evidence), expected, tolerance=1e-4)


def test_what_follows_what_was_looked_at_stays():
    evidence = make_evidence(200, num_queries=8)
    evidence.keys[60] = evidence.queries[-1].unflatten(0, (2, -1)).mean(1) * 10
    kept = KVSparsity(Induction(8, ahead=20, behind=2), budget=60, window=8, sinks=0).keep(evidence, 60)
    for head in kept.tolist():
        after, before = (sum(first <= token < first + 20 for token in head) for first in (61, 38))
        assert 60 in head and after > before + 5


def test_the_window_is_in_the_denominator():
    evidence = make_evidence(50, num_queries=10)
    scores = SnapKV(10, kernel_size=1).scores(evidence)
    close(scores.sum(1), np.full(2, 10.0))


def test_a_window_looks_at_the_last_queries_only():
    evidence = make_evidence(50)
    last = evidence._replace(
        queries=evidence.queries[-6:], query_positions=evidence.query_positions[-6:], lse=evidence.lse[-6:]
    )
    for scorer in (SnapKV(6), Induction(6), PyramidInfer(6), RKV(6), TOVA(), ExpectedAttention(6), Keyformer(6)):
        torch.testing.assert_close(scorer.scores(evidence), scorer.scores(last))


def test_h2o():
    evidence = make_evidence(50)
    _, weights = attention(evidence)
    close(H2O().scores(evidence), by_kv_head(weights.sum(1)).mean(1))


def test_tova_is_the_same_for_all_heads():
    evidence = make_evidence(50, num_queries=4)
    _, weights = attention(evidence)
    close(TOVA().scores(evidence), np.broadcast_to(weights[:, -1].mean(0), (2, 50)))


@pytest.mark.parametrize("window", [8, 100])
def test_pyramidinfer(window):
    evidence = make_evidence(50)
    _, weights = attention(evidence)
    count = min(window, 50)
    importance = (weights[:, -count:] * np.linspace(1, 1.2, count)[:, None]).mean((0, 1))
    close(PyramidInfer(window).scores(evidence), np.broadcast_to(importance, (2, 50)))


def test_kvzip_is_the_most_attention_of_the_second_pass():
    evidence = make_evidence(30, behind=35, soft_cap=3.0)
    _, weights = attention(evidence)
    close(KVzip().scores(evidence), by_kv_head(weights.max(1)).max(1))


def test_kvzip_refuses_the_queries_of_the_prompt():
    with pytest.raises(ValueError, match="second pass"):
        KVzip().scores(make_evidence(30))


@pytest.mark.parametrize("scorer", [SnapKV(8, 1), H2O(), TOVA(), PyramidInfer(8)])
def test_attention_is_that_of_all_that_queries_saw(scorer):
    # Once tokens are evicted, what the others got does not change: the LSE is over the whole path.
    evidence, kept = make_evidence(40), [0, 3, 4, 11, 30, *range(32, 40)]
    torch.testing.assert_close(scorer.scores(kept_only(evidence, kept)), scorer.scores(evidence)[:, kept])


def test_queries_of_branches_do_not_see_what_is_behind_them():
    evidence = make_evidence(40, num_queries=6)
    for scorer in (SnapKV(6, 1), H2O(), PyramidInfer(6), Keyformer()):
        early = evidence._replace(query_positions=evidence.query_positions - 10)
        assert (scorer.scores(early)[:, -10:] == 0).all()
        assert (scorer.scores(early)[:, :-10].sum(1) > 0).all()
        assert (scorer.scores(evidence._replace(query_positions=evidence.query_positions - 40)) == 0).all()


def test_keyformer():
    evidence = make_evidence(30, soft_cap=5.0)
    scores, _ = attention(evidence)
    heads = torch.arange(6).view(6, 1, 1)
    drawn = numbers(uniform(5, 1, heads, evidence.query_positions[:, None], evidence.positions))
    perturbed = (scores - np.log(-np.log(drawn))) / 1.5
    exponentials = np.exp(perturbed - perturbed.max(-1, keepdims=True))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    close(Keyformer(temperature=1.5).scores(evidence), by_kv_head(weights.sum(1)).mean(1))
    other = Keyformer(temperature=1.5).scores(evidence._replace(seed=6))
    assert not torch.allclose(other, Keyformer(temperature=1.5).scores(evidence))


def test_blocks_of_queries_change_nothing(monkeypatch):
    evidence, behind = make_evidence(30), make_evidence(30, behind=30)
    whole = [Keyformer().scores(evidence), RKV().scores(evidence), KVzip().scores(behind)]
    monkeypatch.setattr("treewise.sparsity.logits.LOGITS", 500)
    monkeypatch.setattr("treewise.sparsity.scorers.rkv.LOGITS", 500)
    for before, scores in zip(
        whole, [Keyformer().scores(evidence), RKV().scores(evidence), KVzip().scores(behind)], strict=True
    ):
        torch.testing.assert_close(scores, before)


# ------------------------------------------------------------------ attention that will be


@pytest.mark.parametrize(("num_queries", "rope_scale", "start"), [(None, 1.0, 0), (12, 1.3, 7)])
def test_expected_attention(num_queries, rope_scale, start):
    evidence = make_evidence(60, rope_scale=rope_scale, start=start)
    q, k, v = numbers(evidence.queries), numbers(evidence.keys), numbers(evidence.values)
    positions = evidence.query_positions.numpy()
    # The rotation's matrix [positions, head_dim, head_dim], without its scale, by rotating the axes.
    bare = RopeConfig(evidence.rope.inverse_frequencies)
    axes = np.eye(8)[:, None]

    def matrices(at):
        return np.stack([rotated(axes, np.full(8, position), bare)[:, 0].T for position in at])

    plain = np.einsum("qji,qhj->qhi", matrices(positions), q)[-(num_queries or 60) :]  # turned back
    coming = matrices(positions[-1] + 1 + np.arange(512)).mean(0)
    expected = np.zeros((2, 60))
    for head in range(6):
        mean = coming @ plain[:, head].mean(0)
        covariance = coming @ np.cov(plain[:, head].T, bias=True) @ coming.T
        keys = k[:, head // 3]
        z = evidence.scale * keys @ mean + evidence.scale**2 / 2 * np.einsum("ki,ij,kj->k", keys, covariance, keys)
        expected[head // 3] += np.exp(z) / np.exp(z).sum() / 3
    expected *= np.linalg.norm(v, axis=-1).T
    close(ExpectedAttention(num_queries).scores(evidence), expected, 2e-4)


def test_expected_attention_goes_by_positions_not_by_how_many_were_kept():
    # One head to a KV head, so that only the denominator tells that some tokens are gone.
    evidence, kept = make_evidence(60, group=1), [0, 1, 2, 20, 33, *range(40, 60)]
    whole, part = ExpectedAttention().scores(evidence)[:, kept], ExpectedAttention().scores(kept_only(evidence, kept))
    torch.testing.assert_close(part / part.sum(1, True), whole / whole.sum(1, True))


# ------------------------------------------------------------------ keys alone


def test_keydiff():
    evidence = make_evidence(40)
    keys = numbers(evidence.keys)
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    anchor = unit.mean(0)
    cosines = (unit * anchor).sum(-1) / np.linalg.norm(anchor, axis=-1)
    close(KeyDiff().scores(evidence), -cosines.T)


def test_knorm():
    evidence = make_evidence(40)
    close(KNorm().scores(evidence), -np.linalg.norm(numbers(evidence.keys), axis=-1).T)


def test_rkv():
    evidence = make_evidence(40, head_dim=4)
    evidence.keys[20] = evidence.keys[5] * 2
    evidence = make_evidence(40, head_dim=4, keys=evidence.keys)
    _, weights = attention(evidence)
    importance = by_kv_head(weights[:, -8:].mean(1)).max(1)
    padded = np.pad(importance[:, :-8], ((0, 0), (3, 3)))
    importance[:, :-8] = np.stack([padded[:, i : i + 32] for i in range(7)]).max(0)
    keys = numbers(evidence.keys).transpose(1, 0, 2)
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    expected = np.zeros((2, 40))
    for head in range(2):
        cosines = unit[head] @ unit[head].T
        for i in range(40):
            cosines[i, i] = 0
            similar = [j for j in range(40) if cosines[i, j] > 0.5]
            if similar:
                cosines[i, similar[-1]] = 0
        mean = cosines.mean(0)
        expected[head] = 0.1 * importance[head] - 0.9 * np.exp(mean) / np.exp(mean).sum()
    close(RKV().scores(evidence), expected)


def test_rkv_keeps_the_newest_of_equal_tokens():
    evidence = make_evidence(40)
    evidence.keys[[5, 9, 39]] = evidence.keys[3].clone()
    redundancy = -RKV(share=0.0).scores(evidence)
    assert (redundancy[:, 39] < redundancy[:, [3, 5, 9]].amin(1)).all()


# ------------------------------------------------------------------ neither


def test_random_depends_on_seed_layer_head_and_position_alone():
    evidence = make_evidence(1000)
    scores = Random().scores(evidence)
    kept = list(range(0, 1000, 7))
    assert torch.equal(Random().scores(kept_only(evidence, kept)), scores[:, kept])
    assert abs(scores.mean() - 0.5) < 0.03 and scores.min() > 0 and scores.max() < 1
    drawn = torch.cat([scores, *(Random().scores(evidence._replace(**{x: 2})) for x in ("seed", "layer"))])
    correlations = np.corrcoef(drawn.numpy()) - np.eye(6)
    assert abs(correlations).max() < 0.12  # 3.8 standard deviations
    assert not torch.equal(scores, Random().scores(evidence._replace(seed=5 + (1 << 40))))


def test_streaming_keeps_the_newest():
    policy = KVSparsity("streaming", budget=10, window=2, sinks=3)
    assert policy.keep(make_evidence(40), 10).tolist() == [[0, 1, 2, *range(33, 40)]] * 2


def test_oracles_know_positions():
    evidence = kept_only(make_evidence(40), [0, 4, 7, 30])
    assert Oracle.of({4, 9}).scores(evidence).tolist() == [[0, 1, 0, 0]] * 2
    assert Oracle((0.5,) * 31).scores(evidence).tolist() == [[0.5] * 4] * 2
    assert Oracle.of(()).scores(evidence).tolist() == [[0.0] * 4] * 2


# ------------------------------------------------------------------ what they are for


@pytest.mark.parametrize("name", ["snapkv", "h2o", "tova", "pyramidinfer", "keyformer", "rkv", "expected_attention"])
def test_planted_attention_is_found(name):
    # Queries and heavy keys share a direction. The rotation is slow, so that it stays one.
    planted = [21, 40, 41, 77]
    random = np.random.default_rng(3)
    direction = random.normal(size=8)
    direction /= np.linalg.norm(direction)
    keys = 0.3 * random.normal(size=(120, 2, 8))
    keys[planted] += 3 * direction
    queries = 0.3 * random.normal(size=(120, 6, 8)) + 5 * direction
    settings = {"keys": torch.tensor(keys).float(), "queries": torch.tensor(queries).float()}
    evidence = make_evidence(120, rope=RopeConfig((1e-6,) * 4), **settings)
    settings = {"scorer": RKV(8, share=0.9)} if name == "rkv" else {"scorer": name}
    kept = KVSparsity(**settings, budget=40, window=8, sinks=0).keep(evidence, 40)
    assert all(set(planted) <= set(row) for row in kept.tolist())
    random_one = KVSparsity("random", budget=40, window=8, sinks=0).keep(evidence, 40)
    assert not all(set(planted) <= set(row) for row in random_one.tolist())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SnapKV(kernel_size=4), "kernel_size must be odd, not 4"),
        (lambda: SnapKV(pooling="sum"), "pooling is 'sum'; choose one of avg, max"),
        (lambda: SnapKV(reduce="min"), "reduce is 'min'; choose one of mean, max, sum"),
        (lambda: SnapKV(num_queries=0), "num_queries"),
        (lambda: RKV(share=1.5), "share"),
        (lambda: RKV(kernel_size=2), "kernel_size"),
        (lambda: RKV(threshold=-0.1), "threshold"),
        (lambda: Keyformer(temperature=0), "temperature"),
        (lambda: Keyformer(num_queries=0), "num_queries must be an integer of at least 1 or None"),
        (lambda: ExpectedAttention(horizon=0), "horizon"),
        (lambda: PyramidInfer(last_weight=0), "last_weight"),
    ],
)
def test_settings_of_scorers_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_streaming_scores_grow():
    assert (Streaming().scores(make_evidence(12)).diff() > 0).all()
