"""The sampler against plain formulas, row by row, whatever else is in the batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from treewise.choices import choose
from treewise.config import SamplingParams
from treewise.sampler import Distributions, SamplingRow, invalid_rows, log_probs, row_key, sample, top_log_probs
from treewise.search import self_certainty

NEVER = -math.inf


def draw(logits, params, count, seed=0, **fields):
    """Token counts [vocab] of `count` independent rows with the same logits."""
    rows = [SamplingRow(params, row_key(seed, (i,)), position=7, **fields) for i in range(count)]
    tokens = sample(torch.tensor(logits).expand(count, -1), rows)
    return torch.bincount(tokens, minlength=len(logits))


def assert_follows(counts, probabilities):
    """Chi-square test at about one false alarm in a million."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else True


LOGITS = [2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, NEVER, 1.5, 1.0]


def softmax_of(logits, kept=None):
    logits = torch.tensor(logits, dtype=torch.float64)
    if kept is not None:
        mask = torch.ones(len(logits), dtype=torch.bool)
        mask[list(kept)] = False
        logits[mask] = NEVER
    return logits.softmax(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_draws_follow_the_softmax_at_the_temperature(temperature, seed):
    counts = draw(LOGITS, SamplingParams(temperature=temperature), 4_000, seed)
    assert_follows(counts, softmax_of([x / temperature for x in LOGITS]))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 8, 1, 9]),  # 1 and 9 are equally likely: both stay
        ({"top_k": 5}, [0, 8, 1, 9, 2]),
        ({"top_k": 2**30}, range(10)),
        ({"top_k": 2**70}, range(10)),
        ({"top_k": -1}, range(10)),
        ({"top_p": 1e-6}, [0]),
        ({"top_p": 0.5}, [0, 8]),  # 0.35, 0.21
        ({"top_p": 0.7}, [0, 8, 1, 9]),
        ({"min_p": 0.5}, [0, 8]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 2, "top_p": 0.6}, [0]),  # top_p looks at what top_k left: 0.62 of it is the first
        ({"min_p": 0.3, "top_p": 0.9}, [0, 8, 1, 9]),
    ],
)
def test_cuts_keep_the_right_tokens(fields, kept):
    assert_follows(draw(LOGITS, SamplingParams(**fields), 4_000), softmax_of(LOGITS, kept))


def test_top_p_over_a_large_vocabulary_equals_a_full_sort():
    logits = torch.randn(4, 6_000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[5.0], [2], [1], [0.1]])
    for top_p in (0.1, 0.9, 0.999999):
        ordered, tokens = logits.double().sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        for row in range(4):
            kept = set(tokens[row][before[row] < top_p].tolist())
            rows = [SamplingRow(SamplingParams(top_p=top_p), row_key(3, (i,)), 0) for i in range(8)]
            assert set(sample(logits[row].expand(8, -1), rows).tolist()) <= kept


def naive_penalties(logits, params, prompt, output):
    logits = logits.clone()
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in output:
        logits[token] -= params.frequency_penalty
    for token in set(output):
        logits[token] -= params.presence_penalty
    return logits


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.8},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.9},
    ],
)
def test_penalties_equal_the_plain_formula(fields):
    prompt, output = [0, 1, 1, 6], [2, 2, 2, 8, 1]
    expected = naive_penalties(torch.tensor(LOGITS), SamplingParams(**fields), prompt, output)
    counts = draw(LOGITS, SamplingParams(**fields), 4_000, prompt_tokens=prompt, output_tokens=output)
    assert_follows(counts, softmax_of(expected.tolist()))
    greedy = SamplingRow(SamplingParams(temperature=0, **fields), 0, 0, 0, prompt, output)
    assert sample(torch.tensor([LOGITS]), [greedy]).item() == int(expected.argmax())


