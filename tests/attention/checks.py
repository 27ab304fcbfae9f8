"""What the Triton kernels must do on a GPU and under the interpreter alike, against the reference backend."""

from __future__ import annotations

import pytest
import torch
from matrix import TREES, eight_bit_pools, place, relative_error

from treewise.attention import TreeSpec, plan_tree, run_plan
from treewise.attention.buffers import PlanBuffers

BOUNDS = {torch.float32: 3e-6, torch.float16: 5e-4, torch.bfloat16: 3e-3}
INTERVAL_METHODS = ("deft:flatten", "deft:node", "deft:node_chunk", "radix")


def agrees(plan, q, k, v, backend="triton", **options):
    """Run a plan on the kernels and in double precision; compare outputs and LSE."""
    expected, expected_lse = run_plan(plan, q, k, v, return_lse=True, backend="reference", **options)
    out, lse = run_plan(plan, q, k, v, return_lse=True, backend=backend, **options)
    error = relative_error(out, expected)
    assert error < BOUNDS[q.dtype] * (4 if plan.method == "medusa" else 1)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-5 if q.dtype == torch.float32 else 2e-2)


def scores_are_capped(method, device, dtype):
    """Soft cap, with scores far beyond it."""
    spec = TREES[5]()
    plan = plan_tree(spec, method, num_heads=6, num_kv_heads=2, head_dim=24, dtype=dtype, device=device)
    q, k, v = (
        torch.randn(n, h, 24, device=device, dtype=dtype)
        for n, h in ((spec.num_queries, 6), (spec.num_tokens, 2), (spec.num_tokens, 2))
    )
    agrees(plan, q, k, v, scale=2.0, soft_cap=3.0)


def eight_bits_are_read(method, device, dtype):
    """8-bit keys and values with a factor a head."""
    spec = TREES[5]()
    (k, v), (k_scale, v_scale), _ = eight_bit_pools(spec.num_tokens, 2, 32, device)
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "kv_dtype": torch.float8_e4m3fn}
    plan = plan_tree(spec, method, dtype=dtype, device=device, **shape)
    q = torch.randn(spec.num_queries, 6, 32, device=device, dtype=dtype)
    agrees(plan, q, k, v, k_scale=k_scale, v_scale=v_scale)
    agrees(plan, q, k, v)
    agrees(plan, q, k, v, v_scale=v_scale)


def slots_come_in_runs(run, device, dtype):
    """Runs of slots, whole or cut at places that the kernel must not take for the inside of a run."""
    spec = TreeSpec([-1, 0, 0, 0], [200, 64, 70, 5], [1, 2, 3])
    slots, size = place(spec, run, seed=3)
    q = torch.randn(3, 4, 16, device=device, dtype=dtype)
    k, v = (torch.randn(size, 2, 16, device=device, dtype=dtype) for _ in range(2))
    for method in INTERVAL_METHODS:
        for chunk in (None, 64, 90):
            plan = plan_tree(
                spec, method, num_heads=4, num_kv_heads=2, head_dim=16, slots=slots, page_size=run, chunk=chunk,
                dtype=dtype, device=device,
            )  # fmt: skip
            agrees(plan, q, k, v)


def buffers_take_one_plan_after_another(method, device, dtype, replay=None):
    """Growth, forks, pruned branches and spare rows in the same arrays; `replay(run)` captures on a GPU."""
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": dtype, "device": device}
    k, v = (torch.randn(900, 2, 64, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(8, 4, 64, device=device, dtype=dtype)

    def plan(parent, length, queries):
        tree = TreeSpec(parent, length, queries)
        slots = torch.randperm(800)[: tree.num_tokens]
        return plan_tree(tree, method, slots=slots, room=2, **shape)

    first = plan([-1, 0, 0, 0, 0, 0], [300, 30, 30, 3, 9, 1], [1, 2, 3, 4, 5])
    buffers = PlanBuffers(first, rows=8)
    out = torch.empty_like(q)

    def run():
        out.copy_(run_plan(buffers.plan, q, k, v, backend="triton" if device == "cpu" else None))

    run = replay(run) if replay else run

    def right(loaded):
        out.fill_(torch.nan)
        run()
        rows = loaded.num_rows
        error = relative_error(out[:rows], run_plan(loaded, q[:rows], k, v, backend="reference"))
        assert error < BOUNDS[dtype]
        assert not out[rows:].any()

    right(first)
    for parent, length, queries in [
        ([-1, 0, 0, 2, 2], [300, 30, 20, 10, 10], [1, 3, 4]),  # a fork
        ([-1, 0], [310, 1], [1]),  # all pruned but one
        ([-1, -1, 0, 0, 1], [100, 50, 20, 30, 9], [2, 3, 4]),  # a forest
    ]:
        following = plan(parent, length, queries)
        buffers.load(following)
        right(following)
        following.grow(range(800, 800 + len(queries)))
        right(following)
    with pytest.raises(ValueError, match="the plan does not fit these buffers: it has 9 row_order, the buffers hold 8"):
        buffers.load(plan([-1] + [0] * 9, [9] + [1] * 9, range(1, 10)))
    with pytest.raises(
        ValueError, match="the plan does not fit these buffers: its head_dim is 32, that of the buffers"
    ):
        buffers.load(plan_tree(TreeSpec([-1], [4], [0]), method, **{**shape, "head_dim": 32}))
    with pytest.raises(ValueError, match="rows is 2; the plan has 5"):
        PlanBuffers(first, rows=2)
