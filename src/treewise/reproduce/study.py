"""Carries out a study: measurements one after the other, each kept at once, within a time, and a report of all."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch

from treewise.bench.measure import describe_machine, progress
from treewise.reproduce.report import Section, write
from treewise.results import json_safe

Result = dict[str, Any]
Results = Mapping[str, Result]
"""By key of the measurement. ``{"out_of_memory": True}`` and ``{"error": …}`` are results as well."""


@dataclass(frozen=True)
class Measurement:
    """Something to measure.

    Attributes
    ----------
    key : str
        Names its file; letters, digits and ``-_.:``.
    title : str
        What the progress bar says.
    seconds : float
        How long it is expected to take.
    run : callable
        Measures; what it returns can be written as JSON.
    settings : mapping
        All that the result depends on beside the code and the machine. A result with the same settings is not
        measured again.
    """

    key: str
    title: str
    seconds: float
    run: Callable[[], Result]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Measurements, the most telling first, and what is reported of their results.

    Attributes
    ----------
    name, title : str
        Its verb, and the report's title.
    measurements : sequence of Measurement
    report : callable
        Makes the sections of what was measured, which may be anything from nothing to everything.
    """

    name: str
    title: str
    measurements: Sequence[Measurement]
    report: Callable[[Results], list[Section]]


def attempt(function: Callable[[], Result]) -> Result:
    """Return what a function returns, or how it failed: a lack of memory is a result, other failures end no study."""
    try:
        return function()
    except Exception as error:  # of memory that is too small, and of what a machine does not have
        place = traceback.extract_tb(error.__traceback__)[-1]
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        failure: Result = {"error": f"{words} ({Path(place.filename).name}:{place.lineno})"}
        lacking = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
        if lacking:
            failure["out_of_memory"] = True
    release()  # here, where the error and with it the frames of the function are gone
    return failure


def release() -> None:
    """Give a GPU's memory back that nothing holds any more."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def carry_out(study: Study, out: Path, device: torch.device, minutes: float | None = None) -> Results:
    """Measure what has not been measured with the same settings, and write the report.

    Each result goes to ``raw/KEY.json`` at once, so that a study that was ended can be taken up again.

    Parameters
    ----------
    study : Study
    out : Path
        The folder of the report.
    device : torch.device
        Where it measures.
    minutes : float, optional
        What would take longer than is left is not begun; it is left out of the report, which says so.

    Returns
    -------
    dict
        The results, those of an earlier run included.
    """
    (out / "raw").mkdir(parents=True, exist_ok=True)
    records = {each.key: record for each in study.measurements if (record := _kept(each, out)) is not None}
    todo = [each for each in study.measurements if each.key not in records]
    machine = describe_machine(device)
    expected = sum(each.seconds for each in todo)
    print(
        f"{study.title}: {len(todo)} of {len(study.measurements)} measurements to do, about {_duration(expected)}"
        + (f", at most {_duration(minutes * 60)}" if minutes is not None else "")
        + f"; results in {out}",
        file=sys.stderr,
        flush=True,
    )
    try:
        with progress() as bar:
            task = bar.add_task(study.name, total=expected)
            start, planned = perf_counter(), 0.0
            for each in todo:
                slower = max(1.0, (perf_counter() - start) / planned) if planned else 1.0
                if minutes is not None and perf_counter() - start + each.seconds * slower > minutes * 60:
                    continue
                bar.update(task, description=each.title)
                records[each.key] = _measure(study, each, out, machine)
                planned += each.seconds
                bar.advance(task, each.seconds)
                if bar.disable:
                    said = records[each.key]["result"].get("error", "")
                    print(f"{_duration(perf_counter() - start)}  {each.title}  {said}", file=sys.stderr, flush=True)
    finally:
        write_report(study.title, study.report, records, out, [each.title for each in study.measurements])
    print(f"{out / 'report.html'}", flush=True)
    return {key: record["result"] for key, record in records.items()}


def check(results: Results) -> None:
    """Exit with code 1 if a measurement failed for want of anything but memory: the report is there all the same."""
    if any("error" in result and "out_of_memory" not in result for result in results.values()):
        sys.exit(1)


def write_report(
    title: str,
    report: Callable[[Results], list[Section]],
    records: Mapping[str, Mapping[str, Any]],
    out: Path,
    titles: Sequence[str] = (),
) -> None:
    """Write the report of records, as they lie in ``raw``.

    Parameters
    ----------
    title : str
    report : callable
        See `Study`.
    records : mapping of str to mapping
    out : Path
    titles : sequence of str
        Of all measurements: those that no record has are listed as not measured.
    """
    sections = report({key: record["result"] for key, record in records.items()})
    done = {record["title"] for record in records.values()}
    missing = [each for each in titles if each not in done]
    failed = [
        f"{record['title']}: {'out of memory' if record['result'].get('out_of_memory') else record['result']['error']}"
        for record in records.values()
        if "error" in record["result"]
    ]
    if missing or failed:
        lines = [*(f"- not measured: {each}" for each in missing), *(f"- failed: {each}" for each in failed)]
        sections.append(Section("What is missing", "\n".join(lines)))
    write(title, sections, _facts(records), out)


def read_records(out: Path) -> dict[str, dict[str, Any]]:
    """Read all records of a folder, by key.

    Raises
    ------
    ValueError
        If there are none.
    """
    files = sorted((out / "raw").glob("*.json"))
    if not files:
        raise ValueError(f"out: {out} holds no results of an earlier run, raw/*.json")
    records = [json.loads(file.read_text("utf-8")) for file in files]
    return {record["key"]: record for record in records}


def _kept(each: Measurement, out: Path) -> dict[str, Any] | None:
    """Return the record of an earlier run with the same settings, unless it failed for want of anything but memory."""
    try:
        record: dict[str, Any] = json.loads(_file(each.key, out).read_text("utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    same = record["settings"] == json.loads(json.dumps(json_safe(dict(each.settings))))
    failed = "error" in record["result"] and "out_of_memory" not in record["result"]
    return record if same and not failed else None


def _measure(study: Study, each: Measurement, out: Path, machine: Mapping[str, object]) -> dict[str, Any]:
    begin, start = datetime.now(UTC), perf_counter()
    result = attempt(each.run)
    record = {
        "study": study.name,
        "key": each.key,
        "title": each.title,
        "settings": dict(each.settings),
        "machine": dict(machine),
        "date": begin.isoformat(timespec="seconds"),
        "seconds": round(perf_counter() - start, 3),
        "result": result,
    }
    release()
    target, text = _file(each.key, out), json.dumps(json_safe(record), indent=1)
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, target)
    return cast(dict[str, Any], json.loads(text))


def _file(key: str, out: Path) -> Path:
    return out / "raw" / f"{key.replace(':', '-')}.json"


def _facts(records: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Say what all results depend on, for the report's head."""
    if not records:
        return {"measured": "nothing yet"}
    machines = [record["machine"] for record in records.values()]
    devices = Counter(
        f"{machine['device']} ({machine['cores']} CPU cores, {machine['threads']} threads)" for machine in machines
    )
    versions = {name: number for machine in machines for name, number in machine["versions"].items()}
    dates = sorted(record["date"] for record in records.values())
    return {
        "device": "; ".join(f"{device}, {number} measurements" for device, number in devices.most_common()),
        "commit": ", ".join(dict.fromkeys(machine["commit"] or "unknown" for machine in machines)),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "date": dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}",
        "time": _duration(sum(record["seconds"] for record in records.values())),
    }


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
