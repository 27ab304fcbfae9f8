"""MMLU and LongBench through lm-eval, dense against sparse, where lm-eval and the data can be had."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants

from treewise.bench.runs import Facts
from treewise.llm import LLM
from treewise.reproduce.report import Cell, Section, Table, slug
from treewise.reproduce.sparsity.serving import DENSE
from treewise.reproduce.study import Measurement, Results
from treewise.sparsity.policy import KVSparsity


@dataclass(frozen=True)
class Benchmark:
    """Tasks of lm-eval, and the engines that are asked.

    Attributes
    ----------
    name : str
        `MMLU` or `LONGBENCH`.
    tasks : tuple of str
        Of lm-eval.
    policies : tuple of str
        By name.
    budgets : tuple of int or float
        Of each policy; see `KVSparsity.budget`.
    num_fewshot : int or None
        Worked examples; the tasks' own number if None.
    limit : int or None
        Questions of each task.
    seconds : float
        What it takes on a CPU, about, for each engine.
    """

    name: str
    tasks: tuple[str, ...]
    policies: tuple[str, ...]
    budgets: tuple[int | float, ...]
    num_fewshot: int | None
    limit: int | None
    seconds: float


MMLU, LONGBENCH = "MMLU", "LongBench"
DOCUMENTS = ("longbench_qasper", "longbench_multifieldqa_en", "longbench_hotpotqa")
BENCHMARKS = (
    Benchmark(MMLU, ("mmlu",), ("novita", "snapkv"), (0.25, 1024), 5, 5, 400.0),
    Benchmark(LONGBENCH, DOCUMENTS, ("novita", "snapkv"), (0.1,), None, 10, 400.0),
)
QUICK_BENCHMARKS = (
    Benchmark(MMLU, ("mmlu_high_school_geography",), ("novita",), (0.25,), 5, 10, 15.0),
    Benchmark(LONGBENCH, DOCUMENTS[:1], ("novita",), (0.1,), None, 2, 25.0),
)
"""For a first look."""

PATIENCE = 5.0
"""Seconds that the place of the data may take to answer."""


def missing() -> str | None:
    """Say which package no task can be run without, None if all are here."""
    for package in ("lm_eval", "datasets"):
        if find_spec(package) is None:
            return f"{package} is not installed: pip install 'treewise[eval]'"
    return None


def reachable() -> bool:
    """Tell whether the place that data sets come from answers."""
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=PATIENCE).close()
    except HTTPError:  # which is an answer
        return True
    except OSError:
        return False
    return True


def evaluate(
    engines: Mapping[str, Callable[[], LLM]],
    tasks: Sequence[Any],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> Facts:
    """Run tasks of lm-eval on several engines.

    Parameters
    ----------
    engines : mapping of str to callable
        By name, what makes an engine: one is there at a time.
    tasks : sequence of str or task of lm-eval
        All by name, or all made already.
    num_fewshot : int, optional
        Worked examples of each question; the task's own number if left out.
    limit : int, optional
        Questions of each task; all if left out.

    Returns
    -------
    dict
        ``absent``: why there is no result. Or ``results``: of each engine the metrics of each task and group, and
        ``questions``, how many each had.
    """
    if reason := missing():
        return {"absent": reason}
    if not (online := reachable()):
        # NOTE: for all of this process, and read when `datasets` is imported: what was loaded before is taken, and
        # nothing is waited for.
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import lm_eval

    from treewise.adapters.lm_eval import TreewiseLM

    found: Facts = {"results": {}, "questions": {}}
    for name, engine in engines.items():
        try:
            result = lm_eval.simple_evaluate(
                TreewiseLM(engine()), tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, bootstrap_iters=0
            )
        except ImportError as error:  # of what a task computes its metrics with
            return {"absent": _first_line(error)}
        except (OSError, LookupError, ValueError) as error:  # what `datasets` raises where it has no data
            if online or not _of_data(error):
                raise
            return {"absent": f"the data is not here, and there is no network: {_first_line(error)}"}
        found["results"][name] = {task: _numbers(own) for task, own in result["results"].items()}
        found["questions"] = {task: own["effective"] for task, own in result["n-samples"].items()}
    return found


def _of_data(error: BaseException) -> bool:
    """Whether an error comes from where data sets are loaded."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").split(".")[0] in ("datasets", "huggingface_hub"):
            return True
        trace = trace.tb_next
    return False


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics themselves, without the filter that is part of their names."""
    return {
        name.partition(",")[0]: float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float))
        and "stderr" not in name
        and name not in ("alias", "sample_len", "sample_count")
    }


def measurements(benchmarks: Sequence[Benchmark], model: str, device: str) -> list[Measurement]:
    """Return what there is to measure: each benchmark, of all engines."""
    data = missing() or ("online" if reachable() else "offline")

    def measure(benchmark: Benchmark) -> Facts:
        contenders = {DENSE: None} | {
            f"{name}, {_budget(budget)}": KVSparsity.named(name, budget=budget)
            for name in benchmark.policies
            for budget in benchmark.budgets
        }
        engines = {name: partial(LLM, model, device=device, kv_sparsity=policy) for name, policy in contenders.items()}
        found = evaluate(engines, benchmark.tasks, num_fewshot=benchmark.num_fewshot, limit=benchmark.limit)
        return {"model": model, **asdict(benchmark), **found}

    def seconds(benchmark: Benchmark) -> float:
        engines = 1 + len(benchmark.policies) * len(benchmark.budgets)
        return benchmark.seconds * engines if data == "online" else 20.0

    return [
        Measurement(
            f"tasks-{slug(benchmark.name)}",
            f"{benchmark.name} through lm-eval",
            seconds(benchmark),
            partial(measure, benchmark),
            {"model": model, "device": device, "data": data, **asdict(benchmark)},
        )
        for benchmark in benchmarks
    ]


def section(results: Results, account: Mapping[str, Any]) -> Section:
    """Report the account's tables 2 and 3, as far as there was data."""
    low, high = account["long_questions_tokens"]
    claims = {
        MMLU: f"table 2, a loss of {account['mmlu_loss_at_most']:.0%} at most",
        LONGBENCH: f"table 3, a loss of about {account['long_questions_loss']:.0%} at more than "
        f"{account['long_questions_compression']} times compression of {low:,} to {high:,} tokens",
    }
    lines: list[str] = []
    tables: list[Table] = []
    for name, claim in claims.items():
        result = results.get(f"tasks-{slug(name)}", {})
        if "results" in result:
            tables.append(_table(result))
            said = f"at most {result['limit']} questions of each task"
        else:
            said = f"not measured: {result['absent']}" if "absent" in result else "not measured"
        lines.append(f"- **{name}** (the account's {claim}): {said}")
    lead = (
        "The account has MMLU, and questions about long documents, of Llama-3-8B. Here lm-eval asks a small real "
        "model, dense and sparse, where the data can be had. What policies lose over budgets, above, needs no data."
    )
    return Section("MMLU and questions about long documents", lead + "\n\n" + "\n".join(lines), tables)


def _table(result: Facts) -> Table:
    rows: list[list[Cell]] = []
    dense = result["results"][DENSE]
    for engine, own in result["results"].items():
        for task in result["tasks"]:  # without what a group consists of
            for metric, value in own[task].items():
                whole = dense[task][metric]
                rows.append([engine, task, metric, value, value / whole if whole else None])
    return Table(
        f"{result['name']} of {result['model']}",
        ["engine", "task", "metric", "score", "over dense"],
        rows,
        f"{sum(result['questions'].values()):,} questions. A model so small is near chance on many of them.",
    )


def _budget(budget: int | float) -> str:
    return f"{budget:.0%} of the prompt" if isinstance(budget, float) else f"{budget:,} tokens"
