"""A request that a benchmark runs, the work of which is known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from treewise.attention import TreeSpec
from treewise.engine import Program
from treewise.replay import Schedule, Speculation, total_io
from treewise.speculate.drafter import Drafter


@dataclass(frozen=True)
class Case:
    """One request and what it is bound to do.

    Attributes
    ----------
    name : str
    program : Program
        What the engine runs.
    prompt_tokens, longest : int
        Tokens of the prompt, and of the longest path.
    widest : int
        The most rows of a decode step.
    decoded : int
        Tokens that are decoded in all.
    peak_tokens, peak_nodes : int
        The most tokens and nodes that have keys at a time.
    work : Schedule, Speculation or None
        The tree of every decode step, where it does not depend on the model.
    drafter : callable or None
        Makes what guesses how the paths go on.
    """

    name: str
    program: Program
    prompt_tokens: int
    longest: int
    widest: int
    decoded: int
    peak_tokens: int
    peak_nodes: int
    work: Schedule | Speculation | None = None
    drafter: Callable[[], Drafter] | None = None

    def num_slots(self, page_size: int) -> int:
        """Return slots enough, when each node starts on a page of its own and one page is scratch."""
        return self.peak_tokens + page_size * (self.peak_nodes + self.widest + 2)

    def trees(self) -> Iterator[TreeSpec]:
        """Yield the tree of each decode step.

        Raises
        ------
        ValueError
            If they depend on the model.
        """
        if self.work is None:
            raise ValueError(f"workload: the trees of {self.name} depend on the model")
        steps = self.work
        return iter(steps) if isinstance(steps, Speculation) else map(steps.at, range(1, steps.num_steps + 1))

    def kv_tokens(self) -> tuple[int, int] | None:
        """Return tokens whose keys all decode steps read: each once a step, and by each query; None if unknown."""
        if self.work is None:
            return None
        shape: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "dtype": torch.float32}
        once, each = (total_io(self.work, method, **shape).kv_once // 8 for method in ("deft:node", "radix"))
        return once, each
