"""What the attention benchmark times: anything that can be prepared for a tree and run again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from treewise.attention import TreeSpec


@dataclass(frozen=True)
class Job:
    """Attention over one tree, ready to run.

    Attributes
    ----------
    run : callable
        Returns the outputs, [queries, heads, head_dim]; does the same work in each call, on fixed memory.
    plan : callable or None
        What has to be done anew whenever the tree changes, or None for nothing.
    rows : Tensor [queries] or None
        The query of each row that ``run`` returns, if not the caller's order.
    facts : dict
        What else is worth a column.
    """

    run: Callable[[], torch.Tensor]
    plan: Callable[[], object] | None = None
    rows: torch.Tensor | None = None
    facts: dict[str, object] = field(default_factory=dict)


class Contender(Protocol):
    """Something that computes attention over a tree."""

    @property
    def name(self) -> str:
        """What it is called in results."""

    def missing(self, device: torch.device) -> str | None:
        """Say why it cannot run on a device, or None if it can."""

    def prepare(self, tree: TreeSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Job:
        """Make ready for one tree, token ``t`` in slot ``t``; raises ValueError if it does not serve such trees."""