def test_logit_bias_and_min_tokens():
    biased = SamplingParams(temperature=0, logit_bias={6: 100, 0: -100})
    assert sample(torch.tensor([LOGITS]), [SamplingRow(biased, 0, 0)]).tolist() == [6]
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[8])
    logits = torch.tensor([LOGITS])
    assert sample(logits, [SamplingRow(params, 0, 0, num_tokens=2)], eos_token_ids={0}).tolist() == [1]
    assert sample(logits, [SamplingRow(params, 0, 0, num_tokens=3)], eos_token_ids={0}).tolist() == [0]
    keeps_eos = SamplingParams(temperature=0, min_tokens=3, ignore_eos=True)
    assert sample(logits, [SamplingRow(keeps_eos, 0, 0)], eos_token_ids={0}).tolist() == [0]
    assert logits.tolist() == [LOGITS]  # the caller's logits are left alone


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("top_p", [1e-4, 1.0])
@pytest.mark.parametrize("top_k", [1, 0])
def test_tiny_temperatures_agree_with_greedy(temperature, top_p, top_k):
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1)) * 8
    logits[:, 5] = NEVER
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    rows = [SamplingRow(params, row_key(0, (i,)), 0) for i in range(50)]
    assert torch.equal(sample(logits, rows), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.002, 0.01, 1000])
def test_extreme_temperatures_are_finite(temperature):
    logits = torch.tensor([[3e38, -3e38, NEVER, 2e38]])
    row = SamplingRow(SamplingParams(temperature=temperature), 1, 1)
    assert sample(logits, [row]).tolist() == [0]


def test_greedy_ties_go_to_the_lowest_id():
    row = SamplingRow(SamplingParams(temperature=0), 0, 0)
    assert sample(torch.tensor([[0.0, 4.0, 4.0], [4.0, 4.0, 4.0]]), [row, row]).tolist() == [1, 0]


def test_one_hot_rows_always_give_the_hot_id():
    vocab = 300
    hot = torch.arange(0, vocab, 13)
    logits = torch.full((len(hot), vocab), NEVER)
    logits[torch.arange(len(hot)), hot] = 0.0
    for fields in ({}, {"top_k": 2**30}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0}):
        for position in range(20):
            rows = [SamplingRow(SamplingParams(**fields), row_key(1, (i,)), position) for i in range(len(hot))]
            assert torch.equal(sample(logits, rows), hot)


def many_kinds():
    return [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 40},
        {"top_p": 0.7},
        {"min_p": 0.05, "top_p": 0.95, "top_k": 100},
        {"temperature": 0, "logit_bias": {3: 2.0}, "repetition_penalty": 1.2},
        {"frequency_penalty": 0.5, "presence_penalty": -0.5},
        {"min_tokens": 4, "stop_token_ids": [9]},
    ]


@pytest.mark.parametrize("vocab", [33, 1021, 49_152])
def test_rows_of_a_mixed_batch_are_as_alone_and_in_any_slot(vocab):
    generator = torch.Generator().manual_seed(5)
    kinds = many_kinds() * 2
    logits = torch.randn(len(kinds), vocab, generator=generator) * 3
    logits[:, 11] = NEVER  # a banned token beside greedy and random rows
    rows = [
        SamplingRow(SamplingParams(**fields), row_key(2, (i,)), 30 + i, i % 6, [1, 2, 3], [4, 4, 5])
        for i, fields in enumerate(kinds)
    ]
    together = sample(logits, rows, {7})
    alone = torch.cat([sample(logits[i : i + 1], [rows[i]], {7}) for i in range(len(rows))])
    assert torch.equal(together, alone)
    order = torch.randperm(len(rows), generator=generator)
    shuffled = sample(logits[order], [rows[i] for i in order.tolist()], {7})
    assert torch.equal(shuffled, together[order])
    assert 11 not in together.tolist()


