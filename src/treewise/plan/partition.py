"""The partitions: ways to cut rows × key tokens into groups and work items."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from treewise.plan.data import FREE_END, GROUP, KV_END, KV_START, MASK, ROW_HIGH, ROW_LOW
from treewise.plan.devices import multiprocessors
from treewise.plan.layout import Layout, indptr, pack, pairs, range_min, ranges, stable_order
from treewise.plan.spec import Ints

STEP = 64
"""Key tokens that a GPU kernel takes at once: lists are cut at multiples of it, so that only their ends are ragged."""
LONGEST = 4096
"""Most key tokens of an item on a GPU."""
ALONE = 1 << 10
"""Items with at least so many (row, key token) pairs run alone on a CPU: their products outweigh the calls."""
BATCH = 1 << 18
"""Most elements that a CPU gathers from the pool for a batch of smaller items, to stay in the cache."""
COPIED = 1 << 17
"""Most key tokens of a node times the row tiles that list it, where every tile lists all that it reads."""
NEVER = 1 << 62
"""A length that no node has."""
BOUNDS = (16, 64)
"""Packed rows up to which items of the Triton kernel are of one kind, and of another."""
SHORT = 512
"""Items of at most so many key tokens are bound by latency: a GPU runs more of them at once, in smaller steps."""


class Cut(NamedTuple):
    """How to cut one kind of list: into items of at most so many rows and key tokens.

    ``wanted`` pairs a number of items with a length: the fewest key tokens an item are taken that make no more items
    than that, unless they pass the length; then the next pair decides. Where there are more lists than items wanted,
    those are cut that are longer than the share of an item; very long ones, and all of few rows, whose partial results
    are cheap, at a third of it, so that the last items to run do not run alone for long.
    """

    rows: int
    most: int
    wanted: tuple[tuple[int, int], ...] = ()
    few_rows: bool = False

    def chunk(self, lengths: Ints) -> int:
        """Most key tokens an item for lists of these lengths."""
        if not self.wanted or not len(lengths):
            return self.most
        length, count = lengths, np.ones_like(lengths)
        if len(lengths) > 1024:
            length, count = np.unique(lengths, return_counts=True)
        least = max(128, int(lengths.max()) // 64)  # a row that merges more partial results waits for them
        for items, limit in self.wanted:
            chunks = range(-(-least // STEP) * STEP, limit + 1, STEP)
            fitting = bisect_left(chunks, -items, key=lambda chunk: -int(count @ -(-length // chunk)))
            if fitting < len(chunks):
                return chunks[fitting]
        share = int(lengths.sum()) // self.wanted[-1][0]
        if self.few_rows:
            return max(256, min(share // 3, self.most))
        return max(STEP, min(share, max(self.most, share // 3)))


class Blocks(NamedTuple):
    """How `flatten` cuts rows × key tokens.

    A node of at least ``shared_length`` key tokens, or ``lone_length`` where one item holds its readers, gets groups
    of its own; the others are read along the paths of a row tile. So is one that an item of a path can hold where
    next to nothing is left for the paths otherwise, or one row tile holds all rows: another kernel would not pay.
    But a node gets groups of its own if it would stand more than ``copied`` times in the lists of the paths.

    ``paths`` are the tiles to choose from, the widest first: that is taken if it makes few more pairs of rows and key
    tokens than the one that makes fewest. ``bounds`` are those of `Partition`.
    """

    shared_length: int
    lone_length: int
    copied: int
    shared: Cut
    lone: Cut
    paths: tuple[Cut, ...]
    bounds: tuple[int, ...]


class Partition(NamedTuple):
    """Work items over a layout's rows and key tokens, and the masks of their kind (see `treewise.plan.data.Plan`).

    Items of one kernel have packed rows (rows × group) up to the same of the ``bounds``, or above all of them.
    """

    layout: Layout
    items: Ints
    group_tokens: Ints
    mask_words: Ints = np.zeros(0, np.int64)
    mask_dense: npt.NDArray[np.bool_] = np.zeros((0, 0), bool)
    parts: tuple[Ints, Ints] | None = None  # [start, end) of the layout's key tokens that are the partition's
    bounds: tuple[int, ...] = BOUNDS


def cutting_step(device: torch.device, chunk: int | None) -> int:
    """Key tokens of which the pieces of a list are multiples, but for its last."""
    return STEP if device.type != "cpu" and (chunk or STEP) % STEP == 0 else 1


def by_node(layout: Layout, window: int | None, row_tile: int, chunk: int, step: int) -> Partition:
    """One group a node and chunk of its key tokens, with all its readers."""
    _, start, end = _even(layout.node_start, layout.node_end, np.full(len(layout.node_start), chunk), step)
    return _by_tokens(layout, window, row_tile, start, end, np.zeros(len(start), bool))


def cpu_blocks(num_rows: int, row_tile: int | None, chunk: int | None) -> Blocks:
    """Choose the sizes for `flatten` on a CPU: few operations.

    Masked pairs cost as much as others there, hence narrow tiles for the paths: 16 rows take a fifth less than 128 over
    17 trees. Where one tile holds all rows, it reads everything: a merge costs more than what is masked.
    """
    own, rows = Cut(row_tile or 128, chunk or 2048), row_tile or 16
    if num_rows <= rows:
        return Blocks(own.most + 1, own.most + 1, NEVER, own, own, (Cut(rows, own.most),), BOUNDS)
    shortest, paths = min(32, own.most), Cut(rows, min(512, own.most))
    return Blocks(shortest, shortest, NEVER, own, own, (paths,), BOUNDS)


def blocks(
    device: torch.device, num_kv_heads: int, group_size: int, row_tile: int | None, chunk: int | None, has_gluon: bool
) -> Blocks:
    """Choose the sizes for `flatten` on a GPU: few partial results and items for one wave.

    Measured on an H200: what an item of 64 packed rows saves over one of 16 is worth more than the pairs that it masks,
    and partial results cost more than reading a node of less than 2,048 key tokens once a tile.
    Where the kernel in Gluon runs, masked pairs cost so little that one launch of it, along the paths, beats all else.
    """
    narrow, middle, wide = (row_tile or max(1, packed // group_size) for packed in (16, 64, 128))
    wave = max(1, multiprocessors(device) // num_kv_heads)
    one, two, three = (wave, LONGEST), (2 * wave, LONGEST), (3 * wave, SHORT)
    whole, alone, half, third = (
        Cut(rows, chunk or LONGEST, () if chunk else wanted, few_rows)
        for rows, wanted, few_rows in (
            (wide, (one,), False),
            (narrow, (two,), True),
            (middle, (two,), False),
            (middle, (three, two), False),
        )
    )
    if has_gluon:
        return Blocks(NEVER, NEVER, COPIED, whole, alone, (whole, half), ())
    return Blocks(2048, 320, NEVER, whole, alone, (third,), BOUNDS)


def flatten(layout: Layout, sizes: Blocks, step: int) -> Partition:
    """Row tiles with the key tokens that they see, cut in even blocks.

    A long node is read by tiles of its own readers. All others are read along the paths of a row tile, those key
    tokens first that all its rows see, so that a row gets few partial results however many nodes are above it. Two
    trees never share a block: a hidden value that is not finite would still spoil the block's other rows.
    """
    length, readers = layout.node_end - layout.node_start, layout.node_high - layout.node_low
    path_cut, tiled = _tile(layout, sizes.paths)
    copies = tiled.last - tiled.first
    lone = readers <= sizes.lone.rows
    own = length >= np.where(lone, sizes.lone_length, sizes.shared_length)
    tiles = len(tiled.bounds) - 1
    if not (own & lone).any() and (tiles == 1 or length[~own].sum() <= STEP * tiles):
        own &= length > path_cut.most
    own |= (copies > 1) & (copies * length > sizes.copied)
    long = np.flatnonzero(own)
    if not lone[long].all():  # the multiprocessors are not for the paths alone
        path_cut = path_cut._replace(wanted=path_cut.wanted[-1:])
    own_items, own_fresh = _long_nodes(layout, sizes, step, long, lone[long])
    items, fresh, part_start, part_end = _paths(layout, path_cut, tiled, step, own)
    # The key arrays are those of the long nodes, once, and then the paths of each row tile.
    start, end = layout.node_start[long], layout.node_end[long]
    bounds = indptr(end - start)
    own_items[:, [KV_START, KV_END, FREE_END]] += (bounds[:-1] - start)[own_items[:, GROUP], None]
    items[:, [KV_START, KV_END, FREE_END]] += bounds[-1]
    items = np.concatenate((own_items, items))
    items[:, GROUP] = np.arange(len(items))
    parts = (np.concatenate((start, part_start)), np.concatenate((end, part_end)))
    return Partition(layout, items, np.concatenate((own_fresh, fresh)), parts=parts, bounds=sizes.bounds)


class _Tiles(NamedTuple):
    """Tiles of rows, between their bounds; the first that reads each node, and the one after the last."""

    bounds: Ints
    first: Ints
    last: Ints


def _tile(layout: Layout, cuts: tuple[Cut, ...]) -> tuple[Cut, _Tiles]:
    """Choose among tiles of rows."""
    length, last_reader = layout.node_end - layout.node_start, layout.node_high - 1
    pairs, tiles = [], []
    for cut in cuts:
        bounds = _tile_bounds(len(layout.row_order), cut.rows)
        tile_of = np.arange(len(bounds) - 1).repeat(bounds[1:] - bounds[:-1])
        tiles.append(_Tiles(bounds, tile_of[layout.node_low], tile_of[last_reader] + 1))
        width = 1 << (int(bounds[-1] - bounds[-2]) - 1).bit_length()  # a kernel pads its rows
        pairs.append(width * int(length @ (tiles[-1].last - tiles[-1].first)))
    chosen = next(i for i, number in enumerate(pairs) if number <= 1.3 * min(pairs))
    return cuts[chosen], tiles[chosen]


def _tile_bounds(num_rows: int, most: int) -> Ints:
    """Cut rows evenly in the fewest tiles of at most so many."""
    tiles = -(-num_rows // most)
    return np.arange(tiles + 1) * num_rows // tiles


def _long_nodes(layout: Layout, sizes: Blocks, step: int, long: Ints, lone: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Items of nodes that are read by tiles of their own readers, and the key tokens that each is the first to read.

    The group of an item is the place of its node in `long`.
    """
    if not len(long):
        return np.zeros((0, 8), np.int64), long
    readers = layout.node_high[long] - layout.node_low[long]
    which, number, count = _pieces(readers, np.where(lone, sizes.lone.rows, sizes.shared.rows))
    node, readers, lone = long[which], readers[which], lone[which]
    row_low = layout.node_low[node] + number * readers // count
    row_high = layout.node_low[node] + (number + 1) * readers // count
    start = layout.node_start[node]
    end = np.minimum(layout.node_end[node], layout.first_read[row_high])
    limit = np.zeros_like(start)
    for kind, cut in ((lone, sizes.lone), (~lone, sizes.shared)):
        limit[kind] = cut.chunk((end - start)[kind])
    tile, kv_start, kv_end = _even(start, end, limit, step)
    row_low, row_high = row_low[tile], row_high[tile]
    fresh = kv_end - np.clip(layout.first_read[row_low], kv_start, kv_end)
    row_low = np.maximum(row_low, layout.kv_low[kv_start])
    free_end = np.clip(layout.first_read[row_low + 1], kv_start, kv_end)
    return _items(row_low, row_high, kv_start, kv_end, free_end, which[tile]), fresh


