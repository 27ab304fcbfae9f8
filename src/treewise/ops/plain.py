"""The ops in plain torch, in the order of operations of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from treewise.attention.cpu import CPUBackend

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activations of gated MLPs by Transformers' names."""


class Heads(NamedTuple):
    """A layer's stacked queries, keys and values, and what is done to each head of them before attention.

    Attributes
    ----------
    stacked : Tensor [rows, heads + 2 * kv_heads, head_dim]
        Queries, then keys, then values.
    cos, sin : Tensor [rows, head_dim / 2]
        Of the angles by which the pairs ``(i, i + head_dim / 2)`` of queries and keys are turned.
    q_norm, k_norm : Tensor [head_dim] or None
        Weights of the norm of each query and key before it is turned; both or neither.
    eps, offset
        Of that norm, as in `treewise.ops.rms_norm`.
    """

    stacked: Tensor
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    offset: bool = False


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: bool, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `treewise.ops.rms_norm`."""
    if residual is not None:
        x = residual + x
    wide = x.float()
    wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)  # PyTorch's rms_norm is more calls on a CPU
    return (wide * (1.0 + weight.float())).to(x.dtype) if offset else weight * wide.to(x.dtype), x


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """See `treewise.ops.gated_activation`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)


def rotate(heads: Heads, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim], ready to attend."""
    num_turned = heads.stacked.shape[1] - num_kv_heads
    counts = (num_turned - num_kv_heads, num_kv_heads)
    turned, v = heads.stacked[:, :num_turned], heads.stacked[:, num_turned:]
    if heads.q_norm is not None and heads.k_norm is not None:
        norms = zip(turned.split(counts, dim=1), (heads.q_norm, heads.k_norm), strict=True)
        turned = torch.cat([rms_norm(x, weight, heads.eps, heads.offset)[0] for x, weight in norms], dim=1)
    first, second = turned.chunk(2, dim=-1)
    cos, sin = heads.cos[:, None], heads.sin[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned[:, : counts[0]], turned[:, counts[0] :], v


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
    q, k_new, v_new = rotate(heads, k.shape[1])
    CPUBackend().store((k_new, v_new), (k, v), slots.long(), (k_scale, v_scale))
    return q if out is None else out.copy_(q)
