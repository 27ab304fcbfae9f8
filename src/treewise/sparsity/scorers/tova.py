"""TOVA: what the last query looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from treewise.sparsity.evidence import Evidence


@dataclass(frozen=True)
class TOVA:
    """What each token got of the last query's attention, the same for all heads of the layer.

    TOVA (Oren et al., 2024, arXiv 2401.06104): ``S_i = mean over all heads of softmax_i(q k_i scale)`` of the last
    query. Where heads are on several devices, these have to add up their scores.
    """

    num_queries: ClassVar[int | None] = 1

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        sums = evidence.attention(1)
        return sums.mean(0).expand_as(sums)
