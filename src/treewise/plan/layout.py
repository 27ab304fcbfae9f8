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
    row_seen: Ints  # tokens on each row's path, whatever the window
    first_read: Ints  # key tokens [first_read[r], first_read[r + 1]) are seen by row r and none before it
    kv_slots: Ints  # int32
    kv_readers: Ints  # int64: the interval of rows that see each key token, see `pack`
    kv_position: Ints  # empty without a window
    node_start: Ints
    node_end: Ints  # key tokens [start, end) of each node
    node_low: Ints
    node_high: Ints  # its readers, rows [low, high)
    node_root: Ints  # which tree of the forest it belongs to

    @property
    def kv_low(self) -> Ints:
        """First row that sees each key token; never decreases."""
        return unpack(self.kv_readers)[0]

    @property
    def kv_high(self) -> Ints:
        """End of the rows that see each key token."""
        return unpack(self.kv_readers)[1]


def lay_out(tree: TreeSpec, slots: Ints, window: int | None) -> Layout:
    """Order rows and key tokens depth-first and drop the key tokens that no row sees."""
    nodes = _depth_first(tree)
    parent, length, first = nodes.parent, nodes.length, nodes.first
    number = np.arange(tree.num_nodes)
    closed = np.bincount(number + nodes.below + 1, weights=length, minlength=tree.num_nodes + 1)[:-1]
    depth = np.cumsum(length - closed.astype(np.int64))  # tokens down to each node's end
    node, offset = nodes.query_node, tree.query_offset
    seen = (depth - length)[node] + offset + 1
    check("query_node", tree.query_node, seen > 0, "have a token on its path, or its query sees nothing")

    rows_at = np.bincount(node, minlength=tree.num_nodes)
    row_order = _row_order(node, offset, rows_at)
    row_node, row_offset, row_seen = node[row_order], offset[row_order], seen[row_order]
    row_starts = np.ones(len(row_order), bool)
    row_starts[1:] = (row_node[1:] != row_node[:-1]) | (row_offset[1:] != row_offset[:-1] + 1)
    rows_before = indptr(rows_at)
    low, high = rows_before[:-1], rows_before[number + nodes.below + 1]
    if tree.position is None:
        row_position = row_seen - 1
    else:  # tokens of an ancestor come first in the caller's order, so the last one on a path has the largest index
        last = along_paths(reaches(parent), np.where(length > 0, first + length - 1, -1), np.maximum)
        inherited = last[parent[row_node]]
        row_position = tree.position[np.where(row_offset < 0, inherited, first[row_node] + row_offset)]

    used = np.where(high > low, length, 0)
    start = np.cumsum(used) - used  # of each node, in the depth-first token order
    kept = np.flatnonzero(used)
    tokens, begin = used[kept], first[kept]
    row_end = start[row_node] + row_offset + 1
    kv_readers = np.repeat(pack(low[kept], high[kept]), tokens)
    kv_position = np.zeros(0, np.int64)
    needed = None  # all of them
    if (row_offset + 1 < length[row_node]).any():
        # Rows sit in token order, so a token's first reader is the number of rows before it.
        kv_low, kv_high = unpack(kv_readers)
        kv_low[:] = np.cumsum(np.bincount(row_end, minlength=len(kv_low) + 1)[: len(kv_low)])
        needed = kv_low < kv_high
    if window is not None:
        source = ranges(begin, begin + tokens)  # the caller's number of each key token
        kv_position = source - np.repeat((first - depth + length)[kept], tokens)
        if tree.position is not None:
            kv_position = tree.position[source]
        needed = np.ones(len(source), bool) if needed is None else needed
        kv_low, kv_high = unpack(kv_readers[needed])
        needed[needed] = kv_position[needed] > range_min(row_position, kv_low, kv_high) - window
        kv_position = kv_position[needed]
    kv_slots = _take(slots, begin, begin + tokens)
    if needed is not None and not needed.all():
        kv_slots, kv_readers, row_end = kv_slots[needed], kv_readers[needed], indptr(needed)[row_end]
        used = np.bincount(np.repeat(kept, tokens)[needed], minlength=tree.num_nodes)
        kept = kept[used[kept] > 0]
        tokens = used[kept]
    ends = np.cumsum(tokens)
    root = np.cumsum(parent < 0)[kept] - 1
    return Layout(
        row_order, row_position, row_starts, row_seen, np.append(0, row_end), kv_slots, kv_readers, kv_position,
        ends - tokens, ends, low[kept], high[kept], root,
    )  # fmt: skip


