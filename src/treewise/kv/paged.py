"""The paged pool: fixed-size pages with reference counts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from treewise.kv.pool import Copy, OutOfSlots, Slots
from treewise.tree import Node

PAGE_SIZES = (1, 16, 32, 64)


class _Run:
    """The pages of one node: token ``j`` lies at place ``offset + j`` of them."""

    __slots__ = ("length", "offset", "pages", "slots")

    def __init__(self, pages: list[int], offset: int, slots: Slots, length: int) -> None:
        self.pages = pages
        self.offset = offset
        self.slots = slots  # a buffer that grows by doubling; `length` of it are in use
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
        self._refs: NDArray[np.int32] = np.zeros(num_pages, np.int32)
        self._refs[0] = 1
        self._free = list(range(num_pages - 1, 0, -1))  # a stack; low pages first, so that fresh nodes lie in long runs
        self._runs: dict[Node, _Run] = {}
        self._copies: list[Copy] = []

    @property
    def num_free(self) -> int:
        """Slots on pages that nothing uses."""
        return len(self._free) * self.page_size

    def holders_of_page(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return how many nodes have tokens in each of `pages`."""
        return self._refs[pages]

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
        if length > len(run.slots):
            grown = np.empty(max(length, 2 * len(run.slots)), np.int32)
            grown[: run.length] = run.slots[: run.length]
            run.slots = grown
        if length == run.length + 1:  # a leaf that decodes: NumPy would take longer to start than this takes
            place = run.offset + run.length
            run.slots[run.length] = run.pages[place // size] * size + place % size
            run.length = length
            return
        places = np.arange(run.offset + run.length, run.offset + length)
        first = (run.offset + run.length) // size
        pages = np.asarray(run.pages[first:], np.int32)
        run.slots[run.length : length] = pages[places // size - first] * size + places % size
        run.length = length

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

    def release(self, node: Node) -> None:
        """See `SlotPool.release`."""
        run = self._runs.pop(node, None)
        if run is not None:
            for page in reversed(run.pages):
                self._drop(page)

    def take_copies(self) -> list[Copy]:
        """See `SlotPool.take_copies`."""
        copies, self._copies = self._copies, []
        return copies

    def check_integrity(self, nodes: Iterable[Node]) -> None:
        """See `SlotPool.check_integrity`."""
        known = set(nodes)
        assert self._runs.keys() <= known, "a node that left the forest still owns pages"
        refs = np.zeros_like(self._refs)
        refs[0] = 1
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
        target = source % size + page * size
        self._drop(run.pages[-1])
        run.pages[-1] = page
        run.slots[begin : run.length] = target
        self._copies.append(Copy(source, target))

    def _take(self) -> int:
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)
