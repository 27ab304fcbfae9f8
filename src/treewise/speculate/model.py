"""A smaller model guesses: its own keys lie under the engine's slots, and trees grow by its probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from treewise.batch import Batch
from treewise.kv import Copy
from treewise.models import CausalLM
from treewise.runner import Runner
from treewise.speculate.drafter import Stem, Step
from treewise.speculate.paths import PathStates
from treewise.speculate.sprouts import Sprout, grow, lacking
from treewise.speculate.trees import EMPTY, TokenTree

_MASK64 = (1 << 64) - 1


class _Sprout(Sprout):
    """A tree that knows which text ends in each node that it goes on behind."""

    def __init__(self, stem: Stem, place: int, text: int) -> None:
        super().__init__(stem, place)
        self.texts = {-1: text}


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
    wants_path = True

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
        if sprouts:
            logits = self._forward(batch, step)[[sprout.place for sprout in sprouts]]
            grow(sprouts, logits, batch, step, partial(self._level, step))
        elif batch.num_rows:
            self._forward(batch, step)
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
            added, row = lacking(batch, stem, min([len(texts) - 1, *begins, *known]), step, self.max_num_rows)
            for start, end in added:
                self._known[slots[start:end]] = texts[start:end]
            if row is not None:
                sprouts.append(_Sprout(stem, batch.want_logits(row), int(texts[-1])))
        return batch, sprouts

    def _level(self, step: Step, batch: Batch, sprouts: Sequence[_Sprout]) -> Tensor:
        """Compute the newest nodes of trees."""
        for sprout in sprouts:
            for node in sprout.newest:
                text = sprout.texts[node] = _mixed(sprout.texts[sprout.parents[node]], sprout.tokens[node])
                self._known[sprout.slots[node]] = text
        return self._forward(batch, step)

    def _forward(self, batch: Batch, step: Step) -> Tensor:
        """Return the logits that a batch wants, of the tokens that the engine's model has."""
        logits = self.runner.forward(batch, self.runner.plan(batch, step.kv), step.kv)
        return pad(logits, (0, self.vocab_size - logits.shape[1]), value=-torch.inf)  # or cut off

    def _follow(self, copy: Copy) -> None:
        self._known[copy.target] = self._known[copy.source]


def _mixed(text: int, token: int) -> int:
    """Return a number that stands for a text and one more token."""
    text = ((text ^ (token + 1)) * 0x9E3779B97F4A7C15) & _MASK64
    return text ^ (text >> 29)
