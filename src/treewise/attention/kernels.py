"""Triton kernels: partial attention of work items, the merge of partial results, and the KV store.

Rows of an item are packed with the query heads that share a KV head: packed row ``r`` is row ``r // GROUP``, head
``r % GROUP`` of its KV head, so every key is read once for all of them. Element offsets are 64-bit: a pool may hold
more than 2^31 elements.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

NO_MASK, INTERVALS, WORDS, BITS, DENSE = (tl.constexpr(number) for number in range(5))
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend_items(
    q, k, v, out, lse, items, row_order, row_position, kv_slots, kv_low, kv_high, kv_position, masks,
    first_item, num_tokens, scale_log2, window, q_row, q_head, k_slot, k_head, v_slot, v_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PACKED: tl.constexpr, TOKENS: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, DIRECT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend one item and KV head a program: grid (items of a class, KV heads)."""
    item = items + (tl.program_id(0) + first_item) * 8
    _attend_tile(
        q, k, v, out, lse, row_order, row_position, kv_slots, kv_low, kv_high, kv_position, masks,
        tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 5), tl.load(item + 6),
        num_tokens, scale_log2, window, q_row, q_head, k_slot, k_head, v_slot, v_head,
        KV_HEADS, GROUP, DIM, DIM_PAD, PACKED, TOKENS, MASK, WINDOW, DIRECT, PRECISION, STAGES,
    )  # fmt: skip


