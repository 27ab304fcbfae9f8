"""Triton kernels that draw tokens: the lowest logit that each row keeps, and the arg-max of logits plus Gumbel noise.

They do what `treewise.sampler` does with torch, in passes over the logits instead of one launch an operation, and
without waiting for the device. Programs share rows; where they do, what each found is put together by whoever reads it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from treewise.attention.backend import power_of_2
from treewise.plan.devices import overlap

PROGRAMS = 512
"""Programs that a few rows are shared by."""
PARTS = (8, 64)
"""Programs that share a row: at least, and at most."""
BLOCK = 2048
"""Logits that a program takes at once."""
NEGATIVE = tl.constexpr(-2139095041)  # ordered key of -inf

# How many rows there are, and where their settings begin in the one upload of a step, changes all the time: kernels
# compiled for each kind of number would hold up the first step that has it.
_ANY_ROWS = triton.jit(
    do_not_specialize=("rows",),
    do_not_specialize_on_alignment=("temperatures", "min_p", "top_k", "top_p", "lowest", "words"),
)

# Triton's interpreter has no dependent launches.
gdc_launch_dependents, gdc_wait = tl.extra.cuda.gdc_launch_dependents, tl.extra.cuda.gdc_wait


class Parts(NamedTuple):
    """What programs found in their parts of rows.

    Attributes
    ----------
    best : Tensor [rows, parts] float32
        The best logit, noise included.
    token : Tensor [rows, parts] int32
        The first that is as good.
    exponentials, differences : Tensor [rows, parts] float32
        Sums of what logits are below the row's largest, and of the exponentials of that.
    """

    best: torch.Tensor
    token: torch.Tensor
    exponentials: torch.Tensor
    differences: torch.Tensor


def tops(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest logit of each part of each row [rows, parts] float32, of logits [rows, vocab] of any type."""
    rows, vocab_size = logits.shape
    parts = min(max(PARTS[0], power_of_2(PROGRAMS // max(rows, 1))), PARTS[1], power_of_2(-(-vocab_size // BLOCK)))
    largest = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    top_parts[(rows, parts)](
        logits, largest, logits.stride(0), vocab_size, _length(vocab_size, parts),
        PARTS=parts, BLOCK=BLOCK, num_warps=8, **overlap(logits.device),
    )  # fmt: skip
    return largest


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
    logits : Tensor [rows, vocab] floating
    tops : Tensor [rows, parts] float32
        What `tops` returns; a scaled logit is ``(logit - top) / temperature`` with the largest of the row.
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
    lowest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    find_floors[(rows,)](
        logits, tops, temperatures, min_p, top_k, top_p, lowest, logits.stride(0), vocab_size,
        PARTS=tops.shape[1], BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return lowest


def draw(
    logits: torch.Tensor,
    tops: torch.Tensor,
    temperatures: torch.Tensor | None,
    lowest: torch.Tensor | None,
    words: torch.Tensor,
) -> Parts:
    """Draw a token of each part of each row, or take the most likely one where the temperature is 0.

    Parameters
    ----------
    logits, tops, temperatures : Tensor
        As for `floors`; no temperatures: all are 0.
    lowest : Tensor [rows] float32, optional
        What `floors` returns; by default nothing is cut.
    words : Tensor [2, rows] int32
        The random words of each row, see `treewise.sampler`.
    """
    rows, parts = tops.shape
    best, exponentials, differences = torch.empty((3, rows, parts), dtype=torch.float32, device=logits.device)
    token = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    vocab_size = logits.shape[1]
    draw_parts[(rows, parts)](
        logits, tops, temperatures, lowest, words, best, token, exponentials, differences, logits.stride(0),
        vocab_size, _length(vocab_size, parts), rows, PARTS=parts, BLOCK=BLOCK, num_warps=8, **overlap(logits.device),
    )  # fmt: skip
    return Parts(best, token, exponentials, differences)


def finish(logits: torch.Tensor, tops: torch.Tensor, drawn: Parts, raw: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Put parts together.

    Parameters
    ----------
    logits : Tensor [rows, vocab] floating
        The raw ones.
    tops : Tensor [rows, parts] float32
        Theirs.
    drawn : Parts
        Of the logits that tokens were drawn from.
    raw : Parts
        Of the raw logits.

    Returns
    -------
    tokens : Tensor [rows] int64
        The lowest of equally good ones.
    choices : Tensor [rows, 4] float64
        What `treewise.choices.Chosen` tells of them.
    """
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    choices = torch.empty((rows, 4), dtype=torch.float64, device=logits.device)
    finish_rows[(rows,)](
        logits, tops, drawn.best, drawn.token, raw.exponentials, raw.differences, tokens, choices, logits.stride(0),
        vocab_size, PARTS=tops.shape[1], num_warps=1, **overlap(logits.device),
    )  # fmt: skip
    return tokens, choices


def _length(vocab_size: int, parts: int) -> int:
    return -(-vocab_size // (parts * BLOCK)) * BLOCK


@triton.jit
def _top(tops, row, PARTS: tl.constexpr):
    return tl.max(tl.load(tops + row * PARTS + tl.arange(0, PARTS)), 0)


@triton.jit
def top_parts(logits, tops, stride, size, length, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Largest logit of a part of a row, NaN if there is one: grid (rows, PARTS)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * stride
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    end = tl.minimum(size, (part + 1) * length)
    for first in range(part * length, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < end, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, logit, propagate_nan=tl.PropagateNan.ALL)
    odd = tl.max((largest != largest).to(tl.int32), 0)
    tl.store(tops + row * PARTS + part, tl.where(odd > 0, float("nan"), tl.max(largest, 0)))


@triton.jit
def _scaled(logits, top, temperature, first, size, BLOCK: tl.constexpr):
    column = first + tl.arange(0, BLOCK)
    logit = tl.load(logits + column, mask=column < size, other=float("-inf")).to(tl.float32)
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


@_ANY_ROWS
def find_floors(
    logits, tops, temperatures, min_p, top_k, top_p, lowest, stride, size, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Cut by min-p, then top-k, then top-p over what the two left: a row a program."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    top, temperature = _top(tops, row, PARTS), tl.load(temperatures + row)
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


@_ANY_ROWS
def draw_parts(
    logits, tops, temperatures, lowest, words, best, token, exponentials, differences, stride, size, length, rows,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Best token of a part of a row, and the part's sums of logits less the top, and their exponentials.

    The grid is (rows, PARTS).
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * stride
    top, low, temperature = _top(tops, row, PARTS), float("-inf"), 0.0
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
    if lowest is not None:
        low = tl.load(lowest + row)
    word = tl.load(words + row).to(tl.uint32, bitcast=True)
    offset = tl.load(words + rows + row).to(tl.uint32, bitcast=True)
    best_value = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.full([BLOCK], 2147483647, tl.int32)
    exponential = tl.zeros([BLOCK], tl.float32)
    difference = tl.zeros([BLOCK], tl.float32)
    end = tl.minimum(size, (part + 1) * length)
    for first in range(part * length, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < end, other=float("-inf")).to(tl.float32) - top
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
    place = row * PARTS + part
    tl.store(best + place, highest)
    first_best = tl.min(tl.where(best_value == highest, best_token, 2147483647), 0)
    tl.store(token + place, tl.minimum(first_best, size - 1))
    tl.store(exponentials + place, tl.sum(exponential, 0))
    tl.store(differences + place, tl.sum(difference, 0))


@triton.jit
def finish_rows(
    logits, tops, best, token, exponentials, differences, tokens, choices, stride, size,
    PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Put the parts of a row together: grid (rows,)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    place = row * PARTS + tl.arange(0, PARTS)
    largest = tl.load(tops + place)
    top, odd = tl.max(largest, 0), tl.max((largest != largest).to(tl.int32), 0)
    value = tl.load(best + place)
    mine = tl.min(tl.where(value == tl.max(value, 0), tl.load(token + place), size - 1), 0)
    total = top + tl.log(tl.sum(tl.load(exponentials + place), 0))
    mean = top + tl.sum(tl.load(differences + place), 0) / size
    logit = tl.load(logits + row.to(tl.int64) * stride + mine).to(tl.float32)
    valid = (odd == 0) & (tl.abs(top) < float("inf"))
    tl.store(tokens + row, mine.to(tl.int64))
    tl.store(choices + 4 * row, mine.to(tl.float64))
    tl.store(choices + 4 * row + 1, (logit - total).to(tl.float64))
    tl.store(choices + 4 * row + 2, tl.where(valid, 1.0, 0.0).to(tl.float64))
    tl.store(choices + 4 * row + 3, (total - mean - tl.log(size.to(tl.float32))).to(tl.float64))
