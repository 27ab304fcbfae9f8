"""Matrix products, and matrices laid out for them once and for all."""

from __future__ import annotations

from types import ModuleType
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from treewise.plan.devices import default_backend

ROWS = 16
"""Rows of the products that matrices are laid out for: from 4 rows on, the layout hardly differs."""


def pack(weight: Tensor) -> Tensor:
    """Lay a matrix out anew where `linear` is faster then: float32 or bfloat16 on a CPU, if PyTorch has oneDNN there.

    Else a product lays the matrix out each time, which takes up to three times as long as multiplying a few rows.

    Parameters
    ----------
    weight : Tensor [outputs, inputs]

    Returns
    -------
    Tensor
        Of the same shape and values, a copy; or `weight` itself. Few operations but `linear` know a packed one;
        ``to_dense`` gives the plain one back.
    """
    if weight.device.type != "cpu" or weight.is_mkldnn or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype != torch.float32 and not (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows ``x`` [rows, inputs] with the transpose of `weight` [outputs, inputs], as it is or from `pack`."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    kernels = of_few_rows(x, weight)
    if kernels is not None and kernels.is_whole(x, weight):
        return cast(Tensor, kernels.multiply(x, weight, bias))
    return F.linear(x, weight, bias)


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as `linear` does, but leave the last sum to who takes the product, such as `treewise.ops.rms_norm`.

    Returns
    -------
    Tensor
        The product [rows, outputs], or what it is the sum of, float32 [parts, rows, outputs]: where the outputs are
        too few for all of a GPU, it shares the inputs out.
    """
    kernels = of_few_rows(x, weight)
    return linear(x, weight, bias) if kernels is None else cast(Tensor, kernels.multiply(x, weight, bias))


def of_few_rows(x: Tensor, weight: Tensor, *, gated: bool = False) -> ModuleType | None:
    """Return the kernels that multiply few rows on a Hopper GPU, if they can multiply these."""
    if not x.is_cuda or default_backend(x.device) != "hopper":
        return None
    # Imported here because it needs a newer Triton than the rest.
    from treewise.ops import hopper

    return hopper if hopper.suits(x, weight, gated) else None
