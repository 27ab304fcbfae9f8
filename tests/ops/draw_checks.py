"""What fused drawing must do on a GPU and under the interpreter alike."""

from __future__ import annotations

import math

import pytest
import torch

from treewise import draws
from treewise.choices import choose
from treewise.config import SamplingParams
from treewise.constraint import Lexicon
from treewise.grammar import Grammar
from treewise.sampler import SamplingRow, _lowest, log_probs, row_key, sample
from treewise.search import self_certainty

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.01),
    SamplingParams(temperature=3.0, top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(top_p=0.999, temperature=2.0),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=0.02, top_k=40, top_p=0.9),
    SamplingParams(top_k=1),
    SamplingParams(logit_bias={1: 9.0, 2: -100.0}, temperature=0),
    SamplingParams(repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3),
    SamplingParams(min_tokens=3, stop_token_ids=[0, 1], temperature=0.5),
]


def drawn_alike(vocab_size, device, dtype=torch.float32):
    """Tokens, log-probabilities and ties."""
    generator = torch.Generator().manual_seed(vocab_size)
    rows = [
        SamplingRow(params, row_key(seed, (number,)), 5 * seed, seed % 5, (1, 2, 2), (3, 3, 5))
        for seed in range(4)
        for number, params in enumerate(PARAMS)
    ]
    logits = torch.randn(len(rows), vocab_size, generator=generator) * 3
    logits[::5] = logits[::5].round()  # with ties
    logits[::7, vocab_size // 2 :] = -math.inf  # banned
    logits = logits.to(dtype)
    expected = sample(logits.float(), rows, (4,)).tolist()
    choices = choose(logits.to(device), rows, (4,)).read()
    assert choices.tokens == expected
    exact = log_probs(logits)
    assert not choices.invalid
    for row, token in enumerate(choices.tokens):
        assert math.isclose(choices.logprobs[row], float(exact[row, token]), abs_tol=1e-4)
        assert math.isclose(choices.certainties[row], float(self_certainty(exact[row])), abs_tol=1e-4)


def rows_under_grammars_are_drawn_alike(device):
    """Masks come before everything else, and leave the rows between them alone."""
    pytest.importorskip("llguidance")
    lexicon = Lexicon(Words(), 300, {0})
    rows = [
        SamplingRow(
            params,
            row_key(1, (number,)),
            number,
            5,
            constraint=None
            if number % 3 == 0
            else lexicon.start(Grammar.regex("[a-f]+" if number % 3 == 1 else "[0-9]")),
        )
        for number, params in enumerate(PARAMS * 2)
    ]
    logits = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(1)) * 3
    choices = choose(logits.to(device), rows, (0,)).read()
    assert choices.tokens == sample(logits, rows, (0,)).tolist()
    assert all(chr(token) in "abcdef" for token in choices.tokens[1::3])
    assert all(chr(token) in "0123456789" for token in choices.tokens[2::3])
    plain = [row._replace(constraint=None) for row in rows]
    alone = choose(logits.to(device), plain, (0,)).read()
    assert choices.tokens[::3] == alone.tokens[::3] and choices.logprobs[::3] == alone.logprobs[::3]


class Words:
    """Token ``i`` is the byte ``i``."""

    vocab_size = 256

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())

    def token_bytes(self, token):
        return bytes([token]) if token else b""


def floors_alike(device):
    """The lowest logit that each cut leaves, with ties at it."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(12, 5000, generator=generator) * 2).round(decimals=1).to(device)
    tops, temperatures = logits.amax(-1), torch.tensor([0.5, 1.0, 2.0] * 4).to(device)
    scaled = (logits - tops[:, None]) / temperatures[:, None]
    nothing = {"min_p": 0.0, "top_k": 5000, "top_p": 1.0}
    best, total = scaled.sort(dim=-1, descending=True).values, scaled.logsumexp(dim=-1, keepdim=True)
    for cut in ({"min_p": 0.05}, {"top_k": 17}, {"top_k": 4999}, {"top_p": 0.3}, {"top_p": 0.99}):
        settings = nothing | cut
        tensors = [torch.full_like(tops, settings[key]) for key in ("min_p", "top_k", "top_p")]
        lowest = draws.floors(logits, draws.tops(logits), temperatures, tensors[0], tensors[1].int(), tensors[2])
        theirs, known = _lowest(best, total, [SamplingParams(**cut)] * 12, whole=True)
        assert known.all()
        assert torch.equal(scaled >= lowest[:, None], scaled >= theirs)
    kept = draws.floors(logits, tops[:, None], torch.zeros_like(tops), tensors[0], tensors[1].int(), tensors[2] * 0.1)
    assert (kept == -math.inf).all()  # greedy rows


def invalid_rows_are_told(device):
    """Rows of logits that are not numbers, among others."""
    logits = torch.randn(4, 50)
    logits[1, 3], logits[2, 9], logits[3] = math.nan, math.inf, -math.inf
    rows = [SamplingRow(SamplingParams(temperature=number % 2), number, 0) for number in range(4)]
    assert choose(logits.to(device), rows).read().invalid == {1, 2, 3}
