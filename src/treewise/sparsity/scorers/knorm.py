"""Short keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from treewise.sparsity.evidence import Evidence


@dataclass(frozen=True)
class KNorm:
    """The shorter a key, the higher its score.

    Devoto et al., 2024, arXiv 2406.11430: ``S_i = -|k_i|``.
    """

    num_queries: ClassVar[int | None] = 0
    by_head: ClassVar[bool] = True

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        norms: Tensor = torch.linalg.vector_norm(evidence.keys.float(), dim=-1)
        return -norms.T
