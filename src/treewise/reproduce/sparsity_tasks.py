"""MMLU and LongBench through lm-eval, dense against sparse, where lm-eval and the data can be had."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from treewise.bench.runs import Facts
from treewise.llm import LLM

MMLU = ("mmlu",)
LONGBENCH = ("longbench_qasper", "longbench_hotpotqa", "longbench_multifieldqa_en")
"""Questions about long documents, in English."""

PATIENCE = 5.0
"""Seconds that the place of the data may take to answer."""


def missing() -> str | None:
    """Say why no task can be run, or None: without lm-eval, or without a network and data from before."""
    for package in ("lm_eval", "datasets"):
        if find_spec(package) is None:
            return f"{package} is not installed: pip install 'treewise[eval]'"
    return None


def reachable() -> bool:
    """Tell whether the place that data sets come from answers."""
    import httpx
    from huggingface_hub import constants

    try:
        httpx.head(constants.ENDPOINT, timeout=PATIENCE)
    except httpx.HTTPError:
        return False
    return True


def evaluate(
    llms: Mapping[str, LLM], tasks: Sequence[Any], *, num_fewshot: int | None = None, limit: int | None = None
) -> Facts:
    """Run tasks of lm-eval on several engines.

    Parameters
    ----------
    llms : mapping of str to LLM
        By the name of the policy.
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
        # Read when `datasets` is imported: data from before is taken, and nothing is waited for.
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import lm_eval

    from treewise.adapters.lm_eval import TreewiseLM

    found: Facts = {"results": {}, "questions": {}}
    for name, llm in llms.items():
        try:
            result = lm_eval.simple_evaluate(
                TreewiseLM(llm), tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, bootstrap_iters=0
            )
        except (OSError, LookupError, ValueError) as error:  # what `datasets` raises where it has no data
            if online or not _of_data(error):
                raise
            return {"absent": f"the data is not here, and the network is not either: {_first_line(error)}"}
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
        if isinstance(value, (int, float)) and "stderr" not in name and name not in ("alias", "sample_len", "sample_count")
    }
