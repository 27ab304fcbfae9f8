"""Fits the cost model behind method ``"auto"`` to measured times of methods on a designed set of trees."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treewise.attention import TreeSpec, plan_tree, run_plan
from treewise.bench.attention import DTYPES, random_inputs, read_heads
from treewise.bench.measure import check_device, describe_machine, progress, report, time_calls
from treewise.bench.trees import find_trees, visible_lengths
from treewise.plan.cost import COEFFICIENTS, FEATURES, MARGIN, Costs, Layer, describe, pick, user_file, work_of_items
from treewise.plan.devices import default_backend
from treewise.results import json_safe

Floats = npt.NDArray[np.float64]

METHODS = ("deft:flatten", "deft:node_chunk", "radix")
"""The methods that ``"auto"`` chooses from."""
TREES = {
    "cuda": (
        "fasttree,deft,unshared,causal:2000,1:200,1:2000,4:300,64:100,64:2000,300:40,1/4:16000/16,1/64:16000/4,"
        "1/200:300/20,1/2/4/8:500/500/500/500,1/8/64:64/64/64,2/64/256:3000/100/10,1/500:1000/100,1000+500"
    ),
    "cpu": (
        "1:20,1:200,1:2000,8:20,8:200,8:1000,40:100,1/4:100/10,1/20:2000/16,1/20:2000/100,1/50:500/50,1/10/100:300/50/20,"
        "1/2/4/8/16/32:64/32/16/8/8/8,1/2/4/8/16/32/64/128:16/8/4/4/4/4/4/4,1/128:16/8,1/4/64:8/64/16,500+20,1000+64,"
        "causal:100,causal:500,1/300:100/4,1/2/64:8/100/32,1/3/9/27/81:100/3/3/3/3,1/40:20/200,2/10:1500/40"
    ),
}
"""Trees that differ in what the model distinguishes: width, depth, lengths, sharing."""
HEADS = {"cuda": "32,8 32,32 16,1", "cpu": "9,3 14,2 8,8"}
HEAD_DIM = {"cuda": 128, "cpu": 64}
MOST_TOKENS = 3 * 10**6
"""Methods that list the path of every query are left out where the paths have more tokens than this."""


@dataclass(frozen=True)
class Measured:
    """The time of one method on one tree, and what the model knows of it."""

    heads: str
    tree: str
    method: str
    features: dict[str, float]
    run_us: float


def fit(
    *,
    device: str = "cpu",
    trees: str = "auto",
    heads: str = "auto",
    dtype: str = "auto",
    repeats: int | None = None,
    out: Path | None = None,
) -> None:
    """Measure methods on trees, fit the model that picks the method of "auto" on this device, and keep it.

    Parameters
    ----------
    device
        cpu or cuda. What was fitted is used on devices of its name from then on.
    trees
        As in `treewise bench attention`; auto is a set made for this.
    heads
        Query heads and KV heads, such as 32,8, several with blanks between.
    dtype
        float32, float16 or bfloat16; auto is float32 on a CPU and bfloat16 on a GPU.
    repeats
        Timed runs of each, 15 on a CPU and 21 on a GPU if left out. What is fitted is the median on a GPU; on a CPU,
        which other programs disturb, the least of at least 5 in turns.
    out
        Where to write the result; the cache folder if left out.
    """
    place = check_device(device)
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype: {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    element = DTYPES[dtype if dtype != "auto" else "bfloat16" if device == "cuda" else "float32"]
    specs = find_trees(TREES[device] if trees == "auto" else trees)
    shapes = (HEADS[device] if heads == "auto" else heads).split()
    repeats = max(5, repeats or (21 if device == "cuda" else 15))
    measured = list(measure(specs, shapes, place, element, repeats))
    name, size = describe(place)
    costs = Costs(name, device, size, fit_costs(device, measured))
    quality, rows = judge(costs, measured)
    target = out or user_file(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    content = asdict(costs) | {"quality": quality, "machine": describe_machine(place)}
    target.write_text(json.dumps(json_safe(content), indent=1) + "\n", encoding="utf-8")
    title = (
        f"{len(measured)} times on {name}, relative error {quality['median_error']:.0%} in the median, "
        f"{quality['worst_error']:.0%} at most; the pick is the fastest in {quality['fastest']:.0%}, "
        f"{quality['mean_loss']:.1%} slower than it in the mean, {quality['worst_loss']:.0%} at most"
    )
    report(title, rows, {"bench": "fit", "file": str(target), **content, "measured": [asdict(one) for one in measured]})


def measure(
    specs: dict[str, TreeSpec], shapes: Sequence[str], device: torch.device, dtype: torch.dtype, repeats: int
) -> Iterable[Measured]:
    """Time every method on every tree, for each shape of a layer."""
    dim = HEAD_DIM[device.type]
    typical, turns = (np.median, 1) if device.type == "cuda" else (np.min, 5)
    with progress() as bar:
        task = bar.add_task("fit", total=len(specs) * len(shapes))
        for heads in shapes:
            num_heads, num_kv_heads = read_heads(heads)
            layer = Layer(device, num_heads, num_kv_heads, dim, dtype, dtype, default_backend(device))
            for tree, spec in specs.items():
                bar.update(task, description=f"{heads}: {tree}")
                q, k, v = random_inputs(spec, num_heads, num_kv_heads, dim, dtype, 1, device)
                plans = [
                    plan_tree(
                        spec,
                        method,
                        num_heads=num_heads,
                        num_kv_heads=num_kv_heads,
                        head_dim=dim,
                        dtype=dtype,
                        device=device,
                    )
                    for method in METHODS
                    if method != "radix" or visible_lengths(spec).sum() <= MOST_TOKENS
                ]
                runs = [partial(run_plan, plan, q, k, v) for plan in plans]
                seconds = [
                    [second for run in runs for second in time_calls(run, device, repeats // turns)]
                    for _ in range(turns)
                ]
                for plan, times in zip(plans, np.reshape(seconds, (turns, len(plans), -1)).swapaxes(0, 1), strict=True):
                    work = work_of_items(plan.items, spec.num_tokens, plan.kernel_bounds)
                    features = FEATURES[device.type](work, layer)
                    yield Measured(heads, tree, plan.method, features, float(typical(times)) * 1e6)
                bar.advance(task)


def fit_costs(kind: str, measured: Sequence[Measured]) -> dict[str, float]:
    """Fit the coefficients so that the squares of the relative errors are least."""
    names = COEFFICIENTS[kind]
    times = np.array([one.run_us for one in measured])
    features = np.array([[one.features[name] for name in names] for one in measured])
    found = non_negative_least_squares(features / times[:, None], np.ones(len(times)))
    return {name: float(f"{value:.4g}") for name, value in zip(names, found.tolist(), strict=True)}


def non_negative_least_squares(matrix: Floats, target: Floats, rounds: int = 20000) -> Floats:
    """Minimise the norm of ``matrix @ x - target`` over x of no negative entries, one entry after the other."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    scaled = matrix / scale
    gram, aim, x = scaled.T @ scaled, scaled.T @ target, np.zeros(matrix.shape[1])
    for _ in range(rounds):
        before = x.copy()
        for place in range(len(x)):
            if gram[place, place]:
                x[place] = max(0.0, x[place] + (aim[place] - gram[place] @ x) / gram[place, place])
        if np.abs(x - before).max() <= 1e-9 * np.abs(x).max():
            break
    return np.asarray(x / scale)


