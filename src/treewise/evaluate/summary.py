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

BASELINE = "random"


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
        held, of all layers and heads; ``kl_below_random`` an interval of what the policy's divergence is less than that
        of random tokens at the same budget, pair by pair.
    """
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.mode, row.policy, row.budget, row.task), []).append(row)
    facts = []
    for mode, policy, budget in dict.fromkeys(key[:3] for key in cells):
        tasks = [key[3] for key in cells if key[:3] == (mode, policy, budget)]
        counted = [task for task in tasks if task != SANITY]
        summaries = []
        for name, chosen in (("all", counted), *((task, [task]) for task in tasks)):
            if chosen:
                own, baseline, oracle = (
                    [cells.get((mode, who, budget, task), []) for task in chosen] for who in (policy, BASELINE, ORACLE)
                )
                summaries.append({"task": name} | _summarise_cells(own, baseline, oracle, solvable))
        if counted:
            worst = min((each for each in summaries if each["task"] in counted), key=lambda each: each["top1"])
            summaries[0] |= {"worst_task": worst["task"], "worst_top1": worst["top1"]}
            own = [cells[mode, policy, budget, task] for task in counted]
            summaries[0]["error_by_layer"] = _average(row.errors for rows in own for row in rows)
            if needles := _kept(own):
                summaries[0]["kept_by_head"] = _average(needles)
        facts += [{"mode": mode, "policy": policy, "budget": budget} | each for each in summaries]
    return facts


def _summarise_cells(
    own: Sequence[Sequence[Row]],
    baseline: Sequence[Sequence[Row]],
    oracle: Sequence[Sequence[Row]],
    solvable: Collection[str],
) -> Facts:
    def table(get: Callable[[Row], float], of: Sequence[Sequence[Row]] = own) -> Array:
        return np.array([[get(row) for row in rows] for rows in of], np.float64)

    facts: Facts = {"seeds": len(own[0]), "held": float(mean(table(lambda row: row.held)))}
    for name in ("kl", "top1", "nll_increase"):
        values = table(attrgetter(name))
        facts |= {name: float(mean(values)), f"{name}_interval": bootstrap([values], mean)}
    if all(baseline):
        pairs = [table(lambda row: row.kl, baseline), table(lambda row: row.kl)]
        facts["kl_below_random"] = bootstrap(pairs, difference)
    counted = [rows for rows in own if rows[0].task in solvable]
    if counted:
        right = table(lambda row: sum(map(all, zip(row.right, row.dense_right, strict=True))), counted)
        dense = table(lambda row: sum(row.dense_right), counted)
        facts |= {"recall": float(ratio(right, dense)), "n": int(dense.sum())}
        facts["recall_interval"] = bootstrap([right, dense], ratio)
    if needles := _kept(own):
        facts["kept"] = float(np.mean(needles))
        if all(oracle):
            facts["kept_of_oracle"] = facts["kept"] / float(np.mean(_kept(oracle)))
    if own[0][0].task == SANITY:
        facts["perplexity"] = float(np.exp(mean(table(lambda row: row.answer_nll))))
    return facts


def _average(arrays: Iterable[Any]) -> list[Any]:
    """Average arrays of one shape, to three places."""
    averages: list[Any] = np.mean(list(arrays), axis=0).round(3).tolist()
    return averages


def _kept(cells: Sequence[Sequence[Row]]) -> list[list[list[float]]]:
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
