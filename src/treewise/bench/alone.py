"""Attention without a model around it: the plans, stores and layers of a whole request."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from treewise.attention import TreeSpec, plan_tree, run_plan, store_kv
from treewise.bench.case import Case
from treewise.config import ModelConfig


def attention_alone(
    method: str, config: ModelConfig, dtype: torch.dtype, device: torch.device, case: Case
) -> Callable[[], float]:
    """Return a function that times all that attention does in the decode steps of a request, in seconds.

    Raises
    ------
    ValueError
        If the trees of the request depend on the model.
    """
    trees = list(case.trees())
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, config.head_dim, generator=generator, device=device).to(dtype)

    slots = max(tree.num_tokens for tree in trees)
    pools = [[draw(slots, config.num_kv_heads) for _ in range(2)] for _ in config.layer_windows]
    q, new = draw(case.widest, config.num_heads), draw(case.widest, config.num_kv_heads)
    shape: dict[str, Any] = {
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "dtype": dtype,
        "device": device,
    }
    scoring: dict[str, Any] = {"scale": config.attention_scale, "soft_cap": config.attention_soft_cap}
    windows = set(config.layer_windows)

    def step(tree: TreeSpec) -> None:
        plans = {window: plan_tree(tree, method, window=window, **shape) for window in windows}
        rows = tree.num_queries
        stored = torch.arange(tree.num_tokens - rows, tree.num_tokens, device=device)
        for window, (k, v) in zip(config.layer_windows, pools, strict=True):
            store_kv(new[:rows], new[:rows], k, v, stored)
            run_plan(plans[window], q[:rows], k, v, **scoring)

    def run() -> float:
        start = perf_counter()
        for tree in trees:
            step(tree)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter() - start

    step(trees[0])
    return run
