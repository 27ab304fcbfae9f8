"""Scorers of kvpress in policies of treewise."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from treewise.sparsity import Evidence

TRIAL = (1, 1, 64, 8)
"""Shape of the keys on which it is tried what a press needs."""


@dataclass(frozen=True)
class PressScorer:
    """The scores of a kvpress scorer that looks at keys and values only.

    Attributes
    ----------
    press : kvpress.ScorerPress
        Such as ``KnormPress()``, ``KeyDiffPress()``, ``LagKVPress()`` or ``CURPress()``. How many tokens are kept is
        the policy's choice; `compression_ratio` counts only where the press makes scores of it, as
        ``StreamingLLMPress`` does. What a press draws is not the same twice: give ``RandomPress`` a seed.

    Raises
    ------
    ValueError
        If the press needs the model's states or attention, or scores no keys.

    Examples
    --------
    >>> from kvpress import KnormPress                                             # doctest: +SKIP
    >>> KVSparsity(PressScorer(KnormPress()), budget=512)                          # doctest: +SKIP
    """

    press: Any

    num_queries: ClassVar[int | None] = 0

    def __post_init__(self) -> None:
        if not callable(getattr(self.press, "score", None)):
            raise ValueError(f"press must have a method score, as those of kvpress do, not {self.press!r}")
        generator = torch.Generator().manual_seed(0)
        keys, values = (torch.randn(TRIAL, generator=generator) for _ in range(2))
        try:
            self._score(0, keys, values)
        except (AttributeError, KeyError, TypeError) as error:
            name = type(self.press).__name__
            raise ValueError(f"press: {name} needs more than keys and values, which is all that there is") from error

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        keys, values = (x.float().transpose(0, 1)[None] for x in (evidence.keys, evidence.values))
        return self._score(evidence.layer, keys, values)[0].float()

    def _score(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        module = SimpleNamespace(layer_idx=layer, head_dim=keys.shape[-1])
        scores: Tensor = self.press.score(module, None, keys, values, None, {})
        return scores
