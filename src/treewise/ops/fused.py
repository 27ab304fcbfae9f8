"""The ops as one Triton kernel each."""

from __future__ import annotations

import torch
from torch import Tensor

from treewise.attention.backend import FP8, power_of_2
from treewise.ops import kernels
from treewise.ops.plain import Heads
from treewise.plan.devices import overlap

COLUMNS = 1024
"""Columns of a program that takes a part of a row: eight a thread of its four warps."""


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: bool, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `treewise.ops.rms_norm`."""
    x = x.contiguous()
    rows, size = x.shape[-2:]
    parts = len(x) if x.dim() == 3 else 1
    normed = torch.empty((rows, size), dtype=weight.dtype if x.dim() == 3 else x.dtype, device=x.device)
    total = None if residual is None and x.dim() == 2 else torch.empty_like(normed)
    block = power_of_2(size)
    kernels.norm_rows[(rows,)](
        x, None if residual is None else residual.contiguous(), weight, normed, total, eps,
        SIZE=size, BLOCK=block, PARTS=parts, OFFSET=offset, num_warps=max(1, min(16, block // 256)),
        **overlap(x.device),
    )  # fmt: skip
    return normed, x if total is None else total


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """See `treewise.ops.gated_activation`."""
    gate_up = gate_up.contiguous()
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, size))
    kernels.gate_rows[(rows, -(-size // COLUMNS))](
        gate_up, out, SIZE=size, BLOCK=COLUMNS, GELU={"silu": False, "gelu_pytorch_tanh": True}[activation],
        num_warps=4, **overlap(gate_up.device),
    )  # fmt: skip
    return out


def rotate_and_store(
    heads: Heads,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """See `treewise.ops.rotate_and_store`."""
    stacked = heads.stacked.contiguous()
    rows, total, dim = stacked.shape
    num_kv_heads = k.shape[1]
    num_heads = total - 2 * num_kv_heads
    q = stacked.new_empty((rows, num_heads, dim)) if out is None else out
    half_pad = power_of_2(dim // 2)
    block = max(1, min(power_of_2(total), COLUMNS // half_pad))
    kernels.rotate_heads[(rows * -(-total // block),)](
        stacked, heads.cos, heads.sin, heads.q_norm, heads.k_norm, q, k, v, k_scale, v_scale, slots, heads.eps,
        torch.finfo(k.dtype).max, *k.stride()[:2], *v.stride()[:2],
        HEADS=num_heads, KV_HEADS=num_kv_heads, HALF=dim // 2, HALF_PAD=half_pad, BLOCK=block, OFFSET=heads.offset,
        LIMITED=k.dtype == FP8, num_warps=4, **overlap(stacked.device),
    )  # fmt: skip
    return q
