"""Predicts how long each method takes on a tree, from a few numbers fitted on the device that are kept as data.

A prediction is a sum of non-negative coefficients, in microseconds, times features of a method's work items. The
coefficients of a device are a JSON file: in the folder ``costs`` beside this module, or in that of the user's cache
folder, which takes precedence and is what ``treewise bench fit`` writes.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from treewise.config import cache_folder
from treewise.plan.data import FREE_END, KV_END, KV_START, ROW_HIGH, ROW_LOW
from treewise.plan.devices import multiprocessors
from treewise.plan.layout import Layout
from treewise.plan.partition import ALONE, BATCH, BOUNDS, STEP
from treewise.plan.spec import Ints

PACKAGED = Path(__file__).parent / "costs"
"""Where the data that come with the package lie."""
MARGIN = {"cuda": 0.1, "cpu": 0.2}
"""By how much a method must be predicted to beat the usual one, which reads less. Predictions err by 5 % in the median
on an H200, and on a CPU by more, the more so as other programs run."""

COEFFICIENTS = {
    "cuda": (
        "launch", "merge", "longest_item", "longest_merge", "partial_mb", "kv_mb",
        "item_16", "item_64", "item_128", "step_16", "step_64", "step_128",
    ),
    "cpu": (
        "call", "row", "item", "item_products", "item_keys", "masked",
        "batch", "batch_products", "batch_keys", "merge", "partials",
    ),
}  # fmt: skip
"""The names of the coefficients of each kind of device."""


class Layer(NamedTuple):
    """What the time of an item depends on besides its rows and key tokens."""

    device: torch.device
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    backend: str


class Work(NamedTuple):
    """Work items, those that are alike in one entry: rows [low, high) in tiles, cut in pieces of so many key tokens."""

    low: Ints
    high: Ints
    tiles: Ints
    tokens: Ints
    masked: Ints  # of the tokens, the last ones
    pieces: Ints
    kv_tokens: int  # key tokens of the tree
    bounds: tuple[int, ...] = BOUNDS  # of packed rows, see `treewise.plan.partition.Partition`


class Candidate(NamedTuple):
    """What a method would have to do, which takes its time to tell in full."""

    items: int  # at least
    work: Callable[[], Work]


def work_of_items(items: Ints, kv_tokens: int, bounds: tuple[int, ...]) -> Work:
    """Take the items of a partition as they are."""
    low, high, start, end, free = items[:, [ROW_LOW, ROW_HIGH, KV_START, KV_END, FREE_END]].astype(np.int64).T
    one = np.ones_like(low)
    return Work(low, high, one, end - start, end - free, one, kv_tokens, bounds)


def work_by_node(layout: Layout, row_tile: int, chunk: int) -> Work:
    """Work of `treewise.plan.partition.by_node`, from the nodes alone."""
    length = layout.node_end - layout.node_start
    return _cut_evenly(layout, layout.node_low, layout.node_high, length, row_tile, chunk)


def work_by_query(layout: Layout, window: int | None, row_tile: int, chunk: int) -> Work:
    """Work of `treewise.plan.partition.by_query`, from the lengths of the paths."""
    low = np.flatnonzero(layout.row_starts)
    high = np.append(low[1:], len(layout.row_starts))
    length = layout.row_seen[high - 1]
    if window is not None:
        length = np.minimum(length, window + high - low - 1)
    return _cut_evenly(layout, low, high, length, row_tile, chunk)


def _cut_evenly(layout: Layout, low: Ints, high: Ints, length: Ints, row_tile: int, chunk: int) -> Work:
    pieces = -(-length // chunk)
    tokens = length if pieces.max() == 1 else -(-length // pieces)
    full = (high - low) // row_tile
    middle = low + full * row_tile  # the last tile of each has fewer rows
    whole, rest = full > 0, middle < high
    low, high, tiles, tokens, pieces = (
        np.concatenate((of_whole[whole], of_rest[rest]))
        for of_whole, of_rest in (
            (low, middle), (middle, high), (full, np.ones_like(full)), (tokens, tokens), (pieces, pieces)
        )
    )  # fmt: skip
    return Work(low, high, tiles, tokens, np.zeros_like(low), pieces, len(layout.kv_slots))


def gpu_features(work: Work, layer: Layer) -> dict[str, float]:
    """List what the time on a GPU is made of: each feature is to be multiplied with its coefficient.

    ``item_*`` and ``step_*`` count items, and steps of 64 key tokens, a multiprocessor, by the packed rows of the
    compiled kernel. A step and the chain of the longest item count as what 128 elements of 16 bits are.
    """
    packed = _rows_of_a_tile(work) * (layer.num_heads // layer.num_kv_heads)
    number = work.tiles * work.pieces * layer.num_kv_heads / multiprocessors(layer.device)
    steps = np.ceil(work.tokens * (1 / STEP)) * (layer.head_dim * layer.kv_dtype.itemsize / 256)
    merged, most = _partial_results(work)
    element = layer.num_heads * layer.head_dim / 1e6
    features = {
        "launch": 1.0,
        "merge": float(merged > 0),
        "longest_item": float(steps.max()),
        "longest_merge": most,
        "partial_mb": 2 * merged * element * (2 if layer.dtype == torch.float16 else 4),
        "kv_mb": 2e-6 * work.kv_tokens * layer.num_kv_heads * layer.head_dim * layer.kv_dtype.itemsize,
    }
    kernel = np.zeros(len(packed), np.int64)
    for bound in work.bounds:
        kernel += packed > bound
    number_in, steps_in = np.bincount(kernel, weights=number), np.bincount(kernel, weights=number * steps)
    items, all_steps = np.zeros((2, 3))
    for i in range(len(number_in)):
        widest = packed.max(where=kernel == i, initial=0)  # a kernel pads all items to its widest
        width = np.searchsorted(BOUNDS, widest)
        items[width] += number_in[i]
        all_steps[width] += steps_in[i]
    for place, name in enumerate(("16", "64", "128")):
        features[f"item_{name}"], features[f"step_{name}"] = float(items[place]), float(all_steps[place])
    return features


def cpu_features(work: Work, layer: Layer) -> dict[str, float]:
    """List what the time on a CPU is made of: items that run alone, batches of small ones, the merge.

    ``*_products`` are millions of multiplications of queries with keys, ``*_keys`` millions of elements of keys that
    are read, ``masked`` millions of scores under a mask.
    """
    rows = _rows_of_a_tile(work)
    number = work.tiles * work.pieces
    alone = rows * work.tokens >= ALONE
    keys = number * work.tokens * (layer.num_kv_heads * layer.head_dim / 1e6)
    products = number * rows * work.tokens * (layer.num_heads * layer.head_dim / 1e6)
    small = ~alone
    shape = np.frexp(rows[small])[1] * 64 + np.frexp(work.tokens[small])[1]
    shapes = np.bincount(shape, weights=keys[small]) if small.any() else np.zeros(1)
    merged, _ = _partial_results(work)
    return {
        "call": 1.0,
        "row": float(work.high.max()) * layer.num_heads * layer.head_dim / 1e6,
        "item": float(number[alone].sum()),
        "item_products": float(products[alone].sum()),
        "item_keys": float(keys[alone].sum()),
        "masked": float((number * rows * work.masked)[alone].sum()) * layer.num_heads / 1e6,
        "batch": float(np.ceil(shapes * (1e6 / BATCH)).sum()),
        "batch_products": float(products[small].sum()),
        "batch_keys": float(keys[small].sum()),
        "merge": float(merged > 0),
        "partials": merged * layer.num_heads * layer.head_dim / 1e6,
    }


FEATURES: Mapping[str, Callable[[Work, Layer], dict[str, float]]] = {"cuda": gpu_features, "cpu": cpu_features}
"""The features of each kind of device."""


def _rows_of_a_tile(work: Work) -> Ints:
    """Return how many rows each tile has at most."""
    rows = work.high - work.low
    several = np.flatnonzero(work.tiles > 1)  # few, and a division takes longer than all else
    rows[several] = -(-rows[several] // work.tiles[several])
    return rows


def _partial_results(work: Work) -> tuple[float, float]:
    """Count the partial results of all rows that have several, and those of the row that has most."""
    end = int(work.high.max()) + 1
    change = np.bincount(work.low, weights=work.pieces, minlength=end)
    change -= np.bincount(work.high, weights=work.pieces, minlength=end)
    a_row = np.cumsum(change)
    return float(a_row[a_row > 1].sum()), float(a_row.max())


@dataclass(frozen=True)
class Costs:
    """Fitted coefficients of one device.

    Attributes
    ----------
    device : str
        Name of the device they were fitted on.
    kind : str
        ``"cuda"`` or ``"cpu"``.
    multiprocessors : int
        Of a GPU; 0 for a CPU.
    microseconds : dict
        Coefficient of each feature.
    """

    device: str
    kind: str
    multiprocessors: int
    microseconds: Mapping[str, float]

    def predict(self, work: Work, layer: Layer) -> float:
        """Predict the time of a method's work for one layer, in microseconds."""
        features = FEATURES[self.kind](work, layer)
        return sum(self.microseconds[name] * amount for name, amount in features.items())

    def least(self, items: int, layer: Layer) -> float:
        """Return what work of so many items is predicted to take at least, whatever they are."""
        if self.kind == "cpu":
            return 0.0
        an_item = min(value for name, value in self.microseconds.items() if name.startswith("item_"))
        return an_item * items * layer.num_kv_heads / multiprocessors(layer.device)


