"""What follows from the times of attention on many trees: ratios, means, and the table that people read."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WRONG = 1e-2
"""A peer with a larger relative error than this computes something else, and is not compared with."""


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Give each row its time over the practical floor, and each of our rows the best peer's time over its own."""
    for row in rows:
        row["of_floor"] = None if row["run_us"] is None else row["run_us"] / row["practical_floor_us"]
        peers = [other for other in rows if other["tree"] == row["tree"] and other["peer"] and _right(other)]
        best = min(peers, key=lambda peer: peer["run_us"], default=None)
        row["best_peer"] = None if best is None else best["method"]
        row["against_peer"] = None
        if best is not None and not row["peer"] and row["run_us"] is not None:
            row["against_peer"] = best["run_us"] / row["run_us"]


def geometric_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """Average the time and both ratios of each method over the trees that it ran on."""
    means: dict[str, dict[str, float | int | None]] = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        ran = [row for row in rows if row["method"] == method and row["run_us"] is not None]
        means[method] = {"trees": len(ran)}
        for key in ("run_us", "of_floor", "against_peer"):
            values = [row[key] for row in ran if row[key] is not None]
            means[method][key] = statistics.geometric_mean(values) if values else None
    return means


def table(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make the rows of the printed table: a line a tree and method, then the geometric means."""
    lines, before = [], None
    for row in result["results"]:
        first = row["tree"] != before
        before = row["tree"]
        lines.append(
            {
                "tree": row["tree"] if first else "",
                "floor us": row["practical_floor_us"] if first else None,
                "method": row["method"],
                "us": row["run_us"],
                "of floor": row["of_floor"],
                "peer/ours": row["against_peer"],
                "error": row["error"],
                "plan us": row["plan_us"],
            }
        )
    for method, mean in result["geometric_means"].items():
        shown = {"us": mean["run_us"], "of floor": mean["of_floor"], "peer/ours": mean["against_peer"]}
        label = f"geometric mean of {mean['trees']}"
        lines.append(dict.fromkeys(lines[0]) | {"tree": label, "method": method} | shown)
    return lines


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which methods did not run, why, and on which trees."""
    trees: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["note"]:
            trees.setdefault((row["method"], row["note"]), []).append(row["tree"])
    return [f"{method} did not run on {', '.join(where)}: {note}" for (method, note), where in trees.items()]


def _right(row: Mapping[str, Any]) -> bool:
    return row["run_us"] is not None and row["error"] < WRONG
