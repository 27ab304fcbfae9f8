"""Times whole branching requests on the engine: sampled branches, recorded trees, drafted tokens, wide beams."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from treewise.bench.compare import means, measure, notes, table
from treewise.bench.engines import OTHERS, check_installed
from treewise.bench.floors import Machine
from treewise.bench.measure import describe_machine, peak_memory, report
from treewise.bench.runs import Watched, alone, other
from treewise.bench.subject import Subject, read_methods
from treewise.bench.timeline import draw_steps
from treewise.bench.workloads import PAPER_TOKEN_BYTES, find_cases, published_tb
from treewise.charts import check_matplotlib
from treewise.config import check_integer
from treewise.results import json_safe


def tree(
    *,
    workload: str = "samples",
    attention: str = "auto",
    against: Literal["transformers", "vllm", "radix", "nothing"] = "nothing",
    prompt_tokens: int | None = None,
    branches: int | None = None,
    new_tokens: int | None = None,
    tree_size: int | None = None,
    topology: str | None = None,
    beam_width: int | None = None,
    trees: int | None = None,
    max_steps: int | None = None,
    data: Path = Path("../shared/data"),
    repeats: int | None = None,
    json_file: Annotated[Path | None, Parameter("--json")] = None,
    png: Path | None = None,
    subject: Annotated[Subject | None, Parameter("*", group="Model and engine")] = None,
) -> None:
    """Time whole branching requests on the engine, from the prompt to the last token, whatever the text.

    Parameters
    ----------
    workload
        samples: a prompt continued by sampled branches. few-shot, sorting, document, keyword, set: recorded trees,
        branching and pruned as they were. speculation: each step verifies a tree of drafted tokens. beam: beam search.
    attention
        The methods that are measured, with commas between; what is relative is relative to the first.
    against
        Run another engine on the samples too: transformers or vllm. radix: measure attention alone, all layers of all
        decode steps, the first method against the one that reads each branch's keys and values on its own.
    prompt_tokens
        Length of the prompt: 1000, few-shot 4000, speculation 1016; recorded trees have their own.
    branches
        Branches of samples (20) and few-shot (50).
    new_tokens
        Tokens a branch, whatever ends the text: samples 32, few-shot 400, beam 3. Speculation accepts 4984 in all.
    tree_size
        Drafted tokens of a step of speculation: 64.
    topology
        star: the drafted tokens all stand right behind the prompt, as in the DeFT paper's code. real: as recorded,
        for 32, 64, 128 or 256 tokens.
    beam_width
        Beams: 5000.
    trees
        Run the first so many recorded trees; all ten if left out.
    max_steps
        End recorded trees and speculation after so many decode steps.
    data
        The folder of the recorded trees, deft_trees.json.gz, or the file itself.
    repeats
        Timed runs of each, turn by turn after a short one that warms up; the median run is reported. 3 if left out, and
        1 for recorded trees and speculation.
    json_file
        Write the result here too.
    png
        Draw the step times of the first request, and the mean seconds of all, here; needs matplotlib.
    """
    subject = subject or Subject()
    place, methods = subject.place, read_methods(attention)
    settings = {
        **{"prompt_tokens": prompt_tokens, "branches": branches, "new_tokens": new_tokens, "tree_size": tree_size},
        **{"topology": topology, "beam_width": beam_width, "trees": trees, "max_steps": max_steps},
    }
    cases, settings = find_cases(workload, data, **settings)
    if repeats is None:
        repeats = 1 if "max_steps" in settings else 3
    check_integer("repeats", repeats, 1)
    if against in OTHERS:
        check_installed(against)
        if workload != "samples":
            raise ValueError(f"against: {against} runs the workload samples only, not {workload}")
    if png is not None:
        check_matplotlib()
    longest, limit = max(case.longest for case in cases), subject.config().max_positions
    if longest > limit:
        raise ValueError(f"workload: paths of {longest} tokens are longer than the model's context, {limit}")
    watched: dict[str, Watched] = {}
    if against == "radix":
        runs = {name: alone(name, subject) for name in (methods[0], "radix")}
    else:
        loaded = subject.load()
        machine = Machine(place, loaded[0].dtype) if place.type == "cuda" else None
        watched = {name: Watched(name, subject, loaded, cases, machine) for name in methods}
        runs = {name: each.run for name, each in watched.items()}
        if against in OTHERS:
            runs[against] = other(against, subject, loaded, cases[0], settings)
    rows = measure(cases, runs, repeats)
    averages = means(rows)
    result: dict[str, Any] = {
        "bench": "tree",
        "workload": workload,
        **settings,
        **asdict(subject),
        "dtype": str(subject.element).removeprefix("torch."),
        "against": against,
        "repeats": repeats,
        "machine": describe_machine(place),
        "results": rows,
        "means": averages,
        "peak_memory_gb": peak_memory(place) / 1e9,
    }
    for engine in watched.values():
        result |= engine.rates()
        if engine.tokens:
            result |= published(workload, settings, engine.tokens.values())
    if json_file is not None:
        json_file.write_text(json.dumps(json_safe(result), indent=1) + "\n", encoding="utf-8")
    title = (
        f"{'attention alone, ' * (against == 'radix')}{workload}, {subject.model}, {result['dtype']}, {subject.device}"
    )
    if png is not None:
        draw_steps(title, {name: (each.first, each.floors()) for name, each in watched.items()}, averages, png)
    print(*notes(rows), sep="\n", file=sys.stderr)
    report(title, table(rows, averages), result)


def published(workload: str, settings: Mapping[str, Any], tokens: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """Put tokens whose keys each request read in the terms of the DeFT paper, beside what it published."""
    terabytes = [statistics.fmean(counts) * PAPER_TOKEN_BYTES / 1e12 for counts in zip(*tokens, strict=True)]
    known = published_tb(workload, settings)
    same = None if known is None else all(map(partial(math.isclose, rel_tol=0.01), terabytes, known))
    return {"paper_kv_tb": terabytes, "published_kv_tb": known, "as_published": same}
