"""Triton kernels of the ops: whole rows, or blocks of a row's heads or columns, a program.

Everything is computed in float32 and rounded to the tensors' type where plain torch would round. With ``OVERLAP`` a
kernel lets the next one start as soon as all its own programs have, is itself launched while the one before it still
runs, and waits for the end of that, and so of all before it, before it reads any of their results or writes.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter has no dependent launches.
gdc_launch_dependents, gdc_wait = tl.extra.cuda.gdc_launch_dependents, tl.extra.cuda.gdc_wait


@triton.jit
def norm_rows(
    x, residual, weight, normed, total, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, OFFSET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add a row, the sum of its parts, to its residual, if there is one, and normalise it: grid (rows,)."""
    if OVERLAP:
        gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    place = tl.program_id(0).to(tl.int64) * SIZE + column
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        wide += tl.load(x + part * tl.num_programs(0) * SIZE + place, mask=inside, other=0.0)
    if residual is not None:
        wide = _round(wide, total.dtype.element_ty) + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if total is not None:
        added = wide.to(total.dtype.element_ty)
        tl.store(total + place, added, mask=inside)
        wide = added.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    tl.store(normed + place, _weigh(wide, factor, normed.dtype.element_ty, OFFSET), mask=inside)


@triton.jit
def gate_rows(
    gate_up, out,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK activated gates of a row with their values: grid (rows, blocks)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    # Both activations are gate * sigmoid(slope): (1 + tanh(y)) / 2 is sigmoid(2 y).
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    gate = _round(gate / (1.0 + tl.exp(-slope)), out.dtype.element_ty)
    tl.store(out + row * SIZE + column, (gate * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_heads(
    stacked, cos, sin, q_norm, k_norm, q, k, v, k_scale, v_scale, slots, eps, largest, k_slot, k_head, v_slot, v_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK: tl.constexpr,
    OFFSET: tl.constexpr, LIMITED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalise, turn and store BLOCK of a row's stacked heads, each in two halves: grid (rows × blocks,)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total: tl.constexpr = HEADS + 2 * KV_HEADS
    blocks: tl.constexpr = (total + BLOCK - 1) // BLOCK
    dtype: tl.constexpr = stacked.dtype.element_ty
    row = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[:, None]
    pair = tl.arange(0, HALF_PAD)[None, :]
    inside = pair < HALF
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    if q_norm is not None:
        first_factor = tl.where(is_query, tl.load(q_norm + pair, mask=inside), tl.load(k_norm + pair, mask=inside)).to(
            tl.float32
        )
        second_factor = tl.where(
            is_query, tl.load(q_norm + HALF + pair, mask=inside), tl.load(k_norm + HALF + pair, mask=inside)
        ).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    across = tl.load(cos + row * HALF + pair, mask=inside).to(tl.float32)
    along = tl.load(sin + row * HALF + pair, mask=inside).to(tl.float32)
    source = stacked + (row * total + head) * (2 * HALF) + pair
    valid = inside & (head < total)
    first = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=valid, other=0.0).to(tl.float32)
    x, y = first, second
    if q_norm is not None:
        rms = tl.rsqrt(tl.sum(x * x + y * y, 1) / (2 * HALF) + eps)[:, None]
        x = _weigh(x * rms, first_factor, dtype, OFFSET).to(tl.float32)
        y = _weigh(y * rms, second_factor, dtype, OFFSET).to(tl.float32)
    first = tl.where(is_value, first, _round(_round(x * across, dtype) - _round(y * along, dtype), dtype))
    second = tl.where(is_value, second, _round(_round(y * across, dtype) + _round(x * along, dtype), dtype))

    target = q + (row * HEADS + head) * (2 * HALF) + pair
    tl.store(target, first.to(dtype), mask=valid & is_query)
    tl.store(target + HALF, second.to(dtype), mask=valid & is_query)
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    k_place, v_place = k + slot * k_slot, v + slot * v_slot
    _store_heads(k_place, k_scale, k_head, head - HEADS, is_key, inside, first, second, largest, HALF, LIMITED)
    is_value = is_value & (head < total)
    _store_heads(
        v_place, v_scale, v_head, head - HEADS - KV_HEADS, is_value, inside, first, second, largest, HALF, LIMITED
    )


@triton.jit
def _store_heads(
    pool, scale, head_stride, head, wanted, inside, first, second, largest, HALF: tl.constexpr, LIMITED: tl.constexpr
):
    """Write the halves of the wanted heads [heads, 1] to their places in a slot of the pool."""
    if scale is not None:
        factor = tl.load(scale + head, mask=wanted, other=1.0)
        first /= factor
        second /= factor
    if LIMITED:  # what does not fit the pool's type becomes the largest number that does
        first = tl.minimum(tl.maximum(first, -largest), largest)
        second = tl.minimum(tl.maximum(second, -largest), largest)
    target = pool + head * head_stride + tl.arange(0, first.shape[1])[None, :]
    tl.store(target, first.to(pool.dtype.element_ty), mask=wanted & inside)
    tl.store(target + HALF, second.to(pool.dtype.element_ty), mask=wanted & inside)


@triton.jit
def _weigh(normed, factor, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """Multiply what is normalised with the norm's weights, in Gemma's form or in Llama's."""
    if OFFSET:
        return (normed * (1.0 + factor)).to(dtype)
    return (_round(normed, dtype) * factor).to(dtype)


@triton.jit
def _round(wide, dtype: tl.constexpr):
    """Round to a narrower type, as if through memory."""
    return wide.to(dtype).to(tl.float32)
