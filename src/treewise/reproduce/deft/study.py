"""`treewise reproduce deft`: the tables and figures of the DeFT paper, on the machine at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

from cyclopts import Parameter

from treewise.bench.subject import Subject
from treewise.bench.workloads import find_recordings
from treewise.config import check_integer
from treewise.reproduce.deft import accuracy, attention, models, runs, texts, traffic, utilisation
from treewise.reproduce.deft.attention import Layer
from treewise.reproduce.deft.workloads import QUICK, Scale, Setup
from treewise.reproduce.report import Section
from treewise.reproduce.study import Measurement, Results, Study, carry_out, check

TITLE = "DeFT, reproduced"


class Bench(NamedTuple):
    """What parts measure with."""

    setup: Setup
    layer: Layer
    engines: runs.Engines
    text_model: str | None


class Part(NamedTuple):
    """A part of the study: what it shows, its measurements, and its sections."""

    shows: tuple[str, ...]
    measurements: Callable[[Bench], Iterator[Measurement]]
    report: Callable[[Results], list[Section]]


PARTS = (
    Part(("table6", "table16"), lambda on: attention.latency(on.setup, on.layer), attention.latency_sections),
    Part(
        ("table5", "figure16", "figure17"),
        lambda on: runs.runs(on.setup, on.layer, on.engines),
        runs.sections,
    ),
    Part(("protocol",), lambda on: iter(()), runs.protocol_sections),
    Part(("table14",), lambda on: utilisation.utilisation(on.setup, on.layer), utilisation.sections),
    Part(("table7", "figure18"), lambda on: attention.by_prompt(on.setup, on.layer), attention.by_prompt_sections),
    Part(
        ("figure13", "figure14", "figure15"),
        lambda on: attention.figures(on.setup, on.layer),
        attention.figures_sections,
    ),
    Part(("table8", "table18", "table20", "table21"), lambda on: models.models(on.setup), models.sections),
    Part(("table15",), lambda on: accuracy.accuracy(on.setup, on.text_model), accuracy.sections),
    Part(("table12", "table17"), lambda on: traffic.traffic(on.setup), traffic.sections),
)
"""In the order of the report."""


def deft(
    *,
    device: str = "cpu",
    quick: bool = False,
    out: Path = Path("reproduced/deft"),
    only: str = "",
    minutes: float | None = None,
    model: str | None = None,
    text_model: Annotated[str | None, Parameter(negative="--no-text")] = "smollm2-135m",
    trees: int | None = None,
    max_steps: int | None = None,
    samples: int | None = None,
    data: Path = Path("../shared/data"),
) -> None:
    """Measure the DeFT paper's tables and figures here, and report them beside the published numbers.

    The report is `report.html`, which needs no other file, and `report.md`; what was measured lies in `raw`. A run that
    was ended goes on where it was. Whole runs of all recorded trees take hours; `--quick`, or `--max-steps` and
    `--trees`, run a part of them, and say so. Attention alone is timed at evenly spaced steps of whole runs always.

    If a measurement fails, the others go on, and the exit code is 1 at the end.

    Parameters
    ----------
    device
        cpu or cuda.
    quick
        A few minutes on a CPU: few samples, short prompts and a few steps of whole requests.
    out
        The folder of the report.
    only
        Tables and figures with commas between, such as table5,figure13: nothing else is measured or shown.
    minutes
        Measurements that would take longer than what is left of this are not begun.
    model
        As in `treewise generate`, or shape:NAME: whose requests are run. shape:llama-3-8b on a GPU, as in the paper,
        shape:smollm2-135m on a CPU if left out.
    text_model
        A model with weights, whose answers are compared with Transformers'.
    trees
        Recorded trees of each task that are run as whole requests; all ten if left out.
    max_steps
        End whole requests after so many decode steps; what all would take is then reckoned.
    samples
        Steps of a workload at which attention is timed: 10, 2 if quick.
    data
        The folder of the recorded trees, deft_trees.json.gz, or the file itself.
    """
    subject = Subject(model or ("shape:llama-3-8b" if device == "cuda" else "shape:smollm2-135m"), device=device)
    scale = QUICK if quick else Scale()
    for name, value in {"trees": trees, "max_steps": max_steps, "samples": samples}.items():
        if value is not None:
            check_integer(name, value, 1)
            scale = replace(scale, **cast(dict[str, Any], {name: value}))
    setup = Setup(subject, scale, find_recordings(data))
    layer = Layer.of(subject, subject.config())
    bench = Bench(setup, layer, runs.Engines(setup), text_model)
    check(carry_out(study(bench, only), out, subject.place, minutes))


def study(bench: Bench, only: str = "") -> Study:
    """Put the parts together that show some tables and figures, all if none is named.

    Raises
    ------
    ValueError
        If there is no such table or figure.
    """
    asked = [name for name in only.lower().split(",") if name]
    known = [name for part in PARTS for name in part.shows]
    for name in asked:
        if name not in known:
            raise ValueError(f"only: {name!r} is not one of {', '.join(known)}")
    parts = [part for part in PARTS if not asked or set(part.shows) & set(asked)]
    measurements = [each for part in parts for each in part.measurements(bench)]
    measurements.sort(key=runs.can_wait)
    return Study("deft", TITLE, measurements, lambda results: _sections(parts, results))


def report(results: Results) -> list[Section]:
    """Make all sections of the report, as far as there are results for them."""
    return _sections(PARTS, results)


def _sections(parts: tuple[Part, ...] | list[Part], results: Results) -> list[Section]:
    return [Section("What this is", texts.ABOUT), *(section for part in parts for section in part.report(results))]
