"""A Gluon kernel for wide work items on Hopper GPUs (compute capability 9.0).

Its warps have roles. One group of four gathers queries, keys and values into shared memory; one or two others, of 64
packed rows each, multiply. The products of one step's scores and of the values of the step before are issued
together, and one group multiplies while the other weighs. A program attends several items in turn, and those of the
next are under way while the last ones are finished.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping

import torch
import triton

if tuple(int(number) for number in triton.__version__.split(".")[:2]) < (3, 6):
    raise ImportError(f"Triton is {triton.__version__}; kernels in Gluon need 3.6")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from treewise.plan.devices import capability, multiprocessors

_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # its name until Triton 3.6

LN_2 = gl.constexpr(0.6931471805599453)


def suits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: int) -> bool:
    """Tell whether `attend` can serve items of at most `packed` rows × group.

    It also needs interval masks or none, and neither a window nor a soft cap nor factors of 8-bit keys.
    """
    return (
        packed <= 128
        and q.dtype in (torch.float16, torch.bfloat16)
        and k.dtype == v.dtype == q.dtype
        and q.shape[2] in (64, 128)
        and capability(q.device) == (9, 0)
        # Copies are of 16 bytes, as Triton knows only where these are multiples of 16.
        and all(
            tensor.stride(2) == 1 and tensor.data_ptr() % 16 == tensor.stride(0) % 16 == tensor.stride(1) % 16 == 0
            for tensor in (q, k, v)
        )
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    first: int,
    num_items: int,
    packed: int,
    masked: bool,
    ordered: bool,
    scale_log2: float,
    overlap: bool = False,
    dependent: bool = False,
) -> None:
    """Attend items of a plan, as `treewise.attention.kernels.attend_items` does, where `suits` allows it.

    Parameters
    ----------
    q, k, v : [queries, heads, dim], [slots, kv_heads, dim]
        Queries, and the pool of keys and values.
    out, lse : [queries, heads, dim], [queries, heads]
        Where items whose ``ENTRY`` is -1 write.
    parts, part_lse : [entries, heads, dim], [entries, heads]
        Where the others write; `parts` is float32 or of the queries' dtype.
    tensors : mapping
        The plan's tensors: ``items``, ``row_order``, ``kv_slots`` and, where masked, ``kv_readers``.
    first, num_items, packed : int
        Which items, and the most rows × group of one of them.
    masked, ordered : bool
        Whether some key tokens are not seen by every row; whether rows are in the caller's order.
    scale_log2 : float
        Factor of the scores, in powers of two.
    overlap, dependent : bool
        Whether the next kernel may start while this one runs; whether this one may start so.
    """
    programs = num_items * k.shape[1]
    wide = packed > 64
    grid = min(programs, multiprocessors(q.device) * (1 if wide else 2))
    attend_wide[(grid,)](
        q, k, v, out, lse, parts, part_lse,
        tensors["items"], tensors["row_order"], tensors["kv_slots"], tensors["kv_readers"],
        first, programs, scale_log2, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        KV_HEADS=k.shape[1], GROUP=q.shape[1] // k.shape[1], DIM=q.shape[2], PACKED=128 if wide else 64,
        TOKENS=128 if wide else 64, MASKED=masked, ORDERED=ordered, STAGES=2, OVERLAP=overlap,
        # Four warps are the launch's, the others come with the roles. The registers of one multiprocessor are for one
        # wide program or for two others: 200 or more for a thread that multiplies, 56 or more for one that gathers.
        REGISTERS=216 if wide else 56, num_warps=4, maxnreg=168 if wide else 128, launch_pdl=dependent,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["first_item", "num_programs"])
def attend_wide(
    q, k, v, out, lse, parts, part_lse, items, row_order, kv_slots, kv_readers,
    first_item, num_programs, scale_log2, q_row, q_head, k_slot, k_head, v_slot, v_head,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PACKED: gl.constexpr, TOKENS: gl.constexpr,
    MASKED: gl.constexpr, ORDERED: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attend items, a KV head of one at a time: grid (any number up to num_programs = items × KV heads,).

    An item of no rows is none.
    """
    if OVERLAP:  # the next kernel may start as soon as all programs of this one have
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    groups: gl.constexpr = PACKED // 64
    element: gl.constexpr = k.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DIM], element)
    queries = gl.allocate_shared_memory(element, [2 * groups, 64, DIM], tile)
    keys = gl.allocate_shared_memory(element, [STAGES, TOKENS, DIM], tile)
    values = gl.allocate_shared_memory(element, [STAGES, TOKENS, DIM], tile)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    readers = gl.allocate_shared_memory(gl.int64, [STAGES, TOKENS if MASKED else 2], plain)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    queries_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    queries_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    keys_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    values_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for place in gl.static_range(2):
        mbarrier.init(queries_full.index(place), count=128)
        mbarrier.init(queries_free.index(place), count=groups)
        mbarrier.init(turns.index(place), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_full.index(stage), count=128)
        mbarrier.init(keys_free.index(stage), count=groups)
        mbarrier.init(values_full.index(stage), count=128)
        mbarrier.init(values_free.index(stage), count=groups)
    work = (items, first_item, num_programs, row_order)
    ring = (
        queries, keys, values, readers, queries_full, queries_free, keys_full, keys_free, values_full, values_free,
    )  # fmt: skip
    read = (q, k, v, kv_slots, kv_readers, q_row, q_head, k_slot, k_head, v_slot, v_head)
    write = (out, lse, parts, part_lse, scale_log2)
    if groups == 2:
        gl.warp_specialize(
            [
                (_attend, (0, work, ring, write, turns, KV_HEADS, GROUP, DIM, TOKENS, MASKED, ORDERED, STAGES, 2)),
                (_attend, (1, work, ring, write, turns, KV_HEADS, GROUP, DIM, TOKENS, MASKED, ORDERED, STAGES, 2)),
                (_gather, (work, ring, read, KV_HEADS, GROUP, DIM, TOKENS, MASKED, ORDERED, STAGES, 2)),
            ],
            [4, 4], [REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (0, work, ring, write, turns, KV_HEADS, GROUP, DIM, TOKENS, MASKED, ORDERED, STAGES, 1)),
                (_gather, (work, ring, read, KV_HEADS, GROUP, DIM, TOKENS, MASKED, ORDERED, STAGES, 1)),
            ],
            [4], [REGISTERS],
        )  # fmt: skip
    if OVERLAP:  # whoever waits for this kernel waits for the ones before it, too
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _program(turn):
    """Which of the grid's pieces of work comes at this turn: to and fro, for items come sorted by length."""
    width, here = gl.num_programs(0), gl.program_id(0)
    return turn * width + gl.where(turn & 1 == 1, width - 1 - here, here)


