"""Induction: what the last queries looked at, and what follows it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treewise.config import check_integer
from treewise.sparsity.evidence import Evidence
from treewise.sparsity.scorers.keydiff import KeyDiff


@dataclass(frozen=True)
class Induction:
    """What each token, or one shortly before it, got of the attention of an observation window, by key and value.

    Who looks something up looks at where it begins, and copies what follows token by token (the induction heads of
    Olsson et al., 2022, arXiv 2209.11895). So the sums of SnapKV (Li et al., 2024, arXiv 2404.14469) are spread to the
    tokens *behind* those that were looked at. They count by their root, so that a token that everybody looks at does
    not crowd out what lies a little further on, and together with two things that are known without a query: how unlike
    the others the key is (KeyDiff: Park et al., 2025, arXiv 2504.15364), and how long the value::

        S_i   = sum over the last num_queries queries j of softmax_i(q_j k_i scale), mean over the heads of a KV head
        P_i   = mean of S over i - ahead ... i + behind
        score = sqrt(P_i) * (1 - cos(k_i, mean key direction)) * |v_i|

    Attributes
    ----------
    num_queries : int
        Size of the observation window, which should reach back to the middle of a question.
    ahead : int
        How many tokens behind one that was looked at are looked for with it: about as many as an answer has.
    behind : int
        How many tokens before it.
    """

    num_queries: int = 16
    ahead: int = 40
    behind: int = 3

    def __post_init__(self) -> None:
        check_integer("num_queries", self.num_queries, 1)
        check_integer("ahead", self.ahead, 0)
        check_integer("behind", self.behind, 0)

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        sums = evidence.attention(self.num_queries)
        observed = max(0, sums.shape[1] - self.num_queries)
        padded = F.pad(sums[:, :observed], (self.ahead, self.behind))
        near = F.avg_pool1d(padded, self.ahead + 1 + self.behind, stride=1) if observed else sums[:, :0]
        looked_at = torch.cat([near, sums[:, observed:]], dim=1)
        lengths: Tensor = torch.linalg.vector_norm(evidence.values.float(), dim=-1).T
        return looked_at.sqrt() * (1 + KeyDiff().scores(evidence)) * lengths
