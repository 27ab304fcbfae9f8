"""What is left of a path's keys and values, layer by layer, and how it is laid out in pages."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treewise.kv.pool import Slots

Count = int | tuple[int, ...]
"""Tokens that a layer keeps in each of its KV heads, or those of each where they differ."""


NEVER = sys.maxsize
"""The length of a path that nobody thins out."""


class Strips(NamedTuple):
    """Where consecutive columns that keep as many tokens have them: in a strip of each of some pages.

    A page is memory for `page_size` tokens in each of its columns: those are the model's layers or, where heads of some
    layer differ, the KV heads of one layer after the other. A strip is that of some consecutive ones, which need not be
    those whose keys it holds.

    Attributes
    ----------
    first, width : int
        The first of the columns, and how many they are.
    pages, columns : int64 [strips]
        The page of each strip, and which of its columns the strip begins with.
    """

    first: int
    width: int
    pages: NDArray[np.int64]
    columns: NDArray[np.int64]


class Thinning(NamedTuple):
    """How the keys of a path are thinned out.

    Attributes
    ----------
    key : str
        All that what is kept depends on, beside the tokens.
    num_queries : int
        At so many of a prompt's last tokens the queries are looked at, so that they are computed whatever is known.
    first : int
        The length of the path at which it begins: the prompt's, or more where a prompt is kept whole.
    joint : bool
        Whether it begins only when branches have computed what they were given behind the prompt.
    every : int or None
        Tokens from there on after which it happens again; None: it does not.
    """

    key: str
    num_queries: int
    first: int
    joint: bool
    every: int | None


@dataclass(eq=False)
class Stage:
    """What a sealed node came from, so that it can be made again.

    Attributes
    ----------
    end : int
        Where it ends.
    before : Stage or None
        That of the last sealed node on the path as it was before; None if it had given up no keys.
    above : Stage or None
        That of its parent, with which it was made.
    chosen : object or None
        Which of its tokens stay, of those that had keys; None where that follows from its last queries alone.
    """

    end: int
    before: Stage | None = None
    above: Stage | None = None
    chosen: object | None = None


class Kept(NamedTuple):
    """What a node has kept.

    Attributes
    ----------
    lent : Slots
        All slots that it has, whole pages, in all layers.
    counts : tuple of Count
        Tokens kept, by layer.
    firsts : tuple of int
        The layers with which runs of equal counts begin; one whose heads differ is a run of its own.
    slots : tuple of tuples of int32 [tokens]
        Of each run, the slots of its tokens in its first layer, see `slots_from`.
    num_slots : int
        Of the pool, in each layer.
    """

    lent: Slots
    counts: tuple[Count, ...]
    firsts: tuple[int, ...]
    slots: tuple[tuple[Slots, ...], ...]
    num_slots: int

    @classmethod
    def within(cls, lent: Slots, counts: Sequence[Count], num_slots: int, page_size: int) -> Kept:
        """Lay out the tokens that layers keep in pages, which there are enough of; see `num_pages`."""
        strips, _ = lay_out(counts, page_size)
        pages, heads = lent.reshape(-1, page_size).astype(np.int64), _num_heads(counts)
        slots: dict[int, tuple[Slots, ...]] = {}  # by the first layer of the run
        for run in strips:
            (layer, head), (layers, begins) = divmod(run.first, heads), np.divmod(run.columns, heads)
            there, count = pages[run.pages] + (layers * num_slots)[:, None], counts[layer]
            if isinstance(count, tuple):
                there, count = there * heads + begins[:, None], count[head]
            slots[layer] = (*slots.get(layer, ()), there.ravel()[:count].astype(np.int32))
        return cls(lent, tuple(counts), tuple(slots), tuple(slots.values()), num_slots)

    def heads_differ(self, layer: int) -> bool:
        """Whether each KV head of `layer` has slots of its own."""
        return isinstance(self.counts[layer], tuple)

    def slots_from(self, layer: int) -> tuple[Slots, ...]:
        """Return the slots of the tokens that `layer` keeps, int32, in all KV heads; those of each where they differ.

        The slots of all layers are numbered together, layer after layer. The ``j``-th layer behind `layer`, if it is of
        the same run, has its tokens ``j * num_slots`` further on. Slots of single heads are numbered by themselves: the
        heads of the first slot, those of the second, and so on.
        """
        run = bisect_right(self.firsts, layer) - 1
        further = np.int32((layer - self.firsts[run]) * self.num_slots)
        return tuple(slots + further for slots in self.slots[run]) if further else self.slots[run]


def num_pages(counts: Sequence[Count], page_size: int) -> int:
    """Return how many pages hold what layers keep."""
    return lay_out(counts, page_size)[1]


def lay_out(counts: Sequence[Count], page_size: int) -> tuple[list[Strips], int]:
    """Lay out the tokens of all layers in as few pages as come of putting wide strips first.

    Parameters
    ----------
    counts : sequence of Count
        Tokens that each layer keeps.
    page_size : int

    Returns
    -------
    strips : list of Strips
        In order of the columns, one for each run of layers of equal counts, or for each head of a layer where they
        differ. That of layers begins with the first head of some layer, in each page.
    num_pages : int

    Examples
    --------
    Two layers that keep 48 tokens, and two that keep 16, take the room of 32 tokens in four layers:

    >>> strips, num_pages = lay_out([48, 48, 16, 16], page_size=16)
    >>> num_pages, strips[0].pages.tolist(), strips[0].columns.tolist()
    (2, [0, 0, 1], [0, 2, 0])
    """
    heads = _num_heads(counts)
    num_columns = len(counts) * heads
    runs: list[tuple[int, int, int]] = []  # first column, columns, strips
    for count, layers in groupby(range(len(counts)), counts.__getitem__):
        firsts = [layer * heads for layer in layers]
        if isinstance(count, tuple):
            runs += [(first + head, 1, -(-own // page_size)) for first in firsts for head, own in enumerate(count)]
        else:
            runs.append((firsts[0], len(firsts) * heads, -(-count // page_size)))
    used = np.zeros(0, np.int64)  # columns of each page, from the first
    placed: dict[int, Strips] = {}
    for first, width, wanted in sorted(runs, key=lambda run: (-run[1], -run[2], run[0])):
        room = (num_columns - used) // width
        missing = wanted - int(room.sum())
        if missing > 0:
            more = -(-missing // (num_columns // width))
            used, room = np.append(used, np.zeros(more, np.int64)), np.append(room, [num_columns // width] * more)
        taken = np.minimum(room, np.maximum(0, wanted - (np.cumsum(room) - room)))
        pages = np.repeat(np.arange(len(used)), taken)
        within = np.arange(wanted) - np.repeat(np.cumsum(taken) - taken, taken)
        placed[first] = Strips(first, width, pages, used[pages] + within * width)
        used = used + taken * width
    return [placed[first] for first, *_ in runs], len(used)


def _num_heads(counts: Sequence[Count]) -> int:
    """Return how many columns of a page belong to each layer."""
    return max(len(count) if isinstance(count, tuple) else 1 for count in counts)
