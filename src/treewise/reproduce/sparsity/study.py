"""`treewise reproduce sparsity`: what is measured, and how much of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from treewise.bench.measure import check_device
from treewise.bench.subject import Subject
from treewise.evaluate.study import Study as Comparison
from treewise.evaluate.study import check_names
from treewise.models.load import load_config
from treewise.reproduce.report import Section
from treewise.reproduce.sparsity import maps, protocol, quality, serving, tasks
from treewise.reproduce.sparsity.quality import POLICIES, QUICK_POLICIES, Quality, grid_policies
from treewise.reproduce.sparsity.serving import Service
from treewise.reproduce.sparsity.tasks import BENCHMARKS, QUICK_BENCHMARKS, Benchmark
from treewise.reproduce.study import Measurement, Results, Study, carry_out

TITLE = "KV sparsity, reproduced"
PARTS = ("serving", "policies", "grid", "maps", "tasks")
SMALL = "smollm2-135m"
"""The real model, if no other is asked for."""


def sparsity(
    *,
    device: str = "cpu",
    quick: bool = False,
    out: Path = Path("reproduced/sparsity"),
    minutes: float | None = None,
    only: str | None = None,
    models: str = SMALL,
    seeds: int | None = None,
) -> None:
    """Measure again what is published of KV sparsity in vLLM, and write a report, report.html and report.md.

    Throughput and the wait for the first token over requests at a time, dense against sparse; what policies lose on a
    real small model, over budgets, and over windows and numbers of sparse layers; massive activations and attention by
    layer; MMLU and LongBench through lm-eval where the data can be had. Each result goes to OUT/raw at once: the same
    command again goes on where it was ended.

    Parameters
    ----------
    device
        cpu: requests are scaled down, of the first of the models. cuda: 4,000 tokens in and 500 out, of the shape of
        Llama-3-8B with random weights, beside vLLM where it is installed. Losses and maps are measured on the CPU.
    quick
        Less of everything: some minutes on two cores.
    out
        The folder of the report.
    minutes
        What would take longer than is left is not begun.
    only
        Parts to measure, with commas between: serving, policies, grid, maps, tasks. `treewise reproduce report` writes
        the report of all that lies in the folder, on whichever machines it was measured.
    models
        Real models with commas between, by built-in names, folders or GGUF files. Losses are those of the first.
    seeds
        Texts of each task that losses are measured on: 4; 2 or 1 if quick.
    """
    parts = tuple(dict.fromkeys(only.split(","))) if only is not None else PARTS
    check_names("only", parts, PARTS)
    place = check_device(device)
    study = make_plan(tuple(dict.fromkeys(models.split(","))), device, quick, seeds).study(parts)
    carry_out(study, out, place, minutes)


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes
    ----------
    models : tuple of str
        Whose layers are looked at; all else is of the first.
    service : Service
    policies, grid : Comparison
        Over budgets; and over windows and numbers of sparse layers, whose policies follow from the model.
    tokens : int
        Of the text whose layers are looked at.
    benchmarks : tuple of Benchmark
    """

    models: tuple[str, ...]
    service: Service
    policies: Comparison
    grid: Comparison
    tokens: int
    benchmarks: tuple[Benchmark, ...]

    def study(self, parts: Sequence[str] = PARTS) -> Study:
        """Return what there is to measure of some of the `PARTS`, and the report."""
        first = self.models[0]

        def grid() -> list[Measurement]:
            policies = grid_policies(load_config(first).num_layers)
            return Quality("grid", first, replace(self.grid, policies=policies)).measurements()

        made: dict[str, Callable[[], list[Measurement]]] = {
            "serving": lambda: serving.measurements(self.service),
            "policies": lambda: Quality("policies", first, self.policies).measurements(),
            "grid": grid,
            "maps": lambda: maps.measurements(self.models, self.tokens),
            "tasks": lambda: tasks.measurements(self.benchmarks, first, self.service.subject.device),
        }
        return Study("sparsity", TITLE, [each for part in parts for each in made[part]()], report)


def make_plan(models: tuple[str, ...], device: str, quick: bool, seeds: int | None = None) -> Plan:
    """Return how much is measured on a device.

    Parameters
    ----------
    models : tuple of str
        Real models.
    device : str
        cpu or cuda.
    quick : bool
        Some minutes on two cores of a CPU.
    seeds : int, optional
        Texts of each task.
    """
    first = models[0]
    if device == "cuda":
        subject = Subject("shape:llama-3-8b", "bfloat16", device=device, max_num_rows=8192, capture_rows=64)
        service = Service(subject, levels=(20, 5), policies=("novita",)) if quick else Service(subject)
    else:
        service = (
            Service.scaled(Subject(first), 256, levels=(10, 5, 1), policies=("novita", "snapkv"), rounds=1)
            if quick
            else Service.scaled(Subject(first), 1000, levels=(20, 10, 5, 1), rounds=1)
        )
    common: dict[str, Any] = {"modes": ("aware", "agnostic"), "branches": 0}
    if quick:
        common |= {"tasks": ("passkey", "niah_multikey"), "tokens": 320, "seeds": 2, "selection_seeds": 1}
        compared = Comparison(QUICK_POLICIES, (0.125, 0.25), new_tokens=8, **common)
        grid = Comparison((), (0.5, 0.25, 0.125), new_tokens=8, **{**common, "seeds": 1})
    else:
        common |= {"tasks": ("passkey", "niah_multikey", "vt", "fwe"), "tokens": 512, "seeds": 4}
        compared = Comparison(POLICIES, (0.1, 0.25), **common)
        grid = Comparison((), (0.5, 0.25, 0.125), **{**common, "selection_seeds": 1})
    if seeds is not None:
        compared, grid = replace(compared, seeds=seeds), replace(grid, seeds=seeds)
    return Plan(models, service, compared, grid, compared.tokens, QUICK_BENCHMARKS if quick else BENCHMARKS)


def report(results: Results) -> list[Section]:
    """Make the sections of the report of what was measured, by keys of measurements."""
    numbers = published()
    return [
        *serving.sections(results, numbers),
        quality.policies_section(results, numbers),
        tasks.section(results, numbers["account"]),
        *maps.sections(results),
        quality.grid_section(results, numbers),
        protocol.section(results, numbers),
    ]


def published() -> dict[str, Any]:
    """Read the published numbers, with their sources."""
    text = files(__package__).joinpath("published.json").read_text(encoding="utf-8")
    numbers: dict[str, Any] = json.loads(text)
    return numbers
