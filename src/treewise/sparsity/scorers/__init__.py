"""Scorers: which tokens of a layer are worth keeping."""

from __future__ import annotations

from collections.abc import Callable

from treewise.sparsity.evidence import Scorer
from treewise.sparsity.scorers.expected_attention import ExpectedAttention
from treewise.sparsity.scorers.full import Full
from treewise.sparsity.scorers.h2o import H2O
from treewise.sparsity.scorers.induction import Induction
from treewise.sparsity.scorers.keydiff import KeyDiff
from treewise.sparsity.scorers.keyformer import Keyformer
from treewise.sparsity.scorers.knorm import KNorm
from treewise.sparsity.scorers.kvzip import KVzip
from treewise.sparsity.scorers.oracle import Oracle
from treewise.sparsity.scorers.pyramidinfer import PyramidInfer
from treewise.sparsity.scorers.random import Random
from treewise.sparsity.scorers.rkv import RKV
from treewise.sparsity.scorers.snapkv import SnapKV
from treewise.sparsity.scorers.streaming import Streaming
from treewise.sparsity.scorers.tova import TOVA

__all__ = [
    "H2O",
    "RKV",
    "SCORERS",
    "TOVA",
    "ExpectedAttention",
    "Full",
    "Induction",
    "KNorm",
    "KVzip",
    "KeyDiff",
    "Keyformer",
    "Oracle",
    "PyramidInfer",
    "Random",
    "SnapKV",
    "Streaming",
]

SCORERS: dict[str, Callable[[int], Scorer]] = {
    "full": lambda window: Full(),
    "random": lambda window: Random(),
    "streaming": lambda window: Streaming(),
    "snapkv": lambda window: SnapKV(num_queries=max(1, window)),
    "induction": lambda window: Induction(num_queries=max(1, window)),
    "h2o": lambda window: H2O(),
    "tova": lambda window: TOVA(),
    "keydiff": lambda window: KeyDiff(),
    "knorm": lambda window: KNorm(),
    "expected_attention": lambda window: ExpectedAttention(),
    "keyformer": lambda window: Keyformer(),
    "pyramidinfer": lambda window: PyramidInfer(num_queries=max(1, window)),
    "rkv": lambda window: RKV(num_queries=max(1, window)),
    "kvzip": lambda window: KVzip(),
}
"""Those that can be chosen by name, given the policy's window: an observation window is as large."""
