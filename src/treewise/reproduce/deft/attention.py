"""Attention alone: tables 6, 7, 16, and figures 13, 14, 15 and 18, from single layers timed at sampled steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from treewise.attention import TreeSpec, plan_tree, run_plan
from treewise.bench.measure import time_calls
from treewise.bench.subject import Subject
from treewise.bench.trees import visible_lengths
from treewise.config import ModelConfig
from treewise.replay import Schedule
from treewise.reproduce.deft import published, texts
from treewise.reproduce.deft.tables import NAMES, against_flatten
from treewise.reproduce.deft.workloads import (
    METHODS,
    PROMPT,
    SIZES,
    STEPS,
    TITLES,
    WIDTHS,
    Setup,
    Work,
    evenly,
    mean_steps,
    samples,
    tree_at,
    with_prompt,
)
from treewise.reproduce.figures import Panel, figure
from treewise.reproduce.report import Compared, Section, Table, ratio
from treewise.reproduce.study import Measurement, Result, Results, attempt, release

PARTITIONS = ("radix", "deft:node", "deft:node_chunk", "deft:flatten")
"""The methods that the paper's ablations compare."""
SORTING_PROMPTS = (5000, 8000, 10000)
SPECULATION_PROMPTS = (1000, 4000, 8000, 20000)
FEW_SHOT_PROMPTS = (1000, 4000, 20000)
ALL_WIDTHS = (10, 20, 30, 40, 50)
CHUNKS = (32, 64, 128, 256, 512)


