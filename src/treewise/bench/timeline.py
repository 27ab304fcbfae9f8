"""A chart of the steps of a request: their times one after the other, and what the whole was spent on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treewise.bench.meter import Step
from treewise.bench.steps import PARTS
from treewise.charts import COLOURS

SHOWN = 400
"""Points of a line; each is the median of the steps that it stands for."""


def draw_steps(
    title: str,
    watched: Mapping[str, tuple[Sequence[Step], Sequence[float]]],
    rows: Sequence[Mapping[str, Any]],
    path: Path,
) -> None:
    """Draw the step times of each engine that was watched, and the seconds of all.

    Parameters
    ----------
    title : str
    watched : mapping of str to (sequence of Step, sequence of float)
        By engine, decode steps and the seconds that each takes at least; nothing where those are not known.
    rows : sequence of mapping
        Means by engine, with ``engine``, ``whole_s`` and, of those that were watched, the seconds of the parts.
    path : Path
        Where to write the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    lines, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    for colour, (name, (steps, _)) in zip(COLOURS, watched.items(), strict=False):
        _line(lines, [step.seconds for step in steps], color=colour, label=name)
    for floors in [floors for _, floors in watched.values() if floors][:1]:  # the same for all
        _line(lines, floors, color="black", linestyle=":", label="floor")
    lines.set_xlabel("step")
    lines.set_ylabel("milliseconds")
    lines.set_ylim(bottom=0)
    lines.grid(color="#eeeeee")
    lines.legend(fontsize=8, frameon=False)
    names = [row["engine"] for row in rows]
    left = np.zeros(len(rows))
    parts = {"prompt": "prefill_s", **{part: f"{part}_s" for part in PARTS}}
    for colour, (label, key) in zip(COLOURS, parts.items(), strict=False):
        widths = np.array([row[key] or 0.0 for row in rows])
        bars.barh(names, widths, left=left, color=colour, label=label)
        left += widths
    rest = np.maximum(np.array([row["whole_s"] for row in rows]) - left, 0)
    bars.barh(names, rest, left=left, color="#bbbbbb", label="all else")
    bars.invert_yaxis()
    bars.set_xlabel("seconds of the whole request")
    bars.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _line(axes: Any, seconds: Sequence[float], **style: Any) -> None:
    pieces = np.array_split(np.array(seconds) * 1e3, min(SHOWN, len(seconds)))
    starts = np.cumsum([1, *(len(piece) for piece in pieces[:-1])])
    axes.plot(starts, [np.median(piece) for piece in pieces], linewidth=1, **style)