@gluon.jit
def _turns(num_programs):
    """How many pieces of work this program has."""
    whole = num_programs // gl.num_programs(0)
    return whole + (_program(whole) < num_programs).to(gl.int32)


@gluon.jit
def _rows(
    row_order, row_low, row_high, kv_head, part: gl.constexpr, GROUP: gl.constexpr, ORDERED: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Row, query, head, and whether it is of the item, of each of 64 packed rows."""
    packed = part * 64 + gl.arange(0, 64, layout)
    row = row_low + packed // GROUP
    valid = row < row_high
    query = row
    if not ORDERED:
        query = gl.load(row_order + row, mask=valid, other=0)
    return row, query.to(gl.int64), kv_head * GROUP + packed % GROUP, valid


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """Go on to the next place in the ring, and to the other phase at its end."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), phase ^ last.to(gl.int32)


@gluon.jit
def _asked(
    row_order, row_low, row_high, kv_head, q_row, q_head, part: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    ORDERED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Where the queries of 64 packed rows lie, and which of them are of the item."""
    _, query, head, valid = _rows(
        row_order, row_low, row_high, kv_head, part, GROUP, ORDERED, gl.SliceLayout(1, layout)
    )
    dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, layout)), 0)
    return gl.expand_dims(query * q_row + head * q_head, 1) + dim, gl.expand_dims(valid, 1)


@gluon.jit
def _gather(
    work, ring, read, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, TOKENS: gl.constexpr,
    MASKED: gl.constexpr, ORDERED: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Gather queries, keys and values, and who sees them, into shared memory as it falls free."""
    items, first_item, num_programs, row_order = work
    queries, keys, values, readers, queries_full, queries_free, keys_full, keys_free, values_full, values_free = ring
    q, k, v, kv_slots, kv_readers, q_row, q_head, k_slot, k_head, v_slot, v_head = read
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, layout)), 0)
    number = 0
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    for turn in range(_turns(num_programs)):
        program = _program(turn)
        item = items + (program // KV_HEADS + first_item) * 8
        kv_head = program % KV_HEADS
        row_low, row_high, start, end = gl.load(item), gl.load(item + 1), gl.load(item + 2), gl.load(item + 3)
        if row_low < row_high:
            slot = gl.load(kv_slots + start + column, mask=start + column < end, other=0)
            asked, valid = _asked(row_order, row_low, row_high, kv_head, q_row, q_head, 0, GROUP, DIM, ORDERED, layout)
            if GROUPS == 2:
                asked_1, valid_1 = _asked(
                    row_order, row_low, row_high, kv_head, q_row, q_head, 1, GROUP, DIM, ORDERED, layout
                )
            side = number & 1
            mbarrier.wait(queries_free.index(side), (number >> 1 & 1) ^ 1)
            _copy(queries.index(side * GROUPS), q + asked, mask=valid)
            if GROUPS == 2:
                _copy(queries.index(side * GROUPS + 1), q + asked_1, mask=valid_1)
            async_copy.mbarrier_arrive(queries_full.index(side), increment_count=False)
            for first in range(start, gl.maximum(end, start + 1), TOKENS):
                token = first + column
                inside = gl.expand_dims(token < end, 1)
                place = gl.expand_dims(slot.to(gl.int64), 1)
                mbarrier.wait(keys_free.index(stage), phase)
                if MASKED:
                    reader = first + gl.arange(0, TOKENS, flat)
                    _copy(readers.index(stage), kv_readers + reader, mask=reader < end)
                _copy(keys.index(stage), k + kv_head * k_head + place * k_slot + dim, mask=inside)
                async_copy.mbarrier_arrive(keys_full.index(stage), increment_count=False)
                # Read one step early, so that no step waits for the addresses of its copies.
                slot = gl.load(kv_slots + token + TOKENS, mask=token + TOKENS < end, other=0)
                mbarrier.wait(values_free.index(stage), phase)
                _copy(values.index(stage), v + kv_head * v_head + place * v_slot + dim, mask=inside)
                async_copy.mbarrier_arrive(values_full.index(stage), increment_count=False)
                stage, phase = _next(stage, phase, STAGES)
            number += 1


@gluon.jit
def _attend(
    part: gl.constexpr, work, ring, write, turns, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    TOKENS: gl.constexpr, MASKED: gl.constexpr, ORDERED: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Attend 64 packed rows of each item."""
    items, first_item, num_programs, row_order = work
    queries, keys, values, readers, queries_full, queries_free, keys_full, keys_free, values_full, values_free = ring
    out, lse, parts, part_lse, scale_log2 = write
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    weight: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, score)
    element: gl.constexpr = keys.dtype
    number = 0
    count = 0
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for turn in range(_turns(num_programs)):
        program = _program(turn)
        item = items + (program // KV_HEADS + first_item) * 8
        kv_head = program % KV_HEADS
        row_low, row_high, start, end = gl.load(item), gl.load(item + 1), gl.load(item + 2), gl.load(item + 3)
        if row_low < row_high:
            free_end, entry = gl.load(item + 4), gl.load(item + 5)
            rows = row_low + (part * 64 + gl.arange(0, 64, by_row)) // GROUP
            nothing = gl.zeros([64, TOKENS], gl.float32, score)
            acc = gl.zeros([64, DIM], gl.float32, result)
            top = gl.full([64], float("-inf"), gl.float32, by_row)
            total = gl.zeros([64], gl.float32, by_row)
            mine = queries.index((number & 1) * GROUPS + part)

            mbarrier.wait(queries_full.index(number & 1), number >> 1 & 1)
            mbarrier.wait(keys_full.index(stage), phase)
            fence_async_shared()  # what the copies wrote is for the products to read
            if GROUPS == 2:  # one multiplies while the other weighs
                mbarrier.wait(turns.index(part), (count + 1 - part) & 1)
            scores = warpgroup_mma(mine, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            if GROUPS == 2:
                mbarrier.arrive(turns.index(1 - part), count=1)
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores = _hide(scores, rows, readers, stage, start, free_end, end, TOKENS, MASKED)
            mbarrier.arrive(keys_free.index(stage), count=1)
            top = _top(scores, top)
            weights, total, fade = _weigh(scores, top, top, total, scale_log2)
            weights = gl.convert_layout(weights.to(element), weight)
            before, before_phase = stage, phase
            stage, phase = _next(stage, phase, STAGES)
            count += 1
            for first in range(start + TOKENS, end, TOKENS):
                # Copies arrive in order: the values of the step before are there, too.
                mbarrier.wait(keys_full.index(stage), phase)
                fence_async_shared()
                if GROUPS == 2:
                    mbarrier.wait(turns.index(part), (count + 1 - part) & 1)
                scores = warpgroup_mma(mine, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
                future = warpgroup_mma(weights, values.index(before), acc, is_async=True)
                if GROUPS == 2:
                    mbarrier.arrive(turns.index(1 - part), count=1)
                scores = warpgroup_mma_wait(1, deps=[scores])
                scores = _hide(scores, rows, readers, stage, first, free_end, end, TOKENS, MASKED)
                mbarrier.arrive(keys_free.index(stage), count=1)
                new_top = _top(scores, top)
                acc, _ = warpgroup_mma_wait(0, deps=[future, weights])
                mbarrier.arrive(values_free.index(before), count=1)
                following, total, fade = _weigh(scores, top, new_top, total, scale_log2)
                top = new_top
                acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, result)), 1)
                weights = gl.convert_layout(following.to(element), weight)
                before, before_phase = stage, phase
                stage, phase = _next(stage, phase, STAGES)
                count += 1
            mbarrier.wait(values_full.index(before), before_phase)
            fence_async_shared()
            future = warpgroup_mma(weights, values.index(before), acc, is_async=True)
            some = total > 0
            safe = gl.where(some, total, 1.0)
            logs = gl.where(some, (top * scale_log2 + gl.log2(safe)) * LN_2, float("-inf"))
            acc, _ = warpgroup_mma_wait(0, deps=[future, weights])
            mbarrier.arrive(values_free.index(before), count=1)
            acc = acc * gl.expand_dims(gl.convert_layout(1.0 / safe, gl.SliceLayout(1, result)), 1)

            if entry < 0:  # these rows have no other item
                _store(
                    out,
                    lse,
                    acc,
                    logs,
                    mine,
                    row_order,
                    row_low,
                    row_high,
                    kv_head,
                    0,
                    part,
                    KV_HEADS,
                    GROUP,
                    DIM,
                    ORDERED,
                    True,
                )
            else:
                _store(
                    parts,
                    part_lse,
                    acc,
                    logs,
                    mine,
                    row_order,
                    row_low,
                    row_high,
                    kv_head,
                    entry,
                    part,
                    KV_HEADS,
                    GROUP,
                    DIM,
                    ORDERED,
                    False,
                )
            mbarrier.arrive(queries_free.index(number & 1), count=1)
            number += 1


@gluon.jit
def _store(
    out, lse, acc, logs, mine, row_order, row_low, row_high, kv_head, entry, part: gl.constexpr,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, ORDERED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """Write the results of 64 packed rows, by query or from `entry` on."""
    by_row: gl.constexpr = logs.type.layout
    row, query, head, valid = _rows(row_order, row_low, row_high, kv_head, part, GROUP, ORDERED or not DIRECT, by_row)
    target = (query if DIRECT else (entry + row - row_low).to(gl.int64)) * (KV_HEADS * GROUP) + head
    gl.store(lse + target, logs, mask=valid)
    staged: gl.constexpr = out.dtype.element_ty == mine.dtype
    chunks: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    layout: gl.constexpr = chunks if staged else acc.type.layout
    found = acc
    if staged:  # by way of the queries' memory, for stores of 16 bytes
        mine.store(acc.to(mine.dtype))
        found = mine.load(layout)
    lane: gl.constexpr = gl.SliceLayout(1, layout)
    target, valid = gl.convert_layout(target, lane), gl.convert_layout(valid, lane)
    dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, layout)), 0)
    gl.store(out + gl.expand_dims(target * DIM, 1) + dim, found, mask=gl.expand_dims(valid, 1))


@gluon.jit
def _hide(
    scores, rows, readers, stage, first, free_end, end, TOKENS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Set the scores of pairs that do not count to -inf: nothing to do in a step that every row sees."""
    if first + TOKENS > free_end:
        across: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        if MASKED:  # a key token past the item's has no readers
            reader = readers.index(stage).load(across)
            low, high = reader.to(gl.int32), (reader >> 32).to(gl.int32)
            # low <= row < high in one comparison
            place = gl.expand_dims(rows, 1) - gl.expand_dims(low, 0)
            seen = place.to(gl.uint32) < gl.expand_dims(high - low, 0).to(gl.uint32)
        else:
            seen = gl.expand_dims(first + gl.arange(0, TOKENS, across) < end, 0)
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def _top(scores, top):
    """Largest score of each row so far."""
    best = scores
    for _ in gl.static_range(2):
        low, high = _halves(best)
        best = gl.maximum(low, high)
    return gl.maximum(top, gl.convert_layout(gl.max(best, 1), top.type.layout))


@gluon.jit
def _weigh(scores, top, new_top, total, scale_log2):
    """One step of the softmax: weights, the rows' new sum, and the factor for what they had."""
    anchor = gl.where(new_top == float("-inf"), 0.0, new_top * scale_log2)  # empty is the identity: no -inf - -inf
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(anchor, 1))
    fade = gl.exp2(top * scale_log2 - anchor)
    added = weights
    for _ in gl.static_range(2):
        low, high = _halves(added)
        added = low + high
    return weights, total * fade + gl.convert_layout(gl.sum(added, 1), top.type.layout), fade


@gluon.jit
def _halves(x):
    """Left and right half of the columns: to reduce these first makes shorter chains of dependent instructions."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
