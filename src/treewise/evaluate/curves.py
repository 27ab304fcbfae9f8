"""A chart of what policies lose over how much they hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from treewise.charts import COLOURS
from treewise.evaluate.trial import MODES

MEASURES = {
    "kl": "KL(dense || sparse), nats a token; less is better",
    "top1": "top-1 agreement; more is better",
    "recall": "recall where the dense cache is right",
}


def draw(result: Mapping[str, Any], path: Path | BinaryIO) -> None:
    """Draw a row of curves for each mode: a line a policy over the share of bytes held, with bands of intervals.

    Parameters
    ----------
    result : mapping
        What `treewise eval kv` writes.
    path : Path or binary file
        Where to write the picture.
    """
    from matplotlib.figure import Figure

    cells = [cell for cell in result["results"] if cell["task"] == "all" and cell["policy"] != "full"]
    modes = list(dict.fromkeys(cell["mode"] for cell in cells))
    policies = list(dict.fromkeys(cell["policy"] for cell in cells))
    figure = Figure(figsize=(13, 1.2 + 3.4 * len(modes)), layout="constrained")
    grid = figure.subplots(len(modes), len(MEASURES), sharex=True, squeeze=False)
    for mode, line in zip(modes, grid, strict=True):
        for (measure, label), axes in zip(MEASURES.items(), line, strict=True):
            for number, policy in enumerate(policies):
                mine = [cell for cell in cells if (cell["mode"], cell["policy"]) == (mode, policy) and measure in cell]
                mine.sort(key=lambda cell: cell["held"])
                held = [cell["held"] for cell in mine]
                style = {"color": COLOURS[number % len(COLOURS)], "linestyle": "-" if number < len(COLOURS) else "--"}
                axes.plot(held, [cell[measure] for cell in mine], marker="o", markersize=3, label=policy, **style)
                low, high = ([cell[f"{measure}_interval"][end] for cell in mine] for end in (0, 1))
                axes.fill_between(held, low, high, color=style["color"], alpha=0.12, linewidth=0)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.3g}")
            axes.set_xlabel("bytes held / bytes of a dense cache", fontsize=8)
            axes.set_title(label, fontsize=8, loc="left")
            axes.grid(color="#eeeeee")
            axes.tick_params(labelsize=8)
            if measure != "kl":
                axes.set_ylim(-0.03, 1.03)
            elif any(cell[measure] for cell in cells):
                axes.set_yscale("log")
        line[0].set_ylabel(mode, fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    ways = "\n".join(f"{mode}: {MODES[mode]}" for mode in modes)
    title = f"{result['model']}, texts of {result['tokens']} tokens, {result['seeds']} seeds\n{ways}"
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
