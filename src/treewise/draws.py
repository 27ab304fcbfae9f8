"""Triton kernels that draw tokens: the lowest logit that each row keeps, and the arg-max of logits plus Gumbel noise.

They do what `treewise.sampler` does with torch, in passes over the logits instead of one launch an operation, and
without waiting for the device.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

PARTS = 8
"""Programs that share a row."""
BLOCK = 2048
"""Logits that a program takes at once."""
NEGATIVE = tl.constexpr(-2139095041)  # ordered key of -inf


def floors(
    logits: torch.Tensor,
    tops: torch.Tensor,
    temperatures: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """Find the lowest scaled logit that each row keeps; equal logits are kept or cut together.

    Parameters
    ----------
    logits : Tensor [rows, vocab] float32
    tops : Tensor [rows] float32
        The largest of each row; a scaled logit is ``(logit - top) / temperature``.
    temperatures : Tensor [rows] float32
        0 for greedy rows, which keep everything.
    min_p, top_p : Tensor [rows] float32
        0 and 1 where a row has none.
    top_k : Tensor [rows] int32
        The vocabulary's size where a row has none.

    Returns
    -------
    Tensor [rows] float32
        ``-inf`` where nothing is cut.
    """
    rows, vocab_size = logits.shape
    lowest = torch.empty_like(tops)
    find_floors[(rows,)](
        logits, tops, temperatures, min_p, top_k, top_p, lowest, logits.stride(0), vocab_size,
        BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return lowest


def draw(
    logits: torch.Tensor,
    tops: torch.Tensor,
    temperatures: torch.Tensor,
    lowest: torch.Tensor,
    words: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a token for each row, or take the most likely one where the temperature is 0.

    Parameters
    ----------
    logits, tops, temperatures : Tensor
        As for `floors`.
    lowest : Tensor [rows] float32
        What `floors` returns.
    words : Tensor [rows, 2] int32
        The random words of each row, see `treewise.sampler`.

    Returns
    -------
    tokens : Tensor [rows] int64
        The lowest of equally good ones.
    log_totals : Tensor [rows] float32
        Natural logarithm of the sum of exponentials of each row's logits.
    means : Tensor [rows] float32
        Mean of each row's logits.
    """
    rows, vocab_size = logits.shape
    best = torch.empty((rows, PARTS), dtype=torch.float32, device=logits.device)
    token = torch.empty((rows, PARTS), dtype=torch.int64, device=logits.device)
    sums = torch.empty((2, rows, PARTS), dtype=torch.float32, device=logits.device)
    length = triton.cdiv(triton.cdiv(vocab_size, PARTS), BLOCK) * BLOCK
    draw_parts[(rows, PARTS)](
        logits, tops, temperatures, lowest, words, best, token, *sums, logits.stride(0), vocab_size, length,
        PARTS=PARTS, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    part = best.argmax(dim=1, keepdim=True)  # the first of equally good parts has the lowest tokens
    exponentials, differences = sums.sum(dim=2)
    return token.gather(1, part)[:, 0], tops + exponentials.log(), tops + differences / vocab_size


@triton.jit
def _scaled(logits, top, temperature, first, size, BLOCK: tl.constexpr):
    column = first + tl.arange(0, BLOCK)
    logit = tl.load(logits + column, mask=column < size, other=float("-inf"))
    return (logit - top) / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _ordered(value):
    """Bits of float32 as int32 in the order of the numbers."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _search(logits, top, temperature, least, goal, size, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Largest key from which on there are `goal` logits, or so much of the probability; 2 bits a pass."""
    low = tl.full([1], least, tl.int32)
    high = tl.full([1], 1, tl.int32)  # the key after that of the largest, 0
    while tl.max(high - low, 0) > 1:
        step = tl.maximum((high - low) // 4, 1)
        keys = low + step * (1 + tl.arange(0, 4))  # the last of them is no candidate
        found = tl.zeros([4], tl.float32)
        for first in range(0, size, BLOCK):
            value = _scaled(logits, top, temperature, first, size, BLOCK)
            key = _ordered(value)
            weight = tl.exp(value) if MASS else tl.where(value > float("-inf"), 1.0, 0.0)
            above = (key[:, None] >= keys[None, :]) & (key >= least)[:, None]
            found += tl.sum(tl.where(above, weight[:, None], 0.0), 0)
        reached = ((found >= goal) & (keys < high)).to(tl.int32)
        passed = tl.sum(reached, 0)
        high = tl.where(passed == 4, high, tl.minimum(high, low + step * (passed + 1)))
        low = low + step * passed
    return tl.max(low, 0)


@triton.jit
def find_floors(
    logits, tops, temperatures, min_p, top_k, top_p, lowest, stride, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut by min-p, then top-k, then top-p over what the two left: a row a program."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    top, temperature = tl.load(tops + row), tl.load(temperatures + row)
    least = tl.full([1], NEGATIVE, tl.int32)
    share = tl.load(min_p + row)
    if (temperature > 0) & (share > 0):
        least = _ordered(tl.log(tl.full([1], 1.0, tl.float32) * share))
    lower = tl.max(least, 0)
    count = tl.load(top_k + row)
    if (temperature > 0) & (count < size):
        lower = _search(logits, top, temperature, lower, count.to(tl.float32), size, False, BLOCK)
    mass = tl.load(top_p + row)
    if (temperature > 0) & (mass < 1):
        total = tl.zeros([1], tl.float32)
        for first in range(0, size, BLOCK):
            value = _scaled(logits, top, temperature, first, size, BLOCK)
            total += tl.sum(tl.where(_ordered(value) >= lower, tl.exp(value), 0.0), 0)
        lower = _search(logits, top, temperature, lower, mass * tl.max(total, 0), size, True, BLOCK)
    bits = tl.where(lower < 0, lower ^ 0x7FFFFFFF, lower)
    tl.store(lowest + row, bits.to(tl.float32, bitcast=True))


@triton.jit
def _scramble(x):
    """Mix the bits of uint32, "lowbias32" of Chris Wellons' hash prospector."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(column, word, offset):
    """Gumbel noise of tokens from a row's two random words."""
    bits = _scramble(_scramble(column.to(tl.uint32)) * (word | 1) + offset) & 0x7FFFFFFF
    uniform = tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * (0.5**31), 1 - 0.5**24)
    rest = 1.0 - uniform
    # log(1 - uniform), right where that rounds to log(1): its error is that of rest, which can be divided out.
    exponential = tl.where(rest == 1.0, uniform, tl.log(rest) * uniform / (rest - 1.0))
    return -tl.log(exponential)


@triton.jit
def draw_parts(
    logits, tops, temperatures, lowest, words, best, token, exponentials, differences, stride, size, length,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best token of a part of a row, and the part's sums of logits less the top, and their exponentials.

    The grid is (rows, PARTS).
    """
    row, part = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * stride
    top, temperature, low = tl.load(tops + row), tl.load(temperatures + row), tl.load(lowest + row)
    word = tl.load(words + 2 * row).to(tl.uint32, bitcast=True)
    offset = tl.load(words + 2 * row + 1).to(tl.uint32, bitcast=True)
    best_value = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.full([BLOCK], 2147483647, tl.int32)
    exponential = tl.zeros([BLOCK], tl.float32)
    difference = tl.zeros([BLOCK], tl.float32)
    end = tl.minimum(size, (part + 1) * length)
    for first in range(part * length, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < end, other=float("-inf")) - top
        exponential += tl.exp(logit)
        difference += tl.where(column < end, logit, 0.0)
        value = logit
        if temperature > 0:
            value = logit / temperature
            value = tl.where(value >= low, value + _noise(column, word, offset), float("-inf"))
        better = value > best_value
        best_value = tl.where(better, value, best_value)
        best_token = tl.where(better, column, best_token)
    highest = tl.max(best_value, 0)
    tl.store(best + row * PARTS + part, highest)
    first_best = tl.min(tl.where(best_value == highest, best_token, 2147483647), 0)
    tl.store(token + row * PARTS + part, tl.minimum(first_best, size - 1).to(tl.int64))
    tl.store(exponentials + row * PARTS + part, tl.sum(exponential, 0))
    tl.store(differences + row * PARTS + part, tl.sum(difference, 0))
