"""Every method on a CPU against the reference, and the reference against dense softmax."""

from __future__ import annotations

import pytest
import torch
from matrix import PARTITIONS, TREES, cases, dense_attention, eight_bit_pools, inputs, place, relative_error

from treewise.attention import TreeSpec, plan_tree, run_plan


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
    expected, expected_lse = run_plan(reference, q, k, v, return_lse=True)
    out, lse = run_plan(plan, q, k, v, return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert relative_error(out, expected) < bound
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("method", "mask"), PARTITIONS)
def test_scores_are_capped(method, mask, backend):
    spec = TREES[5]()
    q, k, v = (torch.randn(n, h, 16) for n, h in ((spec.num_queries, 4), (spec.num_tokens, 2), (spec.num_tokens, 2)))
    expected, expected_lse = dense_attention(spec, range(spec.num_tokens), q, k, v, 2.0, soft_cap=3.0)
    plan = plan_tree(spec, method, mask=mask, num_heads=4, num_kv_heads=2, head_dim=16)
    out, lse = run_plan(plan, q, k, v, scale=2.0, soft_cap=3.0, return_lse=True, backend=backend)
    assert relative_error(out, expected) < 3e-6
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="soft_cap is 0; it must be above 0"):
        run_plan(plan, q, k, v, soft_cap=0, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("method", ["deft:flatten", "deft:node", "radix", "specinfer", "medusa"])
def test_keys_and_values_may_have_eight_bits(method, backend):
    spec = TREES[5]()
    (k, v), (k_scale, v_scale), held = eight_bit_pools(spec.num_tokens, 2, 16)
    q = torch.randn(spec.num_queries, 4, 16)
    expected, expected_lse = dense_attention(spec, range(spec.num_tokens), q, *held, 0.25)
    plan = plan_tree(spec, method, num_heads=4, num_kv_heads=2, head_dim=16, kv_dtype=torch.float8_e4m3fn)
    options = {"k_scale": k_scale, "v_scale": v_scale, "backend": backend}
    out, lse = run_plan(plan, q, k, v, return_lse=True, **options)
    assert relative_error(out, expected) < 3e-6
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert plan.io().kv == plan_tree(spec, method, num_heads=4, num_kv_heads=2, head_dim=16).io().kv // 4
    with pytest.raises(ValueError, match=r"k and v of its kv_dtype torch\.float8_e4m3fn"):
        run_plan(plan, q, *held, **options)
    with pytest.raises(ValueError, match=r"k_scale must be float32 \[kv_heads\] = \[2\]; it is torch.float64 \[2\]"):
        run_plan(plan, q, k, v, k_scale=k_scale.double())


@pytest.mark.parametrize("method", ["deft:flatten", "deft:node_chunk", "radix"])
@pytest.mark.parametrize("window", [None, 24])
def test_a_plan_with_room_follows_its_branches(method, window):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "window": window}
    k, v = torch.randn(400, 2, 16), torch.randn(400, 2, 16)
    plan = plan_tree(TreeSpec([-1, 0, 0], [90, 5, 30], [2, 1]), method, room=2, **shape)
    for step in range(3):
        if step:
            plan.grow([200 + step, 300 + step])
        tree = TreeSpec([-1, 0, 0], [90, 5 + step, 30 + step], [2, 1])
        slots = [*range(95), *range(301, 301 + step), *range(95, 125), *range(201, 201 + step)]
        q = torch.randn(2, 4, 16)
        expected, expected_lse = dense_attention(tree, slots, q, k, v, 0.25, window)
        out, lse = run_plan(plan, q, k, v, return_lse=True)
        assert relative_error(out, expected) < 3e-6
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
