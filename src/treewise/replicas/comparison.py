"""The verb `bench replicas`: simulated replicas behind each router, a row for each load and number of replicas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter

from treewise.bench.measure import describe_machine, progress, report
from treewise.charts import COLOURS, check_matplotlib
from treewise.config import check_integer
from treewise.replicas.calibration import H200, calibrate
from treewise.replicas.settings import ROUTERS
from treewise.replicas.simulation import SimulatedReplica, StepCosts, simulate
from treewise.replicas.traces import TRACES, Trace, find_trace
from treewise.results import json_safe

FEWEST = 2000
"""Requests of a simulation at least."""
ROUNDS = 4
"""Sessions of each client at least: all begin at once, and it takes some for them to spread."""
READERS = 5
"""Requests for each of the texts that are shared, at least, so that caches are full for most of it."""
AT_TEXTS = 4
"""Replicas with which numbers of documents are compared."""


def replicas(
    *,
    trace: str = ",".join(TRACES),
    replicas: str = "1,2,4,8,16,32,64",
    texts: str = "",
    clients: int | None = None,
    pool_tokens: int = 828_944,
    max_num_rows: int = 8192,
    calibration: tuple[Path, ...] = (),
    model: str = "shape:llama-3-8b",
    seed: int = 0,
    json_file: Annotated[Path | None, Parameter("--json")] = None,
    png: Path | None = None,
) -> None:
    """Simulate replicas behind a router that knows prefixes, and behind one that takes turns.

    The routers are those of `treewise serve --data-parallel-size`; the replicas are numbers: a pool, a prefix cache,
    and times of steps.

    Parameters
    ----------
    trace
        Loads, with commas between: documents, chats, tree-programs, system-prompts, distinct. name:number changes how
        many texts are shared, as documents:1000.
    replicas
        Numbers of replicas, with commas between.
    texts
        Numbers of documents, with commas between, that are compared too, with 4 replicas.
    clients
        Sessions under way at a time, for each replica; the load's own number if left out.
    pool_tokens
        Tokens whose keys and values a replica has room for; what an 8B model leaves on an H200 if left out, see
        `treewise env --plan`.
    max_num_rows
        The most rows of a step.
    calibration
        Results of `treewise bench tree`, and of `throughput` and `serve` if there are, that times of steps are fitted
        to; may be repeated. Those of an 8B model on an H200 if left out.
    model
        The results' name of the model.
    seed
        Of the loads.
    json_file
        Write the result here too.
    png
        Draw a chart here; needs matplotlib.
    """
    if png is not None:
        check_matplotlib()
    numbers = _numbers("replicas", replicas)
    loads = [(find_trace(name), number) for name in trace.split(",") for number in numbers]
    loads += [(find_trace(f"documents:{number}"), AT_TEXTS) for number in (_numbers("texts", texts) if texts else [])]
    if clients is not None:
        check_integer("clients", clients, 1)
    check_integer("pool_tokens", pool_tokens, 1)
    check_integer("max_num_rows", max_num_rows, 1)
    found = calibrate(calibration, model) if calibration else None
    costs = H200 if found is None else found.costs
    rows = []
    with progress() as bar:
        task = bar.add_task("", total=sum(number for _, number in loads))
        for load, number in loads:
            bar.update(task, description=f"{load.name} on {number}")
            rows.append(compare(load, number, costs, pool_tokens, max_num_rows, clients or load.clients, seed))
            bar.advance(task, number)
    result = {
        "bench": "replicas",
        "costs": asdict(costs),
        "calibration": None if found is None else asdict(found),
        "pool_tokens": pool_tokens,
        "max_num_rows": max_num_rows,
        "seed": seed,
        "machine": describe_machine(torch.device("cpu")),
        "results": rows,
    }
    if json_file is not None:
        json_file.write_text(json.dumps(json_safe(result), indent=1) + "\n", encoding="utf-8")
    if png is not None:
        draw(rows, png)
    report(f"Simulated, a pool of {pool_tokens:,} tokens each", [_line(row) for row in rows], result)


def compare(
    trace: Trace, number: int, costs: StepCosts, pool_tokens: int, max_num_rows: int, clients: int, seed: int
) -> dict[str, Any]:
    """Return what each router makes of a load on so many replicas, and the gain of knowing prefixes."""
    count = max(ceil(FEWEST / trace.turns), ROUNDS * clients * number, READERS * trace.texts)
    sessions = trace.sessions(count, seed)
    facts: dict[str, Any] = {"trace": trace.name, "texts": trace.texts, "replicas": number, "clients": clients * number}
    for name, router in ROUTERS.items():
        there = [SimulatedReplica(str(place), costs, pool_tokens, max_num_rows) for place in range(number)]
        facts[name] = simulate(sessions, router(), there, clients * number).summary()
    return facts | {"gain": facts["prefix"]["tokens_per_s"] / facts["round_robin"]["tokens_per_s"]}


def _numbers(name: str, words: str) -> list[int]:
    for word in words.split(","):
        if not word.isdecimal() or not int(word):
            raise ValueError(f"{name}: {word!r} is no number from 1 on; give several with commas between")
    return [int(word) for word in words.split(",")]


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the table."""
    known, turns = row["prefix"], row["round_robin"]
    return {
        "load": row["trace"],
        "replicas": row["replicas"],
        "tokens/s": known["tokens_per_s"],
        "by turns": turns["tokens_per_s"],
        "gain": row["gain"],
        "hits": known["prefix_hits"],
        "hits by turns": turns["prefix_hits"],
        "first token s": known["ttft_s"]["p50"],
        "first by turns": turns["ttft_s"]["p50"],
    }


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the gain over the number of replicas, a line a load, and over the number of documents."""
    from matplotlib.figure import Figure

    by_texts = sorted((row for row in rows if row["trace"].startswith("documents:")), key=lambda row: row["texts"])
    figure = Figure(figsize=(11 if by_texts else 6.5, 4), layout="constrained")
    panels = figure.subplots(1, 2 if by_texts else 1, squeeze=False)[0]
    own = [row for row in rows if row not in by_texts]
    for colour, name in zip(COLOURS, dict.fromkeys(row["trace"] for row in own), strict=False):
        line = [row for row in own if row["trace"] == name]
        gains = [row["gain"] for row in line]
        panels[0].plot([row["replicas"] for row in line], gains, marker="o", color=colour, label=name)
    panels[0].set_xlabel("replicas")
    panels[0].legend(fontsize=8, frameon=False)
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.axhline(1.0, color="#999999", linewidth=0.8)
        axes.set_ylabel("throughput over that of turns")
        axes.grid(color="#eeeeee")
        axes.set_axisbelow(True)
    if by_texts:
        panels[1].plot(
            [row["texts"] for row in by_texts], [row["gain"] for row in by_texts], marker="o", color=COLOURS[0]
        )
        panels[1].set_xlabel(f"documents of 8,000 tokens, {AT_TEXTS} replicas")
    for axes in panels:
        axes.set_ylim(bottom=0)
    figure.suptitle("A router that knows prefixes, simulated", fontsize=10)
    figure.savefig(path, dpi=150)
