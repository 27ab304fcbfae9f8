"""Times attention methods and other implementations on named trees: one layer of one decode step."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from cyclopts import Parameter

from treewise.attention import BACKENDS, METHODS, TreeSpec, plan_tree, run_plan
from treewise.bench.chart import draw
from treewise.bench.contender import Contender, Job
from treewise.bench.floors import Machine
from treewise.bench.measure import check_device, describe_machine, progress, report, time_calls, wall_time
from treewise.bench.peers import PEERS, search_path
from treewise.bench.summary import add_ratios, geometric_means, notes, table
from treewise.bench.trees import find_trees
from treewise.charts import check_matplotlib
from treewise.results import json_safe

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WHOLE = {"medusa": "scores of every pair", "vanilla": "a mask of every pair", "specinfer": "the whole tree a query"}
MOST_PAIRS = 10**8
"""Methods that read or write every pair of a query and a token are not tried on trees with more."""


def attention(
    *,
    methods: str = "radix,deft:node_chunk,deft:flatten",
    backends: str = "",
    trees: str = "few-shot,deep,tot,drafted",
    peers: str = "",
    peers_path: Path | None = None,
    heads: str = "32,8",
    head_dim: int = 128,
    dtype: str = "auto",
    device: str = "cpu",
    page_size: int = 1,
    repeats: int | None = None,
    json_file: Annotated[Path | None, Parameter("--json")] = None,
    png: Path | None = None,
) -> None:
    """Time the planning and the run of attention methods and of peers on trees, and check them against float64.

    On a GPU a run is a replay of a CUDA graph with a cold L2 cache. Beside each time stands the practical floor of its
    tree: the time of a kernel that only reads the keys and values once, measured in the same run, or of the products
    alone where that is more.

    Parameters
    ----------
    methods
        Names with commas between, or all.
    backends
        Run each method on each of these: reference, cpu, triton, hopper, with commas between; the device's own if left
        out.
    trees
        Names with commas between, of a tree or of a set: few-shot, few-shot-50, cpu-few-shot, deep, tot, drafted,
        drafted-256; fasttree, deft, prefill, large, unshared. Others are written 1/20:4000/200 (nodes a level, tokens
        a node), 4000+64 (a prompt and drafted tokens) or causal:4000 (a prompt with a query at each token).
    peers
        Names with commas between, or all: sdpa, fasttree, flashinfer-decode, flashinfer-cascade, sglang. One that is
        not installed is reported and left out.
    peers_path
        A folder that peers may be imported from, as may the folders in it.
    heads
        Query heads and KV heads.
    head_dim
        Elements a head.
    dtype
        float32, float16 or bfloat16; auto is float32 on a CPU and bfloat16 on a GPU.
    device
        cpu or cuda.
    page_size
        Tokens a page.
    repeats
        Timed runs of each, 5 on a CPU and 51 on a GPU if left out; medians are reported.
    json_file
        Write the result here too.
    png
        Draw the times of every tree here; needs matplotlib.
    """
    place = check_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    element, shape = DTYPES[dtype], (*read_heads(heads), head_dim)
    names = _choose("methods", methods, (*METHODS, "auto")) if methods != "all" else METHODS
    asked_backends = _choose("backends", backends, BACKENDS) if backends else [None]
    contenders: list[Contender] = [Method(name, page_size, backend) for name in names for backend in asked_backends]
    if peers_path is not None:
        search_path(peers_path)
    asked = [PEERS[name] for name in _choose("peers", peers, tuple(PEERS))] if peers else []
    missing = {peer.name: reason for peer in asked if (reason := peer.missing(place))}
    contenders += [peer for peer in asked if peer.name not in missing]
    specs = find_trees(trees)
    if png is not None:
        check_matplotlib()
    repeats = repeats or (51 if place.type == "cuda" else 5)
    machine = Machine(place, element)
    rows: list[dict[str, Any]] = []
    with progress() as bar:
        task = bar.add_task("attention", total=len(specs) * (len(contenders) + 1))
        for tree, spec in specs.items():
            bar.update(task, description=f"{tree}: reference")
            inputs = random_inputs(spec, *shape, element, page_size, place)
            exact = reference(spec, *inputs)
            facts = {"tree": tree, "queries": spec.num_queries, "tokens": spec.num_tokens}
            facts |= machine.floors_us(spec, *shape)
            bar.advance(task)
            for contender in contenders:
                bar.update(task, description=f"{tree}: {contender.name}")
                who = {"method": contender.name, "peer": contender in asked}
                rows.append(facts | who | measure(contender, spec, inputs, exact, repeats))
                bar.advance(task)
            if place.type == "cuda":
                torch.cuda.empty_cache()  # what captured graphs held
    add_ratios(rows)
    result = {
        "bench": "attention",
        "machine": describe_machine(place),
        "heads": shape[:2],
        "head_dim": head_dim,
        "dtype": dtype,
        "page_size": page_size,
        "repeats": repeats,
        "copy_gb_per_s": machine.bandwidth / 1e9,
        "matrix_tflop_per_s": machine.matrix / 1e12,
        "missing": missing,
        "results": rows,
        "geometric_means": geometric_means(rows),
    }
    if json_file is not None:
        json_file.write_text(json.dumps(json_safe(result), indent=1) + "\n", encoding="utf-8")
    if png is not None:
        draw(result, png)
    absent = [f"{name} is left out: {reason}" for name, reason in missing.items()]
    print(*absent, *notes(rows), sep="\n", file=sys.stderr)
    rate = f"copy {machine.bandwidth / 1e9:.0f} GB/s, matrix product {machine.matrix / 1e12:.3g} TFLOP/s"
    report(f"attention, {heads} heads of {head_dim}, {dtype}, {device}; {rate}", table(result), result)


@dataclass(frozen=True)
class Method:
    """One of our methods, as `treewise.bench.contender.Contender` describes it."""

    method: str
    page_size: int = 1
    backend: str | None = None

    @property
    def name(self) -> str:
        """What it is called in results: the method, and the backend if one was asked for."""
        return self.method if self.backend is None else f"{self.method} on {self.backend}"

    def missing(self, device: torch.device) -> str | None:
        """Say why it cannot run on a device: it always can."""
        return None

    def prepare(self, tree: TreeSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Job:
        """Plan, unless the method has to go through too many pairs."""
        pairs = tree.num_queries * tree.num_tokens
        if self.method in WHOLE and pairs > MOST_PAIRS:
            raise ValueError(f"reads {WHOLE[self.method]}, {pairs / 1e6:.0f} million")
        make = partial(
            plan_tree,
            tree,
            self.method,
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            page_size=self.page_size,
            dtype=q.dtype,
            device=q.device,
            backend=self.backend,
        )
        plan = make()
        moved = plan.io(q.dtype)
        run = cast(Callable[[], torch.Tensor], partial(run_plan, plan, q, k, v))
        return Job(run, make, facts={"kv_mb": moved.kv / 1e6, "io_mb": moved.total / 1e6, "why": plan.why})


def measure(
    contender: Contender, tree: TreeSpec, inputs: Sequence[torch.Tensor], exact: torch.Tensor, repeats: int
) -> dict[str, Any]:
    """Time one contender on one tree; ``note`` says why if it cannot run there, and its times are then None."""
    device = exact.device
    row: dict[str, Any] = dict.fromkeys(("run_us", "spread", "plan_us", "error", "note"))
    try:
        job = contender.prepare(tree, *inputs)
        torch.full_like(inputs[0], torch.nan)  # freed at once: results left unwritten would most likely show this
        out = job.run().double()
        expected = exact if job.rows is None else exact[job.rows.to(device)]
        row |= {"error": float((out - expected).norm() / exact.norm())} | job.facts
        seconds = time_calls(job.run, device, repeats)
        if job.plan is not None:
            planning = [wall_time(job.plan, device) for _ in range(min(repeats, 7))]
            row["plan_us"] = statistics.median(planning) * 1e6
    except Exception as error:  # of other people's code, and of memory that is too small
        return row | {"note": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    row["run_us"] = statistics.median(seconds) * 1e6
    row["spread"] = (max(seconds) - min(seconds)) / statistics.median(seconds)
    return row


def reference(spec: TreeSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend in float64, a piece of a node after the other."""
    plan = plan_tree(
        spec,
        "deft:node_chunk",
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        dtype=torch.float64,
        device=q.device,
        chunk=16384,
    )
    return cast(torch.Tensor, run_plan(plan, q.double(), k.double(), v.double(), backend="reference"))


def _choose(what: str, names: str, choices: Sequence[str]) -> list[str]:
    chosen = list(choices) if names == "all" else names.split(",")
    for name in chosen:
        if name not in choices:
            raise ValueError(f"{what}: {name!r} is not one of all, {', '.join(choices)}")
    return chosen


def read_heads(heads: str) -> tuple[int, int]:
    """Read query heads and KV heads, such as ``32,8``."""
    try:
        num_heads, num_kv_heads = (int(part) for part in heads.split(","))
    except ValueError:
        raise ValueError(f"heads: {heads!r} is not of the form 32,8 (query heads, KV heads)") from None
    if num_kv_heads < 1 or num_heads % num_kv_heads or num_heads < 1:
        raise ValueError(f"heads: {num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    return num_heads, num_kv_heads


def random_inputs(
    spec: TreeSpec,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw fresh normal queries, keys and values for a tree."""
    num_slots = -(-spec.num_tokens // page_size) * page_size
    shapes = ((spec.num_queries, num_heads), (num_slots, num_kv_heads), (num_slots, num_kv_heads))
    generator = torch.Generator(device)
    generator.seed()
    q, k, v = (torch.randn(*shape, head_dim, generator=generator, device=device).to(dtype) for shape in shapes)
    return q, k, v
