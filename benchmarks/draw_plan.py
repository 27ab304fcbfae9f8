"""Draw how attention methods cut one small tree into work items.

    python benchmarks/draw_plan.py docs/images/plans.png

A column is a token, a row a query. Each item has a colour; where it is pale, the pair is computed and hidden by a mask.
"""

from __future__ import annotations

import sys

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from treewise.attention import TreeSpec, plan_tree
from treewise.plan import Plan
from treewise.plan.data import KV_END, KV_START, ROW_HIGH, ROW_LOW

# A prompt of 24 tokens, two thoughts below it, and six leaves below those, of which one holds a single token.
TREE = TreeSpec([-1, 0, 0, 1, 1, 1, 2, 2, 2], [24, 8, 5, 3, 2, 4, 1, 3, 2], range(3, 9))
METHODS = {"radix": {"chunk": 64}, "deft:node": {}, "deft:node_chunk": {"chunk": 12}, "deft:flatten": {"chunk": 16}}


def picture(plan: Plan) -> np.ndarray:
    """Colour each (query, token) pair by the item that computes it; RGBA."""
    cells = np.ones((plan.num_rows, TREE.num_tokens, 4))
    colours = matplotlib.colormaps["tab10"].colors
    for number, item in enumerate(plan.items):
        rows = plan.row_order[item[ROW_LOW] : item[ROW_HIGH]]
        slots = plan.kv_slots[item[KV_START] : item[KV_END]]
        opacity = np.where(plan.visible(number), 1.0, 0.3)
        for row, line in zip(rows, opacity, strict=True):
            cells[row, slots, :3] = colours[number % 10]
            cells[row, slots, 3] = line
    return cells


def main() -> None:
    """Draw the plans one below the other."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    for axes, (method, options) in zip(figure.subplots(len(METHODS), 1), METHODS.items(), strict=True):
        plan = plan_tree(TREE, method, num_heads=4, num_kv_heads=1, head_dim=8, **options)
        read = sum(int(item[KV_END] - item[KV_START]) for item in plan.items)
        axes.imshow(picture(plan), aspect="auto", interpolation="nearest")
        title = f"{method}: {len(plan.items)} items, {read} tokens read, {plan.num_entries} partial results"
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xticks(np.arange(TREE.num_tokens + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(TREE.num_queries + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.7)
        axes.tick_params(which="both", length=0)
        axes.set_yticks(range(TREE.num_queries), [f"query {row}" for row in range(TREE.num_queries)], fontsize=8)
        bounds = np.cumsum([0, *TREE.length])
        names = ["prompt", "thought", "thought", *["leaf"] * 6]
        axes.set_xticks((bounds[:-1] + bounds[1:] - 1) / 2, names, fontsize=8)
        for bound in bounds[1:-1]:
            axes.axvline(bound - 0.5, color="black", linewidth=1)
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
