"""Limits on a part of a program: tokens, time, and an end from outside."""

from __future__ import annotations

from collections.abc import Coroutine
from time import perf_counter
from typing import Any

from treewise.awaitables import Operation, Result, as_coroutine, name_of
from treewise.config import check_integer


class Cancelled(RuntimeError):
    """A part of a program was cancelled, see `Limit.cancel`: raised in whatever the part waits for."""


class BudgetExceeded(Cancelled):
    """A part of a program has used up its tokens or its time: raised in whatever the part waits for.

    Attributes
    ----------
    resource : {"tokens", "seconds"}
    limit : int or float
        What the part was given.
    used : int or float
        What it had used when that was noticed.
    """

    def __init__(self, resource: str, limit: float, used: float, part: str, place: object) -> None:
        super().__init__(f"{resource}: {part} has used {used:.6g} of its {limit:.6g} {resource}, while {place}")
        self.resource, self.limit, self.used = resource, limit, used


class Budget:
    """What a part of a program may use, and has used.

    Parameters
    ----------
    tokens : int, optional
        Tokens that operations of the part may decode; tokens that are appended, scored or computed again do not count.
    seconds : float, optional
        Time since the part began.

    Raises
    ------
    ValueError
        If `tokens` is no integer of at least 1, or `seconds` no positive number.
    """

    def __init__(self, tokens: int | None = None, seconds: float | None = None) -> None:
        if tokens is not None:
            check_integer("tokens", tokens, 1)
        if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
            raise ValueError(f"seconds must be a positive number, not {seconds!r}")
        self.tokens = tokens
        self.seconds = seconds
        self.tokens_used = 0
        self.began: float | None = None
        self.cancelled: str | None = None

    def begin(self) -> None:
        """Start the clock."""
        self.began = perf_counter()

    @property
    def seconds_used(self) -> float:
        """Seconds since the part began."""
        return 0.0 if self.began is None else perf_counter() - self.began

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the time is over, 0 where it is or the part was cancelled; None where time is no limit."""
        if self.cancelled is not None:
            return 0.0
        return None if self.seconds is None else max(0.0, self.seconds - self.seconds_used)

    def verdict(self, part: str, place: object) -> Cancelled | None:
        """Return what is to be raised in `part`, which is at `place`, where something has run out."""
        if self.cancelled is not None:
            return Cancelled(f"{part} was cancelled while {place}: {self.cancelled}")
        if self.tokens is not None and self.tokens_used >= self.tokens:
            return BudgetExceeded("tokens", self.tokens, self.tokens_used, part, place)
        if self.seconds is not None and (used := self.seconds_used) >= self.seconds:
            return BudgetExceeded("seconds", self.seconds, used, part, place)
        return None


class Limit(Operation[Result]):
    """Run a coroutine within a budget; see `limit`."""

    def __init__(self, coroutine: Coroutine[Any, Any, Result] | Operation[Result], budget: Budget) -> None:
        self.coroutine = as_coroutine(coroutine)
        self.budget = budget

    def __str__(self) -> str:
        return f"awaiting {name_of(self.coroutine)}"

    def cancel(self, reason: str = "by the program") -> None:
        """Raise `Cancelled` in whatever the part waits for, at the end of the step under way.

        Another part that runs beside it may call this. Nothing happens where the part has ended.
        """
        self.budget.cancelled = reason


def limit(
    coroutine: Coroutine[Any, Any, Result] | Operation[Result],
    *,
    tokens: int | None = None,
    seconds: float | None = None,
) -> Limit[Result]:
    """Run a coroutine or an operation of this program, but end it when it has used up `tokens` or `seconds`.

    At the end of the step in which that happens, `BudgetExceeded` is raised in every operation that the part waits for,
    and from then on in every further one that it asks for. A step is not cut short, so the part may decode a few tokens
    more, one a leaf; and a function under way in `call` runs to its end, though nobody waits for it. What was decoded
    stays on its branches. An operation that ends in that very step has its result.

    Parameters
    ----------
    coroutine : coroutine or awaitable operation
    tokens : int, optional
        Tokens that the part may decode, over all its branches.
    seconds : float, optional
        Time from when this is awaited, or gathered.

    Returns
    -------
    Limit
        To be awaited once, or gathered; its method ``cancel`` ends the part from outside.

    Raises
    ------
    ValueError
        If `tokens` is no integer of at least 1, `seconds` no positive number, or `coroutine` nothing that a program
        can await.
    """
    return Limit(coroutine, Budget(tokens, seconds))
