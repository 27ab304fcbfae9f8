"""Triton kernels: partial attention of work items, the merge of partial results, and the KV store.

Rows of an item are packed with the query heads that share a KV head: packed row ``r`` is row ``r // GROUP``, head
``r % GROUP`` of its KV head, so every key is read once for all of them. Element offsets are 64-bit: a pool may hold
more than 2^31 elements.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter has no dependent launches.
gdc_launch_dependents, gdc_wait = tl.extra.cuda.gdc_launch_dependents, tl.extra.cuda.gdc_wait

NO_MASK, INTERVALS, WORDS, BITS, DENSE = (tl.constexpr(number) for number in range(5))
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend_items(
    q, k, v, k_scale, v_scale, out, lse, parts, part_lse, items, row_order, row_position, kv_slots, kv_readers,
    kv_position, masks, first_item, num_tokens, scale_log2, cap_log2, window, q_row, q_head, k_slot, k_head, v_slot,
    v_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PACKED: tl.constexpr,
    TOKENS: tl.constexpr, RUN: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, SPLIT: tl.constexpr, ORDERED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend one item and KV head a program: grid (items of a class × KV heads,). An item of no rows is none."""
    if OVERLAP:  # the next kernel may start as soon as all programs of this one have
        gdc_launch_dependents()
    item = items + (tl.program_id(0) // KV_HEADS + first_item) * 8
    row_low, row_high, kv_start, kv_end = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    free_end, entry, mask_start = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    if row_low < row_high:
        _attend_tile(
            q, k, v, k_scale, v_scale, out, lse, parts, part_lse, row_order, row_position, kv_slots, kv_readers,
            kv_position, masks, row_low, row_high, kv_start, kv_end, free_end, entry, mask_start,
            num_tokens, scale_log2, cap_log2, window, q_row, q_head, k_slot, k_head, v_slot, v_head,
            KV_HEADS, GROUP, DIM, DIM_PAD, PACKED, TOKENS, RUN, MASK, WINDOW, CAPPED, SCALED, SPLIT, ORDERED,
            PRECISION, STAGES,
        )  # fmt: skip
    if OVERLAP:  # whoever waits for this kernel waits for the ones before it, too
        gdc_wait()


@triton.jit
def attend_alone(
    q, k, v, k_scale, v_scale, out, lse, parts, part_lse, items, row_order, row_position, kv_slots, kv_readers,
    kv_position, masks, first_item, num_tokens, scale_log2, cap_log2, window, q_row, q_head, k_slot, k_head, v_slot,
    v_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PACKED: tl.constexpr,
    TOKENS: tl.constexpr, RUN: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, SPLIT: tl.constexpr, ORDERED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend a whole group with one program a KV head, row tile after row tile: grid (KV heads,)."""
    item = items + first_item * 8
    row_high = tl.load(item + 1)
    for row_low in range(tl.load(item), row_high, PACKED // GROUP):
        _attend_tile(
            q, k, v, k_scale, v_scale, out, lse, parts, part_lse, row_order, row_position, kv_slots, kv_readers,
            kv_position, masks, row_low, tl.minimum(row_low + PACKED // GROUP, row_high), tl.load(item + 2),
            tl.load(item + 3), tl.load(item + 2), tl.load(item + 5), tl.load(item + 6),
            num_tokens, scale_log2, cap_log2, window, q_row, q_head, k_slot, k_head, v_slot, v_head,
            KV_HEADS, GROUP, DIM, DIM_PAD, PACKED, TOKENS, RUN, MASK, WINDOW, CAPPED, SCALED, SPLIT, ORDERED,
            PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def _attend_tile(
    q, k, v, k_scale, v_scale, out, lse, parts, part_lse, row_order, row_position, kv_slots, kv_readers,
    kv_position, masks, row_low, row_high, kv_start, kv_end, free_end, entry, mask_start,
    num_tokens, scale_log2, cap_log2, window, q_row, q_head, k_slot, k_head, v_slot, v_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PACKED: tl.constexpr,
    TOKENS: tl.constexpr, RUN: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, SPLIT: tl.constexpr, ORDERED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0) % KV_HEADS
    packed = tl.arange(0, PACKED)
    row = row_low + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    valid = row < row_high
    dim = tl.arange(0, DIM_PAD)
    slot = _load_slots(kv_slots, kv_start, kv_end, TOKENS, RUN)
    query = (row if ORDERED else tl.load(row_order + row, mask=valid, other=0)).to(tl.int64)
    q_offsets = query[:, None] * q_row + head[:, None] * q_head + dim[None, :]
    queries = tl.load(q + q_offsets, mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
    keys, values = k + kv_head * k_head, v + kv_head * v_head
    top = tl.full([PACKED], float("-inf"), tl.float32)
    total = tl.zeros([PACKED], tl.float32)
    acc = tl.zeros([PACKED, DIM_PAD], tl.float32)
    if SCALED:
        scale_log2 *= tl.load(k_scale + kv_head)
    if SPLIT:  # whole steps of key tokens that every row sees come first, without their masks, if they are many
        steps = (free_end - kv_start) // TOKENS
        whole = kv_start + tl.where(steps >= SPLIT, steps, 0) * TOKENS
        top, total, acc = _attend_tokens(
            queries, keys, values, top, total, acc, slot, row, row_low, valid, row_position, kv_slots, kv_readers,
            kv_position, masks, kv_start, whole, kv_start, mask_start, num_tokens, scale_log2, cap_log2, window, k_slot,
            v_slot, DIM, DIM_PAD, TOKENS, RUN, NO_MASK, False, CAPPED, True, PRECISION, STAGES,
        )  # fmt: skip
        slot = _load_slots(kv_slots, whole, kv_end, TOKENS, RUN)
    else:
        whole = kv_start
    top, total, acc = _attend_tokens(
        queries, keys, values, top, total, acc, slot, row, row_low, valid, row_position, kv_slots, kv_readers,
        kv_position, masks, whole, kv_end, kv_start, mask_start, num_tokens, scale_log2, cap_log2, window, k_slot,
        v_slot, DIM, DIM_PAD, TOKENS, RUN, MASK, WINDOW, CAPPED, False, PRECISION, STAGES,
    )  # fmt: skip
    some = total > 0
    safe = tl.where(some, total, 1.0)
    acc = acc / safe[:, None]
    if SCALED:
        acc *= tl.load(v_scale + kv_head)
    logs = tl.where(some, (top * (cap_log2 if CAPPED else scale_log2) + tl.log2(safe)) * LN_2, float("-inf"))
    inside = valid[:, None] & (dim < DIM)[None, :]
    if entry < 0:  # these rows have no other item
        target = query * (KV_HEADS * GROUP) + head
        tl.store(out + target[:, None] * DIM + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + target, logs, mask=valid)
    else:
        target = (entry + row - row_low).to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(parts + target[:, None] * DIM + dim[None, :], acc.to(parts.dtype.element_ty), mask=inside)
        tl.store(part_lse + target, logs, mask=valid)


@triton.jit
def _load_slots(kv_slots, first, end, TOKENS: tl.constexpr, RUN: tl.constexpr):
    """First slot of the run in which each of the step's key tokens lies: one address a run of RUN slots."""
    place = first + tl.arange(0, TOKENS) // RUN * RUN
    return tl.load(kv_slots + place, mask=place < end, other=0)


@triton.jit
def _attend_tokens(
    queries, keys, values, top, total, acc, slot, row, row_low, valid, row_position, kv_slots, kv_readers,
    kv_position, masks, start, end, kv_start, mask_start, num_tokens, scale_log2, cap_log2, window, k_slot, v_slot,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, TOKENS: tl.constexpr, RUN: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add key tokens [start, end) to the rows' softmax; WHOLE: all of them are seen and come in whole steps."""
    dim = tl.arange(0, DIM_PAD)
    column = tl.arange(0, TOKENS)
    if WINDOW:
        position = tl.load(row_position + row, mask=valid, other=0)
    for first in tl.range(start, end, TOKENS, num_stages=STAGES):
        token = first + column
        inside = (token < end) | WHOLE
        place = (slot + column % RUN).to(tl.int64)
        key = tl.load(
            keys + place[None, :] * k_slot + dim[:, None], mask=inside[None, :] & (dim < DIM)[:, None], other=0.0
        )  # [dim, tokens]
        value = tl.load(
            values + place[:, None] * v_slot + dim[None, :], mask=inside[:, None] & (dim < DIM)[None, :], other=0.0
        )  # [tokens, dim]
        # Read one step early: keys and values whose addresses are known can be fetched several steps ahead.
        slot = _load_slots(kv_slots, first + TOKENS, end, TOKENS, RUN)
        scores = tl.dot(queries, key.to(queries.dtype), input_precision=PRECISION)
        if CAPPED:  # cap * tanh(x) with 1 - 2 / (exp(2 x) + 1), which overflows to the right limits
            scores = 1.0 - 2.0 / (tl.exp2(scores * scale_log2) + 1.0)
        if not WHOLE:
            seen = inside[None, :]
            if MASK == INTERVALS:
                readers = tl.load(kv_readers + token, mask=inside, other=0)
                low, high = readers.to(tl.int32), (readers >> 32).to(tl.int32)
                # low <= row < high in one comparison; a key token that is not inside has no readers.
                seen = (row[:, None] - low[None, :]).to(tl.uint32) < (high - low)[None, :].to(tl.uint32)
                if WINDOW:
                    spot = tl.load(kv_position + token, mask=inside, other=0)
                    seen = seen & (spot[None, :] > position[:, None] - window)
            elif MASK == WORDS:
                word = tl.load(masks + mask_start + token - kv_start, mask=inside, other=0)
                seen = seen & (((word[None, :] >> (row - row_low)[:, None].to(tl.int64)) & 1) != 0)
            elif MASK == BITS:
                word = tl.load(masks + mask_start + (token - kv_start) // 64, mask=inside, other=0)
                seen = seen & (((word >> ((token - kv_start) % 64).to(tl.int64)) & 1) != 0)[None, :]
            elif MASK == DENSE:
                pair = row.to(tl.int64)[:, None] * num_tokens + token[None, :]
                seen = seen & valid[:, None]
                seen = seen & (tl.load(masks + pair, mask=seen, other=0) != 0)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        factor = cap_log2 if CAPPED else scale_log2
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top * factor)  # empty is the identity: no -inf - -inf
        weights = tl.exp2(scores * factor - anchor[:, None])
        fade = tl.exp2(top * factor - anchor)
        total = total * fade + tl.sum(weights, 1)
        value = value.to(queries.dtype)
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision=PRECISION)
        top = new_top
    return top, total, acc


@triton.jit
def reduce_entries(
    parts, part_lse, out, lse, queries, indptr, entries,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK heads of a row a program, its entries in their fixed order: grid (merged rows × blocks of heads,).

    A row without entries becomes 0; a row whose query is -1 is none.
    """
    if OVERLAP:  # the next kernel may start as soon as all programs of this one have
        gdc_launch_dependents()
    blocks: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    head = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    dim, column = tl.arange(0, DIM_PAD), tl.arange(0, ENTRIES)
    query = tl.load(queries + row).to(tl.int64)
    alive = head < tl.where(query < 0, 0, HEADS)
    valid = alive[:, None] & (dim < DIM)[None, :]
    start, end = tl.load(indptr + row), tl.load(indptr + row + 1)
    entry = tl.load(entries + start + column, mask=start + column < end, other=0)
    if OVERLAP:  # all above is the plan's; from here on it is what the kernels before wrote
        gdc_wait()
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, DIM_PAD], tl.float32)
    for first in range(start, end, ENTRIES):
        inside = first + column < end
        place = entry.to(tl.int64)[:, None] * HEADS + head[None, :]
        logs = tl.load(part_lse + place, mask=inside[:, None] & alive[None, :], other=float("-inf")) * LOG2_E
        part = tl.load(
            parts + place[:, :, None] * DIM + dim[None, None, :], mask=inside[:, None, None] & valid[None], other=0.0
        )
        following = first + ENTRIES + column
        entry = tl.load(entries + following, mask=following < end, other=0)
        new_top = tl.maximum(top, tl.max(logs, 0))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logs - anchor[None, :])
        fade = tl.exp2(top - anchor)
        acc = acc * fade[:, None] + tl.sum(part.to(tl.float32) * weights[:, :, None], 0)
        total = total * fade + tl.sum(weights, 0)
        top = new_top
    safe = tl.where(total > 0, total, 1.0)
    target = query * HEADS + head
    tl.store(out + target[:, None] * DIM + dim[None, :], (acc / safe[:, None]).to(out.dtype.element_ty), mask=valid)
    logs = tl.where(total > 0, (top + tl.log2(safe)) * LN_2, float("-inf"))
    tl.store(lse + target, logs, mask=alive)


@triton.jit
def store_rows(
    k_new, v_new, k, v, k_scale, v_scale, slots, k_new_row, k_new_head, v_new_row, v_new_head, k_slot, k_head, v_slot,
    v_head, largest,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, SCALED: tl.constexpr,
    LIMITED: tl.constexpr,
):  # fmt: skip
    """Copy the keys and values of one row a program to its slot: grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    head, dim = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, DIM_PAD)[None, :]
    inside = (head < HEADS) & (dim < DIM)
    key = tl.load(k_new + row * k_new_row + head * k_new_head + dim, mask=inside)
    value = tl.load(v_new + row * v_new_row + head * v_new_head + dim, mask=inside)
    if SCALED:
        key = key.to(tl.float32) / tl.load(k_scale + head, mask=head < HEADS, other=1.0)
        value = value.to(tl.float32) / tl.load(v_scale + head, mask=head < HEADS, other=1.0)
    if LIMITED:  # what does not fit the pool's type becomes the largest number that does
        key = tl.minimum(tl.maximum(key.to(tl.float32), -largest), largest)
        value = tl.minimum(tl.maximum(value.to(tl.float32), -largest), largest)
    tl.store(k + slot * k_slot + head * k_head + dim, key.to(k.dtype.element_ty), mask=inside)
    tl.store(v + slot * v_slot + head * v_head + dim, value.to(v.dtype.element_ty), mask=inside)
