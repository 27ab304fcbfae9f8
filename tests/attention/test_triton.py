"""The Triton backend: interpreted on a CPU in a process of its own, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import checks
import pytest
import torch
from checks import BOUNDS
from matrix import TREES, cases, inputs, place, relative_error

from treewise.attention import TreeSpec, plan_tree, run_plan, store_kv

HERE = Path(__file__).parent
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("file", ["interpreted.py", "interpreted_engine.py"])
def test_the_kernels_are_right_under_the_interpreter(file):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", file]
    settings = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    done = subprocess.run(command, cwd=HERE, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_a_plan_for_a_cpu_is_refused_unless_interpreted():
    plan, _, q, k, v = inputs(cases(TREES)[0], None)
    with pytest.raises(ValueError, match="cannot run this plan: it runs on cuda, not on cpu"):
        run_plan(plan, q, k, v, backend="triton")
    with pytest.raises(ValueError, match=r"it is made for GPUs of compute capability 9\.0, not for cpu"):
        run_plan(plan, q, k, v, backend="hopper")


class TestOnGPU:
    """The whole matrix again, and what only a GPU can show."""

    pytestmark = on_gpu

    @pytest.mark.parametrize("dtype", BOUNDS)
    @pytest.mark.parametrize("case", cases(TREES), ids=str)
    def test_the_kernels_agree_with_the_reference(self, case, dtype):
        for window in (None, 24):
            plan, reference, q, k, v = inputs(case, window, dtype, "cuda")
            expected, expected_lse = run_plan(reference, q, k, v, return_lse=True)
            out, lse = run_plan(plan, q, k, v, return_lse=True)
            # Unfused, the scores themselves are rounded to the half type on their way through memory.
            assert relative_error(out, expected) < BOUNDS[dtype] * (4 if plan.method == "medusa" else 1)
            torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-5 if dtype == torch.float32 else 2e-2)
            assert torch.equal(out, run_plan(plan, q, k, v))

    @pytest.mark.parametrize("dtype", BOUNDS)
    @pytest.mark.parametrize("case", [case for case in cases(TREES) if case.method != "medusa"], ids=str)
    def test_the_lse_is_exact_in_half_precision_too(self, case, dtype):
        plan, reference, q, k, v = inputs(case, None, dtype, "cuda")
        _, expected = run_plan(reference, q, k, v, return_lse=True)
        _, lse = run_plan(plan, q, k, v, return_lse=True)
        torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-4)

    @pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0")
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("case", [case for case in cases(TREES) if case.head_dim in (64, 128)], ids=str)
    def test_wide_items_need_no_kernel_of_their_own(self, case, dtype):
        plan, _, q, k, v = inputs(case, None, dtype, "cuda", backend="triton")
        checks.agrees(plan, q, k, v)
        assert torch.equal(*(run_plan(plan, q, k, v) for _ in range(2)))

    @pytest.mark.parametrize("method", ["deft:flatten", "deft:node", "radix", "specinfer", "vanilla", "medusa"])
    def test_a_run_can_be_captured_in_a_graph(self, method):
        tree = TREES[0]()
        slots, size = place(tree, 16, seed=0)
        plan = plan_tree(
            tree, method, num_heads=8, num_kv_heads=2, head_dim=64, slots=slots, dtype=torch.float16, device="cuda"
        )
        q = torch.randn(tree.num_queries, 8, 64, dtype=torch.float16, device="cuda")
        k, v = (torch.randn(size, 2, 64, dtype=torch.float16, device="cuda") for _ in range(2))
        run_plan(plan, q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run_plan(plan, q, k, v)
        for pool in (q, k, v):
            pool.normal_()
        graph.replay()
        assert torch.equal(out, run_plan(plan, q, k, v))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("method", ["deft:flatten", "deft:node", "radix", "specinfer", "vanilla", "medusa"])
    def test_scores_are_capped(self, method, dtype):
        checks.scores_are_capped(method, "cuda", dtype)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("method", ["deft:flatten", "deft:node", "radix", "specinfer", "medusa"])
    def test_keys_and_values_may_have_eight_bits(self, method, dtype):
        checks.eight_bits_are_read(method, "cuda", dtype)

    @pytest.mark.parametrize("run", [1, 16, 32, 64])
    def test_slots_come_in_runs(self, run):
        checks.slots_come_in_runs(run, "cuda", torch.float16)

    @pytest.mark.parametrize("method", checks.INTERVAL_METHODS)
    def test_a_captured_graph_takes_one_plan_after_another(self, method):
        def replay(run):
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            return graph.replay

        checks.buffers_take_one_plan_after_another(method, "cuda", torch.float16, replay)

    @pytest.mark.parametrize("method", ["deft:flatten", "deft:node", "radix"])
    def test_large_trees_of_many_shapes(self, method):
        wide = TreeSpec([-1] + [0] * 5000, [300] + [1] * 5000, range(1, 5001))
        deep = TreeSpec(range(-1, 4095), [1] * 4096, [4095, 17, 2000])
        ragged = TreeSpec(
            [-1, *((n - 1) // 3 for n in range(1, 1400))], [n % 7 for n in range(1, 1401)], range(400, 1400)
        )
        for tree in (wide, deep, ragged):
            slots = torch.randperm(tree.num_tokens + 9)[: tree.num_tokens]
            shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "slots": slots, "dtype": torch.float16}
            plan = plan_tree(tree, method, device="cuda", **shape)
            q = torch.randn(tree.num_queries, 8, 64, dtype=torch.float16, device="cuda")
            k, v = (torch.randn(tree.num_tokens + 9, 2, 64, dtype=torch.float16, device="cuda") for _ in range(2))
            checks.agrees(plan, q, k, v)

    def test_offsets_pass_two_to_the_31(self):
        slots = torch.tensor([5, 2**31 // 1024 + 7], device="cuda")
        k, v = (torch.zeros(2**31 // 1024 + 16, 8, 128, dtype=torch.float16, device="cuda") for _ in range(2))
        k_new, v_new, q = (torch.randn(2, 8, 128, dtype=torch.float16, device="cuda") for _ in range(3))
        store_kv(k_new, v_new, k, v, slots)
        assert torch.equal(k[slots], k_new) and torch.equal(v[slots], v_new)
        tree = TreeSpec([-1, -1], [1, 1], [0, 1])
        plan = plan_tree(
            tree, num_heads=8, num_kv_heads=8, head_dim=128, slots=slots.cpu(), dtype=torch.float16, device="cuda"
        )
        torch.testing.assert_close(run_plan(plan, q, k, v), v_new, rtol=1e-3, atol=1e-3)
