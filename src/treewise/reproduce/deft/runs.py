"""Whole requests on the engine: tables 5 and 7, figures 14, 16 and 17, and what changes when the whole loop counts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from treewise.bench.case import Case
from treewise.bench.drafted import speculation
from treewise.bench.floors import Machine
from treewise.bench.runs import Watched
from treewise.bench.subject import Loaded
from treewise.bench.workloads import replayed
from treewise.replay import Schedule
from treewise.reproduce.deft import published, texts
from treewise.reproduce.deft.attention import SPECULATION_PROMPTS, Layer
from treewise.reproduce.deft.tables import KINDS, NAMES, against_flatten, disagreements, sign
from treewise.reproduce.deft.workloads import (
    METHODS,
    TITLES,
    TOTAL,
    Setup,
    Work,
    tree_at,
    with_prompt,
)
from treewise.reproduce.figures import Panel, figure
from treewise.reproduce.report import Cell, Compared, Figure, Section, Table, ratio
from treewise.reproduce.study import Measurement, Result, Results, release

GROUPS = {
    "few-shot": "few-shot prompts",
    "reasoning": "reasoning",
    "star": "speculation, star",
    "real": "speculation, real topology",
}
ORDER = ("deft:flatten", "radix", "deft:node", "deft:node_chunk", "medusa", "specinfer", "flash_decoding")
"""The most telling methods first."""
PAIR = ORDER[:2]
UNPAGED = ("flash_decoding", "medusa")
LINE = 60
"""Points that the steps of a run are summed up in."""


@dataclass
class Engines:
    """Makes engines around one model, which is loaded when the first is wanted."""

    setup: Setup
    _loaded: Loaded | None = field(default=None, repr=False)
    _machine: Machine | None = field(default=None, repr=False)

    def watched(self, method: str, cases: Sequence[Case], pool: str) -> Watched:
        """Return an engine for some requests."""
        subject = replace(self.setup.subject, capture_rows=0)  # its short request captures what these need
        if self._loaded is None:
            self._loaded = subject.load()
            if subject.device == "cuda":
                self._machine = Machine(subject.place, self._loaded[0].dtype)
        return Watched(method, subject, self._loaded, cases, self._machine, pool=pool)


@dataclass(frozen=True)
class Run:
    """A request, the schedule that it follows, and whether it does so to the end."""

    workload: str
    work: Work
    case: Case
    complete: bool


def runs(setup: Setup, layer: Layer, engines: Engines) -> Iterator[Measurement]:
    """Measure requests of all workloads, a measurement a kind of workload and method."""
    scale = setup.scale
    for method in ORDER:
        for group, kind in GROUPS.items():
            workloads = KINDS[kind] if scale.others or method in PAIR else KINDS[kind][:1]
            settings = {
                **{"model": setup.subject.model, "device": setup.subject.device, "dtype": str(setup.subject.element)},
                **{"workloads": workloads, "trees": scale.trees},
                **{"max_steps": scale.max_steps, "prompt": scale.prompt},
            }
            yield Measurement(
                f"run-{group}-{method}",
                f"whole requests, {kind}, {NAMES[method]}",
                _guess(setup, workloads, method),
                partial(_run_all, setup, layer, engines, method, workloads),
                settings,
            )


def can_wait(measurement: Measurement) -> int:
    """Return a measurement's place: last come bytes, which no device changes, before them the less telling requests."""
    if measurement.key.startswith("io-"):
        return 2
    return int(measurement.key.startswith("run-") and not measurement.key.endswith(PAIR))


