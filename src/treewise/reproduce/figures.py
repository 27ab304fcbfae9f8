"""Pictures of a report: line charts as SVG, and what others draw."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO

from treewise.charts import COLOURS
from treewise.reproduce.report import Figure

MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class Panel:
    """One chart of a figure.

    Attributes
    ----------
    title, x, y : str
        The axes with their units.
    curves : mapping of str to (sequence of float, sequence of float)
        By name in the legend, places and heights. A name has the same colour in all panels of a figure.
    log_x, log_y : bool
    marks, joined : bool
        Whether each point has a mark, and a line to the next.
    """

    title: str
    x: str
    y: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_x: bool = False
    log_y: bool = False
    marks: bool = True
    joined: bool = True


def figure(title: str, panels: Sequence[Panel], alt: str, note: str = "") -> list[Figure]:
    """Draw panels side by side, at most two in a row; nothing where nothing was measured, or without matplotlib."""
    panels = [panel for panel in panels if any(len(places) for places, _ in panel.curves.values())]
    if not panels or importlib.util.find_spec("matplotlib") is None:
        return []
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import LogLocator

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    with rc_context({"svg.hashsalt": title, "svg.fonttype": "none", "font.family": "sans-serif"}):
        canvas = Canvas(figsize=(5.2 * columns, 3.5 * rows), layout="constrained")
        axes = canvas.subplots(rows, columns, squeeze=False).flat
        for panel, area in zip(panels, axes, strict=False):
            for name, (places, heights) in panel.curves.items():
                number = names.index(name)
                style = {"color": COLOURS[number % len(COLOURS)], "linestyle": "-" if panel.joined else ""}
                marker = MARKERS[number % len(MARKERS)] if panel.marks else ""
                area.plot(places, heights, label=name, marker=marker, markersize=4, **style)
            area.set_title(panel.title, fontsize=9, loc="left")
            area.set_xlabel(panel.x)
            area.set_ylabel(panel.y)
            area.grid(color="#e6e6e6")
            area.set_axisbelow(True)
            if panel.log_x:
                area.set_xscale("log", base=2)
                area.xaxis.set_major_formatter("{x:,g}")
            if panel.log_y:
                area.set_yscale("log")
                area.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                area.yaxis.set_major_formatter("{x:g}")
                area.yaxis.set_minor_formatter("")
            else:
                area.set_ylim(bottom=0)
            area.legend(fontsize=7, frameon=False)
        for area in list(axes):
            area.remove()
        picture = BytesIO()
        canvas.savefig(picture, format="svg", metadata={"Date": None})
    return [Figure(title, picture.getvalue(), alt, note)]


def drawn(title: str, picture: Callable[[], bytes], alt: str, note: str = "") -> list[Figure]:
    """Return the figure of what is drawn with matplotlib, nothing without it."""
    return [Figure(title, picture(), alt, note)] if importlib.util.find_spec("matplotlib") else []
