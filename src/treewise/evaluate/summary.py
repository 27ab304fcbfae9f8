"""What follows from all rows: means, intervals, the worst task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treewise.evaluate.branches import Shared
from treewise.evaluate.measures import bootstrap
from treewise.evaluate.tasks import SANITY
from treewise.evaluate.trial import ORACLE, Row

Facts = dict[str, Any]
Array = NDArray[np.float64]

Cells = Sequence[Sequence[Row]]
"""Of each task the rows of all seeds."""

BASELINE = "random"

INTERVALS = ("kl", "top1", "nll_increase")
"""Measures that are averages over rows."""


def mean(values: Array) -> Array:
    """Average [tasks, ..., seeds] over tasks and seeds."""
    averages: Array = values.mean((0, -1))
    return averages


def difference(values: Array, others: Array) -> Array:
    """Average the differences of pairs [tasks, ..., seeds]."""
    return mean(values - others)


def ratio(values: Array, totals: Array) -> Array:
    """Divide sums of [tasks, ..., seeds] over tasks and seeds; NaN where there is nothing to divide by."""
    whole = np.asarray(totals.sum((0, -1)))
    shares: Array = np.divide(values.sum((0, -1)), whole, out=np.full(whole.shape, np.nan), where=whole > 0)
    return shares


def summarise(rows: Sequence[Row], solvable: Collection[str]) -> list[Facts]:
    """Sum the rows up for each mode, policy and budget: over all tasks, and for each task.

    Parameters
    ----------
    rows : sequence of Row
        Of the same seeds for each task.
    solvable : collection of str
        The tasks that count for recall.

    Returns
    -------
    list of dict
        Of ``task`` ``all``, which leaves out `SANITY`, and of each task. ``recall`` is the share of the parts of
        answers that are right, of the ``n`` that the dense cache has right; ``kept`` the share of the needle that is
        held, of all layers and heads. Over all tasks there are also bootstrap intervals over seeds; one of what the
        policy's divergence is less than that of random tokens at the same budget, pair by pair; and, by layer, errors
        of attention's outputs and the needle's share in each KV head.
    """
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.mode, row.policy, row.budget, row.task), []).append(row)
    facts = []
    for mode, policy, budget in dict.fromkeys(key[:3] for key in cells):

        def of(who: str, tasks: Sequence[str], mode: str = mode, budget: Any = budget) -> Cells:
            return [cells.get((mode, who, budget, task), []) for task in tasks]

        tasks = [key[3] for key in cells if key[:3] == (mode, policy, budget)]
        singles = [{"task": task} | _averages(of(policy, [task]), of(ORACLE, [task]), solvable) for task in tasks]
        counted = [task for task in tasks if task != SANITY]
        if counted:
            worst = min((each for each in singles if each["task"] in counted), key=lambda each: each["top1"])
            whole = {"task": "all"} | _averages(of(policy, counted), of(ORACLE, counted), solvable)
            whole |= {"worst_task": worst["task"], "worst_top1": worst["top1"]}
            singles.insert(0, whole | _details(of(policy, counted), of(BASELINE, counted), solvable))
        facts += [{"mode": mode, "policy": policy, "budget": budget} | each for each in singles]
    return facts


def _averages(own: Cells, oracle: Cells, solvable: Collection[str]) -> Facts:
    facts = {name: float(mean(_table(own, attrgetter(name)))) for name in ("held", *INTERVALS)}
    if counted := [rows for rows in own if rows[0].task in solvable]:
        right, dense = _answers(counted)
        facts |= {"recall": float(ratio(right, dense)), "n": int(dense.sum())}
    if needles := _kept(own):
        facts["kept"] = float(np.mean(needles))
        if all(oracle):
            facts["kept_of_oracle"] = facts["kept"] / float(np.mean(_kept(oracle)))
    if own[0][0].task == SANITY:
        facts["perplexity"] = float(np.exp(mean(_table(own, attrgetter("answer_nll")))))
    return facts


def _details(own: Cells, baseline: Cells, solvable: Collection[str]) -> Facts:
    facts: Facts = {f"{name}_interval": bootstrap([_table(own, attrgetter(name))], mean) for name in INTERVALS}
    if counted := [rows for rows in own if rows[0].task in solvable]:
        facts["recall_interval"] = bootstrap(_answers(counted), ratio)
    if all(baseline):
        pair = [_table(cells, attrgetter("kl")) for cells in (baseline, own)]
        facts["kl_below_random"] = bootstrap(pair, difference)
    facts["error_by_layer"] = _average(row.errors for rows in own for row in rows)
    if needles := _kept(own):
        facts["kept_by_head"] = _average(needles)
    return facts


def _table(cells: Cells, get: Callable[[Row], float]) -> Array:
    """Return what there is of each row, float64 [tasks, seeds]."""
    return np.array([[get(row) for row in rows] for rows in cells], np.float64)


def _answers(cells: Cells) -> tuple[Array, Array]:
    """Return how many parts of answers are right of those that the dense cache has right, and how many those are."""
    right = _table(cells, lambda row: sum(map(all, zip(row.right, row.dense_right, strict=True))))
    return right, _table(cells, lambda row: sum(row.dense_right))


def _average(arrays: Iterable[Any]) -> list[Any]:
    """Average arrays of one shape, to three places."""
    averages: list[Any] = np.mean(list(arrays), axis=0).round(3).tolist()
    return averages


def _kept(cells: Cells) -> list[list[list[float]]]:
    return [row.kept for rows in cells for row in rows if row.kept is not None]


def summarise_shared(results: Sequence[Shared]) -> list[Facts]:
    """Sum up what branches share for each kind of branches and budget, with intervals over seeds.

    ``kl_above_own`` is an interval of how much more the last branch diverges with each set than with its own.
    """
    groups: dict[tuple[Any, ...], list[Shared]] = {}
    for result in results:
        groups.setdefault((result.kind, result.budget), []).append(result)
    facts = []
    for (kind, budget), group in groups.items():
        kl = {name: np.array([[result.kl[name] for result in group]]) for name in group[0].kl}
        top1 = {name: np.array([[result.top1[name] for result in group]]) for name in group[0].top1}
        facts.append(
            {
                "kind": kind,
                "budget": budget,
                "seeds": len(group),
                "prompt_tokens": float(np.mean([result.prompt_tokens for result in group])),
                "jaccard": float(np.mean([result.jaccard for result in group])),
                "union_tokens": np.mean([result.union_tokens for result in group], axis=0).round(1).tolist(),
                "kl": {name: float(mean(values)) for name, values in kl.items()},
                "top1": {name: float(mean(values)) for name, values in top1.items()},
                "kl_above_own": {
                    name: bootstrap([values, kl["own"]], difference) for name, values in kl.items() if name != "own"
                },
            }
        )
    return facts
