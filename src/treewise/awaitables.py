"""What a program can await: operations that the engine carries out."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Generic, TypeVar, cast

from treewise.branch import Branch
from treewise.config import SamplingParams
from treewise.controller import Controller, Sample
from treewise.sampler import Candidates

Result = TypeVar("Result")


class Operation(Generic[Result]):
    """Something a program awaits and the engine carries out."""

    def __await__(self) -> Generator[Operation[Result], Result, Result]:
        """Hand the operation to the engine and wait for its result."""
        return (yield self)

    def __str__(self) -> str:
        """Say what is under way, for messages."""
        return f"awaiting {type(self).__name__}"


class Decode(Operation[list[Branch]]):
    """Decode below `branches` as `controller` decides."""

    def __init__(self, branches: Iterable[Branch], controller: Controller) -> None:
        self.branches = _living(branches)
        self.controller = controller

    def __str__(self) -> str:
        return f"decoding {_places(self.branches)}"


class Observe(Operation[list[list[Candidates]]]):
    """Log-probabilities of tokens that stand on the paths of `branches` already.

    For each branch, one entry a position from ``starts[i]`` (at least 1) to its end: the token there and the `top`
    likeliest.
    """

    def __init__(self, branches: Iterable[Branch], starts: Sequence[int], top: int = 0) -> None:
        self.branches = _living(branches)
        self.starts = list(starts)
        if len(self.starts) != len(self.branches):
            raise ValueError(f"starts: {len(self.starts)} starts for {len(self.branches)} branches")
        if any(start < 1 for start in self.starts):
            raise ValueError("starts: the first token of a path has no log-probability; at least 1")
        self.top = top

    def __str__(self) -> str:
        return f"scoring {_places(self.branches)}"


class Call(Operation[Any]):
    """Run a function in a worker thread."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments

    def __str__(self) -> str:
        return f"calling {getattr(self.function, '__name__', self.function)!s}"


class Gather(Operation[list[Any]]):
    """Run coroutines side by side.

    Attributes
    ----------
    coroutines : list of coroutine
    begin : callable or None
        The engine's, while they run: starts one more.
    over : bool
        Whether the result, or an error, is there.
    """

    def __init__(self, coroutines: Iterable[Coroutine[Any, Any, Any] | Operation[Any]]) -> None:
        self.coroutines: list[Coroutine[Any, Any, Any]] = []
        self.begin: Callable[[Coroutine[Any, Any, Any]], None] | None = None
        self.over = False
        self._named: set[object] = set()
        for each in coroutines:
            self.add(each)

    def add(self, coroutine: Coroutine[Any, Any, Any] | Operation[Any]) -> None:
        """Run one more beside the others, which may be under way; its result comes behind theirs.

        Raises
        ------
        ValueError
            If it is among them already, is nothing that a program can await, or the others are over.
        """
        if self.over:
            raise ValueError("coroutines: those that this one would run beside are over")
        if coroutine in self._named:
            raise ValueError("coroutines: the same one is named twice")
        self._named.add(coroutine)
        self.coroutines.append(as_coroutine(coroutine))
        if self.begin is not None:
            self.begin(self.coroutines[-1])

    def __str__(self) -> str:
        return f"gathering {', '.join(dict.fromkeys(map(name_of, self.coroutines)))}"


def decode(branches: Iterable[Branch], controller: Controller) -> Decode:
    """Decode token by token below `branches` until `controller` stops or no leaf is left.

    Returns
    -------
    awaitable of list of Branch
        The leaves, finished or not, in depth-first order.
    """
    return Decode(branches, controller)


def generate(branches: Iterable[Branch], params: SamplingParams | None = None, *, in_step: bool = False) -> Decode:
    """Let each of `branches` go on by itself; the same as ``decode(branches, Sample(params, in_step))``.

    Parameters
    ----------
    branches : iterable of Branch
    params : SamplingParams, optional
    in_step : bool
        Let all go on by one token in each step, without guesses of what follows, see `LLM`'s ``speculate``.

    Raises
    ------
    ValueError
        If ``params.n`` is not 1: fork the branches instead.
    """
    params = SamplingParams() if params is None else params
    if params.n != 1:
        raise ValueError(f"n: {params.n} continuations of a branch are branch.fork({params.n})")
    return Decode(branches, Sample(params, in_step))


