"""Operations under way: what each waits for, and what it makes of the logits it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from treewise.awaitables import Observe
from treewise.branch import Branch, BranchTree
from treewise.constraint import Lexicon
from treewise.sampler import Candidates, invalid_rows, log_probs, ranked
from treewise.scheduler import Lane
from treewise.tasks import Task
from treewise.text import Detokenizer
from treewise.thicket import Thicket


class InvalidLogits(RuntimeError):
    """The model gave logits that are not numbers; only the request that they belong to fails."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not numbers")


@dataclass(frozen=True)
class Limits:
    """What ends every branch, whatever its controller thinks.

    Attributes
    ----------
    eos_token_ids : frozenset of int
    max_model_len : int
        The most tokens a path may have.
    vocab_size : int
        Logits of a row.
    lexicon : Lexicon
        What grammars are matched with.
    """

    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    lexicon: Lexicon


class Event:
    """That `branch` gained a token in a step."""

    def __init__(self, branch: Branch, detokenizer: Detokenizer) -> None:
        self.branch = branch
        self._detokenizer = detokenizer

    @cached_property
    def text(self) -> str:
        """What the branch's text gained since the last event that was asked, and no later token can take back."""
        return self._detokenizer.delta()


class Gain(NamedTuple):
    """What the branches of `tree` gained in a step: `num_tokens` tokens; `events` says which branches, and what text.

    NOTE: `events` is to be called before the next step.
    """

    tree: BranchTree
    num_tokens: int
    events: Callable[[], list[Event]]


class Run(Protocol):
    """An operation under way."""

    task: Task

    @property
    def width(self) -> int:
        """How many paths it goes on with."""

    def lanes(self) -> list[Lane | Thicket]:
        """Return the paths whose logits are still awaited."""

    def ready(self) -> bool:
        """Whether the run can advance."""

    def deliver(self, lane: Lane | Thicket, start: int, logits: Tensor, places: Sequence[int]) -> None:
        """Take the logits at positions ``start``, … of a lane: rows `places` of [rows, vocabulary].

        Raises
        ------
        InvalidLogits
        """

    def advance(self) -> Gain:
        """Take the step that the delivered logits allow.

        Raises
        ------
        InvalidLogits
        """

    def result(self) -> Any:
        """Return what the program gets, or None while the run goes on."""


class ObserveRun:
    """Reads the log-probabilities of tokens that are given.

    Parameters
    ----------
    task : Task
    operation : Observe
    limits : Limits

    Raises
    ------
    ValueError
        If a path is longer than the context.
    """

    def __init__(self, task: Task, operation: Observe, limits: Limits) -> None:
        check_own(task, operation.branches)
        for branch in operation.branches:
            if branch.num_tokens > limits.max_model_len:
                given, limit = branch.num_tokens, limits.max_model_len
                raise ValueError(f"branches: {branch.path} has {given} tokens, more than max_model_len={limit}")
        given = len(task.tree.prompt_tokens)
        inside = any(
            start < given and branch.has_whole_prompt
            for branch, start in zip(operation.branches, operation.starts, strict=True)
        )
        if inside and task.tree.thinning is not None:
            raise ValueError(
                "kv_sparsity: log-probabilities of the prompt need all of its keys; ask with kv_sparsity='full'"
            )
        self.task = task
        self.top = operation.top
        self.branches = operation.branches
        self.observed: list[list[Candidates]] = [[] for _ in operation.branches]
        self._delivered: list[tuple[int, int, Tensor, Sequence[int]]] = []  # of one step: branch, position, rows
        self._next_tokens = [branch.path_tokens for branch in operation.branches]
        self._lanes = {
            Lane(branch.tree, branch.end, start - 1, branch.num_tokens - 1): i
            for i, (branch, start) in enumerate(zip(operation.branches, operation.starts, strict=True))
        }

    @property
    def width(self) -> int:
        """See `Run.width`."""
        return len(self.branches)

    def lanes(self) -> list[Lane | Thicket]:
        """See `Run.lanes`."""
        return [lane for lane, i in self._lanes.items() if self.branches[i].alive and not lane.done]

    def ready(self) -> bool:
        """See `Run.ready`."""
        return not self.lanes()

    def deliver(self, lane: Lane | Thicket, start: int, logits: Tensor, places: Sequence[int]) -> None:
        """See `Run.deliver`."""
        if self._delivered and self._delivered[0][2] is not logits:
            self._read()
        self._delivered.append((self._lanes[cast(Lane, lane)], start, logits, places))

    def _read(self) -> None:
        """Take what a step has delivered to the host."""
        delivered, self._delivered = self._delivered, []
        if not delivered:
            return
        rows = gather_rows([(logits, place) for _, _, logits, places in delivered for place in places])
        if invalid_rows(rows).any():
            raise InvalidLogits
        tokens = [
            token
            for i, start, _, places in delivered
            for token in self._next_tokens[i][start + 1 : start + 1 + len(places)]
        ]
        candidates = iter(ranked(log_probs(rows), tokens, self.top))
        for i, _, _, places in delivered:
            self.observed[i] += islice(candidates, len(places))

    def advance(self) -> Gain:
        """See `Run.advance`."""
        self._read()
        for lane, i in self._lanes.items():
            if not lane.done:
                self.branches[i].end()  # another coroutine has pruned it, as this will say
        return Gain(self.task.tree, 0, list)

    def result(self) -> list[list[Candidates]] | None:
        """See `Run.result`."""
        return self.observed if all(lane.done for lane in self._lanes) else None


def check_own(task: Task, branches: Sequence[Branch]) -> None:
    """Refuse branches of another tree than the task's."""
    if any(branch.tree is not task.tree for branch in branches):
        raise ValueError("branches: a program can decode the branches of its own tree only")


def gather_rows(rows: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Return rows of tensors [any, vocabulary] as one, a view where they are all of one."""
    first = rows[0][0]
    if any(tensor is not first for tensor, _ in rows):
        return torch.stack([tensor[place] for tensor, place in rows])
    start, end = rows[0][1], rows[0][1] + len(rows)
    if [place for _, place in rows] == list(range(start, end)):
        return first[start:end]
    return first[[place for _, place in rows]]
