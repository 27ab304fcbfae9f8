"""Programs that leave the whole tree to a controller."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from treewise.branch import Branch, decode, keep
from treewise.config import BeamSearchParams
from treewise.controller import BeamSearch, Replay, Span
from treewise.search.samples import mean_logprob

FAN = ((0, 0, (1, 2, 3)), (1, 4, ()), (1, 4, (4, 5)), (1, 12, ()), (5, 12, ()), (5, 12, ()))
"""A small recording: three branches, one of which ends early and one of which branches again."""


async def beam_search(
    root: Branch,
    beam_width: int = 4,
    max_tokens: int | None = 64,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    stop: Sequence[str] = (),
) -> list[Branch]:
    """Search the likeliest continuations with beams, by the rules of Transformers.

    Parameters
    ----------
    root : Branch
    beam_width, max_tokens, length_penalty, early_stopping, stop
        As in `BeamSearchParams`.

    Returns
    -------
    list of Branch
        The best hypotheses, best first; their scores are the length-penalised log-probabilities.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    """
    params = BeamSearchParams(beam_width, max_tokens, length_penalty, early_stopping, stop=stop)
    controller = BeamSearch(params)
    leaves = await decode(root.fork(), controller)
    scores = [controller.score(leaf.logprob - root.logprob, leaf.num_tokens - root.num_tokens) for leaf in leaves]
    return keep(leaves, scores, beam_width)


async def replay(
    root: Branch,
    recording: str | Path | Sequence[Sequence[Any]] = FAN,
    max_tokens: int | None = None,
) -> list[Branch]:
    """Repeat the branching and pruning of a recorded tree, whatever the text: the same work for any prompt.

    A branch's i-th child starts with the i-th likeliest token; everything else is greedy.

    Parameters
    ----------
    root : Branch
    recording : list of (start, end, children), or path
        The nodes as in `treewise.controller.Replay`, or a JSON file that holds them. Iterations count from the
        prompt's end, however long it is.
    max_tokens : int, optional
        Ends a longer recording after so many iterations.

    Returns
    -------
    list of Branch
        The last leaves, the likeliest a token first.

    Raises
    ------
    ValueError
        If the recording is no tree of spans.
    OSError
        If its file cannot be read.
    """
    if isinstance(recording, str | Path):
        recording = json.loads(Path(recording).read_text(encoding="utf-8"))
    leaves = await decode([root], Replay(_spans(recording), max_tokens))
    return keep(leaves, [mean_logprob(leaf, root) for leaf in leaves], len(leaves))


def _spans(recording: Any) -> list[Span]:
    """Check the form of a recording; `Replay` checks that its spans join."""
    if not isinstance(recording, Sequence) or not recording:
        raise ValueError("recording: not a list of (start, end, children)")
    spans = []
    for place, entry in enumerate(recording):
        match entry:
            case [int(start), int(end), [*children]] if all(
                isinstance(child, int) and place < child < len(recording) for child in children
            ):
                spans.append(Span(start, end, children))
            case _:
                raise ValueError(
                    f"recording[{place}]: {entry!r} is not (start, end, children), children being later places"
                )
    return spans
