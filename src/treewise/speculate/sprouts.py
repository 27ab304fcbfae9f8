"""Trees that grow level by level, by what a smaller network makes of the guesses so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from torch import Tensor

from treewise.batch import Batch
from treewise.kv import OutOfSlots
from treewise.sampler import SamplingRow, leanings
from treewise.speculate.draft import Draft
from treewise.speculate.drafter import Stem, Step
from treewise.speculate.trees import Ints, TokenTree

WIDTH = 8
"""Guesses of a level behind which the tree goes on at most, and tokens that are looked at behind each."""
DEPTH = 8
"""The deepest guesses: each level takes a forward of the smaller network."""
WORTH = 0.2
"""The tree goes on as long as a guess of its last level is at least so likely to be right."""


class Sprout:
    """A tree that grows level by level.

    Parameters
    ----------
    stem : Stem
        Behind which it stands.
    place : int
        Where the logits behind the path stand in the first forward.

    Attributes
    ----------
    tokens, parents : list of int
        Of each node.
    newest, above : list of int
        The nodes of the last level behind which the tree goes on, and those of the level above; -1 is the path.
    """

    def __init__(self, stem: Stem, place: int) -> None:
        self.stem = stem
        self.place = place
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.odds: list[float] = []
        self.reach: list[float] = []
        self.slots: dict[int, int] = {}  # of the nodes that the tree goes on behind, level by level
        self.above: list[int] = []
        self.newest = [-1]

    def add(self, tokens: Sequence[Sequence[int]], odds: Sequence[Sequence[float]]) -> None:
        """Put candidates behind each of the newest nodes; the best of them are the newest then."""
        first = len(self.tokens)
        for above, own_tokens, own_odds in zip(self.newest, tokens, odds, strict=True):
            whole = 1.0 if above < 0 else self.reach[above]
            self.tokens += own_tokens
            self.parents += [above] * len(own_tokens)
            self.odds += own_odds
            self.reach += [whole * each for each in own_odds]
        best = sorted(range(first, len(self.tokens)), key=self.reach.__getitem__, reverse=True)[:WIDTH]
        self.above = self.newest
        self.newest = sorted(best) if best and self.reach[best[0]] >= WORTH else []

    def go_on(self, slots: Sequence[int]) -> tuple[Draft, Ints]:
        """Give the newest nodes slots; return the nodes that have any as a draft, and which of them are the newest."""
        self.slots.update(zip(self.newest, slots, strict=True))
        draft = Draft(self.stem, self.tree().take(np.array(list(self.slots))))
        return draft, draft.rows[-len(self.newest) :]

    def tree(self) -> TokenTree:
        """Return all of it."""
        tree = TokenTree.of(self.tokens, self.parents, self.odds)
        slots = np.full(len(tree), -1, np.int32)
        slots[list(self.slots)] = list(self.slots.values())
        return replace(tree, slots=slots)


S = TypeVar("S", bound=Sprout)


def grow(
    sprouts: Sequence[S],
    logits: Tensor,
    batch: Batch,
    step: Step,
    forward: Callable[[Batch, Sequence[S]], Tensor],
) -> None:
    """Let trees grow as long as there are slots and guesses that are likely enough.

    Parameters
    ----------
    sprouts : sequence of Sprout
    logits : Tensor [sprouts, vocabulary]
        Behind the path of each.
    batch : Batch
        Of the rows whose keys are there already.
    step : Step
    forward : callable
        Computes the newest nodes of some sprouts, which are the rows of the batch: returns the logits behind each.
    """
    _add(logits, sprouts, [sprout.stem.row for sprout in sprouts])
    for depth in range(1, DEPTH):
        going = [sprout for sprout in sprouts if sprout.newest and depth < sprout.stem.room]
        if not going:
            break
        try:
            slots = step.lend(sum(len(sprout.newest) for sprout in going))
        except OutOfSlots:
            break
        ends = np.cumsum([len(sprout.newest) for sprout in going])[:-1]
        grown = [sprout.go_on(own.tolist()) for sprout, own in zip(going, np.split(slots, ends), strict=True)]
        rows = [row for draft, newest in grown for row in draft.sampling_rows(newest.tolist())]
        _add(forward(batch.then(grown), going), going, rows)


def lacking(
    batch: Batch, stem: Stem, first: int, step: Step, max_num_rows: int
) -> tuple[list[tuple[int, int]], int | None]:
    """Let a batch compute the tokens of a path from the one number `first` on that it does not yet, as far as fit.

    Returns
    -------
    added : list of (start, end)
        Numbers of the tokens whose rows were added, in order.
    row : int or None
        That of the last token, if there is room for it.
    """
    added = []
    for node in step.kv.forest.path(stem.node):
        start = max(first - node.start, 0)
        if start < len(node.tokens) and batch.row(node, start) is None:
            end = min(len(node.tokens), start + max_num_rows - batch.num_rows)
            if end > start:
                batch.add(node, end, stem.branch.tree, start)
                added.append((node.start + start, node.start + end))
            if end < len(node.tokens):
                break
    return added, batch.row(stem.node, len(stem.node.tokens) - 1)


def _add(logits: Tensor, sprouts: Sequence[Sprout], rows: Sequence[SamplingRow]) -> None:
    """Let trees have the likeliest tokens behind their newest nodes, from a row of logits for each."""
    odds, tokens = leanings(logits, rows).softmax(dim=-1).topk(min(WIDTH, logits.shape[-1]), dim=-1)
    all_odds, all_tokens, first = odds.tolist(), tokens.tolist(), 0
    for sprout in sprouts:
        own = slice(first, first + len(sprout.newest))
        first = own.stop
        sprout.add(all_tokens[own], all_odds[own])
