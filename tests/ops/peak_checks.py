"""What the pass over logits must find on a GPU and under the interpreter alike."""

from __future__ import annotations

import math

import torch

from treewise import peaks
from treewise.distributions import distributions
from treewise.sampler import CHUNK, Distributions, log_probs


def found_alike(vocab_size, device):
    """The log-probabilities of torch, to rounding, and the same likeliest tokens of all rows."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(9, vocab_size, generator=generator) * 4 + 30
    logits[3, : vocab_size // 2] = -math.inf  # whole chunks and more
    logits[4, 1:] = -math.inf
    logits[5] -= 1e4
    exact, found = log_probs(logits), distributions(logits.to(device))
    assert found.table.device.type == device.type and found.totals.any()
    chunks = logits.split(CHUNK, dim=1)
    assert found.peaks.cpu().tolist() == torch.stack([chunk.amax(-1) for chunk in chunks], dim=1).tolist()
    assert not found.invalid_rows().any()
    torch.testing.assert_close(found.logprobs.cpu(), exact, atol=2e-5, rtol=1e-6)
    rows, tokens = torch.arange(9), torch.arange(9) % vocab_size
    torch.testing.assert_close(found.at(rows, tokens).cpu(), exact[rows, tokens], atol=2e-5, rtol=1e-6)
    offsets = torch.linspace(-3, 0, 9)
    count = min(40, 3 * vocab_size)
    values, places = found.top_sums(offsets.to(device), count)
    expected, _ = Distributions.of(exact).top_sums(offsets, count)
    torch.testing.assert_close(values.cpu(), expected, atol=4e-5, rtol=1e-6)
    sums = (exact + offsets[:, None]).flatten()
    torch.testing.assert_close(sums[places.cpu()], values.cpu(), atol=4e-5, rtol=1e-6)
    assert len(set(places.tolist())) == count


def invalid_rows_are_told(device):
    """As `treewise.sampler.invalid_rows` does."""
    logits = torch.zeros(5, 9000)
    logits[0, 3] = -math.inf
    logits[1, 8999] = math.nan
    logits[2] = -math.inf
    logits[3, 17] = math.inf
    assert distributions(logits.to(device)).invalid_rows().tolist() == [False, True, True, True, False]


def half_precision_is_summed_in_float32(device):
    """Logits of 16 bits count as what they stand for."""
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0)).half()
    found, tops, totals = peaks.peaks_and_totals(logits.to(device))
    torch.testing.assert_close((tops + totals).cpu(), torch.logsumexp(logits.float(), dim=-1), atol=1e-5, rtol=1e-6)
    assert tops.tolist() == found.amax(-1).tolist() == logits.amax(-1).float().tolist()
    values, _ = distributions(logits.to(device)).top_sums(torch.zeros(3, device=device), 20)
    expected, _ = Distributions.of(log_probs(logits)).top_sums(torch.zeros(3), 20)
    torch.testing.assert_close(values.cpu(), expected, atol=2e-5, rtol=1e-6)
