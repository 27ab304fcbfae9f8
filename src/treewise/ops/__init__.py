"""Matrix products, and the element-wise work between them, each op one pass over memory: norms, activations, rotation.

Each element-wise op runs as a Triton kernel on a GPU, and on a CPU under ``TRITON_INTERPRET=1``; elsewhere as plain
torch. The two compute in float32 and round to the tensors' type at the same places, which are those of Transformers.

>>> import torch
>>> x, residual = torch.randn(3, 8), torch.randn(3, 8)
>>> normed, residual = rms_norm(x, torch.ones(8), 1e-6, residual=residual)
>>> gated_activation(torch.cat([normed, residual], dim=-1), "silu").shape
torch.Size([3, 8])
"""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor

from treewise.ops import plain
from treewise.ops.plain import ACTIVATIONS, Heads, rotate
from treewise.ops.products import linear, linear_parts, of_few_rows, pack

__all__ = [
    "ACTIVATIONS",
    "Heads",
    "gated_activation",
    "gated_linear",
    "linear",
    "linear_parts",
    "pack",
    "rms_norm",
    "rotate",
    "rotate_and_store",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on a CPU too. Read once, as by Triton: it would take longer than the choice that hangs on it."""


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: bool = False, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream, and normalise the sum by its root mean square.

    Parameters
    ----------
    x : Tensor [rows, size], or [parts, rows, size]
        Itself or, from `linear_parts`, what it is the sum of.
    weight : Tensor [size]
    eps : float
        Added to the mean square.
    offset : bool
        Gemma's form: multiply by ``1 + weight``, and round to the type of ``x`` only after that.
    residual : Tensor [rows, size], optional
        Default none: the stream begins with ``x``.

    Returns
    -------
    normed : Tensor [rows, size]
    residual : Tensor [rows, size]
        The sum.
    """
    results: tuple[Tensor, Tensor] = _implementation(x).rms_norm(x, weight, eps, offset, residual)
    return results


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return the `gated_activation` of the product of rows ``x`` [rows, inputs] with a stacked matrix, see `linear`."""
    if (kernels := of_few_rows(x, weight, gated=True)) is not None:
        gated: Tensor = kernels.multiply(x, weight, bias, activation)
        return gated
    return gated_activation(linear(x, weight, bias), activation)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) * up`` [rows, size] of a stacked product [rows, 2 * size].

    Parameters
    ----------
    gate_up : Tensor [rows, 2 * size]
        Gates first.
    activation : str
        A name in `ACTIVATIONS`.
    """
    gated: Tensor = _implementation(gate_up).gated_activation(gate_up, activation)
    return gated


def rotate_and_store(
    heads: Heads,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate a layer's queries and keys, and write its keys and values into the pool.

    Parameters
    ----------
    heads : Heads
        The layer's stacked queries, keys and values.
    k, v : Tensor [slots, kv_heads, head_dim]
        The pool, written in place.
    slots : Tensor [rows], int32 or int64
        Where each row goes. A slot that repeats, such as the scratch slot, ends with one of its rows.
    k_scale, v_scale : Tensor [kv_heads], float32, optional
        As for `treewise.attention.store_kv`.
    out : Tensor [rows, heads, head_dim], optional
        Where the queries go: contiguous, and of their type. By default into new memory.

    Returns
    -------
    Tensor [rows, heads, head_dim]
        The queries.

    Raises
    ------
    ValueError
        If shapes do not fit, or slots are not integers of 32 or 64 bits.
    """
    rows, stacked, head_dim = heads.stacked.shape
    if k.shape != v.shape or k.shape[2] != head_dim or stacked <= 2 * k.shape[1]:
        raise ValueError(
            f"k and v must be [slots, kv_heads, head_dim] for stacked [rows, heads + 2 * kv_heads, head_dim] = "
            f"{[rows, stacked, head_dim]}; k is {list(k.shape)}, v {list(v.shape)}"
        )
    if slots.dtype not in (torch.int32, torch.int64) or len(slots) != rows:
        raise ValueError(f"slots must be int32 or int64 [rows] = [{rows}]; they are {slots.dtype} {list(slots.shape)}")
    shape = (rows, stacked - 2 * k.shape[1], head_dim)
    if out is not None and (out.shape != shape or out.dtype != heads.stacked.dtype or not out.is_contiguous()):
        raise ValueError(
            f"out must be contiguous {heads.stacked.dtype} {list(shape)}; it is {out.dtype} {list(out.shape)}"
        )
    q: Tensor = _implementation(heads.stacked).rotate_and_store(heads, k, v, slots, k_scale, v_scale, out)
    return q


def _implementation(x: Tensor) -> ModuleType:
    if x.is_cuda or INTERPRETED:
        # Imported here because Triton is not there on every machine, and reads TRITON_INTERPRET when imported.
        from treewise.ops import fused

        return fused
    return plain