def choose(candidates: Mapping[str, Candidate], layer: Layer) -> tuple[str, str]:
    """Choose the method whose work is predicted to take least time, see `pick`, and say why."""
    costs, source = costs_for(layer.device)
    times: dict[str, float] = {}
    told: list[str] = []
    for method, (items, work) in candidates.items():
        least = costs.least(items, layer)
        hopeless = least > next(iter(times.values()), math.inf)
        times[method] = least if hopeless else costs.predict(work(), layer)
        told.append(f"{method} {'over ' * hopeless}{times[method]:.1f} us")
    margin = MARGIN[layer.device.type]
    method = pick(times, margin)
    rule = f"the first unless another needs {margin:.0%} less"
    return method, f"{method}: predicted {', '.join(told)} ({rule}), from times measured on {source}"


def pick(times: Mapping[str, float], margin: float) -> str:
    """Name what takes least time; the first of all, unless another takes less by more than a prediction may err."""
    usual, best = next(iter(times)), min(times, key=times.__getitem__)
    return best if times[best] < (1 - margin) * times[usual] else usual


@functools.cache
def costs_for(device: torch.device) -> tuple[Costs, str]:
    """Find the data of a device, else those of the known device that is nearest, and name what they were fitted on.

    Raises
    ------
    ValueError
        If a file is not what it should be.
    """
    known = [read_costs(path) for path in _files(device.type)]
    name, size = describe(device)
    exact = [costs for costs in known if costs.device == name]
    nearest = min(exact or known, key=lambda costs: abs(costs.multiprocessors - size))
    source = nearest.device if exact else f"{nearest.device}, of what is known nearest to {name}"
    return nearest, source


