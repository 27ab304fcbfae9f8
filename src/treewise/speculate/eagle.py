"""EAGLE: one decoder layer guesses the model's states, level by level of the trees; from them follow tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from treewise.attention import TreeSpec, plan_tree, run_plan
from treewise.batch import Batch
from treewise.graphs import GraphCache, Kind, Plans
from treewise.kv import KVManager, Slots
from treewise.layers import Linear
from treewise.ops import Heads, rotate_and_store
from treewise.plan.data import upload
from treewise.runner import Move, Runner
from treewise.speculate.drafter import Stem, Step
from treewise.speculate.eagle_heads import EagleHead
from treewise.speculate.sprouts import Sprout, grow, lacking
from treewise.speculate.trees import EMPTY, Ints, TokenTree


class _Sprout(Sprout):
    """A tree that knows the slot of the token that it stands behind."""

    def __init__(self, stem: Stem, place: int, slot: int) -> None:
        super().__init__(stem, place)
        self.slot = slot

    def above_newest(self) -> list[int]:
        """Return the slot of the token before each of the newest nodes."""
        parents = [self.parents[node] for node in self.newest]
        return [self.slot if above < 0 else self.slots[above] for above in parents]


class EagleDrafter:
    """Lets an EAGLE head go on, a level of the trees a forward.

    The head's own key and value of a token lie under the slot that the engine has for the token; they follow from the
    token and the state of the one before. The first token of a path has none. States lie under slots as well. Those of
    tokens that the model has not read are guesses, which its own take the place of when it reads them; keys of guesses
    were made with guessed states, and are made again once a guess was right.

    Attributes
    ----------
    graphs : GraphCache or None
        Captured forwards of the head, where the engine has captured ones.
    """

    wants_hidden = False
    wants_path = True

    def __init__(self, head: EagleHead, engine: Runner, max_num_rows: int) -> None:
        config = head.config
        for module in head.modules():
            if isinstance(module, Linear):
                module.pack()
        self.head = head
        self.engine = engine
        self.max_num_rows = max_num_rows
        shape = (engine.k.shape[1], config.num_kv_heads, config.head_dim)
        self.k, self.v = torch.zeros(2, *shape, dtype=engine.dtype, device=engine.device)
        self.features = head.watch(engine)
        self.graphs = None if engine.graphs is None else GraphCache(self._compute, spare_slot=0)
        self._made = np.zeros(shape[0], bool)  # whether a slot has keys of the head, for what the model has put there
        engine.watchers.append(self._forget)
        engine.followers.append(self._follow)

    @torch.inference_mode()
    def draft(self, stems: Sequence[Stem], size: int, step: Step) -> list[TokenTree]:
        """See `Drafter.draft`."""
        kv = step.kv
        self.engine.move(kv)
        batch, before, sprouts, unread = Batch(), [], [], []
        for stem in stems:
            slots, verified = step.path_slots(stem), self._verified(stem, kv)
            if len(slots) < 2 or verified < len(slots) - 1:
                continue
            # The last row is wanted anyhow, and is made again when the model has read its token.
            lacks = 1 + np.flatnonzero(~self._made[slots[1:]])[:1]
            added, row = lacking(batch, stem, min([len(slots) - 1, *lacks.tolist()]), step, self.max_num_rows)
            before += [slots[start - 1 : end - 1] for start, end in added]
            if row is not None:
                sprouts.append(_Sprout(stem, batch.want_logits(row), int(slots[-1])))
                unread.append(kv.pool.scratch_slot if verified == len(slots) else int(slots[-1]))
        if batch.num_rows:
            guessed = self.guess(batch, kv, np.concatenate(before))
            self._made[batch.store_slots(kv)] = True
            rows = [batch.logit_rows[sprout.place] for sprout in sprouts]
            logits = self._keep(guessed[self.features.place(np.array(rows))], np.array(unread))
            grow(sprouts, logits, batch, step, partial(self._level, kv))
        trees = {sprout.stem: sprout.tree() for sprout in sprouts}
        return [trees.get(stem, EMPTY) for stem in stems]

    def guess(self, batch: Batch, kv: KVManager, before: Ints) -> Tensor:
        """Guess the states of the tokens of a batch, and store their keys.

        Parameters
        ----------
        batch : Batch
        kv : KVManager
        before : int64 [rows]
            The slot of the token before each.

        Returns
        -------
        Tensor [rows, hidden]
            Which the next call overwrites.
        """
        plans = self._plan(batch, kv)
        known = np.stack((batch.tokens(), batch.positions() - 1, batch.store_slots(kv), before))
        rows = upload({"rows": known}, self.engine.device)["rows"]
        guessed = self.graphs.run(rows, plans) if self.graphs is not None and batch.is_decoding else None
        if guessed is None:
            tokens, positions, slots, last = rows
            guessed = self._compute(tokens, positions, slots, last, plans)
        return guessed

    def _level(self, kv: KVManager, batch: Batch, sprouts: Sequence[_Sprout]) -> Tensor:
        """Go on behind the newest nodes of trees: return the logits behind them."""
        before = np.array([slot for sprout in sprouts for slot in sprout.above_newest()], np.int64)
        return self._keep(self.guess(batch, kv, before), batch.store_slots(kv))

    def _keep(self, guessed: Tensor, slots: Ints) -> Tensor:
        """Keep guessed states under slots, for the next level; return the logits that follow from them."""
        self.features.put(self.features.place(slots), guessed)
        return self.head.logits(guessed)

    def _compute(self, tokens: Tensor, positions: Tensor, slots: Tensor, before: Tensor, plans: Plans) -> Tensor:
        """Return the states [rows, hidden] that the head guesses, each from that of the token before."""
        config = self.head.config

        def attend(layer: int, heads: Heads) -> Tensor:
            q = rotate_and_store(heads, self.k, self.v, slots)
            plan = plans[Kind(config.layer_windows[layer])]
            return cast(Tensor, run_plan(plan, q, self.k, self.v, scale=config.attention_scale))

        return cast(Tensor, self.head(tokens, self.features.states[before], positions, attend))

    def _plan(self, batch: Batch, kv: KVManager) -> Plans:
        config, engine = self.head.config, self.engine
        spec, slots = _without_first_tokens(*batch.tree_spec(kv))
        [window] = config.layer_windows
        plan = plan_tree(
            spec,
            engine.attention,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            slots=slots,
            page_size=engine.page_size,
            dtype=engine.dtype,
            device=engine.device,
            window=window,
        )
        return {Kind(window): plan}

    @staticmethod
    def _verified(stem: Stem, kv: KVManager) -> int:
        """Return how many tokens of a path the model has read, from the first."""
        path = kv.forest.path(stem.node)
        return next((node.start + node.computed for node in path if node.computed < len(node.tokens)), stem.node.end)

    def _forget(self, slots: Slots, hidden: Tensor) -> None:
        self._made[slots] = False

    def _follow(self, move: Move) -> None:
        self._made[move.target] = self._made[move.source]
        for pool in (self.k, self.v):
            pool.index_copy_(0, move.target_there, pool.index_select(0, move.source_there))


def _without_first_tokens(spec: TreeSpec, slots: Slots) -> tuple[TreeSpec, Slots]:
    """Leave out the first token of each root, which has no key of the head."""
    roots = spec.parent < 0
    begins = np.cumsum(spec.length) - spec.length
    offsets = spec.query_offset - roots[spec.query_node]
    rest = TreeSpec(spec.parent, spec.length - roots, spec.query_node, offsets)
    return rest, np.delete(slots, begins[roots])
