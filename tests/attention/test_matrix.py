"""Every method on a CPU against the reference, and the reference against dense softmax."""

from __future__ import annotations

import pytest
import torch
from matrix import PARTITIONS, TREES, cases, dense_attention, inputs, place, relative_error

from treewise.attention import plan_tree, run_plan


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("case", cases(TREES), ids=str)
def test_the_cpu_backend_agrees_with_the_reference(case, window):
    plan, reference, q, k, v = inputs(case, window)
    expected, expected_lse = run_plan(reference, q, k, v, return_lse=True)
    out, lse = run_plan(plan, q, k, v, return_lse=True)
    assert relative_error(out, expected) < 3e-6
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("method", "mask"), PARTITIONS)
def test_small_tiles_and_chunks_change_nothing(method, mask, tree):
    spec = tree()
    slots, size = place(spec, 16, seed=2)
    q, k, v = torch.randn(spec.num_queries, 6, 16), torch.randn(size, 2, 16), torch.randn(size, 2, 16)
    for window in (None, 24):
        expected, expected_lse = dense_attention(spec, slots, q, k, v, 0.3, window)
        for row_tile, chunk in ((3, 7), (64, 16)):
            plan = plan_tree(
                spec, method, num_heads=6, num_kv_heads=2, head_dim=16, slots=slots, window=window, mask=mask,
                row_tile=row_tile, chunk=chunk,
            )  # fmt: skip
            out, lse = run_plan(plan, q, k, v, scale=0.3, return_lse=True)
            assert relative_error(out, expected) < 3e-6
            torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("window", [None, 1, 24])
def test_the_reference_agrees_with_dense_softmax_on_any_plan(tree, window):
    spec = tree()
    slots, size = place(spec, 1, seed=3)
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64) for n, h in ((spec.num_queries, 4), (size, 2), (size, 2)))
    expected, expected_lse = dense_attention(spec, slots, q, k, v, 0.5, window)
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "slots": slots, "window": window, "dtype": torch.float64}
    for method, mask in [*PARTITIONS, ("reference", "intervals"), ("auto", "intervals")]:
        plan = plan_tree(spec, method, mask=mask, **shape)
        out, lse = run_plan(plan, q, k, v, scale=0.5, return_lse=True, backend="reference")
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 5e-4), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize("case", cases(TREES)[3::7], ids=str)
def test_half_precision_stays_within_its_bound(case, dtype, bound):
    plan, reference, q, k, v = inputs(case, None, dtype)
    out = run_plan(plan, q, k, v)
    assert out.dtype == dtype
    assert relative_error(out, run_plan(reference, q, k, v)) < bound
