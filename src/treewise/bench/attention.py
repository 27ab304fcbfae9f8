"""Times attention methods on named trees: one layer of one decode step."""

from __future__ import annotations

import statistics
from functools import partial
from typing import cast

import torch

from treewise.attention import METHODS, TreeSpec, plan_tree, run_plan
from treewise.bench.measure import (
    check_device,
    copy_bandwidth,
    describe_machine,
    progress,
    report,
    time_calls,
    wall_time,
)
from treewise.bench.trees import find_tree

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def attention(
    *,
    methods: str = "radix,deft:node_chunk,deft:flatten",
    trees: str = "few-shot,deep,tot,drafted",
    heads: str = "32,8",
    head_dim: int = 128,
    dtype: str = "auto",
    device: str = "cpu",
    page_size: int = 1,
    repeats: int = 5,
) -> None:
    """Time the planning and the run of attention methods on trees, and check them against the reference.

    On a GPU a run is a replay of a CUDA graph with a cold L2 cache; the copy bandwidth of the same run is beside it.

    Parameters
    ----------
    methods
        Names with commas between, or all.
    trees
        Names with commas between; a tree by levels is written 1/20:4000/200 (nodes a level, tokens a node).
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
        Timed runs of each; medians are reported.
    """
    place = check_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    names = list(METHODS) if methods == "all" else methods.split(",")
    for name in names:
        if name not in METHODS:
            raise ValueError(f"methods: {name!r} is not one of all, {', '.join(METHODS)}")
    num_heads, num_kv_heads = _read_heads(heads)
    specs = {name: find_tree(name) for name in trees.split(",")}
    bandwidth = copy_bandwidth(place)
    element = DTYPES[dtype]
    rows = []
    with progress() as bar:
        task = bar.add_task("attention", total=len(specs) * (len(names) + 1))
        for tree_name, spec in specs.items():
            bar.update(task, description=f"{tree_name}: reference")
            q, k, v = random_inputs(spec, num_heads, num_kv_heads, head_dim, element, page_size)
            exact = reference(spec, q, k, v)
            inputs = (q.to(place), k.to(place), v.to(place))
            bar.advance(task)
            for name in names:
                bar.update(task, description=f"{tree_name}: {name}")
                make = partial(
                    plan_tree,
                    spec,
                    name,
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    page_size=page_size,
                    dtype=element,
                    device=place,
                )
                plan = make()
                error = (cast(torch.Tensor, run_plan(plan, *inputs)).double().cpu() - exact).norm() / exact.norm()
                planning = [wall_time(make) for _ in range(repeats)]
                seconds = time_calls(partial(run_plan, plan, *inputs), place, repeats)
                io = plan.io(element)
                rows.append(
                    {
                        "tree": tree_name,
                        "method": name,
                        "queries": spec.num_queries,
                        "tokens": spec.num_tokens,
                        "plan_us": statistics.median(planning) * 1e6,
                        "run_us": statistics.median(seconds) * 1e6,
                        "spread": (max(seconds) - min(seconds)) / statistics.median(seconds),
                        "floor_us": 2 * k.numel() * k.element_size() / bandwidth * 1e6,
                        "kv_mb": io.kv / 1e6,
                        "io_mb": io.total / 1e6,
                        "error": float(error),
                    }
                )
                bar.advance(task)
    title = f"attention, {heads} heads of {head_dim}, {dtype}, {device}; copy {bandwidth / 1e9:.1f} GB/s"
    result = {
        "bench": "attention",
        "machine": describe_machine(place),
        "heads": [num_heads, num_kv_heads],
        "head_dim": head_dim,
        "dtype": dtype,
        "page_size": page_size,
        "repeats": repeats,
        "copy_gb_per_s": bandwidth / 1e9,
        "results": rows,
    }
    report(title, rows, result)


def reference(spec: TreeSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend in float64, one query after the other."""
    plan = plan_tree(
        spec,
        "reference",
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        dtype=torch.float64,
    )
    return cast(torch.Tensor, run_plan(plan, q.double(), k.double(), v.double()))


def _read_heads(heads: str) -> tuple[int, int]:
    try:
        num_heads, num_kv_heads = (int(part) for part in heads.split(","))
    except ValueError:
        raise ValueError(f"heads: {heads!r} is not of the form 32,8 (query heads, KV heads)") from None
    if num_kv_heads < 1 or num_heads % num_kv_heads or num_heads < 1:
        raise ValueError(f"heads: {num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    return num_heads, num_kv_heads


def random_inputs(
    spec: TreeSpec, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw fresh normal queries, keys and values for a tree, on the CPU."""
    generator = torch.Generator()
    generator.seed()
    num_slots = -(-spec.num_tokens // page_size) * page_size
    shapes = ((spec.num_queries, num_heads), (num_slots, num_kv_heads), (num_slots, num_kv_heads))
    q, k, v = (torch.randn(*shape, head_dim, generator=generator).to(dtype) for shape in shapes)
    return q, k, v
