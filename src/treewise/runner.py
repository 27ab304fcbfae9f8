"""One device: weights, KV pool, one forward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from treewise.attention import AttentionSpec, Plan, TreeSpec, get_backend, plan_tree, run_plan
from treewise.batch import Batch
from treewise.graphs import GraphCache, Kind, Plans, padded
from treewise.kv import Copy, Kept, KVManager, Slots
from treewise.models import CausalLM
from treewise.ops import Heads, rotate_and_store
from treewise.plan.data import upload_together
from treewise.sparsity.observation import Seen
from treewise.stems import StemPlanner
from treewise.thicket import Ints

Result = TypeVar("Result")

ROOM = 32
"""Tokens that branches may append on a GPU before a new plan is made."""
LEFT_ROWS = 256
"""Most rows of a step that leaves its queries."""


@dataclass(frozen=True, eq=False)
class Move(Copy):
    """A copy whose slots are known on the device too: `there` [2, tokens], sources and targets."""

    there: Tensor

    @property
    def source_there(self) -> Tensor:
        """The sources on the device."""
        return self.there[0]

    @property
    def target_there(self) -> Tensor:
        """The targets on the device."""
        return self.there[1]


class Step(NamedTuple):
    """What the host says of a forward; the rest is on the device.

    Attributes
    ----------
    rows : int64 [3, rows]
        Tokens, positions and slots. Token ``-1 - i`` is the ``i``-th of those that were drawn, which the host does not
        know.
    plans : Plans
    logit_rows : int64 [logit rows] or None
        The rows whose logits are wanted; None for all of them.
    copies : sequence of Copy
        What has to move before.
    is_decoding : bool
        Whether the step may be a replay of a captured one.
    """

    rows: Ints
    plans: Plans
    logit_rows: Ints | None
    copies: Sequence[Copy]
    is_decoding: bool


class Tap(NamedTuple):
    """Takes what enters some of the model's layers, within every forward.

    Attributes
    ----------
    layers : tuple of int
    take : callable
        Called with the slots of all rows, int64 [rows], and the states side by side [rows, layers * hidden], both on
        the device. Captured steps do again what it did when they were captured, so it does not wait for the device.
    """

    layers: tuple[int, ...]
    take: Callable[[Tensor, Tensor], None]


class _Layer(NamedTuple):
    """Where a layer's keys and values are.

    Attributes
    ----------
    kind : Kind
        Which plan serves the layer.
    own : (Tensor, Tensor)
        Its keys and values [slots, kv_heads, head_dim].
    k, v : Tensor [any, kv_heads, head_dim] or [any, 1, head_dim]
        The same with all behind them, as the plan numbers slots: of all KV heads together or of single ones.
    """

    kind: Kind
    own: tuple[Tensor, Tensor]
    k: Tensor
    v: Tensor


class Runner:
    """Holds a model and its key and value tensors, and computes batches of rows.

    Parameters
    ----------
    model : CausalLM
        Its matrices are packed, see `CausalLM.pack`.
    attention : str
        Method of attention, see `treewise.attention.plan_tree`.
    num_slots, page_size : int
        Of the pool that hands out the slots.
    kv_dtype : torch.dtype
        Element type of keys and values.
    cuda_graphs : bool, optional
        Capture steps of decoding as CUDA graphs; by default where there is a GPU.

    Raises
    ------
    ValueError
        If there is no such method, it cannot serve this model on its device, or there is no CUDA to capture graphs.

    Attributes
    ----------
    k, v : Tensor
        [layers, slots, kv_heads, head_dim]
    num_ranks : int
        Devices that the model is shared out over.
    weight_bytes : int
        On all of them.
    kv_bytes_per_token : int
        Of keys and values, over all layers and on all devices.
    graphs : GraphCache or None
        Captured steps of decoding, where asked for.
    followers : list of callable
        Called with every `Move`, the runner's own first: whoever keeps something under the same slots.
    watchers : list of callable
        Called in every forward with the slots of all rows and the hidden states [rows, hidden] behind the last norm,
        which the next forward overwrites.
    taps : list of Tap
        To be added to before the first step.
    queries : Tensor or None
        Those that the last step of few rows has left, rotated [layers, rows, heads, head_dim]; see `leave_queries`.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: str,
        num_slots: int,
        page_size: int,
        kv_dtype: torch.dtype,
        cuda_graphs: bool | None = None,
    ) -> None:
        self.num_ranks = model.num_ranks
        self.weight_bytes = sum(weight.nbytes for weight in model.parameters())
        model.pack()
        self.model = model
        self.attention = attention
        self.page_size = page_size
        config = model.config
        self.device, self.dtype = model.device, model.dtype
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self.kv_dtype = kv_dtype
        pool = _zeros((2, *shape), self.kv_dtype, self.device)
        self.k, self.v = pool.unbind()
        # The keys of a token in a layer, or the values, are a row; not every operation knows 8-bit floats.
        rows = pool.view(2 * config.num_layers * num_slots, -1)
        self._rows = rows.view(torch.uint8) if rows.element_size() == 1 else rows
        self._starts = torch.arange(0, len(rows), num_slots, device=self.device)[:, None]  # of the layers
        self.kv_bytes_per_token = 2 * self.k[:, 0].numel() * self.k.element_size()
        self._layers = lru_cache(maxsize=16)(self._find_layers)  # most steps have plans of the same kinds
        self.followers: list[Callable[[Move], None]] = [self.copy]
        self.watchers: list[Callable[[Ints, Tensor], None]] = []
        self.taps: list[Tap] = []
        self.queries: Tensor | None = None
        self._refuse_unsupported()
        is_gpu = self.device.type == "cuda"
        if cuda_graphs and not is_gpu:
            raise ValueError(f"cuda_graphs: the model is on {self.device}; they need cuda")
        # Nobody reads slot 0 of a pool: the rows of a graph that a step does not have store their keys there.
        wants_graphs = is_gpu if cuda_graphs is None else cuda_graphs
        self.graphs = GraphCache(self._compute, spare_slot=0) if wants_graphs else None
        self.room = ROOM if is_gpu and attention not in ("medusa", "specinfer", "vanilla") else 0
        windows = set(model.config.layer_windows)
        self.stems = StemPlanner(partial(self._plan, room=0)) if self.room and windows == {None} else None
        # The batch planned last, which belongs to others; how far it had grown; its plans.
        self._planned: tuple[ReferenceType[Batch], int, Plans] | None = None

    def leave_queries(self) -> None:
        """Let steps of at most `LEFT_ROWS` rows leave their queries behind from now on, also those that are captured.

        It costs them nothing: queries are written to where they stay.
        """
        if self.queries is None:
            config = self.model.config
            shape = (config.num_layers, LEFT_ROWS, config.num_heads, config.head_dim)
            self.queries = torch.zeros(shape, dtype=self.dtype, device=self.device)
            if self.graphs is not None:
                self.graphs.clear()

    def kv_bytes(self, plans: Plans) -> int:
        """Return the bytes of keys and values that a forward under `plans` reads."""
        layers = Counter(map(partial(self._kind, plans), range(len(self.k))))
        return sum(plan.io(layers=layers[kind]).kv for kind, plan in plans.items())

    def kv_bytes_of_paths(self, lengths: Sequence[int]) -> list[int]:
        """Return the bytes of keys and values that one query at the end of each of so many tokens has to read."""
        windows = self.model.config.layer_windows
        length = np.asarray(lengths, np.int64)
        seen = np.zeros_like(length)
        for window, layers in Counter(windows).items():
            seen += layers * (length if window is None else np.minimum(length, window))
        return cast(list[int], (seen * self.kv_bytes_per_token // len(windows)).tolist())

    def plan(self, batch: Batch, kv: KVManager) -> Plans:
        """Plan the step's attention once for each kind of layer, or go on with the plans of a batch that only grew."""
        if self._planned is not None:
            planned, grown, plans = self._planned
            if planned() is batch and batch.grown == grown + 1 and self._have_room(plans):
                slots = batch.store_slots(kv).astype(np.int32)
                with torch.inference_mode():
                    for kind, plan in plans.items():
                        of_heads = [kv.numbered(slots, kind.first, head) for head in kind.heads]
                        plan.grow(np.stack(of_heads, axis=1).ravel())
                self._planned = planned, batch.grown, plans
                return plans
        # A captured graph keeps what the last plan that it ran has on the device: no other goes on.
        self._planned = None
        kept = batch.kept(kv)
        if self.stems is not None:
            if not kept and (stems := batch.stems()) is not None:
                return self.stems.plan(stems, kv)
            self.stems.forget()
        room = self.room if batch.can_grow else 0
        if kept:
            kinds = self._kinds(kept, kv)
            seen = batch.tree_specs(kv, [(kind.first, kind.heads) for kind in kinds])
            plans = {kind: self._plan_kind(kind, *own, room=room) for kind, own in zip(kinds, seen, strict=True)}
        else:
            plans = self._plan(*batch.tree_spec(kv), room=room)
        self._planned = ref(batch), batch.grown, plans
        return plans

    def plan_ahead(self, batch: Batch, kv: KVManager) -> None:
        """Plan what may come behind `batch` while the device computes that, if it would take time later."""
        if self.stems is not None and not batch.kept(kv) and (stems := batch.stems()) is not None:
            self.stems.plan_ahead(stems, kv)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        plans: Plans,
        kv: KVManager,
        drawn: Tensor | None = None,
        see: Callable[[Tensor], None] | None = None,
        seen: Sequence[Seen] = (),
    ) -> Tensor:
        """Compute `batch` and store the keys of its rows; nothing waits for the device.

        Parameters
        ----------
        batch : Batch
        plans : Plans
        kv : KVManager
        drawn : Tensor [any], int64, optional
            Tokens that the host does not know: ``-1 - i`` in the batch stands for the ``i``-th.
        see : callable, optional
            Called with what comes before the output head, see `hidden`; the next forward overwrites it.
        seen : sequence of Seen
            Who takes queries of the rows: within the forward or, where a step of decoding leaves them, behind it.

        Returns
        -------
        Tensor
            Logits of ``batch.logit_rows`` [logit rows, vocabulary], see `CausalLM.logits`.
        """
        hidden = self.hidden(batch, plans, kv, drawn, seen)
        if see is not None:
            see(hidden)
        return self.model.logits(hidden)

    def hidden(
        self, batch: Batch, plans: Plans, kv: KVManager, drawn: Tensor | None = None, seen: Sequence[Seen] = ()
    ) -> Tensor:
        """Do what `forward` does up to the output head, whose rows [logit rows, hidden] this returns."""
        everything = batch.logit_rows == list(range(batch.num_rows))
        step = Step(
            np.stack((batch.tokens(), batch.positions(), batch.store_slots(kv))),
            plans,
            None if everything else np.array(batch.logit_rows, np.int64),
            kv.take_copies(),
            batch.is_decoding,
        )
        return self.take(step, drawn, seen)

    def take(self, step: Step, drawn: Tensor | None = None, seen: Sequence[Seen] = ()) -> Tensor:
        """Take a step, see `hidden`."""
        plans, num_rows = step.plans, step.rows.shape[1]
        parts: list[Ints] = [step.rows.ravel()]
        if drawn is not None:
            tokens = step.rows[0]
            unknown = np.flatnonzero(tokens < 0)
            parts += [unknown, ~tokens[unknown]]
        if step.logit_rows is not None:
            parts.append(step.logit_rows)
        unsent = [plan for plan in plans.values() if plan.unsent]
        parts += [part for plan in unsent for part in plan.unsent]
        there = iter(upload_together([*parts, *_indices(step.copies)], self.device))
        rows = next(there).view(3, num_rows)
        if drawn is not None:
            rows[0].index_copy_(0, next(there), drawn.index_select(0, next(there)))
        wanted = None if step.logit_rows is None else next(there)
        for plan in unsent:
            plan.receive(there)
        self._move(step.copies, there)
        left = self._left(num_rows) if step.is_decoding else None
        within = [each for each in seen if left is None or not each.observation.alone]
        replays = self.graphs is not None and step.is_decoding and not within
        hidden = self.graphs.run(rows, plans) if self.graphs is not None and replays else None
        if hidden is None:
            hidden = self._compute(rows[0], rows[1], rows[2], plans, None if self.watchers else wanted, within)
            wanted = wanted if self.watchers else None
        if left is not None:
            for each in seen:
                if each.observation.alone:
                    each.take_behind(left)
        for watch in self.watchers:
            watch(step.rows[2], hidden)
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def _left(self, num_rows: int) -> Tensor | None:
        """Return where a step of so many rows leaves its queries, [layers, rows, heads, head_dim]; None: nowhere."""
        return self.queries if self.queries is not None and num_rows <= self.queries.shape[1] else None

    @torch.inference_mode()
    def read_aside(self, rows: Ints, tree: TreeSpec, slots: Slots) -> Tensor:
        """Compute rows over some of the keys that are there, beside the step under way; returns the logits of all.

        Moves that are due must have been made.

        Parameters
        ----------
        rows : int64 [3, rows]
            Tokens, positions, and where the keys of each go.
        tree : TreeSpec
            What they see, the rows as its queries.
        slots : Slots
            Of the tree's tokens.
        """
        self._planned = None  # a captured graph keeps what it has run last
        if self.stems is not None:
            self.stems.forget()
        plans = self._plan(tree, slots, room=0)
        unsent = [plan for plan in plans.values() if plan.unsent]
        there = iter(upload_together([rows.ravel(), *(part for plan in unsent for part in plan.unsent)], self.device))
        inputs = next(there).view(rows.shape)
        for plan in unsent:
            plan.receive(there)
        hidden = None if self.graphs is None else self.graphs.run(inputs, plans)
        if hidden is None:
            hidden = self._compute(inputs[0], inputs[1], inputs[2], plans)
        return self.model.logits(hidden)

    @torch.inference_mode()
    def rehearse(self, tree: TreeSpec) -> None:
        """Compute the queries of a tree that nobody has asked for, so that kernels are compiled.

        Their keys go to slot 0, and what they read means nothing.
        """
        tokens, positions, slots = torch.zeros((3, tree.num_queries), dtype=torch.int64, device=self.device)
        self._compute(tokens, positions, slots, self._plan(tree, self._any_slots(tree), room=0))

    @torch.inference_mode()
    def make_ready(self, tree: TreeSpec, rows: int, grows: bool) -> None:
        """Capture a graph for steps of up to so many rows on trees like this one, unless there is one.

        Parameters
        ----------
        tree : TreeSpec
        rows : int
            As `treewise.graphs.padded` gives them, at least the tree's queries.
        grows : bool
            Whether each query is at the last token of a leaf of its own, behind which there is to be room.
        """
        if self.graphs is not None:
            plans = self._plan(tree, self._any_slots(tree), room=self.room if grows else 0)
            self.graphs.make_ready(rows, 3, plans)

    def make_ready_for(self, batch: Batch, kv: KVManager) -> None:
        """Capture a graph for steps such as `batch`, unless there is one."""
        if self.graphs is not None:
            self.graphs.make_ready(padded(batch.num_rows), 3, self.plan(batch, kv))

    def _any_slots(self, tree: TreeSpec) -> Slots:
        return np.arange(tree.num_tokens, dtype=np.int32) % self.k.shape[1]

    @torch.inference_mode()
    def move(self, kv: KVManager) -> None:
        """Move keys and values, and what else lies under their slots, that must be elsewhere by the next forward."""
        if copies := kv.take_copies():
            self.on_ranks(Runner.shift, copies)

    def shift(self, copies: Sequence[Copy]) -> None:
        """Move what `copies` say."""
        self._move(copies, iter(upload_together(_indices(copies), self.device)))

    def on_ranks(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function with this runner, and with those of other ranks; here there are none.

        Parameters
        ----------
        function : callable
            Of a module or a class, so that other processes find it by its name.
        *arguments
            What such calls have returned stands for what came of them on each rank.

        Returns
        -------
        object
            What comes of it here.
        """
        return function(self, *arguments)

    def check(self) -> None:
        """Raise an error if what was computed last means nothing, as other ranks have ended; here there are none."""

    def _move(self, copies: Sequence[Copy], there: Iterator[Tensor]) -> None:
        """Let everybody follow copies, whose slots come next of what is on the device."""
        for copy in copies:
            move = Move(copy.source, copy.target, next(there).view(2, -1))
            for follow in self.followers:
                follow(move)

    def copy(self, move: Move) -> None:
        """Move keys and values of this runner.

        Along a dimension within a large tensor `index_copy_` would start a kernel for each two gigabytes of it.
        """
        source, target = (self._starts + move.there[:, None]).flatten(1).unbind()
        self._rows.index_copy_(0, target, self._rows.index_select(0, source))

    def places(self, slots: Sequence[Sequence[Slots]]) -> list[list[Tensor]]:
        """Put on the device the slots of tokens that each layer has, of all KV heads together or of each head."""
        there = iter(upload_together([each for parts in slots for each in parts], self.device))
        return [list(islice(there, len(parts))) for parts in slots]

    def read(self, places: Tensor, parts: int = 1) -> Tensor:
        """Return keys and values at slots as `KVManager.slots` numbers them, those of heads where `parts` are heads.

        Returns
        -------
        Tensor [2, tokens, kv_heads, head_dim] or [2, tokens, 1, head_dim]
        """
        rows = self._rows_of(parts)
        both = rows.index_select(0, self._both(places, rows)).view(self.kv_dtype)
        return both.view(2, len(places), self.k.shape[2] // parts, self.k.shape[3])

    def gather(
        self, places: Sequence[Sequence[Tensor]], chosen: Sequence[Sequence[Tensor] | None]
    ) -> list[Sequence[Tensor]]:
        """Return the keys and values of the tokens that stay in each layer, see `store_kept`.

        Parameters
        ----------
        places : sequence of sequences of Tensor [tokens], int64
            See the method `places`.
        chosen : sequence of sequences of Tensor [kv_heads, kept], int64
            Of each layer which of these tokens each KV head keeps, in one tensor or in one for each head; None for all.

        Returns
        -------
        list of sequences of Tensor [2, kept, kv_heads, head_dim]
            Of each layer in one or in one for each KV head.
        """
        alike: dict[Hashable, list[int]] = {}  # layers that are read at once
        for layer, (parts, kept) in enumerate(zip(places, chosen, strict=True)):
            together = len(parts) == 1 and (kept is None or len(kept) == 1)
            sizes = len(parts[0]), None if kept is None else kept[0].shape[1]
            alike.setdefault(sizes if together else layer, []).append(layer)
        thinned: dict[int, Sequence[Tensor]] = {}
        for first, *others in alike.values():
            parts, kept = places[first], chosen[first]
            if len(parts) > 1 or (kept is not None and len(kept) > 1):
                thinned[first] = self._gather_by_head(parts, kept)
                continue
            layers = [first, *others]
            slots = torch.stack([places[layer][0] for layer in layers])  # [layers, tokens]
            if kept is None:
                both = self.read(slots.flatten())
            else:
                which = torch.stack([own[0] for layer in layers if (own := chosen[layer]) is not None])
                heads = torch.arange(which.shape[1], device=self.device)[:, None]
                slots = (slots[:, None] * len(heads) + heads).gather(2, which).transpose(1, 2)  # [layers, kept, heads]
                both = self.read(slots.flatten(), len(heads)).view(2, -1, len(heads), self.k.shape[3])
            thinned.update(zip(layers, ([own] for own in both.chunk(len(layers), dim=1)), strict=True))
        return [thinned[layer] for layer in range(len(places))]

    def _gather_by_head(self, places: Sequence[Tensor], chosen: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """Return what stays of a layer whose heads hold, or keep, different numbers of tokens."""
        if chosen is None:
            return [self.read(own, len(places)) for own in places]
        heads = self.k.shape[2]
        if len(places) == 1:
            places = [places[0] * heads + head for head in range(heads)]
        return [self.read(own[which[0]], heads) for own, which in zip(places, chosen, strict=True)]

    def store_kept(self, kept: Kept, thinned: Sequence[Sequence[Tensor]]) -> None:
        """Put what layers keep where it belongs; moves that are due come first."""
        for parts in {len(held) for held in thinned}:
            layers = [layer for layer, held in enumerate(thinned) if len(held) == parts]
            slots = np.concatenate([own for layer in layers for own in kept.slots_from(layer)])
            new = torch.cat([both for layer in layers for both in thinned[layer]], dim=1).view(self._rows.dtype)
            rows, [there] = self._rows_of(parts), upload_together([slots], self.device)
            rows.index_copy_(0, self._both(there, rows), new.flatten(2).flatten(0, 1))

    def _rows_of(self, parts: int) -> Tensor:
        """Return keys and values in rows of a token's KV heads in a layer, which are in so many parts."""
        return self._rows.view(len(self._rows) * parts, -1)

    @staticmethod
    def _both(slots: Tensor, rows: Tensor) -> Tensor:
        """Return the rows of keys and then those of values at slots that are numbered over all layers."""
        return torch.cat((slots, slots + len(rows) // 2))

    def _compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        plans: Plans,
        wanted: Tensor | None = None,
        seen: Sequence[Seen] = (),
    ) -> Tensor:
        """Compute rows up to the output head; gives those that are wanted, all of them by default."""
        config = self.model.config
        run = partial(run_plan, scale=config.attention_scale, soft_cap=config.attention_soft_cap)
        layers = self._layers(tuple(plans))
        left = self._left(len(tokens))

        def attend(layer: int, heads: Heads) -> Tensor:
            kind, own, k, v = layers[layer]
            q = rotate_and_store(heads, *own, slots, out=None if left is None else left[layer, : len(tokens)])
            plan = plans[kind]
            queries = q.reshape(plan.num_rows, plan.num_heads, plan.head_dim)
            if not seen:
                return cast(Tensor, run(plan, queries, k, v)).view(q.shape)
            out, lse = run(plan, queries, k, v, return_lse=True)
            for each in seen:
                each.take(layer, q, lse.view(q.shape[:2]))
            return out.view(q.shape)

        inner: dict[int, Tensor] = {}
        see = {layer: partial(inner.__setitem__, layer) for tap in self.taps for layer in tap.layers}
        hidden = cast(Tensor, self.model(tokens, positions, attend, wanted, see))
        for tap in self.taps:
            tap.take(slots, torch.cat([inner[layer] for layer in tap.layers], dim=-1))
        return hidden

    def _find_layers(self, kinds: tuple[Kind, ...]) -> list[_Layer]:
        """Return where the layers' keys and values are, under plans of these kinds."""
        layers = []
        for layer, own in enumerate(zip(self.k.unbind(), self.v.unbind(), strict=True)):
            kind = self._kind(kinds, layer)
            shape = self.k.shape[2] // len(kind.heads), self.k.shape[3]
            k, v = (pool[layer - kind.first :].view(-1, *shape) for pool in (self.k, self.v))
            layers.append(_Layer(kind, own, k, v))
        return layers

    def _kinds(self, kept: Sequence[Kept], kv: KVManager) -> list[Kind]:
        """Return the kinds of layers of which each keeps as much as the others of its kind, of each of these."""
        windows = self.model.config.layer_windows
        firsts = {first for each in kept for first in each.firsts}
        turns = (layer for layer in range(1, len(windows)) if windows[layer] != windows[layer - 1])
        return [Kind(windows[first], first, kv.heads(kept, first)) for first in sorted(firsts.union(turns))]

    def _kind(self, kinds: Iterable[Kind], layer: int) -> Kind:
        """Return the kind of `layer` among those that there are plans for."""
        window = self.model.config.layer_windows[layer]
        return max(kind for kind in kinds if kind.window == window and kind.first <= layer)

    def _plan(self, spec: TreeSpec, slots: Slots | None, open_tokens: int = 0, *, room: int) -> Plans:
        """Plan for layers that all hold the same."""
        kinds = map(Kind, set(self.model.config.layer_windows))
        return {kind: self._plan_kind(kind, spec, slots, open_tokens, room=room) for kind in kinds}

    def _plan_kind(self, kind: Kind, spec: TreeSpec, slots: Slots | None, open_tokens: int = 0, *, room: int) -> Plan:
        config, parts = self.model.config, len(kind.heads)
        return plan_tree(
            spec,
            self.attention,
            num_heads=config.num_heads // parts,
            num_kv_heads=config.num_kv_heads // parts,
            head_dim=config.head_dim,
            slots=slots,
            page_size=self.page_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            device=self.device,
            window=kind.window,
            room=room,
            open_tokens=open_tokens,
        )

    @staticmethod
    def _have_room(plans: Plans) -> bool:
        return all(plan.grown < len(plan.room) for plan in plans.values())

    def _refuse_unsupported(self) -> None:
        """Plan the smallest of trees and ask the backend whether it would run it, before anything is served."""
        for plan in self._plan(TreeSpec(parent=[-1], length=[1], query_node=[0]), None, room=0).values():
            backend = get_backend(plan.backend, self.device)
            if reasons := backend.unsupported(AttentionSpec.of(plan)):
                raise ValueError(f"attention: {self.attention!r} cannot serve this model: {'; '.join(reasons)}")


def _indices(copies: Sequence[Copy]) -> list[Slots]:
    return [np.concatenate((copy.source, copy.target)) for copy in copies]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a pool without garbage in it: a masked score is multiplied with whatever lies there, and NaN survives.

    NumPy's zeros, unlike PyTorch's, take no memory on a CPU until they are written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
