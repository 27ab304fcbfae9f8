"""A chart of attention times, a line a tree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treewise.charts import COLOURS


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw what `treewise bench attention` measured: our methods, the best peer and the practical floor of each tree.

    Parameters
    ----------
    result : mapping
        The line of JSON that the benchmark prints.
    path : Path
        Where to write the picture.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    rows = result["results"]
    trees = list(dict.fromkeys(row["tree"] for row in rows))
    height = {tree: len(trees) - 1 - index for index, tree in enumerate(trees)}
    figure = Figure(figsize=(11, 1.6 + 0.34 * len(trees)), layout="constrained")
    axes = figure.subplots()
    floors = {row["tree"]: row["practical_floor_us"] for row in rows}
    axes.barh(
        [height[tree] for tree in trees], list(floors.values()), height=0.7, color="#d9d9d9", label="practical floor"
    )
    peers = [row for row in rows if row["peer"] and row["method"] == row["best_peer"]]
    if peers:
        values, levels = [row["run_us"] for row in peers], [height[row["tree"]] for row in peers]
        axes.scatter(
            values, levels, s=34, marker="D", facecolor="white", edgecolor="black", label="best peer", zorder=3
        )
    for row in peers:
        at = (1.01, height[row["tree"]])
        axes.annotate(row["method"], at, xycoords=axes.get_yaxis_transform(), va="center", fontsize=7)
    methods = list(dict.fromkeys(row["method"] for row in rows if not row["peer"]))
    for number, method in enumerate(methods):
        lower = 0.6 * (number + 0.5) / len(methods) - 0.3  # side by side, where two take the same time
        mine = [row for row in rows if row["method"] == method and row["run_us"] is not None]
        values, lowered = [row["run_us"] for row in mine], [height[row["tree"]] - lower for row in mine]
        axes.scatter(values, lowered, s=26, color=COLOURS[number % len(COLOURS)], label=method, zorder=4)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_yticks([height[tree] for tree in trees], trees, fontsize=8)
    axes.set_ylim(-0.6, len(trees) - 0.4)
    axes.set_xlabel("microseconds, median; less is better")
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    heads, kv_heads = result["heads"]
    shape = f"{heads}/{kv_heads} heads of {result['head_dim']}, {result['dtype']}"
    axes.set_title(f"Attention of one layer, {shape}, {result['machine']['device']}", fontsize=10, loc="left")
    figure.legend(loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
