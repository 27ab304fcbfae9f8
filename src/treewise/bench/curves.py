"""A chart of what many requests get: tokens a second and the wait for the first token, a line an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treewise.charts import COLOURS


def draw(result: Mapping[str, Any], title: str, path: Path) -> None:
    """Draw what `treewise bench serve` measured.

    Parameters
    ----------
    result : mapping
        The line of JSON that the benchmark prints.
    title : str
        Whom it is of.
    path : Path
        Where to write the picture.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    rows = [row for row in result["results"] if not row["note"]]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, wait = figure.subplots(1, 2)
    for number, engine in enumerate(dict.fromkeys(row["engine"] for row in rows)):
        own = [row for row in rows if row["engine"] == engine]
        style = {"marker": "o", "color": COLOURS[number % len(COLOURS)], "label": engine}
        speed.plot([cases.index(row["case"]) for row in own], [row["tokens_per_s"] for row in own], **style)
        waited = [row for row in own if row.get("ttft_s")]  # another engine gets batches, and has no times a request
        wait.plot([cases.index(row["case"]) for row in waited], [row["ttft_s"]["p50"] for row in waited], **style)
    for axes, name in ((speed, "output tokens a second"), (wait, "seconds to the first token, median")):
        axes.set_xticks(range(len(cases)), cases)
        axes.set_xlabel("requests")
        axes.set_ylabel(name)
        axes.grid(color="#eeeeee")
        axes.set_axisbelow(True)
    speed.set_ylim(bottom=0)
    wait.set_yscale("log")
    wait.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    wait.yaxis.set_major_formatter("{x:g}")
    wait.yaxis.set_minor_formatter("")
    lengths = f"{result['input_tokens']:,} tokens in, {result['output_tokens']:,} out"
    figure.suptitle(f"{lengths}, {title}", fontsize=10)
    speed.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