class _Runs(NamedTuple):
    """Neighbouring nodes of a layout that a list has side by side: short ones that one tile alone reads, or one."""

    mixed: npt.NDArray[np.bool_]  # whether its nodes may have different readers
    start: Ints
    end: Ints  # key tokens [start, end)
    least: Ints
    most: Ints  # where the readers of its nodes end, at least and at most
    root: Ints
    first: Ints
    last: Ints  # the tiles [first, last) that read it


def _runs(layout: Layout, tiled: _Tiles, own: npt.NDArray[np.bool_]) -> _Runs:
    """Put short nodes together, but for those that all rows of their tile see; leave out those of `own`."""
    bounds, first, last = tiled
    low, high = layout.node_low, layout.node_high
    alone = own | (last > first + 1) | ((low == bounds[first]) & (high == bounds[first + 1]))
    alone |= (high > low + 1) & (layout.node_end - layout.node_start >= STEP)
    begins = alone.copy()
    begins[0] = True
    begins[1:] |= alone[:-1] | (first[1:] != first[:-1]) | (layout.node_root[1:] != layout.node_root[:-1])
    node = np.flatnonzero(begins)
    end = layout.node_end[np.append(node[1:], len(begins)) - 1]
    least, most = np.minimum.reduceat(high, node), np.maximum.reduceat(high, node)
    columns = (~alone[node], layout.node_start[node], end, least, most, layout.node_root[node], first[node], last[node])
    listed = ~own[node]
    return _Runs(*(column[listed] for column in columns))


