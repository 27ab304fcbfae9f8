"""PyramidInfer: what the last queries looked at, the very last ones above all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treewise.config import check_integer, check_number
from treewise.sparsity.evidence import Evidence


@dataclass(frozen=True)
class PyramidInfer:
    """What each token got of the last queries' attention, later ones having more weight, the same for all heads.

    PyramidInfer (Yang et al., 2024, arXiv 2405.12532): ``S_i = mean over all heads and the last queries j of w_j
    softmax_i(q_j k_i scale)``, where ``w_j`` goes from 1 to `last_weight` on a straight line. The paper's window is a
    fifth of the tokens, and evicted tokens leave the later layers' forward as well; here only keys and values go,
    behind the forward. Where heads are on several devices, these have to add up their scores.

    Attributes
    ----------
    num_queries : int
        Size of the window.
    last_weight : float
        Of the last query, against 1 of the window's first.
    """

    num_queries: int = 32
    last_weight: float = 1.2

    def __post_init__(self) -> None:
        check_integer("num_queries", self.num_queries, 1)
        check_number("last_weight", self.last_weight, 0, 1000, open_low=True)

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        count = min(self.num_queries, len(evidence.queries))
        weights = torch.linspace(1.0, self.last_weight, count, device=evidence.lse.device)
        # What is taken off the LSE of a query is a factor of its attention.
        lse = torch.cat([evidence.lse[: len(evidence.lse) - count], evidence.lse[-count:] - weights.log()[:, None]])
        sums = evidence._replace(lse=lse).attention(count)
        return sums.mean(0).div(count).expand_as(sums)
