"""Matrix products, and matrices laid out for them once and for all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
"""Rows of the products that matrices are laid out for: from 4 rows on, the layout hardly differs."""


def pack(weight: Tensor) -> Tensor:
    """Lay a matrix out anew where `linear` is faster then: float32 on a CPU, if PyTorch has oneDNN there.

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
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return weight
    if weight.is_mkldnn:
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows ``x`` [rows, inputs] with the transpose of `weight` [outputs, inputs], as it is or from `pack`."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    if x.is_cuda:
        # Imported here because Triton is not there on every machine.
        from treewise.ops import fused

        if fused.multiplies(x, weight):
            return fused.linear(x, weight, bias)
    return F.linear(x, weight, bias)
