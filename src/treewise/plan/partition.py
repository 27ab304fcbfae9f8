"""The partitions: ways to cut rows × key tokens into groups and work items."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from treewise.plan.data import ENTRY, FREE_END, GROUP, KV_END, KV_START, MASK, ROW_HIGH, ROW_LOW
from treewise.plan.layout import Layout, indptr, pairs, range_min, ranges
from treewise.plan.spec import Ints

SMALL_NODE = 64
"""Nodes with fewer key tokens share a block with their neighbours."""
MIXED_BLOCK = 256
"""Most key tokens of a block that holds several nodes."""


class Partition(NamedTuple):
    """Work items over a layout's rows and key tokens, and the masks of their kind (see `treewise.plan.data.Plan`)."""

    layout: Layout
    items: Ints
    group_tokens: Ints
    mask_words: Ints = np.zeros(0, np.int64)
    mask_dense: npt.NDArray[np.bool_] = np.zeros((0, 0), bool)


def default_chunk(layout: Layout, row_tile: int, device: torch.device, num_kv_heads: int) -> int:
    """Most key tokens of a group, so that a GPU gets a few items a multiprocessor; a CPU wants few large products."""
    if device.type == "cpu":
        return 2048
    tiles = -(-(layout.node_high - layout.node_low) // row_tile)
    work = int(((layout.node_end - layout.node_start) * tiles).sum()) * num_kv_heads
    multiprocessors = 132
    return int(np.clip(-(-work // (4 * multiprocessors) // 64) * 64, 256, 2048))


def by_node(layout: Layout, window: int | None, row_tile: int, chunk: int) -> Partition:
    """One group a node and chunk of its key tokens, with all its readers."""
    start, end = _even(layout.node_start, layout.node_end, np.full(len(layout.node_start), chunk))
    return _by_tokens(layout, window, row_tile, start, end, np.zeros(len(start), bool))


def flatten(layout: Layout, window: int | None, row_tile: int, chunk: int) -> Partition:
    """Even blocks of the depth-first key tokens, with all their readers.

    A block inside one node needs no mask; only runs of nodes too small for a block of their own are mixed, and never
    those of two trees: a hidden value that is not finite would still spoil the block's other rows.
    """
    length = layout.node_end - layout.node_start
    small = length < min(SMALL_NODE, chunk)
    new_tree = np.diff(layout.node_root, prepend=-1) != 0
    first = np.flatnonzero(~small | np.diff(small, prepend=False) | new_tree)
    start = layout.node_start[first]
    end = np.append(start[1:], layout.node_end[-1:])
    mixed = np.diff(np.append(first, len(length))) > 1
    limit = np.where(mixed, min(chunk, MIXED_BLOCK), chunk)
    blocks = -(-(end - start) // limit)
    return _by_tokens(layout, window, row_tile, *_even(start, end, limit), np.repeat(mixed, blocks))


def by_query(layout: Layout, window: int | None, row_tile: int, chunk: int) -> Partition:
    """One group a sequence and chunk of its path; the key arrays list each sequence's path, as page tables do.

    A sequence is one query, or the queries of a prompt chunk at consecutive tokens of a node.
    """
    sequence_low = np.flatnonzero(layout.row_starts)
    sequence_high = np.append(sequence_low[1:], len(layout.row_starts))
    sequence_of = np.cumsum(layout.row_starts) - 1  # a node's readers are whole sequences
    first, last = sequence_of[layout.node_low], sequence_of[layout.node_high - 1] + 1
    node, sequence = np.repeat(np.arange(len(first)), last - first), ranges(first, last)
    by_sequence = np.argsort(sequence, kind="stable")
    node, sequence = node[by_sequence], sequence[by_sequence]
    start = layout.node_start[node]
    seen = np.searchsorted(layout.kv_low, sequence_high[sequence] - 1, side="right")
    end = np.minimum(layout.node_end[node], seen)
    token, reader = ranges(start, end), np.repeat(sequence, end - start)
    if window is not None:
        nearest = np.minimum.reduceat(layout.row_position, sequence_low)
        near = layout.kv_position[token] > nearest[reader] - window
        token, reader = token[near], reader[near]
    bounds = indptr(np.bincount(reader, minlength=len(sequence_low)))
    start, end = _even(bounds[:-1], bounds[1:], np.full(len(sequence_low), chunk))
    paths = layout._replace(
        kv_slots=layout.kv_slots[token],
        kv_low=np.maximum(layout.kv_low[token], sequence_low[reader]),
        kv_high=sequence_high[reader],
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
    """Give each masked item a word a key token, bit i telling whether the item's row i sees it."""
    layout, items = partition.layout, partition.items.copy()
    masked = np.flatnonzero(items[:, FREE_END] < items[:, KV_END])
    chosen = items[masked]
    token = ranges(chosen[:, KV_START], chosen[:, KV_END])
    item = np.repeat(np.arange(len(chosen)), chosen[:, KV_END] - chosen[:, KV_START])
    row = chosen[item, ROW_LOW][:, None] + np.arange(64)[None, :]
    inside = row < chosen[item, ROW_HIGH][:, None]
    row = np.minimum(row, len(layout.row_order) - 1)
    items[masked, MASK] = indptr(chosen[:, KV_END] - chosen[:, KV_START])[:-1]
    words = _pack(inside & pairs(layout, window, row, token[:, None])).ravel()
    return partition._replace(items=items, mask_words=words)


def in_launch_order(partition: Partition, group_size: int) -> Partition:
    """Sort items so that those of one compiled kernel follow each other, and the longest of them come first."""
    items = partition.items
    masked = items[:, FREE_END] < items[:, KV_END]
    wide = (items[:, ROW_HIGH] - items[:, ROW_LOW]) * group_size > 16
    items = items[np.lexsort((items[:, KV_START] - items[:, KV_END], wide, masked))]
    items[:, ENTRY] = indptr(items[:, ROW_HIGH] - items[:, ROW_LOW])[:-1]
    return partition._replace(items=items)


def _even(start: Ints, end: Ints, limit: Ints) -> tuple[Ints, Ints]:
    """Cut each range into the fewest pieces of at most its limit, as even as can be."""
    whole, number, pieces = _pieces(end - start, limit)
    first, length = start[whole], (end - start)[whole]
    piece_start: Ints = first + number * length // pieces
    piece_end: Ints = first + (number + 1) * length // pieces
    return piece_start, piece_end


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
    kv_end = np.minimum(end[group], np.searchsorted(layout.kv_low, row_high))
    free_end = np.clip(np.searchsorted(layout.kv_low, row_low, side="right"), kv_start, kv_end)
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
