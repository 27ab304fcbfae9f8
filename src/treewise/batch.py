"""The rows of one step: which tokens of which nodes are computed together, and whose logits are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from treewise.kv import Kept, KVManager, Slots
from treewise.plan import TreeSpec
from treewise.thicket import Ints, Shape, Thicket
from treewise.tree import Node

ACCEPTED = 16
"""Most rows of one node in a step of decoding."""


class Growth(Protocol):
    """Tokens below nodes of the forest that are no nodes themselves: a thicket, or guesses of what follows a leaf.

    Attributes
    ----------
    tenant : object
        The tree that they belong to.
    bases : sequence of Node
        The nodes below which they stand.
    token, length, slot : arrays [entries]
        Of each entry the token, the length of its path, and where its key goes.
    """

    @property
    def tenant(self) -> object: ...  # noqa: D102

    @property
    def bases(self) -> Sequence[Node]: ...  # noqa: D102

    @property
    def token(self) -> Ints: ...  # noqa: D102

    @property
    def length(self) -> Ints: ...  # noqa: D102

    @property
    def slot(self) -> Ints: ...  # noqa: D102

    def shape(self, rows: Ints) -> Shape:
        """Return what the entries `rows` see of this as nodes, and perhaps more."""


class Guesses(Growth, Protocol):
    """A growth all of which is computed at once.

    Attributes
    ----------
    rows : int64 [rows]
        All its entries, depth first.
    below : int64 [rows]
        How many of them see the token of each, itself included: that many from it on.
    first : int
        Where the logits of the first row stand in the runner's answer.
    """

    rows: Ints
    below: Ints
    first: int


class Span(NamedTuple):
    """Consecutive rows of one node: tokens ``start`` to ``end``; ``store`` says whether their keys are new.

    ``owner`` is the tree that asked for them first.
    """

    node: Node
    start: int
    end: int
    store: bool
    owner: object


class _Forest(NamedTuple):
    """What the rows of a batch see, whatever the layer.

    Attributes
    ----------
    sealed : list of Node
        The first nodes: those of which layers hold as much as each has kept. Their length here is 0.
    parent, length, query_node, query_offset, below
        See `TreeSpec`.
    slots : Slots
        Of all other nodes.
    """

    sealed: list[Node]
    parent: Ints
    length: Ints
    query_node: Ints
    query_offset: Ints
    below: Ints | None
    slots: Slots


@dataclass(eq=False)
class Batch:
    """Rows in order of their spans, then those of growths; a row is one token whose query runs in this step.

    A row whose keys are in the pool already is a *query-only* row: it asks again for logits that nobody kept, as a
    fully cached prompt or a second fork from the same place does. Its own keys go to the scratch slot.

    While trees only grow, one token a leaf and step, they keep their batch: `grow` moves all its rows on by a token.
    So whoever has planned for a batch that `can_grow`, with room, may go on with that plan (see `Plan.grow`) as long as
    the same object comes back; the new tokens' slots, in the order of the rows, are its `store_slots`.

    Attributes
    ----------
    spans : list of Span
        As they were in the batch's first step.
    growths : list of (Growth, int64 [rows])
        Each with the entries that are rows of this step.
    num_rows : int
    logit_rows : list of int
        Rows whose logits are wanted, each once however many branches wait for it.
    grown : int
        How many steps ago that was: each span now lies so many tokens further on.
    """

    spans: list[Span] = field(default_factory=list)
    num_rows: int = 0
    logit_rows: list[int] = field(default_factory=list)
    grown: int = 0
    growths: list[tuple[Growth, Ints]] = field(default_factory=list)
    _stored: dict[Node, tuple[int, Span]] = field(default_factory=dict)  # first row of the node's new tokens
    _asked: dict[tuple[Node, int], int] = field(default_factory=dict)  # row of a query-only token
    _logits: dict[int, int] = field(default_factory=dict)  # row -> place among the logits
    _slots: Slots = field(default_factory=lambda: np.empty(0, np.int32))  # of the first rows, as far as known,
    _num_moves: int = 0  # until tokens change their slots
    _first_positions: NDArray[np.int64] | None = None

    @classmethod
    def of_leaves(cls, leaves: Sequence[Node], owners: Sequence[object], kv: KVManager) -> Batch:
        """Return a batch of the last token of each leaf, all logits wanted, in that order; their slots are reserved.

        Raises
        ------
        OutOfSlots
            If the pool is full; some of the leaves may have got their slots.
        """
        spans = [Span(n, len(n.tokens) - 1, len(n.tokens), True, o) for n, o in zip(leaves, owners, strict=True)]
        rows = range(len(spans))
        stored = dict(zip(leaves, enumerate(spans), strict=True))
        logits = dict(zip(rows, rows, strict=True))
        batch = cls(spans, len(spans), list(rows), _stored=stored, _logits=logits)
        batch._reserve(kv)
        return batch

    @cached_property
    def is_decoding(self) -> bool:
        """Whether no node has more rows than drafted tokens that were accepted; prompts come in larger chunks."""
        return all(end - start <= ACCEPTED for _, start, end, _, _ in self.spans)

    @cached_property
    def can_grow(self) -> bool:
        """Whether each row is the last token of a leaf of its own, so that a plan may leave room for the next ones."""
        return self.num_rows == len(self.spans) and all(s.store and not s.node.children for s in self.spans)

    def computed(self, node: Node) -> int:
        """How many tokens of `node` have keys once this batch has run."""
        stored = self._stored.get(node)
        return node.computed if stored is None else stored[1].end + self.grown

    def lacking(self, tip: Node) -> int:
        """How many tokens of the path to `tip` will have no keys even once this batch has run."""
        node: Node | None = tip
        total = 0
        while node is not None and (lacking := len(node.tokens) - self.computed(node)):
            total += lacking
            node = node.parent
        return total

    def add(self, node: Node, end: int, owner: object, start: int | None = None) -> None:
        """Compute the tokens of `node` from `start`, by default those that have no keys yet, up to `end`."""
        span = Span(node, node.computed if start is None else start, end, True, owner)
        self._stored[node] = (self.num_rows, span)
        self._append(span)

    def asked(self) -> Iterator[tuple[Node, int]]:
        """Yield the node of each row that only asks for logits, and where these will stand in the runner's answer."""
        for (node, _), row in self._asked.items():
            if (place := self._logits.get(row)) is not None:
                yield node, place

    def row(self, node: Node, offset: int) -> int | None:
        """Return the row that computes token `offset` of `node`, None if no row does."""
        stored, offset_then = self._stored.get(node), offset - self.grown
        if stored is not None and stored[1].start <= offset_then < stored[1].end:
            return stored[0] + offset_then - stored[1].start
        return self._asked.get((node, offset))

    def ask(self, node: Node, offset: int, owner: object) -> int:
        """Add a query-only row for token `offset` of `node`."""
        row = self._asked[node, offset] = self.num_rows
        self._append(Span(node, offset, offset + 1, False, owner))
        return row

    def want_logits(self, row: int) -> int:
        """Return where the logits of `row` will stand in the runner's answer."""
        place = self._logits.setdefault(row, len(self.logit_rows))
        if place == len(self.logit_rows):
            self.logit_rows.append(row)
        return place

    def add_thicket(self, thicket: Thicket, count: int) -> range:
        """Compute the next `count` rows of `thicket`; return where their logits will stand in the runner's answer."""
        entries = thicket.rows[thicket.num_computed : thicket.num_computed + count]
        self.growths.append((thicket, entries))
        places = range(len(self.logit_rows), len(self.logit_rows) + count)
        self.logit_rows.extend(range(self.num_rows, self.num_rows + count))
        self.num_rows += count
        return places

    def beside(self, guesses: Sequence[Guesses]) -> Batch:
        """Return a batch of these rows and of `guesses`, all logits of which are wanted."""
        batch = replace(self, logit_rows=[*self.logit_rows], growths=[*self.growths], _logits={**self._logits})
        for each in guesses:
            each.first = len(batch.logit_rows)
            batch.growths.append((each, each.rows))
            batch.logit_rows.extend(range(batch.num_rows, batch.num_rows + len(each.rows)))
            batch.num_rows += len(each.rows)
        return batch

    def asking(self, asked: Sequence[tuple[Node, int, object]]) -> Batch:
        """Return a batch of these rows and of query-only ones for tokens of nodes, each for a tree."""
        spans = [Span(n, start + self.grown, end + self.grown, store, o) for n, start, end, store, o in self.spans]
        new = {span.node: span for span in spans if span.store}
        first = self._num_span_rows  # rows of growths come last

        def moved(row: int) -> int:
            return row + len(asked) if row >= first else row

        batch = replace(
            self,
            spans=spans,
            num_rows=first,
            logit_rows=[moved(row) for row in self.logit_rows],
            grown=0,
            growths=[],
            _stored={node: (row, new[node]) for node, (row, _) in self._stored.items()},
            _asked={**self._asked},
            _logits={moved(row): place for row, place in self._logits.items()},
            _first_positions=None,
        )
        for node, offset, owner in asked:
            batch.ask(node, offset, owner)
        batch.growths = [*self.growths]
        batch.num_rows = self.num_rows + len(asked)
        return batch

    def stems(self) -> list[tuple[Node, Guesses | None]] | None:
        """Return the leaf of each row that is no guess, and the guesses behind it; None if there is more to the batch.

        Guesses come in the order of their leaves.
        """
        if not self.growths or self._num_span_rows != len(self.spans):
            return None
        if any(isinstance(growth, Thicket) for growth, _ in self.growths):
            return None
        guesses = {growth.bases[0]: cast(Guesses, growth) for growth, _ in self.growths}
        nodes = [span.node for span in self.spans if span.store and not span.node.children]
        stems = [(node, guesses.get(node)) for node in nodes]
        ordered = [growth for _, growth in stems if growth is not None] == [growth for growth, _ in self.growths]
        return stems if ordered and len(nodes) == len(self.spans) else None

    def then(self, growths: Sequence[tuple[Growth, Ints]]) -> Batch:
        """Return a batch of rows of `growths` alone, all logits of which are wanted, that follows this one."""
        rows = range(sum(len(entries) for _, entries in growths))
        return Batch(growths=list(growths), num_rows=len(rows), logit_rows=list(rows), _stored=self._stored)

    def grow(self, kv: KVManager) -> None:
        """Move every row, each the last token of a leaf, on to the one token that the leaf has gained since.

        Raises
        ------
        OutOfSlots
            If the pool is full; the batch has not changed then.
        """
        self._reserve(kv)
        self.grown += 1

    def commit(self) -> None:
        """Record that the rows have run."""
        for node, _, end, store, _ in self.spans:
            if store:
                node.computed = end + self.grown

    @cached_property
    def rows_of_owners(self) -> dict[object, int]:
        """How many rows each tree has asked for."""
        rows: dict[object, int] = {}
        for _, start, end, _, owner in self.spans:
            rows[owner] = rows.get(owner, 0) + end - start
        for growth, entries in self.growths:
            rows[growth.tenant] = rows.get(growth.tenant, 0) + len(entries)
        return rows

    def tokens(self) -> NDArray[np.int64]:
        """Return the token of each row, int64 [rows]."""
        if self._num_span_rows == len(self.spans):
            tokens = [node.tokens[start + self.grown] for node, start, *_ in self.spans]
        else:
            tokens = [token for span in self.spans for token in span.node.tokens[span.start : span.end]]
        return np.concatenate([np.array(tokens, np.int64), *(growth.token[rows] for growth, rows in self.growths)])

    def positions(self) -> NDArray[np.int64]:
        """Return the logical position of each row, int64 [rows]."""
        if self._first_positions is None:
            starts = np.array([span.node.start + span.start for span in self.spans], np.int64)
            single = self._num_span_rows == len(self.spans)
            self._first_positions = starts if single else np.repeat(starts, self._lengths()) + self._within_spans()
        own = self._first_positions + self.grown
        return (
            np.concatenate([own, *(growth.length[rows] - 1 for growth, rows in self.growths)]) if self.growths else own
        )

    def store_slots(self, kv: KVManager) -> NDArray[np.int64]:
        """Return the slot that each row's keys go to, int64 [rows]; the scratch slot for query-only rows."""
        known = self._slots[: None if kv.pool.num_moves == self._num_moves else 0]
        parts = [
            kv.slots(node)[start:end] if store else np.array([kv.pool.scratch_slot], np.int32)
            for node, start, end, store, _ in self.spans[len(known) :]
        ]
        return np.concatenate([known, *parts, *(growth.slot[rows] for growth, rows in self.growths)], dtype=np.int64)

    def tree_spec(self, kv: KVManager) -> tuple[TreeSpec, Slots]:
        """Return the forest that the rows see, and the slot of each of its tokens, in the first layer."""
        return next(self.tree_specs(kv, [(0, (None,))]))

    def tree_specs(
        self, kv: KVManager, views: Iterable[tuple[int, Sequence[int | None]]]
    ) -> Iterator[tuple[TreeSpec, Slots]]:
        """Yield the forest that the rows see, and the slot of each of its tokens, as layers hold them.

        Nodes that have given up keys come first, then the others, parents first, in the order in which the rows reach
        them, each cut to what has keys after this step. Slots are those of `KVManager.slots`.

        Parameters
        ----------
        kv : KVManager
        views : iterable of (int, sequence of int or None)
            Layers, and of each the KV heads that see forests of their own, which are put side by side. Each row is a
            query of each head, one behind the other. None stands for all heads together.
        """
        seen = self._forest(kv)
        num_sealed = len(seen.sealed)
        at_end = np.flatnonzero(seen.query_node < num_sealed)  # whoever asks where keys were given up
        for layer, heads in views:
            kept = [[kv.slots(node, layer, head) for node in seen.sealed] for head in heads]
            slots = [(*own, kv.numbered(seen.slots, layer, head)) for own, head in zip(kept, heads, strict=True)]
            length = seen.length[None].repeat(len(heads), axis=0)  # [heads, nodes]
            length[:, :num_sealed] = [[len(each) for each in own] for own in kept]
            offset = seen.query_offset[None].repeat(len(heads), axis=0)  # [heads, rows]
            offset[:, at_end] = length[:, seen.query_node[at_end]] - 1
            first = len(seen.length) * np.arange(len(heads))[:, None]
            spec = TreeSpec(
                parent=np.where(seen.parent < 0, -1, seen.parent + first).ravel(),
                length=length.ravel(),
                query_node=(seen.query_node + first).T.ravel(),
                query_offset=offset.T.ravel(),
                below=None if seen.below is None else np.tile(seen.below, len(heads)),
            )
            yield spec, np.concatenate([each for own in slots for each in own])

    def kept(self, kv: KVManager) -> list[Kept]:
        """Return what is kept of the nodes that the rows see, where that is not everything."""
        if not kv.kept:
            return []
        ends = [*(span.node for span in self.spans), *(base for growth, _ in self.growths for base in growth.bases)]
        nodes = dict.fromkeys(node for end in dict.fromkeys(ends) for node in kv.forest.path(end))
        return [kv.kept[node] for node in nodes if node in kv.kept]

    def _forest(self, kv: KVManager) -> _Forest:
        """Return what the rows see, whatever the layer."""
        shapes = [(growth, growth.shape(rows)) for growth, rows in self.growths]
        bases = [
            growth.bases[base]
            for growth, shape in shapes
            for base in np.unique(-1 - shape.parent[shape.parent < 0]).tolist()
        ]
        place: dict[Node, int] = {}
        for end in [*(span.node for span in self.spans), *bases]:
            path: list[Node] = []
            node: Node | None = end
            while node is not None and node not in place:
                path.append(node)
                node = node.parent
            for node in reversed(path):
                place[node] = len(place)
        sealed = [node for node in place if node in kv.kept] if kv.kept else []
        if sealed:
            place = {node: number for number, node in enumerate(dict.fromkeys([*sealed, *place]))}
        whole = [kv.pool.slots(node)[: self.computed(node)] for node in islice(place, len(sealed), None)]
        starts = np.array([span.start for span in self.spans], np.int64)
        parents = [np.array([-1 if node.parent is None else place[node.parent] for node in place], np.int64)]
        nodes = [np.repeat(np.array([place[span.node] for span in self.spans], np.int64), self._lengths())]
        offsets = [np.repeat(starts, self._lengths()) + self._within_spans() + self.grown]
        num_nodes = len(place)
        for growth, shape in shapes:
            above, bottom = shape.parent + num_nodes, shape.parent < 0
            above[bottom] = [place[growth.bases[base]] for base in (-1 - shape.parent[bottom]).tolist()]
            parents.append(above)
            nodes.append(shape.row_node + num_nodes)
            offsets.append(shape.length[shape.row_node] - 1)
            num_nodes += len(shape.parent)
        below = None
        if len(shapes) == len(bases) == 1 and list(place) == kv.forest.path(bases[0]):  # one path, and all else below
            [(_, shape)] = shapes
            if shape.below is not None:
                below = np.concatenate([num_nodes - 1 - np.arange(len(place)), shape.below])
        own = np.array([0] * len(sealed) + [len(slots) for slots in whole], np.int64)
        slots = [np.empty(0, np.int32), *whole, *(shape.slots.astype(np.int32) for _, shape in shapes)]
        return _Forest(
            sealed=sealed,
            parent=np.concatenate(parents),
            length=np.concatenate([own, *(shape.length for _, shape in shapes)]),
            query_node=np.concatenate(nodes),
            query_offset=np.concatenate(offsets),
            below=below,
            slots=np.concatenate(slots),
        )

    @property
    def _num_span_rows(self) -> int:
        return self.num_rows - sum(len(rows) for _, rows in self.growths)

    def _reserve(self, kv: KVManager) -> None:
        self._slots = kv.append([span.node for span in self.spans])
        self._num_moves = kv.pool.num_moves

    def _append(self, span: Span) -> None:
        self.spans.append(span)
        self.num_rows += span.end - span.start

    def _lengths(self) -> NDArray[np.int64]:
        return np.array([end - start for _, start, end, _, _ in self.spans], np.int64)

    def _within_spans(self) -> NDArray[np.int64]:
        """Return which row of its span each row is."""
        lengths = self._lengths()
        return np.arange(self._num_span_rows) - np.repeat(np.cumsum(lengths) - lengths, lengths)
