"""Bytes that attention moves: tables 12 and 17, counted from plans, on any machine to the digit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Any

import torch

from treewise.attention import plan_tree
from treewise.bench.workloads import PUBLISHED_TB
from treewise.replay import Schedule, total_io
from treewise.reproduce.deft import published, texts
from treewise.reproduce.deft.tables import NAMES
from treewise.reproduce.deft.workloads import METHODS, PROMPT, STEPS, TITLES, Setup, Work
from treewise.reproduce.report import Cell, Compared, Section, Table
from treewise.reproduce.study import Measurement, Result, Results

LAYERS = 32
PAPER: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 32, "head_dim": 128, "dtype": torch.float16}
"""A layer as the paper counts it: keys and values once for every query head, 2 bytes."""
CUTS: dict[str, dict[str, Any]] = {
    "deft:node": {"row_tile": 32},
    "deft:node_chunk": {"row_tile": 32, "chunk": 128},
    "deft:flatten": {"row_tile": 32, "chunk": 128},
}
"""How the paper's kernels cut: a key is read once per 32 queries."""
PACKED: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.float16, "row_tile": 16}
"""A layer whose four query heads a KV head are packed into tiles of 64 rows: what is read, not what is counted."""


def count(works: Sequence[Work], methods: Sequence[str] = METHODS) -> Result:
    """Sum the bytes of whole runs, in terabytes, in the mean over the works.

    Returns
    -------
    dict
        By method: ``once``, keys and values of every group once, as the paper counts them; ``read``, with the
        re-reads of groups of more than 32 queries; ``scores``, ``partials``, ``masks``; ``packed``, keys and values
        as a kernel reads them that packs the heads of a group.
    """
    found: Result = {}
    for method in methods:
        totals = [total_io(work, method, **PAPER, **CUTS.get(method, {})) for work in works]
        packed = [total_io(work, method, **PACKED).kv for work in works]
        tera = LAYERS / 1e12
        found[method] = {
            "once": fmean(io.kv_once for io in totals) * tera,
            "read": fmean(io.kv for io in totals) * tera,
            "scores": fmean(io.scores for io in totals) * tera,
            "partials": fmean(io.partials for io in totals) * tera,
            "masks": fmean(io.masks for io in totals) * tera,
            "packed": fmean(packed) * tera,
        }
    return found


def traffic(setup: Setup) -> Iterator[Measurement]:
    """Count all workloads."""
    for workload in TITLES:
        works = setup.works(workload)[: setup.scale.tree_samples]
        seconds = {"sorting": 9.0, "document": 4.0, "keyword": 3.0, "set": 4.0}.get(workload, 0.2) * len(works)
        yield Measurement(
            f"io-{workload}",
            f"bytes, {TITLES[workload]}",
            seconds,
            partial(count, works),
            {"workload": workload, "trees": len(works)},
        )

    def snapshot() -> Result:
        trees = {
            f"few-shot, b = 20, step {STEPS // 2}": Schedule.few_shot(PROMPT, 20, STEPS).at(STEPS // 2),
            "star of 64 below 4,000 tokens": setup.drafted("star", 64).tree(4000),
        }
        return {
            name: {method: asdict(plan_tree(tree, method, **PAPER, **CUTS.get(method, {})).io()) for method in METHODS}
            for name, tree in trees.items()
        }

    yield Measurement("io-snapshot", "bytes of one step", 1.0, snapshot, {})


def sections(results: Results) -> list[Section]:
    """Report tables 12 and 17."""
    found: list[Section] = []
    if "error" not in (snapshot := results.get("io-snapshot", {"error": ""})):
        rows: list[Sequence[Cell]] = []
        for tree, methods in snapshot.items():
            for method, io in methods.items():
                kinds = ("kv_once", "kv", "queries", "scores", "partials", "masks", "metadata")
                rows.append([tree, NAMES[method], *(io[kind] / 1e6 for kind in kinds)])
        columns = [
            "tree",
            "method",
            "KV once, MB",
            "KV read",
            "queries",
            "scores",
            "partial outputs",
            "masks",
            "metadata",
        ]
        table = Table("Table 12: bytes of one layer and step, by kind", columns, rows)
        found.append(Section("What is moved (table 12)", texts.SNAPSHOT, [table]))
    rows = []
    for workload in TITLES:
        for method, io in results.get(f"io-{workload}", {}).items():
            if method not in METHODS:
                continue
            raw = _raw(workload, method)
            rows.append(
                [
                    TITLES[workload],
                    NAMES[method],
                    Compared(io["once"], published.KV_TERABYTES.get(method, {}).get(workload)),
                    raw,
                    io["read"],
                    Compared(io["scores"], published.PARTIAL_TERABYTES.get(method, {}).get(workload)),
                    io["partials"],
                    io["packed"],
                ]
            )
    if rows:
        columns = [
            *("workload", "method", "KV, TB", "KV, raw data", "KV with re-reads", "scores and masks"),
            *("partial outputs", "KV, packed heads"),
        ]
        table = Table("Table 17: terabytes of a whole run", columns, rows, digits=4)
        found.append(Section("Bytes of whole runs (table 17)", texts.TRAFFIC, [table]))
    return found


def _raw(workload: str, method: str) -> float | None:
    kind, _, size = workload.rpartition("-")
    key = {"few-shot": ("few-shot", size), "star": ("speculation", size)}.get(kind)
    pair = PUBLISHED_TB.get((key[0], int(key[1])) if key else (workload, None))
    if pair is None:
        return None
    return {"deft:flatten": pair[0], "medusa": pair[0], "radix": pair[1], "flash_decoding": pair[1]}.get(method)
