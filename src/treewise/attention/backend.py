"""What a backend of attention is, and what it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from treewise.plan import Plan


@dataclass(frozen=True)
class AttentionSpec:
    """The layer shape, element type and device that a backend is asked to serve, and the method."""

    method: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None

    @classmethod
    def of(cls, plan: Plan) -> AttentionSpec:
        """Tell what a plan needs."""
        return cls(plan.method, plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.dtype, plan.device, plan.window)


class AttentionBackend(Protocol):
    """One way to run plans. A backend has no state of its own; what it prepares for a plan it keeps in the plan."""

    name: str

    def unsupported(self, spec: AttentionSpec) -> list[str]:
        """Reasons why this backend cannot serve the spec; empty when it can."""

    def run(
        self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; see `treewise.attention.run_plan`. Returns the output and the LSE, None unless asked for or free."""

    def store(
        self, k_new: torch.Tensor, v_new: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write new rows into the pool; see `treewise.attention.store_kv`."""
