"""The Triton backend: one launch a class of work items, then a merge of partial results where rows have several."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import triton

from treewise.attention import kernels
from treewise.attention.backend import AttentionSpec
from treewise.plan import Plan
from treewise.plan.data import FREE_END, KV_END, ROW_HIGH, ROW_LOW

MASK_KINDS = {
    "intervals": kernels.INTERVALS,
    "words": kernels.WORDS,
    "bits": kernels.BITS,
    "dense": kernels.DENSE,
}


class _Launch(NamedTuple):
    """A run of items that one compiled kernel serves."""

    first: int
    num_items: int
    packed: int  # rows × group, padded
    masked: bool


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
        return reasons

    def run(
        self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `AttentionBackend`."""
        if plan.method == "medusa":
            return _unfused(plan, q, k, v, scale, return_lse)
        q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        parts, part_lse = out, lse
        if not plan.direct:
            parts = torch.empty((plan.num_entries, *q.shape[1:]), dtype=torch.float32, device=q.device)
            part_lse = torch.empty(parts.shape[:2], dtype=torch.float32, device=q.device)
        launches = plan.prepared.get(self.name)
        if launches is None:
            launches = plan.prepared[self.name] = _launches(plan)
        on = plan.tensors
        dim_pad = max(16, triton.next_power_of_2(plan.head_dim))
        kernel = kernels.attend_alone if plan.method == "vanilla" else kernels.attend_items
        for launch in launches:
            kernel[(launch.num_items, plan.num_kv_heads)](
                q, k, v, parts, part_lse, on["items"], on["row_order"], on["row_position"], on["kv_slots"],
                on["kv_low"], on["kv_high"], on["kv_position"],
                on["mask_dense"].view(torch.uint8) if plan.mask == "dense" else on["mask_words"],
                launch.first, len(plan.kv_slots), scale * kernels.LOG2_E.value, plan.window or 0,
                q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                KV_HEADS=plan.num_kv_heads, GROUP=plan.num_heads // plan.num_kv_heads,
                DIM=plan.head_dim, DIM_PAD=dim_pad, PACKED=launch.packed,
                TOKENS=64 if dim_pad * q.element_size() <= 256 else 32,
                MASK=MASK_KINDS[plan.mask] if launch.masked else kernels.NO_MASK,
                WINDOW=plan.window is not None, DIRECT=plan.direct,
                PRECISION="ieee" if q.dtype == torch.float32 else "tf32", STAGES=3 if dim_pad <= 128 else 2,
                num_warps=8 if launch.packed > 64 or dim_pad > 128 or plan.method == "vanilla" else 4,
            )  # fmt: skip
        if not plan.direct:
            kernels.reduce_entries[(plan.num_rows, plan.num_heads)](
                parts, part_lse, out, lse, on["row_order"], on["reduce_indptr"], on["reduce_entries"],
                HEADS=plan.num_heads, DIM=plan.head_dim, DIM_PAD=dim_pad, ENTRIES=4, num_warps=1,
            )  # fmt: skip
        return out, lse

    def store(
        self, k_new: torch.Tensor, v_new: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """See `AttentionBackend`."""
        heads, dim = k.shape[1:]
        kernels.store_rows[(len(slots),)](
            k_new, v_new, k, v, slots, *k_new.stride()[:2], *v_new.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            DIM=dim, DIM_PAD=triton.next_power_of_2(dim), HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads),
        )  # fmt: skip


def _launches(plan: Plan) -> list[_Launch]:
    """Split the items, which come sorted by class, into runs of the same class."""
    if plan.method == "vanilla":
        return [_Launch(0, 1, 64, masked=True)]
    group_size = plan.num_heads // plan.num_kv_heads
    packed = (plan.items[:, ROW_HIGH] - plan.items[:, ROW_LOW]) * group_size
    masked = plan.items[:, FREE_END] < plan.items[:, KV_END]
    kind = 2 * masked + (packed > 16)
    bounds = np.append(np.flatnonzero(np.diff(kind, prepend=-1)), len(kind)).tolist()
    return [
        _Launch(first, end - first, max(16, triton.next_power_of_2(int(packed[first:end].max()))), bool(masked[first]))
        for first, end in pairwise(bounds)
    ]


def _unfused(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Matrix product, scale, mask, softmax, matrix product, each through memory."""
    order, slots = plan.tensors["row_order"], plan.tensors["kv_slots"]
    rows = q.index_select(0, order).view(plan.num_rows, plan.num_kv_heads, -1, plan.head_dim)
    rows = rows.transpose(0, 1).flatten(1, 2)  # [kv_heads, rows * group, dim]
    keys, values = (pool.index_select(0, slots).transpose(0, 1) for pool in (k, v))  # [kv_heads, tokens, dim]
    scores = torch.bmm(rows, keys.transpose(1, 2)).mul_(scale)
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
