"""The model itself guesses, over a part of the keys that it has: verified over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from treewise.batch import Batch, Growth
from treewise.branch import Branch
from treewise.plan import TreeSpec
from treewise.runner import Runner
from treewise.sparsity.observation import Observation, Seen
from treewise.sparsity.policy import KVSparsity
from treewise.sparsity.select import protect, top
from treewise.speculate.drafter import Stem, Step
from treewise.speculate.sprouts import Sprout, grow
from treewise.speculate.trees import EMPTY, Ints, TokenTree
from treewise.survivors import score_together

EVERY = 64
"""Tokens that a branch gains before it is looked at again which of its keys guesses see."""


class View(NamedTuple):
    """The part of a path that guesses see, beside all that comes behind it.

    Attributes
    ----------
    slots : int64 [tokens]
        Where the keys of all its tokens were.
    chosen : int64 [chosen]
        The tokens that are seen, ascending.
    """

    slots: Ints
    chosen: Ints


class _Sprout(Sprout):
    """A tree that knows where the keys are that it sees of its path; the last is that of the pending token."""

    def __init__(self, stem: Stem, place: int, slots: Ints) -> None:
        super().__init__(stem, place)
        self.path = slots


class SparseDrafter:
    """Lets the model go on over a part of its own keys, which takes less reading, a level of the trees a forward.

    As in MagicDec (Chen et al., 2024, arXiv 2408.11049) and TriForce (Sun et al., 2024, arXiv 2404.11912), whose caches
    for guesses are copies. Here guesses read the cache itself, at the slots of the tokens that a policy chooses: the
    same for all layers and heads, by the sum of their scores, so that a level has one plan. No memory is taken but
    that of the guesses, and what they write is written again when they are verified.

    Paths whose keys have been thinned out, or are not all there, have no guesses.

    Parameters
    ----------
    policy : KVSparsity
        Its scorer, budget, window and sinks count.
    runner : Runner
        The engine's.
    max_num_rows : int
        The most rows of a forward.

    Raises
    ------
    ValueError
        If the model has layers with a sliding window, or the scorer wants a second pass.
    """

    wants_hidden = False
    wants_path = True

    def __init__(self, policy: KVSparsity, runner: Runner, max_num_rows: int) -> None:
        if any(window is not None for window in runner.model.config.layer_windows):
            raise ValueError("speculate: 'self' is for models without sliding windows; choose 'ngram'")
        if policy.second_pass:
            raise ValueError(f"speculate: {policy.scoring!r} reads prompts twice; choose 'self:streaming'")
        self.policy = policy
        self.runner = runner
        self.max_num_rows = max_num_rows
        self._views: WeakKeyDictionary[Branch, View] = WeakKeyDictionary()

    def draft(self, stems: Sequence[Stem], size: int, step: Step) -> list[TokenTree]:
        """See `Drafter.draft`."""
        self.runner.move(step.kv)
        sprouts: list[_Sprout] = []
        for stem in stems[: self.max_num_rows]:
            *above, last = step.kv.forest.path(stem.node)
            whole = all(node.computed == len(node.tokens) for node in above)
            if whole and last.computed + 1 == len(last.tokens):
                slots = step.path_slots(stem)
                view = self._view(stem, slots, step)
                seen = np.concatenate([slots[view.chosen], slots[len(view.slots) :]])
                sprouts.append(_Sprout(stem, len(sprouts), seen))
        if sprouts:
            logits = self._read(sprouts, [])
            grow(sprouts, logits, Batch(), step, lambda level, going: self._read(going, level.growths))
        trees = {sprout.stem: sprout.tree() for sprout in sprouts}
        return [trees.get(stem, EMPTY) for stem in stems]

    def _read(self, sprouts: Sequence[_Sprout], growths: Sequence[tuple[Growth, Ints]]) -> Tensor:
        """Return the logits behind the paths or, if there are any, behind the newest nodes of the trees."""
        first, stems = len(sprouts), [sprout.stem.node for sprout in sprouts]
        parent, length = [np.full(first, -1)], [np.array([len(sprout.path) for sprout in sprouts])]
        slots = [sprout.path for sprout in sprouts]
        query_node, rows = [np.arange(first)], [np.array([[stem.tokens[-1], stem.end - 1] for stem in stems]).T]
        stored = [np.array([sprout.path[-1] for sprout in sprouts])]
        if growths:  # the ends of the paths have been read
            query_node, rows, stored = [], [], []
        for number, (growth, newest) in enumerate(growths):
            shape = growth.shape(newest)
            parent.append(np.where(shape.parent < 0, number, shape.parent + first))
            length.append(shape.length)
            slots.append(shape.slots)
            query_node.append(shape.row_node + first)
            rows.append(np.stack([growth.token[newest], growth.length[newest] - 1]))
            stored.append(growth.slot[newest])
            first += len(shape.parent)
        tree = TreeSpec(*map(np.concatenate, (parent, length, query_node)))
        inputs = np.concatenate([np.concatenate(rows, axis=1), [np.concatenate(stored)]])
        return self.runner.read_aside(inputs.astype(np.int64), tree, np.concatenate(slots).astype(np.int32))

    def _view(self, stem: Stem, slots: Ints, step: Step) -> View:
        """Return what guesses see of a path with these slots, the last of which has no key yet."""
        for branch in (stem.branch, stem.branch.parent):
            view = None if branch is None else self._views.get(branch)
            near = view is not None and len(view.slots) < len(slots) <= len(view.slots) + EVERY
            if view is not None and near and np.array_equal(view.slots, slots[: len(view.slots)]):
                self._views[stem.branch] = view
                return view
        view = self._views[stem.branch] = View(slots[:-1], self._choose(stem, slots[:-1], step))
        return view

    def _choose(self, stem: Stem, slots: Ints, step: Step) -> Ints:
        """Return which tokens of a path are seen by guesses."""
        policy, runner, end = self.policy, self.runner, len(slots)
        config = runner.model.config
        budget = sum(policy.budgets(end, config.num_layers)) // config.num_layers
        if budget >= end:
            return np.arange(end)
        wanted = end if policy.num_queries is None else policy.num_queries
        first = end - max(1, min(wanted, end, self.max_num_rows))
        shape = (config.num_layers, config.num_heads, config.head_dim)
        observation = Observation(*shape, first, end, runner.dtype, runner.device, alone=False)
        if wanted:
            batch = Batch()
            for node in step.kv.forest.path(stem.node):
                for offset in range(max(0, first - node.start), min(len(node.tokens), end - node.start)):
                    batch.ask(node, offset, stem.branch.tree)
            places = torch.arange(end - first, device=runner.device)
            seen = [Seen(observation, places, places)]
            runner.hidden(batch, runner.plan(batch, step.kv), step.kv, seen=seen)
        scores = score_together(runner, policy, observation, torch.from_numpy(slots).to(runner.device))
        return top(protect(scores[None], policy.window, policy.sinks), budget)[0].cpu().numpy()
