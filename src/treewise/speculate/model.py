"""A smaller model guesses: its own keys lie under the engine's slots, and trees grow by its probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from treewise.batch import Batch
from treewise.kv import Copy, OutOfSlots
from treewise.models import CausalLM
from treewise.runner import Runner
from treewise.sampler import SamplingRow, leanings
from treewise.speculate.draft import Draft
from treewise.speculate.drafter import Stem, Step
from treewise.speculate.paths import PathStates
from treewise.speculate.trees import EMPTY, Ints, TokenTree

WIDTH = 8
"""Guesses of a level behind which the tree goes on at most, and tokens that are looked at behind each."""
DEPTH = 8
"""The deepest guesses: each level takes a forward of the smaller model."""
WORTH = 0.2
"""The tree goes on as long as a guess of its last level is at least so likely to be right."""
_MASK64 = (1 << 64) - 1


class _Sprout:
    """A tree that grows level by level."""

    def __init__(self, stem: Stem, text: int, place: int) -> None:
        self.stem = stem
        self.place = place  # of the logits behind the path
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.odds: list[float] = []
        self.reach: list[float] = []
        self.texts = {-1: text}  # behind the nodes that the tree goes on behind, level by level; -1 is the path
        self.slots: dict[int, int] = {}  # of these
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
        self.newest = sorted(best) if best and self.reach[best[0]] >= WORTH else []

    def go_on(self, slots: Sequence[int]) -> tuple[Draft, Ints]:
        """Give the newest nodes slots; return the nodes that have any as a draft, and which of them are the newest."""
        for node, slot in zip(self.newest, slots, strict=True):
            self.texts[node] = _mixed(self.texts[self.parents[node]], self.tokens[node])
            self.slots[node] = slot
        draft = Draft(self.stem, self.tree().take(np.array(list(self.slots))))
        return draft, draft.rows[-len(self.newest) :]

    def tree(self) -> TokenTree:
        """Return all of it."""
        tree = TokenTree.of(self.tokens, self.parents, self.odds)
        slots = np.full(len(tree), -1, np.int32)
        slots[list(self.slots)] = list(self.slots.values())
        return replace(tree, slots=slots)


class ModelDrafter:
    """Lets a smaller model with the same tokens go on, a level of the trees a forward.

    Its keys and values are tensors of its own under the same slots as the model's: one slot means the same token to
    both, and keys that move, move in both. What it lacks of a path it computes when it is asked about it: the prompt at
    first, then little more than the pending token. Of each slot it knows which text its keys there belong to, so
    whatever becomes of slots, branches and caches, it computes what it has to and no more.

    A token that is drawn at random is guessed by the smaller model's logits and the very noise that it will be drawn
    with.

    Parameters
    ----------
    model : CausalLM
    engine : Runner
        The engine's, whose keys it follows.
    max_num_rows : int
        The most rows of one of its forwards; a path that lacks more has no guesses in this step.
    """

    wants_hidden = False

    def __init__(self, model: CausalLM, engine: Runner, max_num_rows: int) -> None:
        kv_dtype = model.dtype if engine.kv_dtype == engine.dtype else engine.kv_dtype
        num_slots, graphs = engine.k.shape[1], engine.graphs is not None
        self.runner = Runner(model, engine.attention, num_slots, engine.page_size, kv_dtype, graphs)
        self.vocab_size = engine.model.config.vocab_size
        self.max_num_rows = max_num_rows
        engine.followers += [self.runner.copy, self._follow]
        self.runner.followers = engine.followers
        self._texts = PathStates(_mixed, start=1)
        self._known = np.zeros(num_slots, np.uint64)  # the text up to the token whose keys each slot has

    def draft(self, stems: Sequence[Stem], size: int, step: Step) -> list[TokenTree]:
        """See `Drafter.draft`."""
        self.runner.move(step.kv)
        batch, sprouts = self._lacking(stems, step)
        if batch.num_rows:
            logits = self._forward(batch, step)
            self._add(logits[[sprout.place for sprout in sprouts]], sprouts, [sprout.stem.row for sprout in sprouts])
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
            self._known[slots] = np.array([sprout.texts[node] for sprout in going for node in sprout.newest], np.uint64)
            rows = [draft.sampling_rows()[node] for draft, newest in grown for node in newest.tolist()]
            self._add(self._forward(batch.then(grown), step), going, rows)
        trees = {sprout.stem: sprout.tree() for sprout in sprouts}
        return [trees.get(stem, EMPTY) for stem in stems]

    def _lacking(self, stems: Sequence[Stem], step: Step) -> tuple[Batch, list[_Sprout]]:
        """Return the rows that paths lack, as far as there is room for them, and beginnings of trees for the others."""
        batch, sprouts = Batch(), []
        for stem in stems:
            texts = np.array(self._texts.along(stem.branch), np.uint64)
            slots, path = step.path_slots(stem), step.kv.forest.path(stem.node)
            # Behind what the model itself has computed, nothing is known of slots; the last row has the logits.
            begins = [node.start + node.computed for node in path if node.computed < len(node.tokens)]
            known = np.flatnonzero(self._known[slots] != texts)[:1].tolist()
            first = min([len(texts) - 1, *begins, *known])
            for node in path:
                start = max(first - node.start, 0)
                if start < len(node.tokens) and batch.row(node, start) is None:
                    end = min(len(node.tokens), start + self.max_num_rows - batch.num_rows)
                    if end > start:
                        batch.add(node, end, stem.branch.tree, start)
                        rows = slice(node.start + start, node.start + end)
                        self._known[slots[rows]] = texts[rows]
                    if end < len(node.tokens):
                        break
            if (row := batch.row(stem.node, len(stem.node.tokens) - 1)) is not None:
                sprouts.append(_Sprout(stem, int(texts[-1]), batch.want_logits(row)))
        return batch, sprouts

    def _forward(self, batch: Batch, step: Step) -> Tensor:
        return self.runner.forward(batch, self.runner.plan(batch, step.kv), step.kv)

    def _add(self, logits: Tensor, sprouts: Sequence[_Sprout], rows: Sequence[SamplingRow]) -> None:
        """Let trees have the likeliest tokens behind their newest nodes, from a row of logits for each."""
        if not sprouts:
            return
        missing = self.vocab_size - logits.shape[1]
        logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)  # or cut off
        odds, tokens = leanings(logits, rows).softmax(dim=-1).topk(min(WIDTH, self.vocab_size), dim=-1)
        all_odds, all_tokens, first = odds.tolist(), tokens.tolist(), 0
        for sprout in sprouts:
            own = slice(first, first + len(sprout.newest))
            first = own.stop
            sprout.add(all_tokens[own], all_odds[own])

    def _follow(self, copy: Copy) -> None:
        self._known[copy.target] = self._known[copy.source]


def _mixed(text: int, token: int) -> int:
    """Return a number that stands for a text and one more token."""
    text = ((text ^ (token + 1)) * 0x9E3779B97F4A7C15) & _MASK64
    return text ^ (text >> 29)
