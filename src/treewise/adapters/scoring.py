"""Scores given continuations of given contexts; what contexts have in common is computed and read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from treewise.awaitables import Observe
from treewise.branch import Branch
from treewise.llm import LLM

CONTEXTS = 256
"""The most contexts that are scored side by side."""


class Scored(NamedTuple):
    """How likely a continuation is.

    Attributes
    ----------
    logprob : float
        Summed over its tokens.
    greedy : bool
        Whether each of its tokens is the likeliest in its place.
    """

    logprob: float
    greedy: bool


def score_continuations(llm: LLM, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
    """Score continuations; those of one context are branches of one tree.

    Parameters
    ----------
    llm : LLM
    pairs : sequence of (context, continuation)
        Token ids. A context has at least one; an empty continuation is certain.

    Raises
    ------
    ValueError
        If a context is empty or a pair is longer than ``llm.max_model_len``.
    """
    wanted: dict[tuple[int, ...], list[int]] = {}
    for place, (context, continuation) in enumerate(pairs):
        if not context:
            raise ValueError(f"pairs[{place}]: the context is empty; begin it with a token such as the end of text")
        if len(context) + len(continuation) > llm.max_model_len:
            given = len(context) + len(continuation)
            raise ValueError(f"pairs[{place}]: {given} tokens are more than max_model_len={llm.max_model_len}")
        if continuation:
            wanted.setdefault(tuple(context), []).append(place)
    scored = [Scored(0.0, True)] * len(pairs)

    async def observe(root: Branch) -> None:
        places = wanted[tuple(root.path_tokens)]
        ends = [fork.append(pairs[place][1]) for fork, place in zip(root.fork(len(places)), places, strict=True)]
        observed = await Observe(ends, [end.start for end in ends])
        for place, end, positions in zip(places, ends, observed, strict=True):
            own = [position[token] for position, token in zip(positions, end.tokens, strict=True)]
            scored[place] = Scored(sum(logprob for logprob, _ in own), all(rank == 1 for _, rank in own))
            end.prune()

    contexts = sorted(wanted)  # neighbours begin alike
    for start in range(0, len(contexts), CONTEXTS):
        llm.run(observe, contexts[start : start + CONTEXTS])
    return scored