class _Nodes(NamedTuple):
    """The nodes of a tree in depth-first order."""

    parent: Ints
    length: Ints
    below: Ints  # how many nodes stand below each, right behind it
    first: Ints  # of each node's tokens, in the caller's order
    query_node: Ints


def _depth_first(tree: TreeSpec) -> _Nodes:
    """Bring nodes in depth-first order, if they are not."""
    first = np.cumsum(tree.length) - tree.length
    if tree.below is not None:
        return _Nodes(tree.parent, tree.length, tree.below, first, tree.query_node)
    rank, size = _preorder(tree.parent)
    order = np.empty_like(rank)
    order[rank] = np.arange(len(rank))
    above = tree.parent[order]
    parent = np.where(above < 0, -1, rank[above])
    return _Nodes(parent, tree.length[order], size[order] - 1, first[order], rank[tree.query_node])


def _row_order(node: Ints, offset: Ints, rows_at: Ints) -> Ints:
    """Order rows by node and offset, equal ones as they come."""
    if rows_at.max() == 1:
        row_at = np.empty_like(rows_at)
        row_at[node] = np.arange(len(node))
        return row_at[rows_at > 0]
    order = stable_order(offset + 1, int(offset.max()) + 2)
    return order[stable_order(node[order], len(rows_at))]


def pack(low: Ints, high: Ints) -> Ints:
    """Put intervals into one 64-bit number each, the low ends in the lower halves."""
    both = np.empty((len(low), 2), np.int32)
    both[:, 0], both[:, 1] = low, high
    return both.view(np.int64)[:, 0]


def unpack(intervals: Ints) -> tuple[Ints, Ints]:
    """Return views of the low and the high ends."""
    both = intervals.view(np.int32)
    return both[::2], both[1::2]


def reaches(parent: Ints) -> list[Ints]:
    """List where each node gets by 1, 2, 4, ... steps up; one more node stands above the roots."""
    count = len(parent)
    hop = np.append(np.where(parent < 0, count, parent), count)
    hops = []
    while hop.min() < count:
        hops.append(hop)
        hop = hop[hop]
    return hops


def _preorder(parent: Ints) -> tuple[Ints, Ints]:
    """Depth-first place and subtree size of each node, in a few passes that double their reach."""
    count, hops = len(parent), reaches(parent)
    size = np.ones(count + 1)
    for hop in hops:
        size[count] = 0  # stands above the roots
        size += np.bincount(hop, weights=size, minlength=count + 1)
    sizes = size[:count].astype(np.int64)
    above = np.where(parent < 0, count, parent)
    siblings = stable_order(above, count + 1)
    sizes_there, above_there = sizes[siblings], above[siblings]
    before = sizes_there.cumsum() - sizes_there
    new = np.ones(count, bool)
    np.not_equal(above_there[1:], above_there[:-1], out=new[1:])
    step = np.empty(count, np.int64)  # from a parent's place to its child's
    step[siblings] = before - np.maximum.accumulate(before * new) + 1
    return along_paths(hops, step, np.add) - 1, sizes


def along_paths(hops: list[Ints], values: Ints, combine: np.ufunc) -> Ints:
    """Combine the values from each node's root down to the node; the ufunc's identity must be 0 or below values."""
    total = np.append(values, 0 if combine is np.add else -1)
    for hop in hops:
        total = combine(total, total[hop])
    return total[:-1]


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
    offsets = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=offsets[1:])
    return offsets


def ranges(start: Ints, end: Ints) -> Ints:
    """Concatenate arange(start[i], end[i]) for all i, none reversed."""
    if not (some := end > start).all():
        start, end = start[some], end[some]
    ends = np.cumsum(end - start)
    # Differences to the number before, summed in place: page faults of large intermediate arrays would cost more.
    numbers = np.ones(ends[-1] if len(ends) else 0, np.int64)
    numbers[:1] = start[:1]
    numbers[ends[:-1]] += start[1:] - end[:-1]
    return np.cumsum(numbers, out=numbers)


def _take(values: Ints, start: Ints, end: Ints) -> Ints:
    """Concatenate values[start[i]:end[i]] for all i, none reversed; a view where they follow each other."""
    if len(start) and (start[1:] == end[:-1]).all():
        return values[start[0] : end[-1]]
    return values.take(ranges(start, end))


def stable_order(keys: Ints, end: int) -> Ints:
    """Order keys of [0, end), equal ones as they come; linear in time if 16 bits hold them."""
    return np.argsort(keys.astype(np.uint16) if end <= 2**16 else keys, kind="stable")


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
