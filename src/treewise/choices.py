"""The next tokens of many rows at once: drawn on the device, brought to the host in one copy."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewise.ops import INTERPRETED
from treewise.sampler import SamplingRow, edited_logits, random_words, sample


class Chosen:
    """Choices that the host knows, as lists by row.

    Parameters
    ----------
    fields : float64 [rows, 4]
        Of each row the token, its log-probability, whether the logits were numbers, and the certainty.

    Attributes
    ----------
    tokens : list of int
        Without meaning in invalid rows, as all else is.
    logprobs : list of float
        Their natural log-probabilities by the raw logits.
    invalid : frozenset of int
        The rows whose logits were not numbers.
    """

    def __init__(self, fields: NDArray[np.float64]) -> None:
        tokens, logprobs, valid, self._certainties = fields.T
        self.tokens: list[int] = tokens.astype(np.int64).tolist()
        self.logprobs: list[float] = logprobs.tolist()
        self.invalid = frozenset[int]() if valid.all() else frozenset(np.flatnonzero(valid == 0).tolist())

    @cached_property
    def certainties(self) -> list[float]:
        """How far the raw logits' distributions are from uniform, see `treewise.search.self_certainty`."""
        return cast(list[float], self._certainties.tolist())


class Choices:
    """The next tokens of rows: on the device at once, on the host as soon as they are there.

    Parameters
    ----------
    tokens : Tensor [rows], int64
    choices : Tensor [rows, 4], float64
        What `Chosen` tells of each row.
    """

    def __init__(self, tokens: Tensor, choices: Tensor) -> None:
        self.tokens = tokens
        self._choices = choices
        self._copied: torch.cuda.Event | None = None
        if choices.is_cuda:
            self._choices = torch.empty_like(choices, device="cpu", pin_memory=True).copy_(choices, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Chosen:
        """Return the choices; waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return Chosen(self._choices.numpy())


def choose(logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int] = ()) -> Choices:
    """Choose the next token of each row, see `sample`; what there is to know about it comes to the host in one copy.

    The logits [rows, vocab] may be of any floating type.
    """
    if logits.is_cuda or INTERPRETED:
        return Choices(*_draw_fused(logits, rows, eos_token_ids))
    logits = logits.float()
    tokens, tops = sample(logits, rows, eos_token_ids), logits.amax(dim=-1)
    # The largest probability is exp(top - log-sum-exp); a softmax takes half the time of a log-sum-exp.
    log_totals = tops - torch.softmax(logits, dim=-1).amax(dim=-1).log_()
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - log_totals
    certainties = log_totals - logits.mean(dim=-1) - math.log(logits.shape[1])
    fields = (tokens, logprobs, tops.isfinite(), certainties)
    return Choices(tokens, torch.stack([field.double() for field in fields], dim=1))


def _draw_fused(logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int]) -> tuple[Tensor, Tensor]:
    """Do the same in few kernels; return what `Choices` takes."""
    # Imported here because Triton is not there on every machine, and reads TRITON_INTERPRET when imported.
    from treewise import draws

    vocab_size = logits.shape[1]
    params = [row.params for row in rows]
    settings = np.array([[0.0 if p.is_greedy else p.temperature, p.min_p, p.top_p] for p in params], np.float32)
    top_k = np.array([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], np.int32)
    # All in one upload, a setting a row, and nothing waits for it.
    host = torch.from_numpy(np.hstack((settings.view(np.int32), top_k[:, None], random_words(rows))).T.copy())
    there = (host.pin_memory() if logits.is_cuda else host).to(logits.device, non_blocking=True)
    temperatures, min_p, top_p = there[:3].view(torch.float32)
    words, lowest = there[4:], None
    edited = edited_logits(logits, rows, eos_token_ids)
    tops = draws.tops(edited)
    if any(not p.is_greedy and (p.min_p > 0 or p.top_p < 1 or 0 < p.top_k < vocab_size) for p in params):
        lowest = draws.floors(edited, tops, temperatures, min_p, there[3], top_p)
    drawn = raw = draws.draw(edited, tops, temperatures, lowest, words)
    if edited is not logits:
        tops = draws.tops(logits)
        raw = draws.draw(logits, tops, None, None, words)
    return draws.finish(logits, tops, drawn, raw)
