"""The next tokens of many rows at once: drawn on the device, brought to the host in one copy."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treewise.sampler import SamplingRow, edited_logits, random_words, sample


class Choice(NamedTuple):
    """The next token of one row.

    Attributes
    ----------
    token : int
    logprob : float
        Its natural log-probability by the raw logits.
    valid : bool
        Whether the logits were numbers; the rest means nothing otherwise.
    certainty : float
        How far the raw logits' distribution is from uniform, see `treewise.search.self_certainty`.
    """

    token: int
    logprob: float
    valid: bool
    certainty: float


class Choices:
    """The next tokens of rows: on the device at once, on the host as soon as they are there.

    Parameters
    ----------
    tokens : Tensor [rows], int64
    logprobs : Tensor [rows]
    valid : Tensor [rows], bool
    certainties : Tensor [rows]
    """

    def __init__(self, tokens: Tensor, logprobs: Tensor, valid: Tensor, certainties: Tensor) -> None:
        self.tokens = tokens
        packed = torch.stack([each.double() for each in (tokens, logprobs, valid, certainties)], dim=1)
        self._copied: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._packed = torch.empty_like(packed, device="cpu", pin_memory=True).copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._packed = packed

    def read(self) -> list[Choice]:
        """Return the choices; waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return [Choice(int(token), logprob, bool(valid), sure) for token, logprob, valid, sure in self._packed.tolist()]


def choose(logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int] = ()) -> Choices:
    """Choose the next token of each row, see `sample`; what there is to know about it comes to the host in one copy."""
    if logits.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        tokens, tops, log_totals, means = _draw_fused(logits, rows, eos_token_ids)
    else:
        tokens, tops = sample(logits, rows, eos_token_ids), logits.amax(dim=-1)
        log_totals, means = _statistics(logits, tops)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - log_totals
    certainties = log_totals - means - math.log(logits.shape[1])
    return Choices(tokens, logprobs, tops.isfinite(), certainties)


def _statistics(logits: Tensor, tops: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each row, whose largest is given, and the mean."""
    # The largest probability is exp(top - log-sum-exp); a softmax takes half the time of a log-sum-exp.
    return tops - torch.softmax(logits, dim=-1).amax(dim=-1).log_(), logits.mean(dim=-1)


def _draw_fused(
    logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what `sample` does in few kernels; return tokens, and of the raw logits the largest and `_statistics`."""
    # Imported here because Triton is not there on every machine, and reads TRITON_INTERPRET when imported.
    from treewise import draws

    vocab_size = logits.shape[1]
    params = [row.params for row in rows]
    settings = np.array([[0.0 if p.is_greedy else p.temperature, p.min_p, p.top_p] for p in params], np.float32)
    top_k = np.array([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], np.int32)
    # All in one upload, and nothing waits for it.
    host = torch.from_numpy(np.hstack((settings.view(np.int32), top_k[:, None], random_words(rows))))
    there = (host.pin_memory() if logits.is_cuda else host).to(logits.device, non_blocking=True).T.contiguous()
    temperatures, min_p, top_p = there[:3].view(torch.float32)
    edited = edited_logits(logits, rows, eos_token_ids)
    tops = edited.amax(dim=-1)
    if any(not p.is_greedy and (p.min_p > 0 or p.top_p < 1 or 0 < p.top_k < vocab_size) for p in params):
        lowest = draws.floors(edited, tops, temperatures, min_p, there[3], top_p)
    else:
        lowest = torch.full_like(tops, -math.inf)
    tokens, log_totals, means = draws.draw(edited, tops, temperatures, lowest, there[4:].T.contiguous())
    if edited is not logits:
        tops = logits.amax(dim=-1)
        log_totals, means = _statistics(logits, tops)
    return tokens, tops, log_totals, means
