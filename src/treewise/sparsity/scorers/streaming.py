"""The newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from treewise.sparsity.evidence import Evidence


@dataclass(frozen=True)
class Streaming:
    """The later a token, the higher its score.

    With the sinks that the policy protects this is StreamingLLM (Xiao et al., 2023, arXiv 2309.17453), apart from its
    positions: tokens keep their own here.
    """

    num_queries: ClassVar[int | None] = 0
    by_head: ClassVar[bool] = True

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        tokens, kv_heads, _ = evidence.keys.shape
        return torch.arange(tokens, dtype=torch.float32, device=evidence.keys.device).expand(kv_heads, tokens)
