"""Rotary embeddings: from a Transformers configuration's parameters to frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from treewise.config import RopeConfig

Parameters = Mapping[str, Any]


def make_rope(parameters: Parameters, head_dim: int, max_positions: int) -> RopeConfig:
    """Work out the frequencies of a rotary embedding in float32, in the order of operations of Transformers.

    Parameters
    ----------
    parameters : mapping
        Transformers' ``rope_parameters``: ``rope_theta``, ``rope_type`` (or ``type``) and what that type needs.
    head_dim : int
        Dimensions of a head, all of which are rotated.
    max_positions : int
        Stands in for ``original_max_position_embeddings`` where that is absent.

    Raises
    ------
    ValueError
        The type is unknown, a parameter is missing, or only a part of the head is rotated.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} is not supported; choose from {', '.join(sorted(ROPE_TYPES))}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor {parameters['partial_rotary_factor']} is not supported; only 1.0 is")
    try:
        base_powers = parameters["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        frequencies, scale = ROPE_TYPES[kind](
            base_powers, {"original_max_position_embeddings": max_positions, **parameters}
        )
    except KeyError as missing:
        raise ValueError(f"rope_type {kind!r} needs the parameter {missing}") from None
    return RopeConfig(tuple(frequencies.tolist()), scale)


def _default(base_powers: Tensor, parameters: Parameters) -> tuple[Tensor, float]:
    return 1.0 / base_powers, 1.0


def _linear(base_powers: Tensor, parameters: Parameters) -> tuple[Tensor, float]:
    return 1.0 / base_powers / parameters["factor"], 1.0


def _llama3(base_powers: Tensor, parameters: Parameters) -> tuple[Tensor, float]:
    """Slow rotations are slowed down further by ``factor``, fast ones kept, those between blended (Llama 3.1)."""
    frequencies = 1.0 / base_powers
    factor, low, high = (parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > context / low, frequencies / factor, frequencies)
    share = (context / wavelengths - low) / (high - low)
    blended = (1 - share) * slowed / factor + share * slowed
    between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(between, blended, slowed), 1.0


def _yarn(base_powers: Tensor, parameters: Parameters) -> tuple[Tensor, float]:
    """Interpolate slow rotations, keep fast ones, with a ramp over dimensions between (YaRN, arXiv 2309.00071)."""
    factor, base = parameters["factor"], parameters["rope_theta"]
    context = parameters["original_max_position_embeddings"]
    head_dim = 2 * len(base_powers)

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(parameters.get("beta_fast") or 32), dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = 1.0 / (factor * base_powers) * (1 - kept) + 1.0 / base_powers * kept

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = parameters.get("attention_factor")
    if scale is None:
        weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = magnitude(weight) / magnitude(weight_all) if weight and weight_all else magnitude(1.0)
    return frequencies, float(scale)


ROPE_TYPES: dict[str, Callable[[Tensor, Parameters], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
