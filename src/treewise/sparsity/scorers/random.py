"""Random tokens: what every other scorer has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from treewise.sparsity.evidence import Evidence
from treewise.sparsity.noise import uniform


@dataclass(frozen=True)
class Random:
    """A number in (0, 1) for each KV head and position, drawn from the evidence's seed and layer.

    A token has the same score whatever other tokens are there. So what is left after many evictions is a uniform sample
    of all tokens that ever were, if the evidence always has their own positions. Those of an engine that gives up keys
    of a path for the second time are stand-ins, for which numbers are drawn anew: later tokens are more likely to stay.
    """

    num_queries: ClassVar[int | None] = 0

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        heads = evidence.first_head + torch.arange(evidence.keys.shape[1], device=evidence.keys.device)
        return uniform(evidence.seed, evidence.layer, heads[:, None], evidence.positions)
