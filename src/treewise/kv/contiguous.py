"""The contiguous pool: each node is one unbroken run of slots."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

import numpy as np

from treewise.kv.pool import MOST_MOVED, Copy, OutOfSlots, Slots
from treewise.tree import Node


class _Run:
    __slots__ = ("capacity", "length", "start")

    def __init__(self, start: int, capacity: int, length: int) -> None:
        self.start = start
        self.capacity = capacity
        self.length = length


class ContiguousPool:
    """One run of consecutive slots a node, with room to grow; the run moves when its room is used up.

    The unpaged memory of the methods that read keys as one slice. A run that outgrows its place is copied to a larger
    one; when free slots are plenty but scattered, all runs are moved together.

    Parameters
    ----------
    num_slots : int
        Slots in all, the scratch slot included; at least two.
    """

    page_size = 1

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"num_kv_slots: {num_slots} slots leave no room beside the scratch slot")
        self.num_slots = num_slots
        self.scratch_slot = 0
        self.num_moves = 0
        self._holes: list[tuple[int, int]] = [(1, num_slots)]  # free [start, end), sorted, never touching
        self._runs: dict[Node, _Run] = {}
        self._copies: list[Copy] = []
        self._used = 0  # slots of tokens

    @property
    def num_free(self) -> int:
        """Slots outside the runs, and the spare room inside them."""
        return self.num_slots - 1 - self._used

    def num_held(self, nodes: Iterable[Node]) -> int:
        """See `SlotPool.num_held`."""
        return sum(run.length for node in nodes if (run := self._runs.get(node)) is not None)

    def extend(self, node: Node, length: int) -> None:
        """See `SlotPool.extend`."""
        run = self._runs.get(node)
        held = 0 if run is None else run.length
        if length <= held:
            return
        if length - held > self.num_free:
            raise OutOfSlots(f"{length - held} slots wanted, {self.num_free} free")
        if run is None or length > run.capacity:
            # A node that grows keeps growing: leave it as much room again, where there is any.
            room = 2 * length if run is not None else length
            place = self._find(room) or self._find(length)
            if place is None:
                self._compact()
                place = self._find(length)
            if place is None:  # all that is left lies behind `node` itself once it is the last run
                self._compact(last=node)
                run = self._runs[node]
                self._carve(run.start + run.length, run.start + length)
                run.capacity = length
            else:
                self._carve(*place)
                run = self._move(node, _Run(place[0], place[1] - place[0], held))
        run.length = length
        self._used += length - held

    def append(self, nodes: Sequence[Node]) -> Slots:
        """See `SlotPool.append`."""
        for node in nodes:
            self.extend(node, len(node.tokens))
        return np.array([self._runs[node].start + len(node.tokens) - 1 for node in nodes], np.int32)

    def slots(self, node: Node) -> Slots:
        """See `SlotPool.slots`."""
        run = self._runs.get(node)
        return np.empty(0, np.int32) if run is None else _span(run.start, run.length)

    def split(self, upper: Node, lower: Node) -> None:
        """See `SlotPool.split`."""
        run = self._runs.get(lower)
        if run is None:
            return
        at = len(upper.tokens)
        if run.length <= at:
            self._runs[upper] = self._runs.pop(lower)
            return
        self._runs[upper] = _Run(run.start, at, at)
        self._runs[lower] = _Run(run.start + at, run.capacity - at, run.length - at)

    def join(self, upper: Node, lower: Node) -> bool:
        """See `SlotPool.join`."""
        above, below = self._runs.get(upper), self._runs.get(lower)
        if above is None:
            return True
        if below is not None:
            if above.start + above.length == below.start:
                above.capacity += below.capacity
            elif below.length <= min(MOST_MOVED, above.capacity - above.length):
                end = above.start + above.length
                self._copy(Copy(_span(below.start, below.length), _span(end, below.length)))
                self._free(below.start, below.start + below.capacity)
            else:
                return False
            above.length += below.length
        self._runs[lower] = self._runs.pop(upper)
        return True

    def shrink(self, node: Node, length: int) -> None:
        """See `SlotPool.shrink`."""
        run = self._runs.get(node)
        if run is None or length >= run.length:
            return
        self._used -= run.length - length
        run.length = length
        if not length:
            del self._runs[node]
            self._free(run.start, run.start + run.capacity)

    def lend(self, num_slots: int) -> Slots:
        """See `SlotPool.lend`; there is nothing outside of the runs, which move."""
        raise OutOfSlots("a pool of unbroken runs lends no slots")

    def take_back(self, slots: Slots) -> None:
        """See `SlotPool.take_back`."""

    def origins(self, slots: Slots) -> Slots:
        """See `SlotPool.origins`; copies are made one after the other."""
        return slots

    def move(self, origins: Slots, target: Slots) -> None:
        """See `SlotPool.move`."""
        self._copy(Copy(origins, target))

    def take_copies(self) -> list[Copy]:
        """See `SlotPool.take_copies`."""
        copies, self._copies = self._copies, []
        return copies

    def check_integrity(self, nodes: Iterable[Node]) -> None:
        """See `SlotPool.check_integrity`."""
        assert self._runs.keys() <= set(nodes), "a node that left the forest still owns slots"
        spans = sorted([(run.start, run.start + run.capacity) for run in self._runs.values()] + self._holes)
        assert all(run.length <= run.capacity for run in self._runs.values()), "a run is longer than its room"
        assert self._used == sum(run.length for run in self._runs.values()), "the count of used slots is wrong"
        edge = 1
        for start, end in spans:
            assert start == edge and end > start, f"slots {edge}..{start} are lost or owned twice"
            edge = end
        assert edge == self.num_slots, "slots at the end of the pool are lost"
        holes = zip(self._holes, self._holes[1:], strict=False)
        assert all(left[1] < right[0] for left, right in holes), "two holes touch"

    def _find(self, size: int) -> tuple[int, int] | None:
        return next(((start, start + size) for start, end in self._holes if end - start >= size), None)

    def _carve(self, start: int, end: int) -> None:
        """Take [start, end) out of the hole that holds it."""
        index = next(i for i, hole in enumerate(self._holes) if hole[0] <= start and end <= hole[1])
        left, right = self._holes[index]
        self._holes[index : index + 1] = [hole for hole in ((left, start), (end, right)) if hole[0] < hole[1]]

    def _free(self, start: int, end: int) -> None:
        insort(self._holes, (start, end))
        merged: list[tuple[int, int]] = []
        for left, right in self._holes:
            if merged and merged[-1][1] == left:
                merged[-1] = (merged[-1][0], right)
            else:
                merged.append((left, right))
        self._holes = merged

    def _move(self, node: Node, target: _Run) -> _Run:
        """Make `target` the run of `node`, taking along the tokens it has."""
        old = self._runs.get(node)
        self._runs[node] = target
        if old is not None:
            self._copy(Copy(_span(old.start, old.length), _span(target.start, old.length)))
            self._free(old.start, old.start + old.capacity)
        return target

    def _copy(self, copy: Copy) -> None:
        self._copies.append(copy)
        self.num_moves += 1

    def _compact(self, last: Node | None = None) -> None:
        """Move all runs together at the front, without spare room, `last` behind the others."""
        edge = 1
        moves: list[Copy] = []
        for node, run in sorted(self._runs.items(), key=lambda item: (item[0] is last, item[1].start)):
            if run.start != edge:
                moves.append(Copy(_span(run.start, run.length), _span(edge, run.length)))
            self._runs[node] = _Run(edge, run.length, run.length)
            edge += run.length
        if moves:  # one copy, so that every slot is read before any is written
            self._copy(Copy(np.concatenate([m.source for m in moves]), np.concatenate([m.target for m in moves])))
        self._holes = [(edge, self.num_slots)] if edge < self.num_slots else []


def _span(start: int, length: int) -> Slots:
    return np.arange(start, start + length, dtype=np.int32)
