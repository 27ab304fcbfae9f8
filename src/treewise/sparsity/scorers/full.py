"""The scorer of a policy that keeps everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from treewise.sparsity.evidence import Evidence


@dataclass(frozen=True)
class Full:
    """All tokens are worth the same; goes with the allocator ``full``, which keeps them all."""

    num_queries: ClassVar[int | None] = 0

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        tokens, kv_heads, _ = evidence.keys.shape
        return evidence.keys.new_zeros((kv_heads, tokens), dtype=evidence.lse.dtype)
