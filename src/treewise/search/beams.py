"""Programs that leave the whole tree to a controller."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from treewise.awaitables import decode
from treewise.branch import Branch, keep, prune
from treewise.config import BeamSearchParams, check_integer
from treewise.controller import Replay
from treewise.grammar import Grammar
from treewise.replay import Schedule, load_recordings
from treewise.search.diverse import DiverseBeamSearch
from treewise.search.evaluators import mean_logprob

FAN = [[0, 0, [1, 2, 3]], [1, 4, []], [1, 4, [4, 5]], [1, 12, []], [5, 12, []], [5, 12, []]]
"""A small recording: three branches, one of which ends early and one of which branches again."""


async def beam_search(
    root: Branch,
    beam_width: int = 4,
    max_tokens: int | None = 64,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    stop: Sequence[str] = (),
    num_beam_groups: int = 1,
    diversity_penalty: float = 0.0,
    num_return_sequences: int | None = None,
    grammar: Grammar | None = None,
) -> list[Branch]:
    """Search the likeliest continuations with beams or diverse groups of beams, by the rules of Transformers.

    Parameters
    ----------
    root : Branch
    beam_width, max_tokens, length_penalty, early_stopping, stop
        As in `BeamSearchParams`.
    num_beam_groups, diversity_penalty, num_return_sequences, grammar
        As in `BeamSearchParams`; see `DiverseBeamSearch` for what the groups do.

    Returns
    -------
    list of Branch
        The best hypotheses, best first; their scores are the length-penalised log-probabilities, less the penalties
        for what earlier groups had chosen.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    """
    return await beams(
        root,
        BeamSearchParams(
            beam_width,
            max_tokens,
            length_penalty,
            early_stopping,
            stop=stop,
            num_beam_groups=num_beam_groups,
            diversity_penalty=diversity_penalty,
            num_return_sequences=num_return_sequences,
            grammar=grammar,
        ),
    )


async def beams(root: Branch, params: BeamSearchParams) -> list[Branch]:
    """Do what `beam_search` does, with all parameters there are."""
    starts = root.fork(params.num_beam_groups)
    controller = DiverseBeamSearch(params, [start.path for start in starts])
    leaves = await decode(starts, controller)
    # Paths tell the groups apart.
    paths = [leaf.path for leaf in leaves] if len(starts) > 1 else [starts[0].path] * len(leaves)
    given = root.num_tokens
    scores = controller.scores(
        paths,
        (leaf.token_ids for leaf in leaves),
        [leaf.logprob - root.logprob for leaf in leaves],
        [leaf.num_tokens - given for leaf in leaves],
    )
    best = controller.best(paths, scores)[: params.num_return_sequences]
    for leaf, score in zip(leaves, scores, strict=True):
        leaf.score = score
    prune(leaves[i] for i in sorted(set(range(len(leaves))).difference(best)))
    return [leaves[i] for i in best]


async def replay(
    root: Branch,
    recording: str | Path | Schedule | list[Any] = FAN,
    task: str | None = None,
    number: int = 0,
    max_tokens: int | None = None,
) -> list[Branch]:
    """Repeat the branching and pruning of a recorded tree, whatever the text: the same work for any prompt.

    A branch's i-th child starts with the i-th likeliest token; everything else is greedy.

    Parameters
    ----------
    root : Branch
    recording : path, Schedule, or list of [start, end, children]
        A file of recordings, or one recorded tree; see `treewise.replay`.
    task : str, optional
        Which task of the file; its first by default.
    number : int
        Which tree of the task.
    max_tokens : int, optional
        Ends a longer recording after so many steps.

    Returns
    -------
    list of Branch
        The last leaves, the likeliest a token first.

    Raises
    ------
    ValueError
        If the file or the list is no recording, or has no such task or tree.
    """
    leaves = await decode([root], Replay(_schedule(recording, task, number), max_tokens))
    return keep(leaves, [mean_logprob(leaf, root) for leaf in leaves], len(leaves))


def _schedule(recording: str | Path | Schedule | list[Any], task: str | None, number: int) -> Schedule:
    if isinstance(recording, Schedule):
        return recording
    if not isinstance(recording, str | Path):
        return Schedule.from_json(recording)
    tasks = load_recordings(recording).reasoning
    task = next(iter(tasks), "") if task is None else task
    if task not in tasks:
        raise ValueError(f"task: {task!r} is not one of {', '.join(tasks)}")
    check_integer("number", number, 0, len(tasks[task]) - 1)
    return tasks[task][number]