@pytest.mark.parametrize("vocab", [7, 1021, 49_152])
def test_noise_is_the_same_bits_in_any_batch(vocab):
    from treewise.sampler import _gumbel

    rows = [SamplingRow(SamplingParams(), row_key(0, (i,)), i) for i in range(20)]
    together = _gumbel(rows, vocab, torch.device("cpu"))
    assert torch.equal(together, torch.cat([_gumbel([row], vocab, torch.device("cpu")) for row in rows]))
    assert together.isfinite().all()
    assert together.mean().item() == pytest.approx(0.5772, abs=4 * 1.2825 / math.sqrt(together.numel()))
    assert together.var().item() == pytest.approx(math.pi**2 / 6, rel=20 / math.sqrt(together.numel()))


def test_streams_of_different_rows_and_positions_are_independent():
    from treewise.sampler import _gumbel

    paths = ((), (0,), (1,), (0, 0), (0, 1), (1, 0))
    rows = [
        SamplingRow(SamplingParams(), row_key(seed, path), position)
        for seed, path, position in itertools.product((0, 1, 2), paths, (0, 1, 2))
    ]
    noise = _gumbel(rows, 4096, torch.device("cpu")).double()
    correlation = torch.corrcoef(noise).fill_diagonal_(0)
    assert correlation.abs().max() < 5.5 / math.sqrt(4096)
    neighbours = torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))[0, 1]
    assert abs(neighbours) < 5 / math.sqrt(noise.numel())


def test_a_seeded_row_does_not_depend_on_the_seed_of_its_neighbour():
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.8)
    tokens = [
        [
            sample(logits, [SamplingRow(params, row_key(42, (0,)), p), SamplingRow(params, row_key(other, (0,)), p)])[0]
            for p in range(16)
        ]
        for other in range(4)
    ]
    assert all(drawn == tokens[0] for drawn in tokens)


def test_row_keys_are_distinct_and_stable():
    paths = [(), *((i,) for i in range(30)), *((i, j) for i in range(30) for j in range(30))]
    keys = {row_key(seed, path) for seed in (0, 1, -1, 2**64 - 2, 10**30) for path in paths}
    assert len(keys) == 5 * len(paths)
    assert row_key(5, (1, 2)) == row_key(5 + 2**64, [1, 2])
    assert all(0 <= key < 2**64 for key in keys)
    assert row_key(0, ()) == 16294208416658607535  # a change of this number changes every seeded output


def test_log_probs_are_of_the_raw_logits():
    logits = torch.randn(3, 50, dtype=torch.float64).float()
    logprobs = log_probs(logits)
    torch.testing.assert_close(logprobs, logits.double().log_softmax(-1).float())
    values, tokens = top_log_probs(logprobs, 4)
    assert torch.equal(values, logprobs.gather(1, tokens))
    assert (values.diff(dim=-1) <= 0).all()
    assert top_log_probs(logprobs, 99)[0].shape == (3, 50)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (2, 128), (7, 300), (40, 1000), (1, 5000)])
