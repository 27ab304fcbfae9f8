"""R-KV: what the last queries looked at and no other token says as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from treewise.config import check_number
from treewise.sparsity.evidence import Evidence
from treewise.sparsity.logits import LOGITS
from treewise.sparsity.scorers.snapkv import SnapKV


@dataclass(frozen=True)
class RKV:
    """Importance less redundancy.

    R-KV (Cai et al., 2025, arXiv 2505.24133)::

        I   = max-pooled mean of the last queries' attention, over all keys; the largest of the heads of a KV head
        s_ij = cos(k_i, k_j), but 0 for i = j, and for the last j with cos(k_i, k_j) > threshold
        R   = softmax_j(mean over i of s_ij)
        S   = share I - (1 - share) R

    The newest of similar tokens does not count as redundant. All pairs of keys are compared: the time is quadratic.

    Attributes
    ----------
    num_queries : int
        Size of the observation window.
    kernel_size : int
        Of the pooling, odd.
    share : float
        Of the importance, in [0, 1].
    threshold : float
        The cosine above which two keys are similar, in [0, 1].
    """

    by_head: ClassVar[bool] = True

    num_queries: int = 8
    kernel_size: int = 7
    share: float = 0.1
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_number("share", self.share, 0, 1)
        check_number("threshold", self.threshold, 0, 1)
        self._window()

    def _window(self) -> SnapKV:
        return SnapKV(self.num_queries, self.kernel_size, pooling="max", reduce="max")

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        importance = self._window().scores(evidence) / min(self.num_queries, len(evidence.queries))
        return self.share * importance - (1 - self.share) * self._redundancy(evidence.keys)

    def _redundancy(self, keys: Tensor) -> Tensor:
        """Return how much each key is like the others, float32 [kv_heads, tokens], of keys [tokens, kv_heads, dim]."""
        directions = F.normalize(keys.float(), dim=-1).transpose(0, 1)  # [kv_heads, tokens, head_dim]
        kv_heads, tokens, _ = directions.shape
        index = torch.arange(tokens, device=keys.device)
        sums = directions.new_zeros((kv_heads, tokens))
        for rows in index.split(max(1, LOGITS // (kv_heads * tokens))):
            cosines = directions[:, rows] @ directions.mT  # [kv_heads, rows, tokens]
            cosines[:, rows - rows[0], rows] = 0
            last = torch.where(cosines > self.threshold, index, -1).amax(-1, keepdim=True)
            cosines.masked_fill_(index == last, 0)
            sums += cosines.sum(1)
        return (sums / tokens).softmax(-1)