def _paths(
    layout: Layout, cut: Cut, tiled: _Tiles, step: int, own: npt.NDArray[np.bool_]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Items that read all nodes but `own` along the paths of row tiles, and the tokens that each is the first to read.

    Also returns of which parts [start, end) of the layout their key tokens consist.
    """
    bounds, trees = tiled.bounds, int(layout.node_root[-1]) + 1
    tiles = len(bounds) - 1
    runs = _runs(layout, tiled, own)
    run, tile = np.arange(len(runs.start)).repeat(runs.last - runs.first), ranges(runs.first, runs.last)

    # Segments: what a row tile sees of a run, mask-free and then masked. A list is all segments of a row tile.
    start, end = runs.start[run], np.minimum(runs.end[run], layout.first_read[bounds[1:]][tile])
    free = np.clip(layout.first_read[bounds[:-1] + 1][tile], start, end)
    free = np.where(runs.mixed[run] | (runs.most[run] < bounds[1:][tile]), start, free)
    open_part, masked_part = np.flatnonzero(free > start), np.flatnonzero(end > free)
    start, end = (np.concatenate((a[open_part], b[masked_part])) for a, b in ((start, free), (free, end)))
    pair = np.concatenate((open_part, masked_part))
    own_list = tile[pair] * trees + runs.root[run[pair]]
    order = stable_order(own_list, tiles * trees)
    start, end, own_list, run, tile = start[order], end[order], own_list[order], run[pair[order]], tile[pair[order]]

    # Lists are cut evenly; a part is what an item holds of a segment.
    offset = indptr(end - start)
    first = np.flatnonzero(np.append(True, own_list[1:] != own_list[:-1]))
    list_start, list_end = offset[first], offset[np.append(first[1:], len(own_list))]
    chunk = cut.chunk(list_end - list_start)
    _, kv_start, kv_end = _even(list_start, list_end, np.full(len(first), chunk), step)
    inside = np.searchsorted(offset, kv_start, side="right") - 1  # the segment in which each item starts
    cuts = kv_start > offset[inside]
    head = inside + cuts.cumsum()  # the first part of each item
    segment = np.arange(len(start)).repeat(np.bincount(inside[cuts], minlength=len(start)) + 1)
    part = offset[segment]
    part[head] = kv_start
    part_start = start[segment] + part - offset[segment]
    part_end = part_start + np.append(part[1:], offset[-1]) - part
    row_low, least, most = bounds[tile[segment]], runs.least[run[segment]], runs.most[run[segment]]
    # What is but a part of several nodes may end elsewhere.
    torn = np.flatnonzero(runs.mixed[run[segment]] & (part_end - part_start < (end - start)[segment]))
    nodes = np.searchsorted(layout.node_start, np.stack((part_start[torn], part_end[torn] - 1), axis=1), "right") - 1
    for ends, combine in ((least, np.minimum), (most, np.maximum)):
        ends[torn] = combine(combine.reduceat(layout.node_high, nodes.ravel())[::2], layout.node_high[nodes[:, 1]])
    item_low = np.maximum(row_low[head], np.minimum.reduceat(layout.kv_low[part_start], head))
    item_high = np.minimum(bounds[tile[segment[head]] + 1], np.maximum.reduceat(most, head))
    item = np.repeat(np.arange(len(head)), np.append(head[1:], len(part)) - head)
    every = (layout.kv_low[part_end - 1] <= item_low[item]) & (least >= item_high[item])
    free_end = np.minimum.reduceat(np.where(every, kv_end[item], part), head)
    # A key token is first read by the tile of its first reader.
    fresh = part_end - np.clip(layout.first_read[row_low], part_start, part_end)
    items = _items(item_low, item_high, kv_start, kv_end, free_end, head)
    return items, np.add.reduceat(fresh, head), part_start, part_end


def with_keys(partition: Partition, window: int | None) -> Partition:
    """List the key tokens of a partition that has only told of which parts of the layout they consist."""
    if partition.parts is None:
        return partition
    layout, token = partition.layout, ranges(*partition.parts)
    layout = layout._replace(
        kv_slots=layout.kv_slots.take(token),
        kv_readers=layout.kv_readers.take(token),
        kv_position=layout.kv_position.take(token) if window is not None else layout.kv_position,
    )
    items = partition.items
    if window is not None:
        bounds = _trim(layout, window, *items[:, [ROW_LOW, ROW_HIGH, KV_START, KV_END]].T)
        items[:, [KV_START, KV_END, FREE_END]] = np.stack(bounds, axis=1)
        items = items[items[:, KV_START] < items[:, KV_END]]
    return partition._replace(layout=layout, items=items, parts=None)


def by_query(layout: Layout, window: int | None, row_tile: int, chunk: int, step: int) -> Partition:
    """One group a sequence and chunk of its path; the key arrays list each sequence's path, as page tables do.

    A sequence is one query, or the queries of a prompt chunk at consecutive tokens of a node.
    """
    sequence_low = np.flatnonzero(layout.row_starts)
    sequence_high = np.append(sequence_low[1:], len(layout.row_starts))
    sequence_of = np.cumsum(layout.row_starts) - 1  # a node's readers are whole sequences
    first, last = sequence_of[layout.node_low], sequence_of[layout.node_high - 1] + 1
    node, sequence = np.repeat(np.arange(len(first)), last - first), ranges(first, last)
    by_sequence = stable_order(sequence, len(sequence_low))
    node, sequence = node[by_sequence], sequence[by_sequence]
    start = layout.node_start[node]
    end = np.minimum(layout.node_end[node], layout.first_read[sequence_high[sequence]])
    token, reader = ranges(start, end), np.repeat(sequence, end - start)
    if window is not None:
        nearest = np.minimum.reduceat(layout.row_position, sequence_low)
        near = layout.kv_position[token] > nearest[reader] - window
        token, reader = token[near], reader[near]
    bounds = indptr(np.bincount(reader, minlength=len(sequence_low)))
    _, start, end = _even(bounds[:-1], bounds[1:], np.full(len(sequence_low), chunk), step)
    paths = layout._replace(
        kv_slots=layout.kv_slots[token],
        kv_readers=pack(np.maximum(layout.kv_low[token], sequence_low[reader]), sequence_high[reader]),
        kv_position=layout.kv_position[token] if window is not None else layout.kv_position,
    )
    return _by_tokens(paths, window, row_tile, start, end, np.zeros(len(start), bool))


def by_query_over_trees(layout: Layout, window: int | None) -> Partition:
    """One group a query, over all key tokens of its tree, with a bit for each."""
    first = np.flatnonzero(np.diff(layout.node_root, prepend=-1))
    last = np.append(first[1:], len(layout.node_root)) - 1
    starts, ends = layout.node_start[first], layout.node_end[last]
    row_low = np.minimum.reduceat(layout.node_low, first)
    row_high = np.maximum.reduceat(layout.node_high, first)
    words = []
    for low, high, start, end in zip(row_low, row_high, starts, ends, strict=True):
        block = max(1, 2**26 // int(end - start))  # rows at a time, to bound the memory
        for row in range(low, high, block):
            rows = np.arange(row, min(row + block, high))
            words.append(_pack(pairs(layout, window, rows[:, None], np.arange(start, end)[None, :])).ravel())
    tree = np.repeat(np.arange(len(first)), row_high - row_low)
    reader = ranges(row_low, row_high)
    items = _items(reader, reader + 1, starts[tree], ends[tree], starts[tree], np.arange(len(reader)))
    items[:, MASK] = indptr(-(-(items[:, KV_END] - items[:, KV_START]) // 64))[:-1]
    return Partition(layout, items, (ends - starts)[tree], mask_words=np.concatenate(words))


def dense(layout: Layout, window: int | None) -> Partition:
    """One group of all rows and key tokens, with a byte for each pair."""
    rows, tokens = np.arange(len(layout.row_order)), np.arange(len(layout.kv_slots))
    zero = np.zeros(1, np.int64)
    items = _items(zero, zero + len(rows), zero, zero + len(tokens), zero, zero)
    seen = pairs(layout, window, rows[:, None], tokens[None, :])
    return Partition(layout, items, zero + len(tokens), mask_dense=seen)


def with_words(partition: Partition, window: int | None) -> Partition:
    """Give each item a word a key token, bit i telling whether the item's row i sees it."""
    layout, items = partition.layout, partition.items.copy()
    length = items[:, KV_END] - items[:, KV_START]
    token = ranges(items[:, KV_START], items[:, KV_END])
    item = np.repeat(np.arange(len(items)), length)
    row = items[item, ROW_LOW][:, None] + np.arange(64)[None, :]
    inside = row < items[item, ROW_HIGH][:, None]
    row = np.minimum(row, len(layout.row_order) - 1)
    items[:, MASK] = indptr(length)[:-1]
    words = _pack(inside & pairs(layout, window, row, token[:, None])).ravel()
    return partition._replace(items=items, mask_words=words)


def in_launch_order(partition: Partition, group_size: int) -> Partition:
    """Sort items so that those of one kernel follow each other, and the longest of them come first."""
    items = partition.items
    width = np.searchsorted(partition.bounds, (items[:, ROW_HIGH] - items[:, ROW_LOW]) * group_size)
    return partition._replace(items=items[np.lexsort((items[:, KV_START] - items[:, KV_END], -width))])


def _even(start: Ints, end: Ints, limit: Ints, step: int) -> tuple[Ints, Ints, Ints]:
    """Cut each range into the fewest pieces of at most its limit, as even as multiples of a step can be.

    Returns the range of each piece, its start and its end.
    """
    whole, number, pieces = _pieces(end - start, limit)
    first, last, steps = start[whole], end[whole], (-(-(end - start) // step))[whole]
    piece_start: Ints = first + number * steps // pieces * step
    piece_end: Ints = np.minimum(first + (number + 1) * steps // pieces * step, last)
    return whole, piece_start, piece_end


def _pieces(length: Ints, limit: Ints | int) -> tuple[Ints, Ints, Ints]:
    """For each piece of at most `limit`: which range it is of, its number there, and how many there are."""
    pieces: Ints = -(-length // limit)
    whole = np.repeat(np.arange(len(length)), pieces)
    return whole, np.arange(len(whole)) - (np.cumsum(pieces) - pieces)[whole], pieces[whole]


def _items(row_low: Ints, row_high: Ints, kv_start: Ints, kv_end: Ints, free_end: Ints, group: Ints) -> Ints:
    items = np.zeros((len(row_low), 8), np.int64)
    columns = (ROW_LOW, ROW_HIGH, KV_START, KV_END, FREE_END, GROUP)
    for column, values in zip(columns, (row_low, row_high, kv_start, kv_end, free_end, group), strict=True):
        items[:, column] = values
    return items


def _by_tokens(
    layout: Layout, window: int | None, row_tile: int, start: Ints, end: Ints, mixed: npt.NDArray[np.bool_]
) -> Partition:
    """Make groups of key tokens with all their readers, cut in row tiles and trimmed to what each tile sees."""
    group_low = np.minimum.reduceat(layout.kv_low, start)
    group_high = np.maximum.reduceat(layout.kv_high, start)
    group, number, _ = _pieces(group_high - group_low, row_tile)
    row_low = group_low[group] + number * row_tile
    row_high = np.minimum(row_low + row_tile, group_high[group])
    kv_start = start[group]
    # First readers never decrease in depth-first order, so what a tile sees of a single node is found by bisection.
    low = np.ascontiguousarray(layout.kv_low)
    kv_end = np.minimum(end[group], np.searchsorted(low, row_high.astype(np.int32)))
    free_end = np.clip(np.searchsorted(low, row_low.astype(np.int32), side="right"), kv_start, kv_end)
    hard = np.flatnonzero(mixed[group]) if window is None else np.arange(len(group))
    if len(hard):
        trimmed = _trim(layout, window, row_low[hard], row_high[hard], kv_start[hard], kv_end[hard])
        kv_start[hard], kv_end[hard], free_end[hard] = trimmed
    keep = kv_start < kv_end
    columns = (row_low, row_high, kv_start, kv_end, free_end, group)
    return Partition(layout, _items(*(column[keep] for column in columns)), end - start)


def _trim(
    layout: Layout, window: int | None, row_low: Ints, row_high: Ints, start: Ints, end: Ints
) -> tuple[Ints, Ints, Ints]:
    """Bounds of the key tokens that some row of each tile sees, and the end of their leading mask-free part."""
    tile, token = np.repeat(np.arange(len(start)), end - start), ranges(start, end)
    low, high = layout.kv_low[token], layout.kv_high[token]
    some = (low < row_high[tile]) & (high > row_low[tile])
    every = (low <= row_low[tile]) & (high >= row_high[tile])
    if window is not None:
        nearest = range_min(layout.row_position, row_low, row_high)
        farthest = -range_min(-layout.row_position, row_low, row_high)
        some &= layout.kv_position[token] > (nearest - window)[tile]
        every &= layout.kv_position[token] > (farthest - window)[tile]
    bounds = indptr(end - start)[:-1]
    first = np.minimum.reduceat(np.where(some, token, end[tile]), bounds)
    last = np.maximum.reduceat(np.where(some, token + 1, first[tile]), bounds)
    partly = np.minimum.reduceat(np.where(every | (token < first[tile]), end[tile], token), bounds)
    return first, last, np.clip(partly, first, last)


def _pack(bits: npt.NDArray[np.bool_]) -> Ints:
    """Pack the last axis into 64-bit words, first bit lowest."""
    short = -bits.shape[-1] % 64
    return np.packbits(np.pad(bits, ((0, 0), (0, short))), axis=-1, bitorder="little").view("<i8")