def judge(costs: Costs, measured: Sequence[Measured]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Tell how well the model predicts and picks; also a row a tree, with the times of its methods."""
    predicted = [sum(costs.microseconds[name] * x for name, x in one.features.items()) for one in measured]
    errors = [abs(guess / one.run_us - 1) for guess, one in zip(predicted, measured, strict=True)]
    guesses: dict[tuple[str, str], dict[str, float]] = {}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for guess, one in zip(predicted, measured, strict=True):
        key = (one.heads, one.tree)
        guesses.setdefault(key, {})[one.method] = guess
        rows.setdefault(key, {"heads": one.heads, "tree": one.tree} | dict.fromkeys(METHODS))[one.method] = one.run_us
    for key, times in guesses.items():
        method, row = pick(times, MARGIN[costs.kind]), rows[key]
        row |= {"pick": method, "predicted": times[method], "loss": row[method] / min(row[name] for name in times) - 1}
    losses = [row["loss"] for row in rows.values()]
    quality = {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "fastest": statistics.mean(float(loss == 0) for loss in losses),
        "mean_loss": statistics.mean(losses),
        "worst_loss": max(losses),
    }
    rounded = {name: float(f"{value:.4g}") for name, value in quality.items()}
    return {"times": len(measured), **rounded}, list(rows.values())