@triton.jit
def attend_alone(
    q, k, v, out, lse, items, row_order, row_position, kv_slots, kv_low, kv_high, kv_position, masks,
    first_item, num_tokens, scale_log2, window, q_row, q_head, k_slot, k_head, v_slot, v_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PACKED: tl.constexpr, TOKENS: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, DIRECT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend a whole group with one program a KV head, row tile after row tile: grid (1, KV heads)."""
    item = items + (tl.program_id(0) + first_item) * 8
    row_high = tl.load(item + 1)
    for row_low in range(tl.load(item), row_high, PACKED // GROUP):
        _attend_tile(
            q, k, v, out, lse, row_order, row_position, kv_slots, kv_low, kv_high, kv_position, masks,
            row_low, tl.minimum(row_low + PACKED // GROUP, row_high), tl.load(item + 2), tl.load(item + 3),
            row_low, tl.load(item + 6), num_tokens, scale_log2, window, q_row, q_head, k_slot, k_head, v_slot, v_head,
            KV_HEADS, GROUP, DIM, DIM_PAD, PACKED, TOKENS, MASK, WINDOW, DIRECT, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def _attend_tile(
    q, k, v, out, lse, row_order, row_position, kv_slots, kv_low, kv_high, kv_position, masks,
    row_low, row_high, kv_start, kv_end, entry, mask_start,
    num_tokens, scale_log2, window, q_row, q_head, k_slot, k_head, v_slot, v_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PACKED: tl.constexpr, TOKENS: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, DIRECT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    packed = tl.arange(0, PACKED)
    row = row_low + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    valid = row < row_high
    dim = tl.arange(0, DIM_PAD)
    column = tl.arange(0, TOKENS)
    query = tl.load(row_order + row, mask=valid, other=0).to(tl.int64)
    q_offsets = query[:, None] * q_row + head[:, None] * q_head + dim[None, :]
    queries = tl.load(q + q_offsets, mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
    if WINDOW:
        position = tl.load(row_position + row, mask=valid, other=0)
    top = tl.full([PACKED], float("-inf"), tl.float32)
    total = tl.zeros([PACKED], tl.float32)
    acc = tl.zeros([PACKED, DIM_PAD], tl.float32)
    for start in tl.range(kv_start, kv_end, TOKENS, num_stages=STAGES):
        token = start + column
        inside = token < kv_end
        slot = tl.load(kv_slots + token, mask=inside, other=0).to(tl.int64)
        keys = tl.load(
            k + slot[None, :] * k_slot + kv_head * k_head + dim[:, None],
            mask=inside[None, :] & (dim < DIM)[:, None],
            other=0.0,
        )  # [dim, tokens]
        values = tl.load(
            v + slot[:, None] * v_slot + kv_head * v_head + dim[None, :],
            mask=inside[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )  # [tokens, dim]
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale_log2
        seen = inside[None, :] & valid[:, None]
        if MASK == INTERVALS:
            low = tl.load(kv_low + token, mask=inside, other=0)
            high = tl.load(kv_high + token, mask=inside, other=0)
            seen = seen & (row[:, None] >= low[None, :]) & (row[:, None] < high[None, :])
            if WINDOW:
                place = tl.load(kv_position + token, mask=inside, other=0)
                seen = seen & (place[None, :] > position[:, None] - window)
        elif MASK == WORDS:
            word = tl.load(masks + mask_start + token - kv_start, mask=inside, other=0)
            seen = seen & (((word[None, :] >> (row - row_low)[:, None].to(tl.int64)) & 1) != 0)
        elif MASK == BITS:
            word = tl.load(masks + mask_start + (token - kv_start) // 64, mask=inside, other=0)
            seen = seen & (((word >> ((token - kv_start) % 64).to(tl.int64)) & 1) != 0)[None, :]
        elif MASK == DENSE:
            pair = row.to(tl.int64)[:, None] * num_tokens + token[None, :]
            seen = seen & (tl.load(masks + pair, mask=seen, other=0) != 0)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)  # empty is the identity: no -inf - -inf
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(top - anchor)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision=PRECISION)
        top = new_top
    some = total > 0
    safe = tl.where(some, total, 1.0)
    acc = acc / safe[:, None]
    logs = tl.where(some, (top + tl.log2(safe)) * LN_2, float("-inf"))
    target = query if DIRECT else (entry + row - row_low).to(tl.int64)
    target = target * (KV_HEADS * GROUP) + head
    tl.store(
        out + target[:, None] * DIM + dim[None, :],
        acc.to(out.dtype.element_ty),
        mask=valid[:, None] & (dim < DIM)[None, :],
    )
    tl.store(lse + target, logs, mask=valid)


@triton.jit
def reduce_entries(
    parts, part_lse, out, lse, row_order, indptr, entries,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Merge one row and head a program, its entries in their fixed order: grid (rows, heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(indptr + row), tl.load(indptr + row + 1)
    query = tl.load(row_order + row).to(tl.int64)
    dim, column = tl.arange(0, DIM_PAD), tl.arange(0, ENTRIES)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([DIM_PAD], tl.float32)
    for first in range(start, end, ENTRIES):
        inside = first + column < end
        entry = tl.load(entries + first + column, mask=inside, other=0).to(tl.int64) * HEADS + head
        logs = tl.load(part_lse + entry, mask=inside, other=float("-inf")) * LOG2_E
        part = tl.load(
            parts + entry[:, None] * DIM + dim[None, :], mask=inside[:, None] & (dim < DIM)[None, :], other=0.0
        ).to(tl.float32)
        new_top = tl.maximum(top, tl.max(logs, 0))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logs - anchor)
        fade = tl.exp2(top - anchor)
        acc = acc * fade + tl.sum(part * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        top = new_top
    safe = tl.where(total > 0, total, 1.0)
    target = query * HEADS + head
    tl.store(out + target * DIM + dim, (acc / safe).to(out.dtype.element_ty), mask=dim < DIM)
    tl.store(lse + target, tl.where(total > 0, (top + tl.log2(safe)) * LN_2, float("-inf")))


@triton.jit
def store_rows(
    k_new, v_new, k, v, slots, k_new_row, k_new_head, v_new_row, v_new_head, k_slot, k_head, v_slot, v_head,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
):  # fmt: skip
    """Copy the keys and values of one row a program to its slot: grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    head, dim = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, DIM_PAD)[None, :]
    inside = (head < HEADS) & (dim < DIM)
    key = tl.load(k_new + row * k_new_row + head * k_new_head + dim, mask=inside)
    value = tl.load(v_new + row * v_new_row + head * v_new_head + dim, mask=inside)
    tl.store(k + slot * k_slot + head * k_head + dim, key.to(k.dtype.element_ty), mask=inside)
    tl.store(v + slot * v_slot + head * v_head + dim, value.to(v.dtype.element_ty), mask=inside)
