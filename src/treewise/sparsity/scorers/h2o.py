"""H2O: what all queries looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from treewise.sparsity.evidence import Evidence


@dataclass(frozen=True)
class H2O:
    """What each token got of the attention of all queries, as heavy hitters are found by.

    H2O (Zhang et al., 2023, arXiv 2306.14048): ``S_i = sum over all queries j of softmax_i(q_j k_i scale)``, and the
    mean of the heads that share a KV head. Early tokens are seen by more queries, which the sum does not make up for.
    The method's own window is half of the budget.
    """

    num_queries: ClassVar[int | None] = None
    by_head: ClassVar[bool] = True

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        return evidence.attention()