def describe(device: torch.device) -> tuple[str, int]:
    """Name a device as its data do, and count its multiprocessors; a GPU that is not there is an H200."""
    if device.type == "cpu":
        return "cpu", 0
    name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else "NVIDIA H200"
    return name, multiprocessors(device)


def user_file(name: str) -> Path:
    """Where a user's own data of a device lie."""
    return cache_folder() / "costs" / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")


def _files(kind: str) -> list[Path]:
    """List the files of a kind of device, the user's first."""
    found = [path for folder in (cache_folder() / "costs", PACKAGED) for path in sorted(folder.glob("*.json"))]
    return [path for path in found if (path.stem == "cpu") == (kind == "cpu")]


def read_costs(path: Path) -> Costs:
    """Read one file of fitted data.

    Raises
    ------
    ValueError
        If it is malformed; the message names the file and the field.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None

    def need(right: bool, field: str, value: object, rule: str) -> None:
        if not right:
            raise ValueError(f"{path}: {field} is {value!r}; it must {rule}")

    need(isinstance(content, dict), "the whole", content, "be an object")
    device, kind = content.get("device"), content.get("kind")
    need(isinstance(device, str) and device != "", "device", device, "be a name")
    need(kind in FEATURES, "kind", kind, f"be one of {', '.join(FEATURES)}")
    size = content.get("multiprocessors")
    need(_is_number(size, whole=True), "multiprocessors", size, "be a whole number of at least 0")
    given = content.get("microseconds")
    need(isinstance(given, dict), "microseconds", given, "be an object with a number for each feature")
    names = COEFFICIENTS[kind]
    for name in (*names, *given):
        need(name in names, f"microseconds.{name}", given.get(name), f"be one of {', '.join(names)}")
        value = given.get(name)
        need(_is_number(value), f"microseconds.{name}", value, "be a number of at least 0")
    return Costs(device, kind, size, {name: float(given[name]) for name in names})


def _is_number(value: Any, whole: bool = False) -> bool:
    right = isinstance(value, int) if whole else isinstance(value, int | float)
    return right and not isinstance(value, bool) and 0 <= value < float("inf")
