"""Picks rows within a token budget and a slot budget; chunks prompts; preempts whole trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from treewise.batch import Batch
from treewise.kv import KVManager, OutOfSlots
from treewise.tree import Node


class Tenant(Protocol):
    """One running tree, as the scheduler sees it."""

    @property
    def order(self) -> int:
        """Rank of arrival; the tree that came last gives way first."""

    def tips(self) -> Iterable[Node]:
        """Return the nodes in which the tree's live branches end."""


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


@dataclass
class Delivery:
    """Logits of `lane` at positions ``start``, ``start + 1``, …: rows `places` of the runner's answer."""

    lane: Lane
    start: int
    places: list[int] = field(default_factory=list)


class PoolTooSmall(Exception):
    """The tree of `tenant` does not fit the pool even alone."""

    def __init__(self, tenant: Tenant) -> None:
        super().__init__("the KV pool is too small for this tree")
        self.tenant = tenant


class Scheduler:
    """Chooses the rows of each step.

    Every path lacks some tokens' keys: a new prompt all of them, a decoding leaf one, a preempted leaf its whole
    path. That is the only difference there is. Paths that lack one token go first, so that a long prompt, taken in
    chunks, never holds up decoding; otherwise the earlier tree goes first.

    Parameters
    ----------
    kv : KVManager
    max_num_rows : int
        The most rows of one step.
    """

    def __init__(self, kv: KVManager, max_num_rows: int) -> None:
        self.kv = kv
        self.max_num_rows = max_num_rows
        self.num_preemptions = 0
        self._step = 0

    def next_batch(self, lanes: Sequence[Lane], tenants: Sequence[Tenant]) -> tuple[Batch, list[Delivery]]:
        """Return the rows of the next step, their slots reserved, and who gets which logits.

        Parameters
        ----------
        lanes : sequence of Lane
            Paths that wait for logits.
        tenants : sequence of Tenant
            All running trees, waiting or not, in order of arrival.

        Raises
        ------
        PoolTooSmall
            If not one row fits although every other tree gave way: first those that came later, at last also those
            that wait for a function rather than for logits.
        """
        self._step += 1
        batch, deliveries = Batch(), []
        lacking = {lane: self._lacking(lane.tip()) for lane in lanes}
        victims = list(tenants)
        evictable: int | None = None  # counted where it matters, and what has been evicted before with it
        for lane in sorted(lanes, key=lambda lane: (lacking[lane] > 1, lane.tenant.order)):
            if batch.num_rows >= self.max_num_rows:
                break
            # A path that lacks much starts only where all of it fits, or two trees would evict each other for ever.
            # Those behind it wait as well, or ever new small ones would take the room that it waits for.
            if lacking[lane] > 1 and batch.num_rows and lacking[lane] > self.kv.pool.num_free:
                if evictable is None:
                    evictable = self.kv.num_evictable() + self.kv.num_evicted
                if lacking[lane] > self.kv.pool.num_free + evictable - self.kv.num_evicted:
                    break
            if delivery := self._schedule(lane, batch, victims):
                deliveries.append(delivery)
        if lanes and not batch.num_rows:
            waiting = {lane.tenant for lane in lanes}
            if self._preempt_last([tenant for tenant in tenants if tenant not in waiting], batch):
                return self.next_batch(lanes, tenants)
            raise PoolTooSmall(min((lane.tenant for lane in lanes), key=lambda tenant: tenant.order))
        return batch, deliveries

    def commit(self, batch: Batch, deliveries: Sequence[Delivery]) -> None:
        """Record that the rows of `batch` have run."""
        for span in batch.spans:
            if span.store:
                span.node.computed = span.end
        for delivery in deliveries:
            delivery.lane.wanted += len(delivery.places)

    def _lacking(self, tip: Node) -> int:
        node: Node | None = tip
        total = 0
        while node is not None and node.computed < len(node.tokens):
            total += len(node.tokens) - node.computed
            node = node.parent
        return total

    def _schedule(self, lane: Lane, batch: Batch, victims: list[Tenant]) -> Delivery | None:
        """Add the rows that `lane` lacks as far as the budgets go; the logits it gets from them, if any."""
        path = self.kv.forest.path(lane.tip())
        for node in path:
            node.last_used = self._step
            begin = batch.computed(node)
            if begin < len(node.tokens):
                end = min(len(node.tokens), begin + self.max_num_rows - batch.num_rows)
                # Another lane took part of this node in this very step: its rows cannot be extended any more.
                if begin > node.computed or end == begin or not self._reserve(node, end, lane, batch, victims):
                    break
                batch.add(node, end, lane.tenant)
                if end < len(node.tokens):
                    break
        delivery = Delivery(lane, lane.wanted)
        for node in path:
            for position in range(max(node.start, lane.wanted), min(node.end, lane.end)):
                row = self._row(node, position - node.start, batch, lane.tenant)
                if row is None:
                    return delivery if delivery.places else None
                delivery.places.append(batch.want_logits(row))
        return delivery

    def _row(self, node: Node, offset: int, batch: Batch, tenant: Tenant) -> int | None:
        row = batch.row(node, offset)
        if row is None and offset < node.computed and batch.num_rows < self.max_num_rows:
            row = batch.ask(node, offset, tenant)
        return row

    def _reserve(self, node: Node, length: int, lane: Lane, batch: Batch, victims: list[Tenant]) -> bool:
        """Find slots for `node` up to `length`; later trees give way to a lane that decodes or is the step's first."""
        while True:
            try:
                self.kv.extend(node, length)
                return True
            except OutOfSlots:
                if not self._preempt_last(victims, batch, lane.tenant.order):
                    return False

    def _preempt_last(self, victims: list[Tenant], batch: Batch, after: int = -1) -> bool:
        """Free the latest of `victims` that came later than `after` and has no rows in `batch`; whether there was one.

        Those that were looked at leave the list: in this step they give no more.
        """
        if not victims or victims[-1].order <= after:
            return False
        running = {span.node for span in batch.spans}
        while victims and victims[-1].order > after:
            tips = list(victims.pop().tips())
            path = {node for tip in tips for node in self.kv.forest.path(tip)}
            if running.isdisjoint(path) and self.kv.preempt(tips):
                self.num_preemptions += 1
                return True
        return False