def test_top_sums_are_the_largest_of_all(rows, columns):
    generator = torch.Generator().manual_seed(rows * columns)
    table = torch.randn(rows, columns, generator=generator)
    table[torch.rand(rows, columns, generator=generator) < 0.2] = -math.inf
    offsets = torch.randn(rows, generator=generator)
    offsets[rows // 2] = -math.inf if rows > 1 else 0.0
    sums = (table + offsets[:, None]).flatten()
    for count in sorted({1, min(7, rows * columns), rows * columns // 3 + 1, rows * columns}):
        values, places = Distributions.of(table).top_sums(offsets, count)
        assert values.tolist() == sums.topk(count).values.tolist()
        known = values > -math.inf
        assert sums[places[known]].tolist() == values[known].tolist()
        assert len(set(places[known].tolist())) == int(known.sum())


def test_the_likeliest_tokens_of_logits_are_those_of_their_log_probs():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 3 + 9
    tops = logits.amax(dim=-1)
    totals = (logits - tops[:, None]).exp().sum(dim=-1).log()
    written = Distributions.of(log_probs(logits))
    found = Distributions(logits, tops, totals, Distributions.of(logits).peaks)
    torch.testing.assert_close(found.logprobs, written.table)
    torch.testing.assert_close(found.at(torch.arange(6), torch.arange(6)), written.at(torch.arange(6), torch.arange(6)))
    offsets = torch.linspace(-2, 0, 6)
    values, places = found.top_sums(offsets, 40)
    expected, expected_places = written.top_sums(offsets, 40)
    torch.testing.assert_close(values, expected)
    assert places.tolist() == expected_places.tolist()
    assert not found.invalid_rows().any() and not written.invalid_rows().any()


def test_only_rows_that_cannot_be_sampled_are_invalid():
    logits = torch.zeros(5, 9)
    logits[0, 3] = NEVER
    logits[1, 3] = math.nan
    logits[2] = NEVER
    logits[3, 0] = math.inf
    assert invalid_rows(logits).tolist() == [False, True, True, True, False]
    assert Distributions.of(log_probs(logits)).invalid_rows().tolist() == [False, True, True, True, False]
    rows = [SamplingRow(SamplingParams(top_p=0.9, top_k=3), row_key(0, (i,)), 0) for i in range(5)]
    tokens = sample(logits, rows)  # a broken row neither raises nor spoils the others
    assert ((tokens >= 0) & (tokens < 9)).all()
    for i in (0, 4):
        assert tokens[i] == sample(logits[i : i + 1], rows[i : i + 1])[0]


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens():
    kinds = many_kinds() * 4
    logits = torch.randn(len(kinds), 49_152, generator=torch.Generator().manual_seed(5)) * 3
    rows = [
        SamplingRow(SamplingParams(**fields), row_key(2, (i,)), 30 + i, i % 6, [1, 2, 3], [4, 4, 5])
        for i, fields in enumerate(kinds)
    ]
    assert torch.equal(sample(logits.cuda(), rows, {7}).cpu(), sample(logits, rows, {7}))


@pytest.mark.parametrize(
    "cuts", [{"top_p": 0.9}, {"top_k": 1500}, {"min_p": 0.3}, {"min_p": 0.2, "top_k": 900, "top_p": 0.8}]
)
def test_cuts_may_keep_more_than_is_looked_at_first(cuts):
    vocab, count = 3000, 400
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1)) * 0.5
    params = SamplingParams(**cuts)
    probs = logits[0].double().softmax(-1)
    kept = probs >= params.min_p * probs.max()
    if params.top_k:
        kept &= probs >= probs.sort(descending=True).values[params.top_k - 1]
    ordered = (probs * kept / (probs * kept).sum()).sort(descending=True).values
    if params.top_p < 1:
        last = int((ordered.cumsum(0) < params.top_p).sum())
        kept &= probs >= probs[kept].sort(descending=True).values[last]
    rows = [SamplingRow(params, row_key(7, (i,)), i) for i in range(count)]
    drawn = sample(logits.expand(count, -1), rows)
    assert kept[drawn].all() and len(set(drawn.tolist())) > 128
    expected = (probs * kept / (probs * kept).sum()).sort(descending=True)
    half = set(expected.indices[: int((expected.values.cumsum(0) < 0.5).sum())].tolist())
    assert abs(sum(token in half for token in drawn.tolist()) / count - 0.5) < 0.1


def test_a_choice_tells_how_likely_the_token_was_and_how_certain_the_model():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(2)) * 4
    logits[4, 7] = torch.nan
    fields = ({"temperature": 0}, {}, {"top_p": 0.5}, {"logit_bias": {3: 50.0}}, {}, {"top_k": 2})
    rows = [SamplingRow(SamplingParams(**field), row_key(0, (i,)), 9) for i, field in enumerate(fields)]
    choices, exact = choose(logits, rows).read(), log_probs(logits)
    assert choices.invalid == {4} and choices.tokens[3] == 3
    for i, token in enumerate(choices.tokens):
        if i not in choices.invalid:
            assert choices.logprobs[i] == pytest.approx(float(exact[i, token]), abs=1e-4)
            assert choices.certainties[i] == pytest.approx(float(self_certainty(exact[i])), abs=1e-4)
