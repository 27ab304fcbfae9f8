"""Which tokens stay, given their scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def protect(scores: Tensor, window: int, sinks: int) -> Tensor:
    """Return the scores [kv_heads, tokens] with those of the first `sinks` and the last `window` tokens infinite."""
    tokens = scores.shape[1]
    scores = scores + 0.0  # NOTE: a copy, and without negative zeros, which a sort on a GPU may tell from zeros
    scores[:, :sinks] = torch.inf
    scores[:, max(0, tokens - window) :] = torch.inf
    return scores


def ranked(scores: Tensor) -> Tensor:
    """Return the tokens of each row of scores, the highest first; of equal ones the lower position first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def top(scores: Tensor, budget: int) -> Tensor:
    """Return the `budget` best tokens of each row of scores [rows, tokens], int64 [rows, budget], ascending."""
    return ranked(scores)[:, :budget].sort(dim=-1).values


def top_of_each(scores: Sequence[Tensor], budgets: Sequence[int]) -> list[Tensor]:
    """Return the best tokens of each row of scores, as many as the row's budget, int64, ascending."""
    return [ranked(row)[:budget].sort().values for row, budget in zip(scores, budgets, strict=True)]