async def score(branches: Iterable[Branch], prompt: str | Sequence[int], choices: Sequence[str]) -> list[list[float]]:
    """Rate each branch by how likely each of `choices` is after the branch's path and `prompt`.

    Prompt and choices are tokenised on their own. They stand on scratch forks, so every prefix's keys are shared and
    nothing of it remains.

    Returns
    -------
    list of list of float
        Summed log-probability of each choice [branches][choices].

    Raises
    ------
    ValueError
        If a choice is empty text, or the choices are one text.
    """
    if isinstance(choices, str):
        raise ValueError(f"choices: give a list of texts, not the text {choices!r}")
    branches = _living(branches)
    asked: list[Branch] = []
    ends: list[Branch] = []
    try:
        for branch in branches:
            question = branch.scratch().append(prompt)
            asked.append(question)
            for choice in choices:
                end = question.scratch().append(choice)
                asked.append(end)
                ends.append(end)
                if not end.tokens:
                    raise ValueError(f"choices: {choice!r} has no tokens to score")
        observed = await Observe(ends, [end.start for end in ends])
    finally:
        for scratch in reversed(asked):
            if scratch.alive:
                scratch.release("scratch")
    sums = [
        sum(position[token][0] for position, token in zip(positions, end.tokens, strict=True))
        for positions, end in zip(observed, ends, strict=True)
    ]
    return [sums[i * len(choices) : (i + 1) * len(choices)] for i in range(len(branches))]


def call(function: Callable[..., Result], *arguments: Any) -> Operation[Result]:
    """Run a blocking function, such as a reward model, in a worker thread while other trees keep decoding."""
    return Call(function, arguments)


def gather(*coroutines: Coroutine[Any, Any, Any] | Operation[Any]) -> Gather:
    """Run coroutines or operations of this program side by side; their results in order.

    The first error ends the others and is raised here. What this returns has a method `add`, by which those that run
    can start more beside themselves.

    Raises
    ------
    ValueError
        If one is named twice, or is nothing that a program can await.
    """
    return Gather(coroutines)


def as_coroutine(awaitable: Coroutine[Any, Any, Result] | Operation[Result]) -> Coroutine[Any, Any, Result]:
    """Return a coroutine that gives what `awaitable` gives.

    Raises
    ------
    ValueError
        If it is neither a coroutine nor an operation.
    """
    if isinstance(awaitable, Coroutine):
        return awaitable
    if not isinstance(awaitable, Operation):
        raise ValueError(f"coroutines: {awaitable!r} is neither a coroutine nor an operation")
    named: Any = _awaiting(awaitable)
    named.__name__ = type(awaitable).__name__.lower()
    return cast(Coroutine[Any, Any, Result], named)


def name_of(coroutine: Coroutine[Any, Any, Any]) -> str:
    """Return the name of the function that has made `coroutine`."""
    return str(getattr(coroutine, "__name__", type(coroutine).__name__))


async def _awaiting(operation: Operation[Result]) -> Result:
    return await operation


def _places(branches: Sequence[Branch]) -> str:
    """Name branches by their paths, the first few of many."""
    paths = list(dict.fromkeys(str(branch.path) for branch in branches))
    shown = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    return f"branch{'es' if len(paths) > 1 else ''} {shown}"


def _living(branches: Iterable[Branch]) -> list[Branch]:
    branches = [branches] if isinstance(branches, Branch) else list(branches)
    for branch in branches:
        if not isinstance(branch, Branch):
            raise ValueError(f"branches: {branch!r} is not a Branch")
        branch.require_alive()
    if len(set(branches)) != len(branches):
        raise ValueError("branches: the same branch is named twice; fork it instead")
    return branches
