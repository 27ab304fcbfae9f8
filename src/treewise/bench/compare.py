"""Runs requests on several engines, turn by turn, and compares them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Protocol

from treewise.bench.measure import progress
from treewise.bench.runs import Facts, Run
from treewise.bench.steps import PARTS

SECONDS = ("whole_s", "prefill_s", "decode_s", *(f"{part}_s" for part in PARTS), "floor_s")
RATIOS = ("of_floor", "forward_of_floor", "times_first")


class Named(Protocol):
    """What engines are compared on."""

    @property
    def name(self) -> str:
        """What it is called in results."""


def measure(cases: Sequence[Named], runs: Mapping[str, Run], repeats: int) -> list[Facts]:
    """Run every case on every engine, turn by turn; of the repeats the median run counts.

    Returns
    -------
    list of dict
        A row a case and engine. ``times_first``: how many times it takes what the first engine takes. One that fails
        has a ``note``, and no more of its facts.

    Raises
    ------
    Exception
        The first error, if all fail.
    """
    rows: list[Facts] = []
    errors: list[Exception] = []
    with progress() as bar:
        task = bar.add_task("bench", total=len(cases) * repeats * len(runs))
        for case in cases:
            taken: dict[str, list[Facts]] = {name: [] for name in runs}
            notes: dict[str, str] = {}
            for repeat in range(repeats):
                for name, run in runs.items():
                    bar.update(task, description=f"{case.name}, {name}, run {repeat + 1} of {repeats}")
                    try:
                        taken[name].append(run(case, repeat))
                    except Exception as error:  # of memory that is too small, and of other people's code
                        errors.append(error)
                        notes[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                    bar.advance(task)
            first = None
            for name, own in taken.items():
                row: Facts = {"case": case.name, "engine": name, "note": notes.get(name)}
                if name not in notes:
                    own.sort(key=itemgetter("whole_s"))
                    row |= own[len(own) // 2]
                    row["whole_s_all"] = [facts["whole_s"] for facts in own]
                    first = first or row["whole_s"]
                    row["times_first"] = row["whole_s"] / first
                rows.append(row)
    if all(row["note"] for row in rows):
        raise errors[0]
    return rows


def means(rows: Sequence[Facts]) -> list[Facts]:
    """Sum up each engine: means of what its requests took, and geometric means of what is relative."""
    engines = dict.fromkeys(row["engine"] for row in rows)
    return [_mean(name, [row for row in rows if row["engine"] == name and not row["note"]]) for name in engines]


def _mean(engine: str, rows: Sequence[Facts]) -> Facts:
    facts: Facts = {"engine": engine, "requests": len(rows)}
    for names, average in ((SECONDS, statistics.fmean), (RATIOS, statistics.geometric_mean)):
        for name in names:
            values = [row[name] for row in rows if row.get(name) is not None]
            facts[name] = average(values) if values else None
    return facts


def table(rows: Sequence[Facts], averages: Sequence[Facts]) -> list[Facts]:
    """Choose what a person wants to see of each request and engine, and of the means of several requests."""
    lines = [_line(row) for row in rows]
    if len({row["case"] for row in rows}) > 1:
        lines += [_line({"case": f"mean of {row['requests']}", **row}) for row in averages]
    return [{name: line[name] for name in line if any(each[name] is not None for each in lines)} for line in lines]


def _line(row: Facts) -> Facts:
    step, plan = row.get("step_ms") or {}, row.get("plan_share")
    return {
        "request": row["case"],
        "engine": row["engine"],
        "whole s": row.get("whole_s"),
        "prompt s": row.get("prefill_s"),
        "forward s": row.get("forward_s"),
        **{f"{name} ms": step.get(name) for name in ("p50", "p90", "p99")},
        "plan": None if plan is None else f"{plan:.0%}",
        "of floor": row.get("of_floor"),
        "KV GB once": row.get("unique_kv_gb"),
        "read": row.get("read_kv_gb"),
        "slots": row.get("peak_slots"),
        "times first": row.get("times_first"),
    }


def notes(rows: Sequence[Facts]) -> list[str]:
    """Say what did not run, and what did not do as its recording did."""
    said = [f"{row['engine']} did not run {row['case']}: {row['note']}" for row in rows if row["note"]]
    differing = [row for row in rows if row.get("as_recorded") is False]
    return said + [f"{row['engine']} did not read the recorded keys of {row['case']}" for row in differing]
