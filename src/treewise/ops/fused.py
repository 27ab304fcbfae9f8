"""The ops as one Triton kernel each."""

from __future__ import annotations

import torch
from torch import Tensor

from treewise.attention.backend import FP8, power_of_2
from treewise.ops import kernels
from treewise.ops.plain import Heads
from treewise.plan.devices import capability, multiprocessors, overlap

COLUMNS = 1024
"""Columns of a program that takes a part of a row: eight a thread of its four warps."""
OUTPUTS, STAGES, AHEAD = 8, 4, 512
"""Of a program that multiplies a single row: rows of the matrix; steps under way at once; columns fetched ahead."""
RESIDENT = 4
"""Such programs that a multiprocessor has room for at once: their steps take 55 KB each."""


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` is faster than PyTorch's: a single row of 16 bits, on a GPU whose kernels start early."""
    alike = x.dtype == weight.dtype and x.element_size() == 2 and x.is_contiguous() and weight.is_contiguous()
    return alike and len(x) == 1 and capability(x.device) >= (9, 0) and x.shape[1] >= AHEAD


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `treewise.ops.linear`; for a single row."""
    outputs, inputs = weight.shape
    out = x.new_empty((1, outputs))
    resident = RESIDENT * multiprocessors(x.device)
    kernels.multiply_row[(-(-outputs // OUTPUTS),)](
        x, weight, bias, out, outputs, resident,
        INPUTS=inputs, OUTPUTS=OUTPUTS, COLUMNS=COLUMNS, STAGES=STAGES, AHEAD=AHEAD, num_warps=4, **overlap(x.device),
    )  # fmt: skip
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: bool, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `treewise.ops.rms_norm`."""
    x = x.contiguous()
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = power_of_2(x.shape[1])
    kernels.norm_rows[(len(x),)](
        x, None if residual is None else residual.contiguous(), weight, normed, total, eps,
        SIZE=x.shape[1], BLOCK=block, OFFSET=offset, num_warps=max(1, min(16, block // 256)), **overlap(x.device),
    )  # fmt: skip
    return normed, total


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
    heads: Heads, k: Tensor, v: Tensor, slots: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> Tensor:
    """See `treewise.ops.rotate_and_store`."""
    stacked = heads.stacked.contiguous()
    rows, total, dim = stacked.shape
    num_kv_heads = k.shape[1]
    num_heads = total - 2 * num_kv_heads
    q = stacked.new_empty((rows, num_heads, dim))
    half_pad = power_of_2(dim // 2)
    block = max(1, min(power_of_2(total), COLUMNS // half_pad))
    kernels.rotate_heads[(rows * -(-total // block),)](
        stacked, heads.cos, heads.sin, heads.q_norm, heads.k_norm, q, k, v, k_scale, v_scale, slots, heads.eps,
        torch.finfo(k.dtype).max, *k.stride()[:2], *v.stride()[:2],
        HEADS=num_heads, KV_HEADS=num_kv_heads, HALF=dim // 2, HALF_PAD=half_pad, BLOCK=block, OFFSET=heads.offset,
        LIMITED=k.dtype == FP8, num_warps=4, **overlap(stacked.device),
    )  # fmt: skip
    return q