@dataclass
class Layer:
    """One layer's attention, and the keys and values that it reads.

    Attributes
    ----------
    num_heads, num_kv_heads, head_dim, num_layers : int
    dtype : torch.dtype
    device : torch.device
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    _pool: torch.Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(cls, subject: Subject, config: ModelConfig) -> Layer:
        """Take a model's."""
        shape = config.num_heads, config.num_kv_heads, config.head_dim, len(config.layer_windows)
        return cls(*shape, subject.element, subject.place)

    @property
    def shape(self) -> dict[str, Any]:
        """What `plan_tree` wants to know."""
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        return {**heads, "dtype": self.dtype, "device": self.device}

    def make_room(self, tokens: int) -> None:
        """Take memory for the keys and values of so many tokens in all layers, and give it back.

        Raises
        ------
        torch.OutOfMemoryError, RuntimeError
            If it is not there.
        """
        self._empty(self.num_layers, tokens)
        release()

    def pool(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random keys and values of at least so many tokens, of one layer."""
        if self._pool is None or self._pool.shape[2] < tokens:
            self._pool = None
            self._pool = self._empty(1, tokens).normal_()
        k, v = self._pool[0].unbind()
        return k, v

    def seconds(self, tree: TreeSpec, method: str, repeats: int, chunk: int | None = None) -> float:
        """Time one layer of one step; on a GPU by graph replays with a cold L2 cache."""
        plan = plan_tree(tree, method, chunk=chunk, **self.shape)
        k, v = self.pool(tree.num_tokens)
        q = torch.randn(tree.num_queries, self.num_heads, self.head_dim, device=self.device).to(self.dtype)
        return typical(time_calls(partial(run_plan, plan, q, k, v), self.device, repeats), self.device)

    def _empty(self, layers: int, tokens: int) -> torch.Tensor:
        shape = (layers, 2, tokens, self.num_kv_heads, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def typical(seconds: Sequence[float], device: torch.device) -> float:
    """Return what stands for several timings: the median, or on a CPU, which other programs disturb, the least."""
    return statistics.median(seconds) if device.type == "cuda" else min(seconds)


def apart(tree: TreeSpec) -> TreeSpec:
    """Return the sequences of a tree's queries, each with tokens of its own.

    Examples
    --------
    >>> tree = TreeSpec(parent=[-1, 0, 0], length=[40, 2, 3], query_node=[1, 2])
    >>> apart(tree).length.tolist()
    [42, 43]
    """
    return TreeSpec([-1] * tree.num_queries, visible_lengths(tree), range(tree.num_queries))


def over_runs(
    layer: Layer, works: Sequence[Work], methods: Sequence[str], count: int, repeats: int, chunk: int | None = None
) -> Result:
    """Time attention at sampled steps of whole runs, and add it up.

    Flash-Decoding has memory without pages, so that each sequence has its own copy of all keys.

    Returns
    -------
    dict
        ``steps``: of a run, in the mean. ``methods``: by name ``us``, of one layer at each sample, and ``seconds``, of
        all layers over a whole run in the mean.
    """
    chosen = samples(works, count)
    found: Result = {
        "device": layer.device.type,
        "steps": mean_steps(works),
        "layers": layer.num_layers,
        "samples": [{"queries": tree.num_queries, "tokens": tree.num_tokens, "steps": each} for tree, each in chosen],
        "methods": {},
    }

    def timed(method: str) -> Result:
        trees = [tree for tree, _ in chosen]
        if method == "flash_decoding":
            layer.make_room(max(int(visible_lengths(tree_at(work, work.num_steps)).sum()) for work in works))
            trees = [apart(tree) for tree in trees]
        us = [layer.seconds(tree, method, repeats, chunk) * 1e6 for tree in trees]
        whole = sum(each * weight for each, (_, weight) in zip(us, chosen, strict=True)) * layer.num_layers * 1e-6
        return {"us": us, "seconds": whole}

    for method in methods:
        found["methods"][method] = attempt(partial(timed, method))
    return found


# ------------------------------------------------------------------------------------------------ tables 6 and 16


def latency(setup: Setup, layer: Layer) -> Iterator[Measurement]:
    """Measure all methods on all workloads."""
    scale = setup.scale
    for workload in TITLES:
        works = setup.works(workload)[: scale.tree_samples]
        settings = _settings(setup, workload=workload, samples=scale.samples, trees=len(works))
        yield Measurement(
            f"attention-{workload}",
            f"attention, {TITLES[workload]}",
            _guess(setup, len(METHODS) * max(scale.samples, len(works)), workload),
            partial(over_runs, layer, works, METHODS, scale.samples, scale.repeats),
            settings,
        )


def latency_sections(results: Results) -> list[Section]:
    """Report tables 6 and 16."""
    seconds = {
        workload: {
            method: "OOM" if facts.get("out_of_memory") else facts.get("seconds")
            for method, facts in found["methods"].items()
        }
        for workload in TITLES
        if "methods" in (found := results.get(f"attention-{workload}", {}))
    }
    tables = against_flatten("Tables 6 and 16: attention latency", seconds, published.ATTENTION_SECONDS)
    return [Section("Attention latency (tables 6 and 16)", texts.LATENCY, tables)] if tables else []


# ------------------------------------------------------------------------------------------- table 7 and figure 18


def by_prompt(setup: Setup, layer: Layer) -> Iterator[Measurement]:
    """Measure attention with prompts of several lengths."""
    scale = setup.scale

    def measure() -> Result:
        found: Result = {"sorting": {}, "few-shot": {}, "speculation": {}}
        time = partial(over_runs, layer, count=max(1, scale.samples // 3), repeats=scale.repeats)
        trees = [work for work in setup.works("sorting")[: scale.tree_samples] if isinstance(work, Schedule)]
        for prompt in (None, *SORTING_PROMPTS):
            works = [work if prompt is None else with_prompt(work, prompt) for work in trees]
            found["sorting"][prompt or 1000] = time(works, methods=("radix", "deft:flatten"))
        for prompt in FEW_SHOT_PROMPTS:
            for width in WIDTHS:
                works = [Schedule.few_shot(prompt, width, STEPS)]
                found["few-shot"][f"{prompt}-{width}"] = time(works, methods=("radix", "deft:flatten"))
        for prompt in SPECULATION_PROMPTS:
            for size in (32, 64):
                drafted = [setup.drafted("star", size, prompt, prompt + 1000)]
                found["speculation"][f"{prompt}-{size}"] = time(drafted, methods=PARTITIONS)
        return found

    yield Measurement(
        "prompts",
        "attention by prompt length",
        _guess(setup, 2 * 14 * scale.samples, "prompts"),
        measure,
        _settings(setup, samples=scale.samples, trees=scale.tree_samples),
    )


def by_prompt_sections(results: Results) -> list[Section]:
    """Report table 7's attention and figure 18."""
    found = results.get("prompts", {})
    if "sorting" not in found:
        return []
    rows: list[list[Any]] = []
    for prompt, one in found["sorting"].items():
        said = published.SORTING_BY_PROMPT.get(int(prompt), (None, None))[0]
        rows.append(["sorting, table 7", int(prompt), Compared(_radix_over_flatten(one), said)])
    for key, one in found["few-shot"].items():
        prompt, width = map(int, key.split("-"))
        said = published.FEW_SHOT_BY_PROMPT[prompt][width][0]
        rows.append([f"few-shot, b = {width}, raw data", prompt, Compared(_radix_over_flatten(one), said)])
    for key, one in found["speculation"].items():
        prompt, size = map(int, key.split("-"))
        attention = published.ATTENTION_BY_PROMPT[size, prompt]
        said = attention["radix"] / attention["deft:flatten"]
        rows.append([f"speculation, t = {size}, figure 18", prompt, Compared(_radix_over_flatten(one), said)])
    table = Table(
        "Table 7, attention: Radix over flatten by prompt length",
        ["workload", "prompt tokens", "Radix over flatten"],
        rows,
    )
    panels = []
    for size in (32, 64):
        curves = {
            NAMES[method]: (
                list(SPECULATION_PROMPTS),
                [
                    found["speculation"][f"{prompt}-{size}"]["methods"][method].get("seconds", float("nan"))
                    for prompt in SPECULATION_PROMPTS
                ],
            )
            for method in PARTITIONS
        }
        panels.append(
            Panel(f"speculation, star of {size}, 239 steps", "prompt tokens", "attention, s", curves, log_y=True)
        )
    drawn = figure(
        "Figure 18: attention latency of speculation by prompt length",
        panels,
        "Seconds of attention over prompt tokens for radix and the three DeFT partitions, one chart a tree size",
    )
    return [Section("Prompt lengths: attention (table 7, figure 18)", texts.PROMPTS_ATTENTION, [table, *drawn])]


# ----------------------------------------------------------------------------------------------- figures 13 to 15


def figures(setup: Setup, layer: Layer) -> Iterator[Measurement]:
    """Measure the steps of one sorting tree, of prompts that branch more or less, and sizes of blocks."""
    scale = setup.scale

    def iterations() -> Result:
        work = setup.works("sorting")[0]
        steps = evenly(work.num_steps, scale.points)
        trees = [tree_at(work, step) for step in steps]
        return {
            "steps": steps,
            "leaves": [tree.num_queries for tree in trees],
            "nodes": [tree.num_nodes for tree in trees],
            "length_deviation": [float(np.std(tree.length)) for tree in trees],
            "us": {
                method: [layer.seconds(tree, method, scale.repeats) * 1e6 for tree in trees]
                for method in ("deft:node", "deft:flatten")
            },
        }

    def widths() -> Result:
        found: Result = {}
        for width in ALL_WIDTHS:
            work = Schedule.few_shot(PROMPT, width, STEPS)
            steps = evenly(STEPS, max(2, scale.samples // 2))
            us = {
                method: [layer.seconds(work.at(step), method, scale.repeats) * 1e6 for step in steps]
                for method in ("radix", "deft:flatten")
            }
            found[str(width)] = {"steps": steps, "us": us}
        return found

    def blocks() -> Result:
        trees = {f"few-shot, b = {width}": Schedule.few_shot(PROMPT, width, STEPS).at(STEPS // 2) for width in (20, 50)}
        trees |= {f"star, t = {size}": setup.drafted("star", size).tree(3500) for size in SIZES[:3]}
        found: Result = {}
        for name, tree in trees.items():
            for method in ("deft:node_chunk", "deft:flatten"):
                seconds = [layer.seconds(tree, method, scale.repeats, chunk) for chunk in CHUNKS]
                found.setdefault(name, {})[method] = [second * 1e6 for second in seconds]
        return found

    settings = _settings(setup, points=scale.points, samples=scale.samples)
    count = 2 * scale.points, 2 * len(ALL_WIDTHS) * max(2, scale.samples // 2), 2 * 5 * len(CHUNKS)
    for key, title, run, number in (
        ("iterations", "each step of sorting", iterations, count[0]),
        ("widths", "steps by the tree's width", widths, count[1]),
        ("blocks", "sizes of blocks", blocks, count[2]),
    ):
        yield Measurement(key, title, _guess(setup, number, key), run, settings)


def figures_sections(results: Results) -> list[Section]:
    """Report figures 13, 14 (attention) and 15."""
    sections = []
    if "us" in (found := results.get("iterations", {})):
        steps, us = found["steps"], found["us"]
        node_over = [node / flat for node, flat in zip(us["deft:node"], us["deft:flatten"], strict=True)]
        related = float(np.corrcoef(found["length_deviation"], node_over)[0, 1])
        panels = [
            Panel(
                "sorting, tree 0",
                "step",
                "attention of a layer, µs",
                {NAMES[method]: (steps, us[method]) for method in us},
                marks=False,
            ),
            Panel(
                "node over flatten, by how uneven nodes are",
                "standard deviation of node lengths, tokens",
                "deft:node / deft:flatten",
                {"a step": (found["length_deviation"], node_over)},
                joined=False,
            ),
            Panel(
                "the tree",
                "step",
                "leaves, nodes",
                {"live leaves": (steps, found["leaves"]), "nodes": (steps, found["nodes"])},
                marks=False,
            ),
        ]
        text = texts.ITERATIONS.format(related=related, least=min(node_over), most=max(node_over))
        alt = "Attention time of node and flatten at each step of one sorting tree, and their ratio"
        sections.append(
            Section(
                "Steps of sorting (figure 13)",
                text,
                figure("Figure 13: each step of sorting, node and flatten", panels, alt),
            )
        )
    if "10" in (found := results.get("widths", {})):
        heights = {
            method: [statistics.fmean(found[str(width)]["us"][method]) for width in ALL_WIDTHS]
            for method in ("radix", "deft:flatten")
        }
        over = [radix / flat for radix, flat in zip(heights["radix"], heights["deft:flatten"], strict=True)]
        curves = {NAMES[method]: (list(ALL_WIDTHS), each) for method, each in heights.items()}
        panels = [
            Panel("4,000-token prompt", "branches", "attention of a layer, µs", curves),
            Panel("what sharing is worth", "branches", "times", {"Radix over flatten": (list(ALL_WIDTHS), over)}),
        ]
        parts = figure(
            "Figure 14: attention by the tree's width",
            panels,
            "Microseconds of attention of a layer over the number of branches, for radix and flatten, and their ratio",
            "The wider the tree, the more often a sequence-by-sequence method reads the same prompt.",
        )
        sections.append(Section("Width of the tree (figure 14)", "", parts))
    found = results.get("blocks", {"error": ""})
    if "error" not in found:
        panels = [
            Panel(
                name,
                "tokens a block",
                "attention of a layer, µs",
                {NAMES[method]: (list(CHUNKS), us[method]) for method in us},
                log_x=True,
            )
            for name, us in found.items()
        ]
        pairs = [pair for us in found.values() for pair in zip(us["deft:flatten"], us["deft:node_chunk"], strict=True)]
        wins = sum(flatten < chunked for flatten, chunked in pairs)
        text = texts.BLOCKS.format(wins=wins, pairs=len(pairs))
        alt = "Attention time over the size of blocks for node-chunk and flatten, one chart a tree"
        sections.append(Section("Block size (figure 15)", text, figure("Figure 15: block size", panels, alt)))
    return sections


def _radix_over_flatten(found: Mapping[str, Any]) -> float | None:
    return ratio(found["methods"]["radix"].get("seconds"), found["methods"]["deft:flatten"].get("seconds"))


def _settings(setup: Setup, **others: Any) -> dict[str, Any]:
    subject, scale = setup.subject, setup.scale
    model = {"model": subject.model, "dtype": str(subject.element), "device": subject.device}
    return {**model, "repeats": scale.repeats, **others}


def _guess(setup: Setup, timings: int, workload: str) -> float:
    """Estimate the seconds of so many timings."""
    if setup.subject.device == "cuda":
        return 1.0 + 0.04 * timings
    wide = 4.0 if workload.endswith(("128", "256")) else 1.0
    return 0.1 * timings * wide * setup.scale.repeats / 3
