"""Walks over the paths of many branches at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from treewise.branch.handle import Branch

Inherited = TypeVar("Inherited")


def along_paths(
    branches: Iterable[Branch], first: Inherited, step: Callable[[Inherited, Branch], Inherited]
) -> dict[Branch, Inherited]:
    """Return what each of many branches makes of what its parent has; the root makes it of `first`.

    What they share of their paths is walked once.
    """
    known: dict[Branch, Inherited] = {}
    for branch in branches:
        above: list[Branch] = []
        here: Branch | None = branch
        while here is not None and here not in known:
            above.append(here)
            here = here.parent
        value = first if here is None else known[here]
        for each in reversed(above):
            value = known[each] = step(value, each)
    return known


def depth_first(branches: Iterable[Branch]) -> list[Branch]:
    """Return branches of one tree in the order of their paths."""
    wanted = set(branches)
    below: dict[Branch | None, list[Branch]] = {}
    known: set[Branch] = set()
    for branch in wanted:
        here: Branch | None = branch
        while here is not None and here not in known:
            known.add(here)
            below.setdefault(here.parent, []).append(here)
            here = here.parent
    order, stack = [], below.get(None, [])
    while stack:
        branch = stack.pop()
        if branch in wanted:
            order.append(branch)
        if (forks := below.get(branch)) is not None:
            if len(forks) > 1:
                forks.sort(key=_ordinal, reverse=True)
            stack += forks
    return order


def _ordinal(branch: Branch) -> int:
    return -1 if branch.ordinal is None else branch.ordinal
