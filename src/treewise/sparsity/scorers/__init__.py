"""Scorers: which tokens of a layer are worth keeping."""

from __future__ import annotations

from collections.abc import Callable

from treewise.sparsity.evidence import Scorer
from treewise.sparsity.scorers.full import Full
from treewise.sparsity.scorers.snapkv import SnapKV

__all__ = ["SCORERS", "Full", "SnapKV"]

SCORERS: dict[str, Callable[[int], Scorer]] = {
    "full": lambda window: Full(),
    "snapkv": lambda window: SnapKV(num_queries=max(1, window)),
}
"""Those that can be chosen by name, given the policy's window; one that observes as many queries fits it best."""
