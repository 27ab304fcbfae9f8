"""Picks rows within a token budget and a slot budget; chunks prompts; lets branches take turns where room is short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple, Protocol

from treewise.batch import Batch
from treewise.kv import KVManager, OutOfSlots, Preemption
from treewise.thicket import Thicket
from treewise.tree import Node

PROMPT_SHARE = 4
"""One row in so many is left to paths that lack more than one token, where there are any."""


class Tenant(Protocol):
    """One running tree, as the scheduler sees it."""

    @property
    def rank(self) -> tuple[int, int]:
        """Negative priority, and rank of arrival: the lower goes first, the highest gives way first."""

    def horizon(self, tip: Node) -> int | None:
        """Return the position up to which keys of the path to `tip` may be computed now; None for any."""

    def rests(self, tip: Node) -> bool:
        """Whether the path to `tip` needs no keys before other branches have come as far."""

    def tips(self) -> Iterable[Node]:
        """Return the nodes that the tree's live branches hold."""


@dataclass(eq=False)
class Lane:
    """A path whose logits somebody waits for.

    Attributes
    ----------
    tenant : Tenant
        The tree that the path belongs to.
    tip : Callable
        Returns the node in which the path ends (it changes when a node is cut).
    wanted : int
        The first position whose logits were not delivered yet.
    end : int
        The position after the last one wanted.
    """

    tenant: Tenant
    tip: Callable[[], Node]
    wanted: int
    end: int

    @property
    def done(self) -> bool:
        """Whether all wanted logits were delivered."""
        return self.wanted >= self.end

    def take(self, count: int) -> None:
        """Note that so many more logits were delivered."""
        self.wanted += count

    def lengths(self, start: int, count: int) -> Sequence[int]:
        """Return how long the path is to the last of the logits ``start`` to ``start + count``."""
        return [start + count]


class Delivery(NamedTuple):
    """Logits of `lane` at positions ``start``, ``start + 1``, …: rows `places` of the runner's answer.

    Of a thicket, `start` is a row.
    """

    lane: Lane | Thicket
    start: int
    places: Sequence[int]


class Crowded(Exception):
    """There is no room unless thickets give way as branches do."""


