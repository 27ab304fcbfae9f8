"""KeyDiff: keys unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from treewise.sparsity.evidence import Evidence


@dataclass(frozen=True)
class KeyDiff:
    """How little a key points in the mean direction of the keys of its head.

    KeyDiff (Park et al., 2025, arXiv 2504.15364): ``S_i = -cos(k_i, mean over i of k_i / |k_i|)``. Needs no queries, so
    that it does not depend on what is asked.
    """

    num_queries: ClassVar[int | None] = 0
    by_head: ClassVar[bool] = True

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        directions = F.normalize(evidence.keys.float(), dim=-1)  # [tokens, kv_heads, head_dim]
        return -(directions * F.normalize(directions.mean(0), dim=-1)).sum(-1).T
