"""What somebody knows to be important."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from treewise.sparsity.evidence import Evidence


@dataclass(frozen=True)
class Oracle:
    """Scores that are given: for tests, and for the most that a budget could keep.

    Attributes
    ----------
    importance : tuple of float
        The score of each position, in all heads of all layers; 0 for those behind.

    Examples
    --------
    >>> Oracle.of({1, 3})
    Oracle(importance=(0.0, 1.0, 0.0, 1.0))
    """

    importance: tuple[float, ...]

    num_queries: ClassVar[int | None] = 0
    by_head: ClassVar[bool] = True

    @classmethod
    def of(cls, positions: Iterable[int]) -> Self:
        """Return an oracle that prefers the tokens at some positions."""
        chosen = set(positions)
        return cls(tuple(float(position in chosen) for position in range(max(chosen, default=-1) + 1)))

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        positions = evidence.positions
        known = torch.tensor((*self.importance, 0.0), device=positions.device)
        return known[positions.clamp(max=len(self.importance))].expand(evidence.keys.shape[1], -1)
