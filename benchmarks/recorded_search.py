"""Records what a program asks of the engine, so that another engine can be asked for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

from treewise import LLM, Branch
from treewise.awaitables import Decode, Observe
from treewise.controller import Greedy, Sample


class Call(NamedTuple):
    """A text to continue: how many tokens, none to look at the likelihoods behind it, and how many sequences."""

    text: Sequence[int]
    tokens: int
    sequences: int = 1


class Operation(NamedTuple):
    """What a program asked for at once; beginnings and ends of operations are counted through."""

    start: int
    end: int
    calls: list[Call]


def recorded(llm: LLM, run: Callable[[], Any]) -> tuple[Any, float, list[Operation]]:
    """Run a program once; what came of it, the seconds it took, and what it asked for in the order of the beginnings.

    While it runs, no more is noted down than how long branches are where operations begin and end.
    """
    engine, moments = llm.engine, count()
    start, answer = engine._start, engine._answer_those_over
    under_way: dict[Any, tuple[int, Any, list[int]]] = {}  # by the task that waits
    over: list[tuple[int, int, Any, list[int], list[int]]] = []

    def started(task: Any, operation: Any) -> None:
        if isinstance(operation, Decode | Observe):
            if isinstance(operation, Decode) and not isinstance(operation.controller, Sample | Greedy):
                raise ValueError(f"controller: what {type(operation.controller).__name__} forks are no requests")
            under_way[task] = next(moments), operation, [branch.num_tokens for branch in operation.branches]
        start(task, operation)

    def answered(runs: Iterable[Any]) -> list[Any]:
        runs = list(runs)
        going_on = answer(runs)
        waiting = set(going_on)
        for run in [run for run in runs if run not in waiting]:
            began, operation, lengths = under_way.pop(run.task)
            over.append(
                (began, next(moments), operation, lengths, [branch.num_tokens for branch in operation.branches])
            )
        return going_on

    with patch.object(engine, "_start", started), patch.object(engine, "_answer_those_over", answered):
        begin = perf_counter()
        result = run()
        seconds = perf_counter() - begin
    operations = []
    for began, ended, operation, before, after in sorted(over, key=lambda one: one[0]):
        if isinstance(operation, Observe):
            calls = questions(operation.branches, operation.starts)
        else:
            calls = continuations(operation.branches, before, after)
        if calls:
            operations.append(Operation(began, ended, calls))
    return result, seconds, operations


def continuations(branches: Sequence[Branch], before: Sequence[int], after: Sequence[int]) -> list[Call]:
    """List a call for each branch that has grown from one length to another."""
    return [
        Call(tuple(branch.path_tokens[:length]), grown - length)
        for branch, length, grown in zip(branches, before, after, strict=True)
        if grown > length
    ]


def questions(branches: Sequence[Branch], starts: Sequence[int]) -> list[Call]:
    """List the calls that tell how likely the tokens of branches from `starts` on are.

    It is one for all answers of one token behind a text, else one for each answer.
    """
    texts: dict[tuple[int, ...], None] = {}
    for branch, first in zip(branches, starts, strict=True):
        path = branch.path_tokens
        texts[tuple(path[: first if len(path) == first + 1 else -1])] = None
    return [Call(text, 0) for text in texts]
