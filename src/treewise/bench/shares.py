"""Tells how much of the time on a CPU goes into matrix products, and how much into attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any
from unittest.mock import patch

from treewise import layers, ops, runner
from treewise.models import decoder
from treewise.ops import products

PARTS = (
    ("products", layers, "linear"),
    ("products", ops, "linear"),
    ("products", products, "linear"),
    ("products", decoder, "linear"),
    ("attention", runner, "run_plan"),
)
"""What a part's time goes into: where the function is called from, and its name there."""


@contextmanager
def timed_parts(clock: Callable[[], float] = perf_counter) -> Iterator[dict[str, float]]:
    """Add up the seconds of products and of attention, read from a clock, until the block ends.

    On a CPU only, where a call ends when its work is done. Reading the clock takes some time itself, which is no
    part's.
    """
    spent = {part: 0.0 for part, _, _ in PARTS}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = clock()
            result = function(*arguments, **options)
            spent[part] += clock() - start
            return result

        return call

    with ExitStack() as patches:
        for part, module, name in PARTS:
            patches.enter_context(patch.object(module, name, timed(part, getattr(module, name))))
        yield spent
