"""From a method's name to its partition: the sizes that each takes by default, and the choice that ``"auto"`` makes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treewise.plan import partition
from treewise.plan.cost import Candidate, Layer, choose, work_by_node, work_by_query, work_of_items
from treewise.plan.layout import Layout
from treewise.plan.partition import Partition


class Task(NamedTuple):
    """What a layout is cut for."""

    layout: Layout
    layer: Layer
    window: int | None
    row_tile: int | None
    chunk: int | None


class Result(NamedTuple):
    """A partition, the method that it is of and why, and the most rows that read a key token together."""

    partition: Partition
    method: str
    why: str
    row_tile: int


def cut(method: str, task: Task, mask: str) -> Result:
    """Cut a layout by a method, or by the one that is predicted to take least time.

    That is usually flatten, and plain decoding where no two sequences share anything.
    """
    if method != "auto":
        made, why = _cut(method, task), "asked for by name"
        return Result(partition.with_keys(made, task.window), method, why, _most_rows(method, task))
    layout, blocks = task.layout, _cut("deft:flatten", task)
    candidates = {
        "deft:flatten": Candidate(
            len(blocks.items), lambda: work_of_items(blocks.items, len(layout.kv_slots), blocks.bounds)
        ),
        "deft:node_chunk": Candidate(
            len(layout.node_start), lambda: work_by_node(layout, *_rows_and_chunk("deft:node_chunk", task))
        ),
    }
    if mask == "intervals":  # words are for deft:* methods
        sequence = np.cumsum(layout.row_starts)
        plain = {
            "radix": Candidate(
                int(sequence[-1]), lambda: work_by_query(layout, task.window, *_rows_and_chunk("radix", task))
            )
        }
        shared = (sequence[layout.node_low] < sequence[layout.node_high - 1]).any()
        candidates = candidates | plain if shared else plain | candidates
    method, why = choose(candidates, task.layer)
    made = blocks if method == "deft:flatten" else _cut(method, task)
    return Result(partition.with_keys(made, task.window), method, why, _most_rows(method, task))


def _cut(method: str, task: Task) -> Partition:
    """Cut a layout by a method; flatten leaves its key tokens unlisted."""
    layout, layer, window, _, chunk = task
    step = partition.cutting_step(layer.device, chunk)
    if method == "deft:flatten":
        return partition.flatten(layout, _blocks(task), step)
    rows, chunk = _rows_and_chunk(method, task)
    match method:
        case "medusa" | "vanilla":
            return partition.dense(layout, window)
        case "specinfer":
            return partition.by_query_over_trees(layout, window)
        case "flash_decoding" | "radix":
            return partition.by_query(layout, window, rows, chunk, step)
    return partition.by_node(layout, window, rows, chunk, step)


def _blocks(task: Task) -> partition.Blocks:
    layer = task.layer
    if layer.device.type == "cpu":
        return partition.cpu_blocks(len(task.layout.row_order), task.row_tile, task.chunk)
    group_size = layer.num_heads // layer.num_kv_heads
    has_gluon = layer.backend == "hopper" and task.window is None and layer.head_dim in (64, 128)
    has_gluon &= layer.dtype == layer.kv_dtype and layer.dtype.itemsize == 2
    return partition.blocks(layer.device, layer.num_kv_heads, group_size, task.row_tile, task.chunk, has_gluon)


def _rows_and_chunk(method: str, task: Task) -> tuple[int, int]:
    """Most rows and key tokens of an item, of methods other than flatten."""
    layer = task.layer
    group_size = layer.num_heads // layer.num_kv_heads
    rows = task.row_tile or (128 if layer.device.type == "cpu" else max(1, 64 // group_size))
    match method:
        case "deft:node":
            return rows, max(1, len(task.layout.kv_slots))
        case "deft:node_chunk":
            return rows, task.chunk or 256
    # A path is cut as flatten cuts a node that one item's rows read.
    starts = np.append(np.flatnonzero(task.layout.row_starts), len(task.layout.row_starts))
    tiles = -(-np.diff(starts) // rows)
    return rows, task.chunk or _blocks(task).lone.chunk(np.repeat(task.layout.row_seen[starts[1:] - 1], tiles))


def _most_rows(method: str, task: Task) -> int:
    if method == "deft:flatten":
        sizes = _blocks(task)
        return max(sizes.shared.rows, *(paths.rows for paths in sizes.paths))
    return len(task.layout.row_order) if method == "medusa" else _rows_and_chunk(method, task)[0]
