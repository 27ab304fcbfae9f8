"""How well a GPU is used: table 14, from one layer's time and that of each kind of work item alone."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from treewise.attention import Plan, TreeSpec, plan_tree, run_plan
from treewise.bench.floors import Machine
from treewise.bench.measure import time_calls
from treewise.bench.trees import visible_lengths
from treewise.plan.data import KV_END, KV_START, ROW_HIGH, ROW_LOW
from treewise.reproduce.deft import published, texts
from treewise.reproduce.deft.attention import PARTITIONS, Layer, typical
from treewise.reproduce.deft.tables import NAMES
from treewise.reproduce.deft.workloads import Setup
from treewise.reproduce.report import Cell, Compared, Section, Table
from treewise.reproduce.study import Measurement, Result, Results, attempt

QUERIES, PROMPT = 64, 4000
LOW = 0.05
"""The paper calls a time one of low utilisation if less than this share of the arithmetic is used."""


def utilisation(setup: Setup, layer: Layer) -> Iterator[Measurement]:
    """Measure the paper's micro-benchmark."""
    settings = {
        **{"model": setup.subject.model, "device": setup.subject.device, "dtype": str(layer.dtype)},
        **{"queries": QUERIES, "prompt": PROMPT, "repeats": setup.scale.repeats},
    }
    yield Measurement("utilisation", "use of the GPU", 10.0, partial(_measure, setup, layer), settings)


def _measure(setup: Setup, layer: Layer) -> Result:
    tree, device = setup.drafted("star", QUERIES).tree(PROMPT), layer.device
    machine = Machine(device, layer.dtype)
    cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else torch.get_num_threads()
    nothing = torch.zeros(1, device=device)
    launch = typical(time_calls(lambda: torch.neg(nothing, out=nothing), device, setup.scale.repeats), device)
    k, v = layer.pool(tree.num_tokens)
    q = torch.randn(QUERIES, layer.num_heads, layer.head_dim, device=device).to(layer.dtype)
    flops = 4 * int(visible_lengths(tree).sum()) * layer.num_heads * layer.head_dim
    found: Result = {"processors": processors, "methods": {}}

    def seconds(one: TreeSpec, method: str, row_tile: int | None = None) -> tuple[Plan, float]:
        plan = plan_tree(one, method, row_tile=row_tile, **layer.shape)
        call = partial(run_plan, plan, q[: one.num_queries], k, v)
        return plan, typical(time_calls(call, device, setup.scale.repeats), device)

    def used(method: str) -> Result:
        plan, whole = seconds(tree, method)
        sizes = [(int(item[ROW_HIGH] - item[ROW_LOW]), int(item[KV_END] - item[KV_START])) for item in plan.items]
        alone = {}
        for rows, tokens in dict.fromkeys(sizes):  # an item of that size, alone: so many queries of one node
            _, taken = seconds(TreeSpec([-1], [tokens], [0] * rows), "deft:node", rows)
            alone[rows, tokens] = max(0.0, taken - launch)
        durations = [alone[size] for size in sizes for _ in range(layer.num_kv_heads)]
        idle, low = idle_shares(durations, processors)
        return {
            "us": whole * 1e6,
            "matrix": flops / whole / machine.matrix,
            "memory": plan.io().total / whole / machine.bandwidth,
            "kv_gb_per_s": plan.io().kv / whole / 1e9,
            "tflop_per_s": flops / whole / 1e12,
            "idle": idle,
            "low": low,
            "items": {f"{rows} × {tokens}": number for (rows, tokens), number in Counter(sizes).items()},
        }

    for method in PARTITIONS:
        found["methods"][method] = attempt(partial(used, method))
    return found


def idle_shares(durations: Sequence[float], processors: int) -> tuple[float, float]:
    """Give work to whichever processor is free first, in order, and see how they are used.

    Returns
    -------
    idle : float
        Share of all processors' time, until the last one is done, in which they have nothing to do.
    low : float
        Share of the time in which fewer than one in twenty have something to do.

    Examples
    --------
    >>> idle_shares([1.0] * 4, 4), idle_shares([4.0, 1.0], 2)[0]
    ((0.0, 0.0), 0.375)
    """
    free = [0.0] * processors
    ends = []
    for duration in durations:
        start = heapq.heappop(free)
        ends.append(start + duration)
        heapq.heappush(free, start + duration)
    whole = max(ends)
    if whole == 0:
        return 0.0, 0.0
    last = sorted(free, reverse=True)  # nobody pauses, so the number at work only falls once all work is given out
    few = int(LOW * processors)
    return 1 - sum(durations) / (processors * whole), 1 - last[few] / whole if few < processors else 0.0


def sections(results: Results) -> list[Section]:
    """Report table 14."""
    found = results.get("utilisation", {})
    if "methods" not in found:
        return []
    rows: list[Sequence[Cell]] = []
    for method, one in found["methods"].items():
        if "error" in one:
            continue
        said: tuple[Any, ...] = published.UTILISATION.get(method, (None,) * 4)
        rows.append(
            [
                NAMES[method],
                Compared(one["us"], said[0]),
                Compared(one["matrix"], said[1]),
                Compared(one["memory"], said[2]),
                Compared(one["low"], said[3]),
                one["idle"],
                one["tflop_per_s"],
                one["kv_gb_per_s"],
                ", ".join(f"{number} of {size}" for size, number in list(one["items"].items())[:3]),
            ]
        )
    columns = [
        *("method", "µs", "share of the matrix rate", "share of the copy rate", "time of low use", "idle processors"),
        *("TFLOP/s", "KV GB/s", "items, rows × tokens"),
    ]
    text = texts.UTILISATION.format(queries=QUERIES, prompt=PROMPT, processors=found["processors"])
    return [Section("Use of the GPU (table 14)", text, [Table("Table 14: DeFT-Node and DeFT-Flatten", columns, rows)])]
