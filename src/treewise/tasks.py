"""Coroutines of programs, on whose behalf operations run, and what their budgets say."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from treewise.awaitables import Operation, name_of
from treewise.branch import BranchTree
from treewise.budgets import Budget, Cancelled


class Task:
    """A coroutine of a program and what to do with its result.

    Parameters
    ----------
    tree : BranchTree
    coroutine : coroutine
    done : callable
        Called once with ``(result, None)`` or ``(None, error)``.
    parent : Task, optional
        The task that gathers this one.
    budget : Budget, optional
        What this task and those that it gathers may use; its clock starts now.
    """

    def __init__(
        self,
        tree: BranchTree,
        coroutine: Coroutine[Any, Any, Any],
        done: Callable[[Any, BaseException | None], None],
        parent: Task | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.tree = tree
        self.coroutine = coroutine
        self.done = done
        self.parent = parent
        # Those that this task draws on, the innermost first, each with the task that has it.
        self.budgets: list[tuple[Task, Budget]] = [] if budget is None else [(self, budget)]
        self.budgets += [] if parent is None else parent.budgets
        self.operation: Operation[Any] | None = None  # the last that it has asked for
        if budget is not None:
            budget.begin()

    @property
    def name(self) -> str:
        """Name of the coroutine's function."""
        return name_of(self.coroutine)

    def lineage(self) -> list[Task]:
        """Return this task, the one that gathers it, and so on to the program itself."""
        task, line = self, [self]
        while task.parent is not None:
            task = task.parent
            line.append(task)
        return line

    def charge(self, tokens: int) -> None:
        """Count decoded tokens on all budgets that this task draws on."""
        for _, budget in self.budgets:
            budget.tokens_used += tokens

    def verdict(self) -> Cancelled | None:
        """Return what is to be raised in this task because a budget of its is used up."""
        for task, budget in self.budgets:
            if (verdict := budget.verdict(task.name, self.operation)) is not None:
                return verdict
        return None

    def tokens_left(self) -> int | None:
        """Return how many tokens may be decoded on behalf of this task; None where that is no limit."""
        left = [budget.tokens - budget.tokens_used for _, budget in self.budgets if budget.tokens is not None]
        return min(left, default=None)

    def seconds_left(self) -> float | None:
        """Return how long this task may go on waiting; None for as long as it takes."""
        return min((left for _, budget in self.budgets if (left := budget.seconds_left) is not None), default=None)

    def close(self) -> None:
        """End the coroutine where it stands; what it says on the way out, nobody waits to hear."""
        with suppress(Exception):
            self.coroutine.close()

    def resume(self, value: Any, error: BaseException | None) -> Operation[Any] | None:
        """Run the coroutine up to its next operation; None when it has ended.

        An error that ends it is noted to have been here, by the coroutine's name and the branches it worked on last.
        """
        while True:
            try:
                yielded = self.coroutine.send(value) if error is None else self.coroutine.throw(error)
            except StopIteration as stop:
                self.done(stop.value, None)
                return None
            except BaseException as failure:
                failure.add_note(
                    f"in {self.name}, {'after' if error is None else 'while'} {self.operation or 'it began'}"
                )
                self.done(None, failure)
                if isinstance(failure, KeyboardInterrupt):
                    raise
                return None
            if isinstance(yielded, Operation):
                self.operation = yielded
                return yielded
            value, error = (
                None,
                TypeError(
                    f"a program awaits treewise operations only, not {type(yielded).__name__}; "
                    "run blocking code as `await call(function, ...)`"
                ),
            )
