"""A Triton kernel that reads logits once, for what has to be known to find the likeliest tokens of many rows."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from treewise.sampler import CHUNK

CHUNKS = 64
"""Chunks that a program takes at once."""


def peaks_and_totals(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest logit of each chunk and of each row, and what a log-softmax takes from a row besides that.

    Parameters
    ----------
    logits : Tensor [rows, vocab]
        Each row's side by side.

    Returns
    -------
    peaks : Tensor [rows, chunks] float32
    tops : Tensor [rows] float32
    totals : Tensor [rows] float32
        Natural logarithm of the sum of exponentials of logits less the top.
        ``tops - totals`` is not finite where a logit is NaN or +inf, or all are -inf.
    """
    rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    peaks = torch.empty((rows, num_chunks), dtype=torch.float32, device=logits.device)
    tops, totals = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
    find_peaks[(rows,)](
        logits, peaks, tops, totals, logits.stride(0), vocab_size, num_chunks,
        CHUNK=CHUNK, CHUNKS=CHUNKS, num_warps=16,
    )  # fmt: skip
    return peaks, tops, totals


@triton.jit
def find_peaks(logits, peaks, tops, totals, stride, size, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Go over one row; each of `CHUNKS` places keeps its own largest and sum, so that no step waits for all threads."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    peaks += row.to(tl.int64) * num_chunks
    largest = tl.full([CHUNKS], float("-inf"), tl.float32)
    total = tl.zeros([CHUNKS], tl.float32)
    for first in range(0, num_chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        logit = tl.load(logits + column, mask=column < size, other=float("-inf")).to(tl.float32)
        peak = tl.max(logit, 1)
        tl.store(peaks + chunk, peak, mask=chunk < num_chunks)
        highest = tl.maximum(largest, peak)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(logit - base[:, None]), 1)
        largest = highest
    top = tl.max(largest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + row, top)
    tl.store(totals + row, tl.log(tl.sum(total * tl.exp(largest - base), 0)))
