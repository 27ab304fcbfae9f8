"""What is left of a path's keys and values, layer by layer, and how it is laid out in pages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treewise.kv.pool import Slots


class Strips(NamedTuple):
    """Where consecutive layers that keep as many tokens have them: in a strip of each of some pages.

    A page is memory for `page_size` tokens in each of the model's layers; a strip is that of some consecutive ones,
    which need not be those whose keys it holds.

    Attributes
    ----------
    first, width : int
        The first of the layers, and how many they are.
    pages, columns : int64 [strips]
        The page of each strip, and which of its layers the strip begins with.
    """

    first: int
    width: int
    pages: NDArray[np.int64]
    columns: NDArray[np.int64]


class Thinning(NamedTuple):
    """How the keys of a prompt are thinned out once all of them are there.

    Attributes
    ----------
    key : str
        All that what is kept depends on, beside the tokens.
    num_queries : int
        At so many of the last tokens the queries are looked at, so that they are computed whatever is known.
    """

    key: str
    num_queries: int


class Kept(NamedTuple):
    """What a node has kept.

    Attributes
    ----------
    lent : Slots
        All slots that it has, whole pages, in all layers.
    counts : tuple of int
        Tokens kept, by layer.
    firsts : tuple of int
        The layers with which runs of equal counts begin.
    slots : tuple of int32 [tokens]
        Of each run, the slots of its tokens in its first layer, see `slots_from`.
    num_slots : int
        Of the pool, in each layer.
    """

    lent: Slots
    counts: tuple[int, ...]
    firsts: tuple[int, ...]
    slots: tuple[Slots, ...]
    num_slots: int

    @classmethod
    def within(cls, lent: Slots, counts: Sequence[int], num_slots: int, page_size: int) -> Kept:
        """Lay out the tokens that layers keep in pages, which there are enough of; see `num_pages`."""
        strips, _ = lay_out(counts, page_size)
        pages = lent.reshape(-1, page_size).astype(np.int64)
        slots = [
            (pages[run.pages] + (run.columns * num_slots)[:, None]).ravel()[: counts[run.first]].astype(np.int32)
            for run in strips
        ]
        return cls(lent, tuple(counts), tuple(run.first for run in strips), tuple(slots), num_slots)

    def slots_from(self, layer: int) -> Slots:
        """Return the slots of the tokens that `layer` keeps, int32.

        The slots of all layers are numbered together, layer after layer. The ``j``-th layer behind `layer`, if it is of
        the same run, has its tokens ``j * num_slots`` further on.
        """
        run = bisect_right(self.firsts, layer) - 1
        return self.slots[run] + np.int32((layer - self.firsts[run]) * self.num_slots)


def num_pages(counts: Sequence[int], page_size: int) -> int:
    """Return how many pages hold what layers keep."""
    return lay_out(counts, page_size)[1]


def lay_out(counts: Sequence[int], page_size: int) -> tuple[list[Strips], int]:
    """Lay out the tokens of all layers in as few pages as come of putting wide strips first.

    Parameters
    ----------
    counts : sequence of int
        Tokens that each layer keeps.
    page_size : int

    Returns
    -------
    strips : list of Strips
        In order of the layers, one for each run of equal counts.
    num_pages : int

    Examples
    --------
    Two layers that keep 48 tokens, and two that keep 16, take the room of 32 tokens in four layers:

    >>> strips, num_pages = lay_out([48, 48, 16, 16], page_size=16)
    >>> num_pages, strips[0].pages.tolist(), strips[0].columns.tolist()
    (2, [0, 0, 1], [0, 2, 0])
    """
    num_layers = len(counts)
    runs: list[tuple[int, int, int]] = []  # first layer, layers, strips
    for count, layers in groupby(range(num_layers), counts.__getitem__):
        run = list(layers)
        runs.append((run[0], len(run), -(-count // page_size)))
    used = np.zeros(0, np.int64)  # layers of each page, from the first
    placed: dict[int, Strips] = {}
    for first, width, wanted in sorted(runs, key=lambda run: (-run[1], -run[2], run[0])):
        room = (num_layers - used) // width
        missing = wanted - int(room.sum())
        if missing > 0:
            more = -(-missing // (num_layers // width))
            used, room = np.append(used, np.zeros(more, np.int64)), np.append(room, [num_layers // width] * more)
        taken = np.minimum(room, np.maximum(0, wanted - (np.cumsum(room) - room)))
        pages = np.repeat(np.arange(len(used)), taken)
        within = np.arange(wanted) - np.repeat(np.cumsum(taken) - taken, taken)
        placed[first] = Strips(first, width, pages, used[pages] + within * width)
        used = used + taken * width
    return [placed[first] for first, *_ in runs], len(used)
