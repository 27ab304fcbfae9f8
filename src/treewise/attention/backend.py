"""What a backend of attention is, and what it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from treewise.plan import Plan

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""
Factors = tuple[torch.Tensor | None, torch.Tensor | None]
"""Of keys and of values, float32 [kv_heads]."""
FP8 = torch.float8_e4m3fn
"""The 8-bit element type that keys and values may have."""


@dataclass(frozen=True)
class AttentionSpec:
    """The layer shape, element type and device that a backend is asked to serve, and the method."""

    method: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    window: int | None = None

    @classmethod
    def of(cls, plan: Plan) -> AttentionSpec:
        """Tell what a plan needs."""
        return cls(
            plan.method, plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.dtype, plan.kv_dtype, plan.device,
            plan.window,
        )  # fmt: skip


@dataclass(frozen=True)
class Scoring:
    """What is done to scores and values besides the softmax.

    Attributes
    ----------
    scale : float
        Factor of the scores.
    soft_cap : float or None
        Scores become ``soft_cap * tanh(scores / soft_cap)``.
    k_scale, v_scale : Tensor [kv_heads], float32, or None
        Factors of the stored keys and values.
    """

    scale: float
    soft_cap: float | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def cap(self, scores: torch.Tensor) -> torch.Tensor:
        """Cap scaled scores."""
        return scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)


def read(
    pool: torch.Tensor, slots: slice | torch.Tensor, factor: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Read slots of a pool as [slots, kv_heads, dim] of a wider type, times the factor of each KV head."""
    if isinstance(slots, slice):
        tokens = pool[slots]
    elif pool.dtype == FP8:  # not every operation knows the type
        tokens = pool.view(torch.uint8).index_select(0, slots).view(FP8)
    else:
        tokens = pool.index_select(0, slots)
    wide = tokens.to(dtype)
    return wide if factor is None else wide * factor.to(dtype)[:, None]


def quantise(rows: torch.Tensor, pool: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Turn new rows [rows, kv_heads, dim] into the pool's type; what is too large for 8 bits becomes the largest."""
    if factor is not None:
        rows = rows.float() / factor[:, None]
    if pool.dtype == FP8:
        rows = rows.float().clamp(-torch.finfo(FP8).max, torch.finfo(FP8).max)
    return rows.to(pool.dtype)


def power_of_2(number: int) -> int:
    """Return the least power of two that is not below `number`; Triton's own function costs the host microseconds."""
    return 1 << (number - 1).bit_length()


class AttentionBackend(Protocol):
    """One way to run plans. A backend has no state of its own; what it prepares for a plan it keeps in the plan."""

    name: str

    def unsupported(self, spec: AttentionSpec) -> list[str]:
        """Reasons why this backend cannot serve the spec; empty when it can."""

    def run(
        self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; see `treewise.attention.run_plan`. Returns the output and the LSE, None unless asked for or free."""

    def store(self, new: Pair, pool: Pair, slots: torch.Tensor, factors: Factors = (None, None)) -> None:
        """Write new rows into the pool; see `treewise.attention.store_kv`."""