class PoolTooSmall(Exception):
    """The path of `lane` does not fit the pool even alone."""

    def __init__(self, lane: Lane, kv: KVManager) -> None:
        path = kv.forest.path(lane.tip())
        taken = sum(-(-len(node.tokens) // kv.pool.page_size) for node in path) * kv.pool.page_size
        super().__init__(
            f"num_kv_slots: the KV pool is too small for a path of {path[-1].end} tokens, "
            f"which takes {taken} of {kv.num_slots} slots, even where every other branch gives way"
        )
        self.tenant = lane.tenant


class KeysGivenUp(Exception):
    """Logits are wanted inside a part of the path of `lane` of which only some keys were kept."""

    def __init__(self, lane: Lane) -> None:
        super().__init__(
            "kv_sparsity: keys were given up between this place and the end of what was decoded; "
            "log-probabilities can be asked for behind them, or of everything with kv_sparsity='full'"
        )
        self.tenant = lane.tenant


class Scheduler:
    """Chooses the rows of each step.

    Every path lacks some tokens' keys: a new prompt all of them, a decoding leaf one, a preempted leaf its own part
    of its path. That is the only difference there is.

    *Rows.* Higher priorities go first; there is no aging, so a lower one waits as long as higher ones fill the steps.
    Within a priority, paths that lack one token go first, so that a long prompt, taken in chunks, never holds up
    decoding, but for one row in `PROMPT_SHARE`, which is left to paths that lack more, so that decoding never holds
    up prompts. Where not all who decode get a row, each tree gets one before any gets a second. Otherwise the earlier
    tree goes first.

    *Slots.* All branches stand in one line: trees by priority and arrival, in each first the branches that wait for
    logits, in their order, then those that nobody waits for. Where the pool is full of keys in use, whoever is last
    in line gives up keys that only it needs, from its end, as many as are wanted, and computes them again when its
    turn comes. Nobody gives way to those behind it, unless not one row would run otherwise. So the first in line
    always goes on, however wide the trees are.

    *Thickets* have their slots already. Each gets as many rows as others, up to all that it wants; paths keep their
    part. They have no place in line: where room is short or not all of one priority, `Crowded` asks that they be made
    into branches, which have.

    Parameters
    ----------
    kv : KVManager
    max_num_rows : int
        The most rows of one step.

    Attributes
    ----------
    num_preemptions : int
        How often branches have given way so far.
    """

    def __init__(self, kv: KVManager, max_num_rows: int) -> None:
        self.kv = kv
        self.max_num_rows = max_num_rows
        self.num_preemptions = 0
        self._steady: _Steady | None = None
        # The batch of the step under way with the lanes that it was chosen for and their tips, if it may grow.
        self._chosen: tuple[Batch, Sequence[Lane], list[Node]] | None = None
        self._left = max_num_rows  # for paths

    def next_batch(
        self, lanes: Sequence[Lane | Thicket], tenants: Sequence[Tenant], reserved: int = 0
    ) -> tuple[Batch, list[Delivery]]:
        """Return the rows of the next step, their slots reserved, and who gets which logits.

        Where the leaves that had rows in the last step have only grown by a token each, and nothing else has
        happened, that is the last step's batch, see `Batch.grow`.

        Parameters
        ----------
        lanes : sequence of Lane and Thicket
            Paths that wait for logits.
        tenants : sequence of Tenant
            All running trees, waiting or not.
        reserved : int
            Rows that are left for others, up to half of those of paths.

        Raises
        ------
        PoolTooSmall
            If not one row fits although every other branch gave way: those behind the first in line, then also those
            before it, of trees that wait for a function rather than for logits.
        Crowded
            If thickets stand in the way; nothing else has happened then that matters.
        """
        thickets = [lane for lane in lanes if isinstance(lane, Thicket)]
        paths = [lane for lane in lanes if isinstance(lane, Lane)]
        counts = self._share(thickets, paths)
        self._left = self.max_num_rows - sum(counts)
        self._left -= min(reserved, self._left // 2)
        if thickets or not paths:
            self._steady = None
        batch, deliveries = self._batch_of_paths(paths, tenants, bool(thickets)) if paths else (Batch(), [])
        for thicket, count in zip(thickets, counts, strict=True):
            if count:
                deliveries.append(Delivery(thicket, thicket.num_computed, batch.add_thicket(thicket, count)))
        return batch, deliveries

    def _share(self, thickets: Sequence[Thicket], paths: Sequence[Lane]) -> list[int]:
        """Return how many rows each thicket gets."""
        if not thickets:
            return []
        left = self.max_num_rows
        if paths:
            priorities = {lane.tenant.rank[0] for lane in paths} | {thicket.tenant.rank[0] for thicket in thickets}
            if left < 2 * PROMPT_SHARE or len(priorities) > 1:
                raise Crowded
            left -= min(left // PROMPT_SHARE, sum(max(1, _lacking(lane.tip())) for lane in paths))
        counts: dict[Thicket, int] = {}
        for i, thicket in enumerate(sorted(thickets, key=attrgetter("tenant.rank"))):
            counts[thicket] = min(thicket.num_wanted, -(-left // (len(thickets) - i)))
            left -= counts[thicket]
        return [counts[thicket] for thicket in thickets]

    def _batch_of_paths(
        self, lanes: Sequence[Lane], tenants: Sequence[Tenant], beside_thickets: bool
    ) -> tuple[Batch, list[Delivery]]:
        tips = [lane.tip() for lane in lanes]
        if self._steady is not None and self._steady.grow(lanes, tips):
            return self._steady.batch, self._steady.deliveries(lanes)
        self._steady = self._chosen = None
        tip_of = dict(zip(lanes, tips, strict=True))
        ranked = sorted(lanes, key=attrgetter("tenant.rank"))
        queue = self._queue(ranked, tip_of) if len(ranked) > 1 else ranked
        batch, deliveries = self._decode(queue, tip_of)
        only_room = True  # is what those lack who get nothing
        if rest := queue[len(deliveries) :]:
            line = _Line(self.kv, ranked, tip_of, tenants, batch, beside_thickets)
            only_room = self._serve(rest, tip_of, batch, deliveries, line)
            self.num_preemptions += line.num_preemptions
            if not batch.num_rows:
                if any(lane.tenant.rests(tip) for lane, tip in tip_of.items()):
                    return batch, []
                if line.give_all(ranked[0]):
                    self.num_preemptions += 1
                    return self._batch_of_paths(lanes, tenants, beside_thickets)
                raise PoolTooSmall(ranked[0], self.kv)
        if only_room and not beside_thickets:
            self._chosen = batch, lanes, tips
        return batch, deliveries

    def _serve(
        self,
        queue: Sequence[Lane],
        tip_of: Mapping[Lane, Node],
        batch: Batch,
        deliveries: list[Delivery],
        line: _Line,
    ) -> bool:
        """Give rows to lanes in turn; return whether room is all that those lack who get nothing."""
        blocked = False  # somebody waits for room: whoever starts behind it would take it, for ever
        only_room = True
        gave_way = False  # somebody did, if only for nothing
        for lane in queue:
            rows, tip = batch.num_rows, tip_of[lane]
            if rows == self._left or line.gave_way(lane):
                only_room = only_room and rows < self._left
                gave_way = gave_way or rows < self._left
                continue
            lacking = batch.lacking(tip)
            if lacking > 1 and rows:
                blocked = blocked or not self._fits(lane, lacking, line)
                if blocked:
                    continue
            delivery = self._schedule(lane, tip, batch, line)
            if delivery is not None:
                deliveries.append(delivery)
            if delivery is not None or batch.num_rows > rows:
                line.served.add(line.place(lane))
            elif lacking > 1:
                blocked = True
        return only_room and not (gave_way and line.num_preemptions)

    def commit(self, batch: Batch, deliveries: Sequence[Delivery]) -> None:
        """Record that the rows of `batch` have run."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None and chosen[0] is batch:
            self._steady = _Steady.after(self.kv, batch, deliveries, *chosen[1:])
        elif self._steady is not None and self._steady.batch is not batch:  # it had guesses beside it
            self._steady = None
        batch.commit()
        for lane, _, places in deliveries:
            lane.take(len(places))

    def _queue(self, ranked: Sequence[Lane], tip_of: Mapping[Lane, Node]) -> list[Lane]:
        """Return the lanes in the order in which they get rows."""
        lacking = {lane: _lacking(tip) for lane, tip in tip_of.items()}
        queue: list[Lane] = []
        left = self._left
        for _, lanes in groupby(ranked, key=lambda lane: lane.tenant.rank[0]):
            decoding: list[Lane] = []
            starting: list[Lane] = []
            for lane in lanes:
                (decoding if lacking[lane] <= 1 else starting).append(lane)
            wanted = sum(lacking[lane] for lane in starting)
            share = max(1, left // PROMPT_SHARE) if left > 1 else 0
            first = left - min(wanted, share)
            if len(decoding) > first:
                decoding = _in_turns(decoding)
            queue += decoding[:first] + starting + decoding[first:]
            left = max(0, left - len(decoding) - wanted)
        return queue

    def _decode(self, queue: Sequence[Lane], tip_of: Mapping[Lane, Node]) -> tuple[Batch, list[Delivery]]:
        """Begin a batch with those at the head of the queue that lack just the token whose logits they want.

        Many leaves in one go take little longer than a few one by one; where not all of them have room, none is
        taken. Siblings come together, as plans like it.
        """
        families: dict[Node | None, dict[Node, Tenant]] = {}
        head: list[Lane] = []
        for lane in queue[: self._left]:
            tip = tip_of[lane]
            length = len(tip.tokens)
            if tip.computed + 1 != length or not lane.wanted + 1 == lane.end == tip.start + length:
                break
            if (not tip.computed and _lacking(tip) > 1) or _waits(lane, tip):
                break
            families.setdefault(tip.parent, {}).setdefault(tip, lane.tenant)
            head.append(lane)
        owners = {tip: tenant for family in families.values() for tip, tenant in family.items()}
        try:
            batch = Batch.of_leaves(list(owners), list(owners.values()), self.kv)
        except OutOfSlots:
            return Batch(), []
        place = {tip: i for i, tip in enumerate(owners)}
        return batch, [Delivery(lane, lane.wanted, [place[tip_of[lane]]]) for lane in head]

    def _fits(self, lane: Lane, lacking: int, line: _Line) -> bool:
        """Whether all that `lane` lacks has room, with a page to go on for each path that has rows before it.

        Otherwise it would start, be the first to give way, and start again.
        """
        wanted = lacking + len(line.served) * self.kv.pool.page_size
        while self.kv.pool.num_free < wanted and (room := line.room()) < wanted:
            if not line.give_way(lane, wanted - room):
                return False
        return True

    def _schedule(self, lane: Lane, tip: Node, batch: Batch, line: _Line) -> Delivery | None:
        """Add the rows that `lane` lacks as far as the budgets go; the logits it gets from them, if any."""
        path: list[Node] = []
        node: Node | None = tip
        while node is not None and batch.computed(node) < len(node.tokens):
            path.append(node)
            node = node.parent
        horizon = lane.tenant.horizon(tip)
        horizon = tip.end if horizon is None else horizon
        for node in reversed(path):
            begin = batch.computed(node)
            end = min(len(node.tokens), horizon - node.start, begin + self._left - batch.num_rows)
            # Another lane took part of this node in this very step: its rows cannot be extended any more.
            if begin > node.computed or end <= begin or not self._reserve(node, end, lane, line):
                break
            batch.add(node, end, lane.tenant)
            if end < len(node.tokens):
                break
        read = [tip]
        while read[-1].start > lane.wanted and read[-1].parent is not None:
            read.append(read[-1].parent)
        places: list[int] = []
        for node in reversed(read):
            for position in range(max(node.start, lane.wanted), min(node.end, lane.end)):
                if node in self.kv.kept and position + 1 < node.end:
                    raise KeysGivenUp(lane)
                row = self._row(node, position - node.start, batch, lane.tenant)
                if row is None:
                    return Delivery(lane, lane.wanted, places) if places else None
                places.append(batch.want_logits(row))
        return Delivery(lane, lane.wanted, places)

    def _row(self, node: Node, offset: int, batch: Batch, tenant: Tenant) -> int | None:
        row = batch.row(node, offset)
        if row is None and offset < node.computed and batch.num_rows < self._left:
            row = batch.ask(node, offset, tenant)
        return row

    def _reserve(self, node: Node, length: int, lane: Lane, line: _Line) -> bool:
        """Find slots for `node` up to `length`; whoever stands behind `lane` gives way."""
        while True:
            try:
                self.kv.extend(node, length)
                return True
            except OutOfSlots:
                if not line.give_way(lane, length - len(self.kv.slots(node))):
                    return False


def _in_turns(lanes: Iterable[Lane]) -> list[Lane]:
    """Return the first lane of each tree, then the second of each, and so on."""
    turns: dict[Tenant, int] = {}
    order: list[tuple[int, Lane]] = []
    for lane in lanes:
        turns[lane.tenant] = turn = turns.get(lane.tenant, 0) + 1
        order.append((turn, lane))
    return [lane for _, lane in sorted(order, key=itemgetter(0))]


def _lacking(tip: Node) -> int:
    """How many tokens of the path to `tip` have no keys."""
    node: Node | None = tip
    total = 0
    while node is not None and (lacking := len(node.tokens) - node.computed):
        total += lacking
        node = node.parent
    return total


def _waits(lane: Lane, tip: Node) -> bool:
    """Whether the last token of the path to `tip` has to wait for its key."""
    horizon = lane.tenant.horizon(tip)
    return horizon is not None and tip.end > horizon


class _Line:
    """All branches of one step in the order in which they keep their keys; the last gives way first.

    A place in line is a tree and a node in which branches of it end.
    """

    def __init__(
        self,
        kv: KVManager,
        ranked: Sequence[Lane],
        tip_of: Mapping[Lane, Node],
        tenants: Sequence[Tenant],
        batch: Batch,
        beside_thickets: bool = False,
    ) -> None:
        self.kv = kv
        self.beside_thickets = beside_thickets
        self.ranked = ranked
        self.tip_of = tip_of
        self.tenants = tenants
        self.num_preemptions = 0
        self.served: set[tuple[object, Node]] = {(span.owner, span.node) for span in batch.spans}
        self._gone: set[tuple[Tenant, Node]] = set()
        self._preemption = Preemption(kv)
        self._places: dict[tuple[Tenant, Node], int] | None = None  # with the number of branches, the last gives way
        self._evictable: int | None = None  # with what has been evicted before

    def place(self, lane: Lane) -> tuple[Tenant, Node]:
        """Return where `lane` stands."""
        return lane.tenant, self.tip_of[lane]

    def gave_way(self, lane: Lane) -> bool:
        """Whether `lane` has lost keys in this step; it waits for the next."""
        return bool(self._gone) and self.place(lane) in self._gone

    def give_way(self, lane: Lane, num_slots: int) -> bool:
        """Let the last in line behind `lane` that have no rows in this step free slots; whether that made room."""
        if self.beside_thickets:
            raise Crowded
        places = self._in_line()
        own = self.place(lane)
        while not self._preemption.free(num_slots):
            if own not in places:  # it has rows and was passed over: it takes no more in this step
                return False
            last, branches = places.popitem()
            if last == own:
                places[own] = branches
                return False
            if last not in self.served:
                self._gone.add(last)
                self._preemption.add(last[1], branches)
        self.num_preemptions += 1
        return True

    def give_all(self, lane: Lane) -> bool:
        """Let anybody else give way to `lane`; whether that made room."""
        places = self._in_line()
        own = self.place(lane)
        self._places = {own: places[own]} | places
        return self.give_way(lane, self.kv.num_slots)

    def room(self) -> int:
        """Return how many slots are free or hold cached prefixes, which are counted once a step."""
        evicted = self.kv.statistics.evicted_tokens
        if self._evictable is None:
            self._evictable = self.kv.num_evictable() + evicted
        return self.kv.pool.num_free + self._evictable - evicted

    def _in_line(self) -> dict[tuple[Tenant, Node], int]:
        if self._places is None:
            branches: dict[tuple[Tenant, Node], int] = {}
            for tenant in self.tenants:
                for tip in tenant.tips():
                    branches[tenant, tip] = branches.get((tenant, tip), 0) + 1
            waiting = dict.fromkeys(map(self.place, self.ranked))
            order = [*waiting, *(place for place in branches if place not in waiting)]
            order.sort(key=lambda place: place[0].rank)
            self._places = {place: branches[place] for place in order}
        return self._places


class _Steady(NamedTuple):
    """The last step, if each of its rows was the last token of a leaf that got its logits, and others lacked room."""

    kv: KVManager
    batch: Batch
    tips: list[Node]
    places: list[Sequence[int] | None]  # by lane, None where it lacked room
    lengths: list[int]  # of the tips
    version: int
    num_moves: int

    @classmethod
    def after(
        cls, kv: KVManager, batch: Batch, deliveries: Sequence[Delivery], lanes: Sequence[Lane], tips: list[Node]
    ) -> _Steady | None:
        """Remember a step, None where its batch cannot grow."""
        places = {delivery.lane: delivery.places for delivery in deliveries}
        served = {tip for lane, tip in zip(lanes, tips, strict=True) if lane in places}
        if not batch.can_grow or {span.node for span in batch.spans} != served:
            return None
        each = [places.get(lane) for lane in lanes]
        return cls(kv, batch, tips, each, [len(tip.tokens) for tip in tips], kv.forest.version, kv.pool.num_moves)

    def grow(self, lanes: Sequence[Lane], tips: list[Node]) -> bool:
        """Let the batch grow if the same leaves have grown by a token each, and nothing else has happened."""
        if not lanes or self.version != self.kv.forest.version or tips != self.tips:
            return False
        for lane, tip, places, before in zip(lanes, tips, self.places, self.lengths, strict=True):
            length = len(tip.tokens)
            if places is None:
                if length != before:
                    return False
            elif (
                tip.computed + 1 != length or not lane.wanted + 1 == lane.end == tip.start + length or _waits(lane, tip)
            ):
                return False
        try:
            self.batch.grow(self.kv)
        except OutOfSlots:
            return False
        return self.num_moves == self.kv.pool.num_moves

    def deliveries(self, lanes: Sequence[Lane]) -> list[Delivery]:
        """Return who gets which logits."""
        pairs = zip(lanes, self.places, strict=True)
        return [Delivery(lane, lane.wanted, places) for lane, places in pairs if places is not None]