def _run_all(setup: Setup, layer: Layer, engines: Engines, method: str, workloads: Sequence[str]) -> Result:
    todo = [run for workload in workloads for run in _requests(setup, workload)]
    pool = "contiguous" if method in UNPAGED and not workloads[0].startswith("real") else "paged"
    watched = engines.watched(method, [run.case for run in todo], pool)
    found: Result = {}
    for run in todo:
        watched.first = []
        facts = watched.run(run.case, 0)
        middle = max(1, facts["steps"] // 2)
        layer_s = layer.seconds(tree_at(run.work, middle), method, 3 * setup.scale.repeats)
        found.setdefault(run.workload, []).append(
            facts
            | {
                "complete": run.complete,
                "attention_ms": layer_s * layer.num_layers * 1e3,
                "line_ms": _line([step.seconds * 1e3 for step in watched.first]),
            }
        )
    del watched
    release()
    return found


def _requests(setup: Setup, workload: str) -> list[Run]:
    scale, found = setup.scale, []
    works = setup.works(workload)
    for number, work in enumerate(works[: scale.trees]):
        tokens = min(work.prompt_tokens, scale.prompt or work.prompt_tokens)
        complete = tokens == work.prompt_tokens and (scale.max_steps or work.num_steps) >= work.num_steps
        complete &= scale.trees >= len(works)
        if isinstance(work, Schedule):
            work = with_prompt(work, tokens)
            case = replayed(f"{workload} {number}", work, scale.max_steps)
        else:
            topology, _, size = workload.partition("-")
            work = setup.drafted(topology, int(size), tokens, TOTAL - work.prompt_tokens + tokens)
            added = TOTAL - setup.recordings.prompt_tokens
            case = speculation(setup.recordings, scale.max_steps, tokens, added, int(size), topology)
        found.append(Run(workload, work, case, complete))
    return found


def _line(milliseconds: Sequence[float]) -> list[float]:
    """Sum the steps up in medians of neighbours."""
    pieces = np.array_split(np.array(milliseconds), min(LINE, len(milliseconds)))
    return [round(float(np.median(piece)), 4) for piece in pieces]


def _guess(setup: Setup, workloads: Sequence[str], method: str) -> float:
    """Estimate the seconds of some workloads with one method."""
    steps = {"keyword": 520, "set": 760, "sorting": 4164, "document": 2850}
    total = 5.0
    for workload in workloads:
        each = steps.get(workload, 399 if workload.startswith("few") else 1507)
        ran = min(each, setup.scale.max_steps or each) * (setup.scale.trees if workload in steps else 1)
        size = 4 if workload.endswith(("128", "256")) else 1
        if setup.subject.device == "cuda":
            total += 0.3 + ran * (0.008 if method not in ("medusa", "specinfer") else 0.03) * size**0.5
        else:
            total += 0.5 + ran * 0.3 * size
    return total


# --------------------------------------------------------------------------------------------------------- estimates


@dataclass(frozen=True)
class Whole:
    """Seconds of a whole run, in the mean over its trees: forwards alone, and everything but the prompt."""

    forward: float
    loop: float
    measured: bool


class Totals:
    """What whole runs take, by workload and method.

    A run that was measured to its end counts as it is. Of others, the part of a step that is not attention is taken
    from the steps that ran, in the median, and attention from what was measured of it along the whole run.
    """

    def __init__(self, results: Results) -> None:
        self._results = results

    def runs(self, workload: str, method: str) -> list[Mapping[str, Any]]:
        """Return the runs of a workload, none if there are none."""
        for group, kind in GROUPS.items():
            if workload in KINDS[kind]:
                found = self._results.get(f"run-{group}-{method}", {})
                return found.get(workload, []) if "error" not in found else []
        return []

    def failed(self, workload: str, method: str) -> bool:
        """Tell whether there was too little memory."""
        group = next(group for group, kind in GROUPS.items() if workload in KINDS[kind])
        return bool(self._results.get(f"run-{group}-{method}", {}).get("out_of_memory"))

    def attention(self, workload: str, method: str) -> float | None:
        """Return the seconds of attention over a whole run, in the engine's memory."""
        methods = self._results.get(f"attention-{workload}", {}).get("methods", {})
        seconds: float | None = methods.get("radix" if method == "flash_decoding" else method, {}).get("seconds")
        return seconds

    def rest_ms(self, workload: str, method: str, part: str) -> float | None:
        """Return the milliseconds of a step, or of its forward, that are not attention."""
        found = self.runs(workload, method)
        if not found:
            return None
        # Where other programs disturb one of the two, the rest may seem to be less than nothing.
        return max(0.0, statistics.fmean(run[part]["p50"] - run["attention_ms"] for run in found))

    def whole(self, workload: str, method: str) -> Whole | None:
        """Return a run's seconds, None if there are not enough measurements."""
        found = self.runs(workload, method)
        if not found:
            return None
        if all(run["complete"] for run in found):
            forward, loop = (statistics.fmean(run[part] for run in found) for part in ("forward_s", "decode_s"))
            return Whole(forward, loop, True)
        attention = self.attention(workload, method)
        if attention is None:
            return None
        forward_ms, loop_ms = (self.rest_ms(workload, method, part) for part in ("forward_ms", "step_ms"))
        if forward_ms is None or loop_ms is None:
            return None
        steps = self._results[f"attention-{workload}"]["steps"]
        return Whole(steps * forward_ms * 1e-3 + attention, steps * loop_ms * 1e-3 + attention, False)


# ------------------------------------------------------------------------------------------------------------ report


def sections(results: Results) -> list[Section]:
    """Report table 5, the whole loop, and figures 14, 16 and 17."""
    totals = Totals(results)
    seconds: dict[str, dict[str, float | str | None]] = {}
    lines: list[list[Any]] = []
    for workload in TITLES:
        for method in METHODS:
            whole = totals.whole(workload, method)
            if whole is not None:
                seconds.setdefault(workload, {})[method] = whole.forward
                lines.append(_line_of(totals, workload, method, whole))
            elif totals.failed(workload, method):
                seconds.setdefault(workload, {})[method] = "OOM"
    if not lines:
        return []
    parts = against_flatten("Table 5: decode latency, forwards alone", seconds, published.DECODE_SECONDS)
    columns = ["workload", "method", "whole loop, s", "over flatten", "forwards, s", "plans, share", "steps"]
    parts.append(Table("The whole loop", columns, lines))
    return [Section("Decode latency (table 5)", texts.RUNS, parts), *_widths(totals), *_prompts(results, totals)]


def _line_of(totals: Totals, workload: str, method: str, whole: Whole) -> list[Any]:
    found, flatten = totals.runs(workload, method), totals.whole(workload, "deft:flatten")
    ran = sum(run["steps"] for run in found)
    how = f"all {ran:,}" if whole.measured else f"{ran:,}, the rest reckoned"
    share = statistics.fmean(run["plan_share"] for run in found)
    over = ratio(whole.loop, None if flatten is None else flatten.loop)
    return [TITLES[workload], NAMES[method], whole.loop, over, whole.forward, f"{share:.1%}", how]


def _widths(totals: Totals) -> list[Section]:
    curves = {}
    for workload in KINDS[GROUPS["few-shot"]]:
        for method in PAIR:
            for run in totals.runs(workload, method)[:1]:
                places = np.linspace(1, run["steps"], len(run["line_ms"])).tolist()
                curves[f"{workload.removeprefix('few-shot-')} branches, {NAMES[method]}"] = places, run["line_ms"]
    panel = Panel("few-shot prompts", "step", "whole step, ms", curves, marks=False)
    parts = figure(
        "Figure 14: each step of few-shot prompts",
        [panel],
        "Milliseconds of each whole step over the steps, for 20, 30 and 50 branches, by radix and flatten",
    )
    return [Section("Steps of few-shot prompts (figure 14)", "", parts)] if parts else []


def _prompts(results: Results, totals: Totals) -> list[Section]:
    found = results.get("prompts", {})
    if "sorting" not in found:
        return []
    rows: list[list[Any]] = []

    def over(workload: str, one: Mapping[str, Any], part: str) -> float | None:
        """Radix over flatten of runs whose attention was timed at some prompt length."""
        whole = []
        for method in ("radix", "deft:flatten"):
            rest = totals.rest_ms(workload, method, part)
            seconds = one["methods"][method].get("seconds")
            whole.append(None if rest is None or seconds is None else one["steps"] * rest * 1e-3 + seconds)
        return ratio(*whole)

    for prompt, one in found["sorting"].items():
        said = published.SORTING_BY_PROMPT.get(int(prompt), (None, None))[1]
        forward = over("sorting", one, "forward_ms")
        rows.append(["sorting, table 7", int(prompt), Compared(forward, said), over("sorting", one, "step_ms"), None])
    for key, one in found["few-shot"].items():
        prompt, width = map(int, key.split("-"))
        loop = over(f"few-shot-{width}", one, "step_ms")
        said = published.FEW_SHOT_BY_PROMPT[prompt][width][1]
        rows.append(
            [f"few-shot, b = {width}, raw data", prompt, over(f"few-shot-{width}", one, "forward_ms"), loop, said]
        )
    for key, one in found["speculation"].items():
        prompt, size = map(int, key.split("-"))
        decode = published.TPOT_BY_PROMPT[size, prompt]
        forward = over(f"star-{size}", one, "forward_ms")
        said = decode["radix"] / decode["deft:flatten"]
        loop = over(f"star-{size}", one, "step_ms")
        rows.append([f"speculation, t = {size}, figure 17", prompt, Compared(forward, said), loop, None])
    if all(row[3] is None for row in rows):
        return []
    columns = ["workload", "prompt tokens", "forwards", "whole loop", "whole loop, published"]
    tables = [Table("Table 7, decode: Radix over flatten by prompt length", columns, rows)]
    panels = []
    for size in (32, 64):
        curves: dict[str, tuple[list[float], list[float]]] = {}
        for method in ("radix", "deft:node", "deft:node_chunk", "deft:flatten"):
            rest = totals.rest_ms(f"star-{size}", method, "step_ms")
            if rest is None:
                continue
            ones = [found["speculation"][f"{prompt}-{size}"] for prompt in SPECULATION_PROMPTS]
            heights = [one["steps"] * rest * 1e-3 + one["methods"][method].get("seconds", np.nan) for one in ones]
            curves[NAMES[method]] = list(map(float, SPECULATION_PROMPTS)), heights
        panels.append(Panel(f"star of {size}", "prompt tokens", "239 steps, s (= ms a token)", curves, log_y=True))
    drawn = figure(
        "Figures 16 and 17: speculation by prompt length, the whole loop",
        panels,
        "Seconds of 239 steps, which accept 1,000 tokens, over prompt tokens, a chart a tree size",
        "Seconds of the 239 steps that accept 1,000 tokens are also milliseconds a token (TPOT).",
    )
    return [Section("Prompt lengths: whole steps (table 7, figures 16 and 17)", texts.PROMPTS_RUNS, [*tables, *drawn])]


def protocol_sections(results: Results) -> list[Section]:
    """Say where the paper's protocol misleads, and put attention, forwards and whole loops side by side."""
    totals = Totals(results)
    rows: list[Sequence[Cell]] = []
    forwards: dict[str, dict[str, float | str | None]] = {}
    attention: dict[str, dict[str, float | str | None]] = {}
    for workload in TITLES:
        methods = results.get(f"attention-{workload}", {}).get("methods", {})
        attention[workload] = {method: facts.get("seconds") for method, facts in methods.items()}
        wholes = {method: whole for method in METHODS if (whole := totals.whole(workload, method)) is not None}
        forwards[workload] = {method: whole.forward for method, whole in wholes.items()}
        loops = {method: whole.loop for method, whole in wholes.items()}
        said_loop = published.LOOP_SPEEDUP.get(workload)
        cells = [
            Compared(_times(attention[workload]), _times(_column(published.ATTENTION_SECONDS, workload))),
            Compared(_times(forwards[workload]), _times(_column(published.DECODE_SECONDS, workload))),
            Compared(_times(loops), said_loop),
        ]
        if any(cell.ours is not None for cell in cells):
            rows.append([TITLES[workload], *cells, sign(_times(loops), said_loop)])
    if not rows:
        return []
    columns = ["workload", "attention", "forwards", "whole loop", "sign, loop"]
    parts: list[Table | Figure] = [Table("Radix over flatten, by what is counted", columns, rows)]
    contrary: dict[tuple[str, str], list[str]] = {}
    for what, seconds, table in (
        ("attention", attention, published.ATTENTION_SECONDS),
        ("forwards", forwards, published.DECODE_SECONDS),
    ):
        for workload, method, ours, said in disagreements(seconds, table):
            contrary.setdefault((method, what), []).append(f"{TITLES[workload]} ({ours:.2f}, paper {said:.2f})")
    on_cpu = any(results[f"attention-{workload}"]["device"] == "cpu" for workload in attention if attention[workload])
    lines = [
        f"- {NAMES[method]} over flatten, {what}: {'; '.join(where)}. Here, "
        + (texts.ON_CPU if on_cpu else texts.REASONS[method]).replace("\n", " ")
        + "."
        for (method, what), where in contrary.items()
    ]
    agreeing = "\n".join(lines) or "Where both say which method is faster, no row contradicts the paper."
    return [
        Section("Where the published protocol misleads", texts.PROTOCOL, parts),
        Section("Where the signs differ", agreeing),
    ]


def _column(table: Mapping[str, Mapping[str, float | None]], workload: str) -> dict[str, float | None]:
    return {method: row.get(workload) for method, row in table.items()}


def _times(seconds: Mapping[str, float | str | None]) -> float | None:
    """Return Radix over flatten."""
    return ratio(seconds.get("radix"), seconds.get("deft:flatten"))
