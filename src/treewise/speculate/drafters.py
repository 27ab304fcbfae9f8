"""Drafters by name."""

from __future__ import annotations

from collections.abc import Callable

from treewise.runner import Runner
from treewise.speculate.drafter import Drafter
from treewise.speculate.ngram import NgramDrafter


def _ngram(what: str, runner: Runner) -> Drafter:
    if what not in ("", "shared"):
        raise ValueError(f"speculate: 'ngram' looks in the request's tree, 'ngram:shared' in all, and none in {what!r}")
    return NgramDrafter(shared=what == "shared")


DRAFTERS: dict[str, tuple[str, Callable[[str, Runner], Drafter]]] = {
    "ngram": ("ngram", _ngram),
}
"""How each kind is written, and what makes one for the model of a runner of what stands behind the kind's colon."""


def make_drafter(name: str, runner: Runner) -> Drafter:
    """Return the drafter of a name such as ``ngram`` or ``draft:smollm2-135m``.

    Raises
    ------
    ValueError
        If there is no such drafter, or it does not fit the model.
    """
    kind, _, what = name.partition(":")
    if kind not in DRAFTERS:
        raise ValueError(f"speculate: {name!r} is not one of {', '.join(usage for usage, _ in DRAFTERS.values())}")
    return DRAFTERS[kind][1](what, runner)
