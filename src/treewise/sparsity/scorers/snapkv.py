"""SnapKV: what the last queries looked at, and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from treewise.attention.scores import REDUCTIONS
from treewise.config import check_integer
from treewise.sparsity.evidence import Evidence

POOLINGS = ("avg", "max")


@dataclass(frozen=True)
class SnapKV:
    """What each token got of the attention of an observation window, smoothed over its neighbours.

    SnapKV (Li et al., 2024, arXiv 2404.14469), and the score of PyramidKV (Cai et al., 2024, arXiv 2406.02069)::

        S_i = sum over the last num_queries queries j of softmax_i(q_j k_i scale)    over all keys, the window's too
        score = pool(reduction of S over the query heads of a KV head)               stride 1, same length

    Attributes
    ----------
    num_queries : int
        Size of the observation window. Its own tokens are seen by a part of it only, so that the policy's `window`
        should be as large.
    kernel_size : int
        Of the pooling, odd; 1 for none. What is outside, and what is in the observation window, counts as 0.
    pooling : {"avg", "max"}
    reduce : {"mean", "max", "sum"}
        How the sums of the heads that share a KV head become one, before the pooling.
    """

    by_head: ClassVar[bool] = True

    num_queries: int = 32
    kernel_size: int = 5
    pooling: Literal["avg", "max"] = "avg"
    reduce: Literal["mean", "max", "sum"] = "mean"

    def __post_init__(self) -> None:
        check_integer("num_queries", self.num_queries, 1)
        check_integer("kernel_size", self.kernel_size, 1)
        if not self.kernel_size % 2:
            raise ValueError(f"kernel_size must be odd, not {self.kernel_size}")
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling is {self.pooling!r}; choose one of {', '.join(POOLINGS)}")
        if self.reduce not in REDUCTIONS:
            raise ValueError(f"reduce is {self.reduce!r}; choose one of {', '.join(REDUCTIONS)}")

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        sums = evidence.attention(self.num_queries, self.reduce)
        observed = max(0, sums.shape[1] - self.num_queries)
        return torch.cat([self._pooled(sums[:, :observed]), sums[:, observed:]], dim=1)

    def _pooled(self, sums: Tensor) -> Tensor:
        if self.kernel_size == 1 or not sums.shape[1]:
            return sums
        pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
        return pool(sums, self.kernel_size, stride=1, padding=self.kernel_size // 2)
