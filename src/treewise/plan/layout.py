"""A tree laid out depth-first, where the readers of every token are one interval of rows."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from treewise.plan.spec import Ints, TreeSpec, check


class Layout(NamedTuple):
    """The tree depth-first, nodes without readers or tokens left out."""

    row_order: Ints
    row_position: Ints
    row_starts: npt.NDArray[np.bool_]  # whether a row does not follow the one before it on the next token of its node
    kv_slots: Ints
    kv_low: Ints
    kv_high: Ints
    kv_position: Ints  # empty without a window
    node_start: Ints
    node_end: Ints  # key tokens [start, end) of each node
    node_low: Ints
    node_high: Ints  # its readers, rows [low, high)
    node_root: Ints  # which tree of the forest it belongs to


def lay_out(tree: TreeSpec, slots: Ints, window: int | None) -> Layout:
    """Order rows and key tokens depth-first and drop the key tokens that no row sees."""
    parent, length = tree.parent, tree.length
    rank, size = _preorder(parent)
    order = np.argsort(rank)  # nodes depth-first
    depth = along_paths(parent, length, np.add)  # tokens down to each node's end
    first = np.cumsum(length) - length  # of each node, in the caller's token order
    node, offset = tree.query_node, tree.query_offset
    seen = depth[node] - length[node] + offset + 1
    check("query_node", node, seen > 0, "have a token on its path, or its query sees nothing")

    row_order = np.lexsort((offset, rank[node]))
    row_node, row_offset = node[row_order], offset[row_order]
    row_starts = (np.diff(row_node, prepend=-1) != 0) | (np.diff(row_offset, prepend=-2) != 1)
    rows_before = indptr(np.bincount(rank[node], minlength=tree.num_nodes))
    low, high = rows_before[rank], rows_before[rank + size]
    if tree.position is None:
        row_position = seen[row_order] - 1
    else:  # tokens of an ancestor come first in the caller's order, so the last one on a path has the largest index
        last = along_paths(parent, np.where(length > 0, first + length - 1, -1), np.maximum)
        inherited = last[parent[row_node]]
        row_position = tree.position[np.where(row_offset < 0, inherited, first[row_node] + row_offset)]

    used = np.where(high > low, length, 0)
    start = np.empty_like(used)  # of each node, in the depth-first token order
    start[order] = np.cumsum(used[order]) - used[order]
    kept = order[used[order] > 0]
    node_of = np.repeat(kept, used[kept])
    token = np.arange(len(node_of)) - start[node_of]  # offset of each key token in its node
    kv_slots = slots[first[node_of] + token]
    # Rows sit in token order, so a token's first reader is the number of rows before it.
    kv_low = np.cumsum(np.bincount(start[row_node] + row_offset + 1, minlength=len(node_of) + 1))[: len(node_of)]
    kv_high = high[node_of]
    kv_position = np.zeros(0, np.int64)
    if window is not None:
        if tree.position is None:
            kv_position = (depth - length)[node_of] + token
        else:
            kv_position = tree.position[first[node_of] + token]
    needed = kv_low < kv_high
    if window is not None:
        nearest = range_min(row_position, kv_low[needed], kv_high[needed])
        needed[needed] = kv_position[needed] > nearest - window
        kv_position = kv_position[needed]
    if not needed.all():
        node_of, kv_slots, kv_low, kv_high = node_of[needed], kv_slots[needed], kv_low[needed], kv_high[needed]
        used = np.bincount(node_of, minlength=tree.num_nodes)
        kept = kept[used[kept] > 0]
    ends = np.cumsum(used[kept])
    root = np.cumsum(parent[order] < 0)[rank[kept]] - 1
    return Layout(
        row_order, row_position, row_starts, kv_slots, kv_low, kv_high, kv_position,
        ends - used[kept], ends, low[kept], high[kept], root,
    )  # fmt: skip


def _preorder(parent: Ints) -> tuple[Ints, Ints]:
    """Depth-first place and subtree size of each node, in a few passes that double their reach."""
    count = len(parent)
    size = np.ones(count + 1, np.int64)
    size[count] = 0  # stands above the roots
    above = np.append(np.where(parent < 0, count, parent), count)
    hop = above
    while (hop < count).any():
        size = size + np.bincount(hop, weights=size, minlength=count + 1).astype(np.int64)
        size[count] = 0
        hop = hop[hop]
    siblings = np.argsort(above[:count], kind="stable")
    ends = np.cumsum(size[siblings])
    new = np.diff(above[siblings], prepend=-1) != 0
    before = ends - size[siblings]
    step = np.empty(count, np.int64)  # from a parent's place to its child's
    step[siblings] = before - np.maximum.accumulate(np.where(new, before, 0)) + 1
    return along_paths(parent, step, np.add) - 1, size[:count]


def along_paths(parent: Ints, values: Ints, combine: np.ufunc) -> Ints:
    """Combine the values from each node's root down to the node; the ufunc's identity must be 0 or below values."""
    count = len(parent)
    total = np.append(values, 0 if combine is np.add else -1)
    hop = np.append(np.where(parent < 0, count, parent), count)
    while (hop < count).any():
        total = combine(total, total[hop])
        hop = hop[hop]
    return total[:count]


def range_min(values: Ints, low: Ints, high: Ints) -> Ints:
    """Minimum of values[low:high] for many ranges, none empty, by a table of power-of-two spans."""
    table = [values]
    while 2 ** len(table) <= len(values):
        half = 2 ** (len(table) - 1)
        table.append(np.minimum(table[-1][:-half], table[-1][half:]))
    padded = np.stack([np.pad(row, (0, len(values) - len(row))) for row in table])
    span = np.frexp(high - low)[1] - 1
    return np.asarray(np.minimum(padded[span, low], padded[span, high - 2**span]))


def indptr(counts: Ints) -> Ints:
    """Offsets of consecutive ranges of these lengths, with the end of the last."""
    return np.concatenate(([0], np.cumsum(counts)))


def ranges(start: Ints, end: Ints) -> Ints:
    """Concatenate arange(start[i], end[i]) for all i."""
    length = (end - start).astype(np.int64)
    ends = np.cumsum(length)
    within = np.arange(ends[-1] if len(ends) else 0)
    return np.asarray(within + np.repeat(start - (ends - length), length))


class Readers(Protocol):
    """Who sees which key token: what a layout and a finished plan have in common."""

    @property
    def kv_low(self) -> Ints:
        """First row that sees each key token."""

    @property
    def kv_high(self) -> Ints:
        """End of the rows that see each key token."""

    @property
    def kv_position(self) -> Ints:
        """Logical position of each key token."""

    @property
    def row_position(self) -> Ints:
        """Logical position of each row."""


def pairs(readers: Readers, window: int | None, rows: Ints, tokens: Ints) -> npt.NDArray[np.bool_]:
    """Whether each row sees each key token; rows and tokens broadcast."""
    seen = (readers.kv_low[tokens] <= rows) & (rows < readers.kv_high[tokens])
    if window is not None:
        seen &= readers.kv_position[tokens] > readers.row_position[rows] - window
    return np.asarray(seen)
