"""The Triton backend: one launch a class of work items, then a merge of partial results where rows have several."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from treewise.attention import kernels
from treewise.attention.backend import FP8, AttentionSpec, Factors, Pair, Scoring, power_of_2, read
from treewise.plan import Plan
from treewise.plan.data import FREE_END, KV_END, KV_START, ROW_HIGH, ROW_LOW
from treewise.plan.devices import capability, multiprocessors
from treewise.plan.layout import ranges
from treewise.plan.partition import BOUNDS, SHORT

LOG2_E = kernels.LOG2_E.value

MASK_KINDS = {
    "intervals": kernels.INTERVALS,
    "words": kernels.WORDS,
    "bits": kernels.BITS,
    "dense": kernels.DENSE,
}


SPLIT = (12, 6)
"""Steps without masks from which a loop of their own pays, beside unmasked and beside masked steps."""


class Launch(NamedTuple):
    """A run of items that one compiled kernel serves, and how it is compiled."""

    first: int
    num_items: int
    packed: int  # rows × group, padded
    masked: bool
    tokens: int
    stages: int
    warps: int
    registers: int | None = None  # most a thread
    split: int = 0  # fewest steps for a loop without masks; 0: there is none
    run: int = 1  # slots are consecutive in runs of so many key tokens from an item's start


class Work(NamedTuple):
    """What a plan comes down to: launches of the attention kernel, and the shape of the merge."""

    launches: tuple[Launch, ...]
    ordered: bool  # rows are in the caller's order
    entries: int  # of the merge, at once
    block: int  # heads of a program of it
    warps: int


class _Step(NamedTuple):
    """One run of a plan: what its kernels read and write."""

    plan: Plan
    work: Work
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    parts: torch.Tensor
    part_lse: torch.Tensor
    scoring: Scoring
    overlap: bool


class TritonBackend:
    """Runs every plan on a GPU, or on a CPU under ``TRITON_INTERPRET=1``. ``medusa`` is unfused, as it is meant."""

    name = "triton"

    def unsupported(self, spec: AttentionSpec) -> list[str]:
        """See `AttentionBackend`."""
        reasons = []
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if interpreted and spec.dtype == torch.bfloat16:
            reasons.append("Triton's interpreter multiplies bfloat16 wrongly")
        if spec.device.type != "cuda" and not interpreted:
            reasons.append(f"it runs on cuda, not on {spec.device}; set TRITON_INTERPRET=1 to interpret its kernels")
        if spec.head_dim > 256:
            reasons.append(f"head_dim is {spec.head_dim}; its kernels hold up to 256")
        if spec.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            reasons.append(f"dtype is {spec.dtype}; it takes float32, float16 and bfloat16")
        if spec.kv_dtype not in (spec.dtype, FP8):
            reasons.append(f"kv_dtype is {spec.kv_dtype}; it takes the queries' dtype and {FP8}")
        if spec.kv_dtype == FP8 and spec.device.type == "cuda" and capability(spec.device) < (8, 9):
            reasons.append(f"kv_dtype is {FP8}, which GPUs below compute capability 8.9 cannot convert")
        return reasons

    def run(
        self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `AttentionBackend`."""
        if plan.method == "medusa":
            return _unfused(plan, q, k, v, scoring, return_lse)
        q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
        work, on = prepare(plan), plan.tensors
        merged = len(plan.reduce_rows) > 0
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        # Rounded to bfloat16 on the way, results would be off by more than its own rounding.
        dtype = torch.float16 if q.dtype == torch.float16 else torch.float32
        parts = torch.empty((plan.num_entries, *q.shape[1:]), dtype=dtype, device=q.device)
        part_lse = torch.empty(parts.shape[:2], dtype=torch.float32, device=q.device)
        # Kernels whose launch depends on the one before may start while it still runs; only the merge waits for all.
        overlap = len(work.launches) + merged > 1 and plan.method != "vanilla" and capability(q.device) >= (9, 0)
        step = _Step(plan, work, q, k, v, out, lse, parts, part_lse, scoring, overlap)
        for number, launch in enumerate(work.launches):
            self._attend(step, launch, dependent=overlap and number > 0)
        if merged:
            kernels.reduce_entries[(len(plan.reduce_rows) * -(-plan.num_heads // work.block),)](
                parts, part_lse, out, lse, on["reduce_queries"], on["reduce_indptr"], on["reduce_entries"],
                HEADS=plan.num_heads, DIM=plan.head_dim, DIM_PAD=_dim_pad(plan), BLOCK=work.block,
                ENTRIES=work.entries, OVERLAP=overlap, num_warps=work.warps, launch_pdl=overlap,
            )  # fmt: skip
        return out, lse

    def _attend(self, step: _Step, launch: Launch, dependent: bool) -> None:
        """Start the kernel of one launch; a dependent one need not wait for those before it."""
        plan, scoring, q, k, v, on = step.plan, step.scoring, step.q, step.k, step.v, step.plan.tensors
        kernel = kernels.attend_alone if plan.method == "vanilla" else kernels.attend_items
        k_scale, v_scale = _both((scoring.k_scale, scoring.v_scale), k)
        scale_log2, cap_log2 = scoring.scale * LOG2_E, 0.0
        if scoring.soft_cap is not None:
            scale_log2, cap_log2 = 2 * scale_log2 / scoring.soft_cap, scoring.soft_cap * LOG2_E
        kernel[(launch.num_items * plan.num_kv_heads,)](
            q, k, v, k_scale, v_scale, step.out, step.lse, step.parts, step.part_lse,
            on["items"], on["row_order"], on["row_position"], on["kv_slots"], on["kv_readers"], on["kv_position"],
            on["mask_dense"].view(torch.uint8) if plan.mask == "dense" else on["mask_words"],
            launch.first, len(plan.kv_slots), scale_log2, cap_log2, plan.window or 0,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            KV_HEADS=plan.num_kv_heads, GROUP=plan.num_heads // plan.num_kv_heads,
            DIM=plan.head_dim, DIM_PAD=_dim_pad(plan), PACKED=launch.packed, TOKENS=launch.tokens, RUN=launch.run,
            MASK=MASK_KINDS[plan.mask] if launch.masked else kernels.NO_MASK, WINDOW=plan.window is not None,
            CAPPED=scoring.soft_cap is not None, SCALED=k_scale is not None, SPLIT=launch.split,
            ORDERED=step.work.ordered, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            STAGES=launch.stages, OVERLAP=step.overlap,
            num_warps=launch.warps, maxnreg=launch.registers, launch_pdl=dependent,
        )  # fmt: skip

    def store(self, new: Pair, pool: Pair, slots: torch.Tensor, factors: Factors = (None, None)) -> None:
        """See `AttentionBackend`."""
        heads, dim = pool[0].shape[1:]
        both = _both(factors, pool[0])
        strides = (stride for tensor in (*new, *pool) for stride in tensor.stride()[:2])
        kernels.store_rows[(len(slots),)](
            *new, *pool, *both, slots, *strides, torch.finfo(pool[0].dtype).max,
            DIM=dim, DIM_PAD=power_of_2(dim), HEADS=heads, HEADS_PAD=power_of_2(heads),
            SCALED=both[0] is not None, LIMITED=pool[0].dtype == FP8,
        )  # fmt: skip


class HopperBackend(TritonBackend):
    """As `TritonBackend`, with the Gluon kernel for wide items: for GPUs of compute capability 9.0."""

    name = "hopper"

    def unsupported(self, spec: AttentionSpec) -> list[str]:
        """See `AttentionBackend`."""
        reasons = super().unsupported(spec)
        if spec.device.type != "cuda" or capability(spec.device) != (9, 0):
            reasons.append(f"it is made for GPUs of compute capability 9.0, not for {spec.device}")
        return reasons

    def _attend(self, step: _Step, launch: Launch, dependent: bool) -> None:
        # Imported here because it needs a newer Triton than the rest.
        from treewise.attention import hopper

        plan, scoring = step.plan, step.scoring
        plain = plan.window is None and scoring.soft_cap is None and scoring.k_scale is None and scoring.v_scale is None
        masks = plan.method != "vanilla" and (plan.mask == "intervals" or not launch.masked)
        # Narrow items of methods that have only such are for the Triton kernel, whose rows are 16.
        wide = launch.packed > BOUNDS[0] or not plan.kernel_bounds
        if plain and masks and wide and hopper.suits(step.q, step.k, step.v, launch.packed):
            hopper.attend(
                step.q, step.k, step.v, step.out, step.lse, step.parts, step.part_lse, plan.tensors,
                launch.first, launch.num_items, launch.packed, launch.masked, step.work.ordered,
                scoring.scale * LOG2_E, step.overlap, dependent,
            )  # fmt: skip
        else:
            super()._attend(step, launch, dependent)


def prepare(plan: Plan) -> Work:
    """Work out the launches of a plan, once."""
    work = plan.prepared.get(TritonBackend.name)
    if work is None:
        row_bytes = _dim_pad(plan) * plan.dtype.itemsize
        # Few rows are merged by many programs at once, each a row's entries in one go; many rows fill the device.
        few = len(plan.reduce_rows) * plan.num_heads <= 12 * multiprocessors(plan.device)
        entries = min(32 if few else 8, max(2, power_of_2(int(np.diff(plan.reduce_indptr).max(initial=1)))))
        work = plan.prepared[TritonBackend.name] = Work(
            launches=_launches(plan, row_bytes),
            ordered=bool((np.diff(plan.row_order) == 1).all()),
            entries=entries,
            block=max(1, min(4, 16 // entries, 1024 // row_bytes, power_of_2(plan.num_heads))),
            warps=max(1, entries // 8),
        )
    return work


def _dim_pad(plan: Plan) -> int:
    return max(16, power_of_2(plan.head_dim))


def _both(factors: Factors, k: torch.Tensor) -> Factors:
    """Return both factors, or neither."""
    if (factors[0] is None) == (factors[1] is None):
        return factors
    ones = torch.ones(k.shape[1], device=k.device)
    return (ones, factors[1]) if factors[0] is None else (factors[0], ones)


def _launches(plan: Plan, row_bytes: int) -> tuple[Launch, ...]:
    """Split the items, which come sorted by width, into runs of one kernel each."""
    large = row_bytes > 256  # a step of 64 key tokens would not fit in shared memory three times
    tokens, stages = (32, 2) if large else (64, 3)
    if plan.method == "vanilla":
        return (Launch(0, 1, 64, True, tokens, stages, 8),)
    packed = (plan.items[:, ROW_HIGH] - plan.items[:, ROW_LOW]) * (plan.num_heads // plan.num_kv_heads)
    length = plan.items[:, KV_END] - plan.items[:, KV_START]
    free = plan.items[:, FREE_END] - plan.items[:, KV_START]
    starts = np.flatnonzero(np.diff(np.searchsorted(plan.kernel_bounds, packed), prepend=-1)).tolist()
    launches = []
    for first, end in pairwise([*starts, len(packed)]):
        width = max(16, power_of_2(int(packed[first:end].max())))
        masked = bool((free[first:end] < length[first:end]).any())
        warps = 8 if width > 64 or plan.head_dim > 128 else 4
        run = _run(plan, first, end) if width <= 32 else 1  # wider ones have better use for their registers
        launch = Launch(first, end - first, width, masked, tokens, stages, warps, run=run if run >= 16 else 1)
        at_once = launch.num_items * plan.num_kv_heads <= 3 * multiprocessors(plan.device)
        if not large and 16 < width <= 64 and length[first] <= SHORT and at_once:
            launch = launch._replace(tokens=32, registers=168)  # three programs a multiprocessor
        # A loop without masks pays where it is long.
        split = SPLIT[int(masked)]
        launches.append(launch._replace(split=split if free[first:end].max() >= launch.tokens * split else 0))
    wide, narrow = launches[0], launches[-1]
    if not large and wide.packed == 128 and narrow.packed == 16:
        work = [int(length[launch.first : launch.first + launch.num_items].sum()) for launch in (wide, narrow)]
        if 2 * work[1] > work[0]:  # registers for one wide and two narrow programs a multiprocessor
            launches[0] = wide._replace(registers=176, split=0)
            launches[-1] = narrow._replace(tokens=32, warps=2, registers=160, split=0)
    return tuple(launches)


def _run(plan: Plan, first: int, last: int) -> int:
    """Longest run, a power of two up to 64, in which the slots of some items are consecutive from their starts on."""
    start, end = plan.items[first:last, KV_START], plan.items[first:last, KV_END]
    breaks = np.flatnonzero(np.diff(plan.kv_slots) != 1) + 1
    if len(breaks) * 16 > len(plan.kv_slots):
        return 1
    low, high = np.searchsorted(breaks, start + 1), np.searchsorted(breaks, end)
    offset = breaks[ranges(low, high)] - np.repeat(start, high - low)
    return int((offset & -offset).min(initial=64))


def _unfused(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Matrix product, scale, mask, softmax, matrix product, each through memory."""
    order, slots = plan.tensors["row_order"], plan.tensors["kv_slots"]
    rows = q.index_select(0, order).view(plan.num_rows, plan.num_kv_heads, -1, plan.head_dim)
    rows = rows.transpose(0, 1).flatten(1, 2)  # [kv_heads, rows * group, dim]
    factors = ((k, scoring.k_scale), (v, scoring.v_scale))
    keys, values = (read(pool, slots, factor, q.dtype).transpose(0, 1) for pool, factor in factors)
    scores = scoring.cap(torch.bmm(rows, keys.transpose(1, 2)).mul_(scoring.scale))  # [kv_heads, rows, tokens]
    by_row = scores.view(plan.num_kv_heads, plan.num_rows, -1, scores.shape[-1])
    by_row.masked_fill_(~plan.tensors["mask_dense"][None, :, None], -torch.inf)
    lse = torch.logsumexp(by_row.float(), dim=-1) if return_lse else None
    # A row that sees nothing has only -inf: its softmax is NaN, and empty must be 0.
    merged = torch.bmm(torch.softmax(scores, dim=-1).nan_to_num_(0.0), values).view(
        plan.num_kv_heads, plan.num_rows, -1, plan.head_dim
    )
    out = torch.empty_like(q)
    out[order] = merged.transpose(0, 1).flatten(1, 2)
    if lse is None:
        return out, None
    by_query = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    by_query[order] = lse.transpose(0, 1).flatten(1, 2)
    return out, by_query
