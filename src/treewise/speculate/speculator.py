"""Guesses of a step: from the drafter into the batch, and the keys of the right ones into the forest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from treewise.batch import Batch
from treewise.branch import Branch
from treewise.kv import KVManager, OutOfSlots, Slots
from treewise.speculate.draft import Allowed, Draft
from treewise.speculate.drafter import Drafter, Stem, Step
from treewise.speculate.pace import Pace

MOST = 1024
"""Guesses of a step for all leaves together that a drafter is asked for, unless there are more leaves."""


class Speculator:
    """Gives leaves guesses of how they go on, as far as rows and slots are left and it pays.

    Parameters
    ----------
    drafter : Drafter
    kv : KVManager
    tree_size : int
        The most guesses for a leaf.
    adaptive : bool
        Take as many as pay, by the measured times of steps, rather than as many as there are.
    """

    def __init__(self, drafter: Drafter, kv: KVManager, tree_size: int, adaptive: bool = True) -> None:
        self.drafter = drafter
        self.kv = kv
        self.tree_size = tree_size
        self.pace = Pace() if adaptive else None
        self._drafts: list[Draft] = []  # of the step under way
        self._stems: Sequence[Stem] = []  # likewise
        self._hidden: Tensor | None = None  # likewise, of the rows whose logits are wanted
        self._verified: WeakKeyDictionary[Branch, Tensor] = WeakKeyDictionary()  # hidden rows behind the newest tokens
        self._step: Step | None = None
        self._num_rows = 0  # of the step, 0 where it is more than decoding
        self._began = self._guessing = 0.0

    @property
    def resting(self) -> bool:
        """Whether there are no guesses, neither in the step under way nor in the next."""
        return self.pace is not None and self.pace.resting and not self._drafts

    @property
    def drafts(self) -> dict[Branch, Draft]:
        """The guesses of the step under way, by the leaves that they follow."""
        return {draft.stem.branch: draft for draft in self._drafts}

    def begin(self) -> None:
        """Start the clock of a step."""
        self._began, self._guessing, self._num_rows = perf_counter(), 0.0, 0

    def draft(self, batch: Batch, stems: Sequence[Stem], rows_left: int) -> list[Draft]:
        """Return guesses of what follows some of `stems`, as rows that `batch` can have beside its own."""
        self._num_rows = batch.num_rows if batch.is_decoding else 0
        self._stems = stems
        if self.pace is not None and self.pace.resting:
            self.pace.pass_by()
            return []
        stems = [stem for stem in stems if stem.room]
        if self.kv.kept and getattr(self.drafter, "wants_path", False):
            stems = [stem for stem in stems if self.kv.forest.path(stem.node)[0] not in self.kv.kept]
        if not 0 < len(stems) <= rows_left:
            return []
        if self._verified:
            for stem in stems:
                stem.hidden = self._verified.get(stem.branch)
        self._step = Step(batch, self.kv)
        start = perf_counter()
        try:
            size = min(self.tree_size, rows_left // len(stems), max(1, MOST // len(stems)))
            trees = self.drafter.draft(stems, size, self._step)
            self._guessing = perf_counter() - start
            allowed = [
                Allowed.of(stem, tree.best(size, stem.room))
                for stem, tree in zip(stems, trees, strict=True)
                if len(tree)
            ]
            drafts = [each.draft() for each in self._paying(allowed, batch)]
            self._give_slots(drafts, self._step)
            self._drafts = drafts
        except OutOfSlots:
            return []
        if self._num_rows:
            self._num_rows += sum(len(draft.rows) for draft in self._drafts)
        return self._drafts

    def see(self, hidden: Tensor) -> None:
        """Keep the step's last hidden states [logit rows, hidden size], if the drafter wants them."""
        if self.drafter.wants_hidden:
            self._hidden = hidden.clone()

    def finish(self) -> list[Draft]:
        """End the step: nodes take over the keys of right guesses, all else is given back; return its guesses."""
        self._keep_hidden()
        drafts, self._drafts = self._drafts, []
        step, self._step = self._step, None
        if step is not None:
            keys = [self.kv.origins(draft.slot[draft.accepted]) for draft in drafts]
            for slots in step.lent:
                self.kv.take_back(slots)
            for draft, own in zip(drafts, keys, strict=True):
                self._adopt(draft, own)
        if self.pace is not None:
            if self._num_rows:
                bare = step is not None and not drafts
                self.pace.stepped(self._num_rows, perf_counter() - self._began - self._guessing, bare)
            if step is not None:
                self.pace.drafted(self._guessing)
            if drafts:
                self.pace.verified([draft.tree.reach for draft in drafts], [len(draft.accepted) for draft in drafts])
        return drafts

    def _keep_hidden(self) -> None:
        """Remember the hidden states that have chosen the newest tokens of each leaf."""
        hidden, self._hidden = self._hidden, None
        stems, self._stems = self._stems, []
        if self._verified:
            self._verified.clear()
        if hidden is None or not stems:
            return
        drafts = self.drafts
        rows = [
            [stem.place, *(draft.first + node for node in draft.accepted)]
            if (draft := drafts.get(stem.branch)) is not None
            else [stem.place]
            for stem in stems
        ]
        together = torch.tensor([place for own in rows for place in own]).to(hidden.device, non_blocking=True)
        parts = hidden.index_select(0, together).split([len(own) for own in rows])
        self._verified.update(zip((stem.branch for stem in stems), parts, strict=True))

    def _paying(self, allowed: Sequence[Allowed], batch: Batch) -> list[Allowed]:
        """Return the part of the guesses that pays, where there are any."""
        if self.pace is not None:
            reach = np.concatenate([np.zeros(0), *(each.tree.reach for each in allowed)])
            order = np.argsort(-reach, kind="stable")
            chosen = np.zeros(len(reach), bool)
            chosen[order[: self.pace.choose(reach[order], len(batch.logit_rows), batch.num_rows)]] = True
            ends = accumulate(len(each.tree) for each in allowed)
            allowed = [
                each.take(np.flatnonzero(chosen[end - len(each.tree) : end]))
                for each, end in zip(allowed, ends, strict=True)
            ]
        return [each for each in allowed if len(each.tree)]

    @staticmethod
    def _give_slots(drafts: Sequence[Draft], step: Step) -> None:
        lacking = [draft.rows if draft.tree.slots is None else np.flatnonzero(draft.slot < 0) for draft in drafts]
        if wanted := sum(map(len, lacking)):
            slots = step.lend(wanted)
            for draft, nodes in zip(drafts, lacking, strict=True):
                draft.slot[nodes], slots = slots[: len(nodes)], slots[len(nodes) :]

    def _adopt(self, draft: Draft, keys: Slots) -> None:
        """Let the leaf's node have the keys of the guesses that it has taken."""
        leaf = draft.stem.branch
        if not len(keys) or not leaf.alive:
            return
        node = leaf.end()
        follows = node.parent is None or node.parent.computed == len(node.parent.tokens)
        if follows and node.start + node.computed == draft.begin:
            try:
                self.kv.adopt(node, keys)
            except OutOfSlots:
                return  # they are computed again
