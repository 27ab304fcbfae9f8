"""What an engine's steps take, fitted to what benchmarks have measured of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from treewise.bench.fit import non_negative_least_squares
from treewise.bench.steps import percentiles
from treewise.models.load import DTYPES, peek_config
from treewise.replicas.routing import RoundRobin
from treewise.replicas.simulation import Outcome, SimulatedReplica, StepCosts, Turn, simulate

H200 = StepCosts(step=0.004133, row=1.075e-05, token=3.068e-08, prompt_row=2.55e-05)
"""Of an 8B model in 16 bits on an H200: what `calibrate` makes of the files in ``benchmarks/results``."""
PROMPT_WORKLOADS = ("samples", "few-shot", "speculation")
"""Of `treewise bench tree`, those whose prompt has a length that the result names."""


class Measured(NamedTuple):
    """Seconds that some steps took together, and what was in them."""

    seconds: float
    steps: float
    rows: float
    tokens: float
    prompt_rows: float


@dataclass(frozen=True)
class Calibration:
    """Step costs, and how well they say what was measured.

    Attributes
    ----------
    costs : StepCosts
    model, device : str
    measured : int
        Times that the costs were fitted to: the decode steps of a request together, its prompt, or a whole run of
        `throughput`.
    errors : dict
        Median, 90th percentile and largest of the relative errors over these.
    loads : list of dict
        Whole runs of `serve`, which nothing was fitted to: seconds that they took, and those of their simulations.
    """

    costs: StepCosts
    model: str
    device: str
    measured: int
    errors: dict[str, float]
    loads: list[dict[str, Any]]


def calibrate(files: Sequence[Path], model: str) -> Calibration:
    """Fit step costs to results of `treewise bench tree` and `throughput`, and try them on those of `serve`.

    Squares of relative errors are made least, and no cost is negative. What is in the steps of a `throughput` run, its
    simulation tells, which knows the costs that single requests say.

    Parameters
    ----------
    files : sequence of Path
        Each has a result, or several as ``runs``.
    model : str
        As the results name it; those of other models are left out.

    Raises
    ------
    ValueError
        If the files have too few results of the model.
    """
    runs = [run for file in files for run in _runs(file) if run.get("model") == model]
    trees = [run for run in runs if run["bench"] == "tree"]
    measured = [times for run in trees for times in _times(run)]
    if len({times[1:] for times in measured}) < 4 or not any(times.prompt_rows for times in measured):
        raise ValueError(
            f"calibration: four costs need four different times of {model}, of prompts among them; there are "
            f"{len(measured)} in {', '.join(map(str, files))}; `treewise bench tree --workload samples` measures some"
        )
    costs = _fit(measured)
    for run in runs:
        if run["bench"] == "throughput":
            for level, result, pool in _loads(run):
                _, replica = _rerun(run, level, result, pool, costs)
                measured.append(Measured(result["whole_s"], *replica.done))
    costs = _fit(measured)
    errors = [abs(costs.seconds(*each[1:]) / each.seconds - 1) for each in measured]
    found = percentiles(errors) or {}
    return Calibration(
        costs=costs,
        model=model,
        device=trees[0]["machine"]["device"],
        measured=len(measured),
        errors={name: float(f"{found[name]:.3g}") for name in ("p50", "p90", "max")},
        loads=[
            _compared(level, result, pool, _rerun(run, level, result, pool, costs)[0])
            for run in runs
            if run["bench"] == "serve"
            for level, result, pool in _loads(run)
        ],
    )


def _fit(measured: Sequence[Measured]) -> StepCosts:
    times = np.array([each.seconds for each in measured])
    work = np.array([each[1:] for each in measured], dtype=float)
    fitted = non_negative_least_squares(work / times[:, None], np.ones(len(times)))
    return StepCosts(*(float(f"{cost:.4g}") for cost in fitted))


def _runs(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of a file, each with the machine that it is of."""
    content = json.loads(file.read_text("utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"calibration: {file} has no result of a benchmark")
    for run in content.get("runs", [content]):
        yield {"machine": content.get("machine"), **run}


def _times(run: Mapping[str, Any]) -> Iterator[Measured]:
    """Yield what a run of `treewise bench tree` took: each request's decode steps, and its prompt if that is known."""
    config = peek_config(run["model"])
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * DTYPES[run["dtype"]].itemsize
    for result in run["results"]:
        # Guesses that were wrong are rows too, and beam search waits for its controller: these decode in another way.
        if result["engine"] == "auto" and result.get("unique_kv_gb") and run["workload"] not in ("speculation", "beam"):
            rows = result["tokens_per_s"] * result["whole_s"] - run.get("branches", 1)
            tokens = result["unique_kv_gb"] * 1e9 / per_token
            yield Measured(result["decode_s"], result["steps"], rows, tokens, 0)
        if result["engine"] == "auto" and run["workload"] in PROMPT_WORKLOADS:
            length = run["prompt_tokens"]
            steps = ceil(length / (run["max_num_rows"] or 1024))
            yield Measured(result["prefill_s"], steps, 0, steps * length, length)


def _loads(run: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Yield requests at a time, result and tokens of the pool of each load that ran on our engine with all keys."""
    for result in run["results"]:
        if result.get("policy", "dense") == "dense" and result.get("engine", "auto") == "auto":
            level = result.get("level") or int(result["case"].split()[0])
            length = run["input_tokens"] + run["output_tokens"]
            yield level, result, result.get("pool_tokens") or (level + 1) * (length + 16)


def _rerun(
    run: Mapping[str, Any], level: int, result: Mapping[str, Any], pool: int, costs: StepCosts
) -> tuple[Outcome, SimulatedReplica]:
    """Simulate a load of prompts that share nothing."""
    prompts = [range(i << 20, (i << 20) + run["input_tokens"]) for i in range(result["requests"])]
    sessions = [[Turn((prompt,), new_tokens=run["output_tokens"])] for prompt in prompts]
    replica = SimulatedReplica("0", costs, pool, run["max_num_rows"])
    return simulate(sessions, RoundRobin(), [replica], level), replica


def _compared(level: int, result: Mapping[str, Any], pool: int, outcome: Outcome) -> dict[str, Any]:
    first = statistics.median(job.first - job.arrived for job in outcome.jobs)
    return {
        "at_once": level,
        "pool_tokens": pool,
        "measured_s": result["whole_s"],
        "simulated_s": outcome.seconds,
        "error": outcome.seconds / result["whole_s"] - 1,
        "measured_ttft_s": result["ttft_s"]["p50"],
        "simulated_ttft_s": first,
    }
