"""The paged pool: fixed-size pages with reference counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from treewise.kv.pool import MOST_MOVED, Copy, OutOfSlots, Slots
from treewise.tree import Node

PAGE_SIZES = (1, 16, 32, 64)
FEW = 16
"""Tokens up to which their slots are reckoned one by one."""


class _Run:
    """The pages of one node: token ``j`` lies at place ``offset + j`` of them."""

    __slots__ = ("length", "offset", "pages", "slots")

    def __init__(self, pages: list[int], offset: int, slots: Slots, length: int) -> None:
        self.pages = pages
        self.offset = offset
        self.slots = slots  # a buffer that grows by doubling; `length` of it are in use
        self.length = length

    def append(self, slots: Slots | list[int]) -> None:
        """Put the slots of further tokens at the end."""
        length = self.length + len(slots)
        if length > len(self.slots):
            grown = np.empty(max(length, 2 * len(self.slots)), np.int32)
            grown[: self.length] = self.slots[: self.length]
            self.slots = grown
        self.slots[self.length : length] = slots
        self.length = length


class PagedPool:
    """Pages of `page_size` slots, each counted by the nodes that have tokens in it.

    A node starts on a fresh page, so a fork at the end of a node copies nothing: the children read the parent's
    page where it is. Only a cut inside a page (a fork or a prefix match in the middle of a node) leaves one page with
    two holders. Such a page is never written: the half that grows first moves its own tokens, less than one page, to
    a page of its own.

    Page 0 is scratch and never handed out.

    Parameters
    ----------
    num_slots : int
        Slots in all; a multiple of `page_size`, at least two pages.
    page_size : int
        1, 16, 32 or 64 tokens.
    """

    def __init__(self, num_slots: int, page_size: int = 16) -> None:
        if page_size not in PAGE_SIZES:
            raise ValueError(f"page_size: {page_size} is not one of {', '.join(map(str, PAGE_SIZES))}")
        num_pages = num_slots // page_size
        if num_pages < 2:
            raise ValueError(f"num_kv_slots: {num_slots} slots are fewer than two pages of {page_size}")
        self.page_size = page_size
        self.num_slots = num_pages * page_size
        self.scratch_slot = 0
        self.num_moves = 0
        self._refs = [1] + [0] * (num_pages - 1)
        # Nodes take low pages first, so that fresh ones lie in long runs; borrowers take them from the other end, so
        # that who gives back and borrows again gets the same.
        self._free = deque(range(num_pages - 1, 0, -1))
        self._runs: dict[Node, _Run] = {}
        self._lent: set[int] = set()
        self._within_page = np.arange(page_size, dtype=np.int32)
        self._moves: dict[int, int] = {}  # new slot -> the slot whose keys it gets, all read before any is written

    @property
    def num_free(self) -> int:
        """Slots on pages that nothing uses."""
        return len(self._free) * self.page_size

    def num_held(self, nodes: Iterable[Node]) -> int:
        """See `SlotPool.num_held`."""
        runs = (run for node in nodes if (run := self._runs.get(node)) is not None)
        return len(set(chain.from_iterable(run.pages for run in runs))) * self.page_size

    def holders_of_page(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return how many nodes have tokens in each of `pages`."""
        return np.asarray(self._refs, np.int32)[pages]

    def extend(self, node: Node, length: int) -> None:
        """See `SlotPool.extend`."""
        run = self._runs.get(node)
        if run is None:
            run = _Run([], 0, np.empty(0, np.int32), 0)
        if length <= run.length:
            return
        size = self.page_size
        new_pages = -(-(run.offset + length) // size) - len(run.pages)
        torn = run.length > 0 and (run.offset + run.length) % size > 0 and self._refs[run.pages[-1]] > 1
        if new_pages + torn > len(self._free):
            raise OutOfSlots(f"{new_pages + torn} pages wanted, {len(self._free)} free")
        self._runs[node] = run
        if torn:
            self._copy_last_page(run)
        run.pages += (self._take() for _ in range(new_pages))
        begin, end = run.offset + run.length, run.offset + length
        if end - begin <= FEW:  # NumPy would take longer to start than this takes
            run.append([run.pages[place // size] * size + place % size for place in range(begin, end)])
            return
        places, first = np.arange(begin, end), begin // size
        pages = np.asarray(run.pages[first:], np.int32)
        run.append(pages[places // size - first] * size + places % size)

    def append(self, nodes: Sequence[Node]) -> Slots:
        """See `SlotPool.append`."""
        runs, size, refs = self._runs, self.page_size, self._refs
        new: list[int] = []
        for node in nodes:
            run, last = runs.get(node), len(node.tokens) - 1
            if run is not None and run.length == last < len(run.slots):
                place, page = (run.offset + last) % size, run.pages[-1]
                if place and refs[page] == 1:
                    run.slots[last] = slot = page * size + place
                    run.length = last + 1
                    new.append(slot)
                    continue
            self.extend(node, last + 1)
            new.append(int(runs[node].slots[last]))
        return np.array(new, np.int32)

    def slots(self, node: Node) -> Slots:
        """See `SlotPool.slots`."""
        run = self._runs.get(node)
        return np.empty(0, np.int32) if run is None else run.slots[: run.length]

    def split(self, upper: Node, lower: Node) -> None:
        """See `SlotPool.split`."""
        run = self._runs.get(lower)
        if run is None:
            return
        at = len(upper.tokens)
        if run.length <= at:
            self._runs[upper] = self._runs.pop(lower)
            return
        cut, size = run.offset + at, self.page_size
        self._runs[upper] = _Run(run.pages[: -(-cut // size)], run.offset, run.slots[:at].copy(), at)
        if cut % size:
            self._refs[run.pages[cut // size]] += 1
        self._runs[lower] = _Run(
            run.pages[cut // size :], cut % size, run.slots[at : run.length].copy(), run.length - at
        )

    def join(self, upper: Node, lower: Node) -> bool:
        """See `SlotPool.join`."""
        above, below = self._runs.get(upper), self._runs.get(lower)
        if above is None:
            return True
        if below is not None and not (self._reunite(above, below) or self._follow(above, below)):
            return False
        self._runs[lower] = self._runs.pop(upper)
        return True

    def shrink(self, node: Node, length: int) -> None:
        """See `SlotPool.shrink`."""
        run = self._runs.get(node)
        if run is None or length >= run.length:
            return
        num_pages = -(-(run.offset + length) // self.page_size) if length else 0
        for page in reversed(run.pages[num_pages:]):
            self._drop(page)
        del run.pages[num_pages:]
        run.length = length
        if not length:
            del self._runs[node]

    def lend(self, num_slots: int) -> Slots:
        """See `SlotPool.lend`."""
        count = -(-num_slots // self.page_size)
        if count > len(self._free):
            raise OutOfSlots(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.popleft() for _ in range(count)][::-1]  # ascending, as they were at first
        for page in pages:
            self._refs[page] = 1
        self._lent.update(pages)
        first = np.array(pages, np.int32) * self.page_size
        return (first[:, None] + self._within_page).ravel()

    def take_back(self, slots: Slots) -> None:
        """See `SlotPool.take_back`."""
        pages = (slots[:: self.page_size] // self.page_size).tolist()
        self._lent.difference_update(pages)
        self._free.extendleft(pages)
        for page in pages:
            self._refs[page] = 0

    def origins(self, slots: Slots) -> Slots:
        """See `SlotPool.origins`."""
        # A slot may be moved again before the runner moves anything: its keys still lie where they were first.
        moves = self._moves
        return np.array([moves.get(slot, slot) for slot in slots.tolist()], np.int32) if moves else slots

    def move(self, origins: Slots, target: Slots) -> None:
        """See `SlotPool.move`."""
        self.num_moves += 1
        self._moves.update(zip(target.tolist(), origins.tolist(), strict=True))

    def take_copies(self) -> list[Copy]:
        """See `SlotPool.take_copies`."""
        moves, self._moves = self._moves, {}
        return [Copy(np.array(list(moves.values()), np.int32), np.array(list(moves), np.int32))] if moves else []

    def check_integrity(self, nodes: Iterable[Node]) -> None:
        """See `SlotPool.check_integrity`."""
        known = set(nodes)
        assert self._runs.keys() <= known, "a node that left the forest still owns pages"
        refs = np.zeros(len(self._refs), np.int32)
        refs[[0, *self._lent]] = 1
        owned: list[Slots] = []
        for run in self._runs.values():
            np.add.at(refs, run.pages, 1)
            owned.append(run.slots[: run.length])
            assert len(run.pages) == -(-(run.offset + run.length) // self.page_size), "a run has the wrong pages"
            places = run.offset + np.arange(run.length)
            expected = np.asarray(run.pages, np.int32)[places // self.page_size] * self.page_size
            assert np.array_equal(owned[-1], expected + places % self.page_size), "a run's slots left its pages"
        assert np.array_equal(refs, self._refs), "reference counts differ from the pages that nodes hold"
        assert sorted(self._free) == np.flatnonzero(refs == 0).tolist(), "the free list is not the unused pages"
        slots = np.concatenate([*owned, np.empty(0, np.int32)])
        assert len(np.unique(slots)) == len(slots), "two tokens share a slot"

    def _copy_last_page(self, run: _Run) -> None:
        """Give `run` its own copy of the last page, which another node holds as well."""
        size = self.page_size
        begin = max(0, (len(run.pages) - 1) * size - run.offset)
        page = self._take()
        source = run.slots[begin : run.length].copy()
        run.slots[begin : run.length] = source % size + page * size
        self._drop(run.pages[-1])
        run.pages[-1] = page
        self.move(self.origins(source), run.slots[begin : run.length])

    def _reunite(self, above: _Run, below: _Run) -> bool:
        """Let `above` go on with the pages of `below` if no key has to move for that."""
        torn = below.offset > 0  # the two halves of one page
        if (above.offset + above.length) % self.page_size != below.offset:
            return False
        if torn and above.pages[-1] != below.pages[0]:
            return False
        if torn:
            self._drop(below.pages[0])
        above.pages += below.pages[torn:]
        above.append(below.slots[: below.length])
        return True

    def _follow(self, above: _Run, below: _Run) -> bool:
        """Move the few tokens of `below` to where those of `above` end, if nobody else has tokens there."""
        end, size = above.offset + above.length, self.page_size
        num_pages = -(-(end + below.length) // size) - len(above.pages)
        if below.length > MOST_MOVED or num_pages > len(self._free) or (end % size and self._refs[above.pages[-1]] > 1):
            return False
        above.pages += (self._take() for _ in range(num_pages))
        places = np.arange(end, end + below.length)
        target = np.asarray(above.pages, np.int32)[places // size] * size + places % size
        self.move(self.origins(below.slots[: below.length]), target)
        above.append(target)
        for page in reversed(below.pages):
            self._drop(page)
        return True

    def _take(self) -> int:
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)
