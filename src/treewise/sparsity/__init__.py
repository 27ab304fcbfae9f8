"""Which keys and values a layer keeps: policies made of a scorer, an allocator, a trigger and an action."""

from __future__ import annotations

from treewise.sparsity.allocators import ALLOCATORS, Ada, Allocator, Calibrated, FirstFull, Pyramid, Table, Uniform
from treewise.sparsity.evidence import Evidence, Scorer
from treewise.sparsity.policy import KVSparsity
from treewise.sparsity.presets import PRESETS
from treewise.sparsity.scorers import SCORERS

__all__ = [
    "ALLOCATORS",
    "PRESETS",
    "SCORERS",
    "Ada",
    "Allocator",
    "Calibrated",
    "Evidence",
    "FirstFull",
    "KVSparsity",
    "Pyramid",
    "Scorer",
    "Table",
    "Uniform",
]
