"""The Triton kernels on a CPU. Collected by `test_triton.py` in a process of its own, under TRITON_INTERPRET=1.

Triton decides when it is imported whether its functions are interpreted, so this cannot share a process with others.
"""

from __future__ import annotations

import checks
import pytest
import torch
from gluon_on_numpy import import_kernels
from matrix import SMALL_TREES, cases, inputs, relative_error

from treewise.attention import TreeSpec, get_backend, plan_tree, run_plan
from treewise.attention.backend import Scoring

CASES = cases(SMALL_TREES)


@pytest.mark.parametrize(
    ("case", "window"), [(case, (None, 24)[number % 2]) for number, case in enumerate(CASES)], ids=str
)
def test_the_kernels_agree_with_the_reference(case, window):
    group = case.heads[0] // case.heads[1]
    plan, reference, q, k, v = inputs(case, window, row_tile=max(1, 64 // group), chunk=128)
    expected, expected_lse = run_plan(reference, q, k, v, return_lse=True)
    out, lse = run_plan(plan, q, k, v, return_lse=True, backend="triton")
    assert relative_error(out, expected) < 3e-6
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES[1::7], ids=str)
def test_half_precision_stays_within_its_bound(case):
    plan, reference, q, k, v = inputs(case, None, torch.float16, row_tile=4, chunk=128)
    expected, expected_lse = run_plan(reference, q, k, v, return_lse=True)
    out, lse = run_plan(plan, q, k, v, return_lse=True, backend="triton")
    assert relative_error(out, expected) < 5e-4
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["deft:flatten", "radix", "specinfer", "vanilla", "medusa"])
def test_scores_are_capped(method):
    checks.scores_are_capped(method, "cpu", torch.float32)


@pytest.mark.parametrize("method", ["deft:flatten", "radix", "medusa"])
def test_keys_and_values_may_have_eight_bits(method):
    checks.eight_bits_are_read(method, "cpu", torch.float32)


@pytest.mark.parametrize("run", [16, 64])
def test_slots_come_in_runs(run):
    checks.slots_come_in_runs(run, "cpu", torch.float32)


@pytest.mark.parametrize("method", checks.INTERVAL_METHODS)
def test_buffers_take_one_plan_after_another(method):
    checks.buffers_take_one_plan_after_another(method, "cpu", torch.float32)


@pytest.mark.parametrize("window", [None, 24])
def test_wide_items_go_to_the_kernel_for_them(monkeypatch, window):
    name = "treewise.attention.hopper"
    with monkeypatch.context() as patch:
        hopper = import_kernels(name, patch)
    calls = []

    def attend(*arguments, **options):
        calls.append(arguments[10])  # how wide
        hopper.attend(*arguments, **options)

    monkeypatch.setattr(f"{name}.attend", attend)
    monkeypatch.setattr(f"{name}.suits", lambda q, k, v, packed: packed > 32)
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 3)
    tree = TreeSpec([-1] + [0] * 30 + [1] * 3, [150] + [70] * 33, range(4, 34))
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "window": window}
    q = torch.randn(30, 8, 64).half()
    k, v = (torch.randn(tree.num_tokens, 2, 64).half() for _ in range(2))
    for method, tile in (("deft:node", 32), ("deft:flatten", 16), ("radix", 32)):
        plan = plan_tree(tree, method, row_tile=tile, **shape)
        expected, expected_lse = run_plan(plan, q, k, v, return_lse=True, backend="reference")
        out, lse = get_backend("hopper", q.device).run(plan, q, k, v, Scoring(0.125), True)
        assert relative_error(out, expected) < 5e-4
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-3)
    assert set(calls) == ({64, 128} if window is None else set())


def test_bfloat16_is_refused():
    plan, _, q, k, v = inputs(CASES[0], None, torch.bfloat16)
    with pytest.raises(ValueError, match="interpreter multiplies bfloat16 wrongly"):
        run_plan(plan, q, k, v, backend="triton")


@pytest.mark.parametrize(("heads", "dim"), [(3, 56), (1, 256), (8, 64)])
def test_rows_are_stored_where_they_belong(heads, dim):
    pool = torch.zeros(2, 40, heads, dim)
    new = torch.randn(5, 2, heads, dim).transpose(0, 1)  # rows are not contiguous
    slots = torch.tensor([39, 0, 7, 8, 20])
    get_backend("triton", pool.device).store((new[0], new[1]), (pool[0], pool[1]), slots)
    expected = torch.zeros_like(pool)
    expected[:, slots] = new
    torch.testing.assert_close(pool, expected, rtol=0, atol=0)
