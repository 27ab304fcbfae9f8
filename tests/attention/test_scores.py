"""Column sums of attention: in blocks on a CPU, the kernel under the interpreter, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import score_checks
import torch
from matrix import PARTITIONS, TREES
from torch.utils._python_dispatch import TorchDispatchMode

from treewise.attention.scores import column_sums

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernel_is_right_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"]
    settings = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    done = subprocess.run(
        [*command, "interpreted_scores.py"], cwd=HERE, env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.parametrize("dtype", score_checks.DTYPES)
@pytest.mark.parametrize("case", score_checks.CASES, ids=str)
def test_sums_are_those_of_double_precision(case, dtype):
    score_checks.agrees(case, dtype=dtype)


@pytest.mark.parametrize("dtype", score_checks.DTYPES)
def test_keys_may_have_eight_bits(dtype):
    score_checks.eight_bits_are_read(dtype=dtype)


def test_any_view_will_do():
    score_checks.any_view_will_do()


def test_who_saw_nothing_gives_nothing():
    score_checks.who_saw_nothing_gives_nothing()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("method", "mask"), PARTITIONS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_nodes_get_their_share_of_paths(tree, method, mask, backend):
    score_checks.nodes_get_their_share_of_paths(tree(), method, mask, backend)


def test_a_window_of_two_by_hand():
    """Equal scores: the first query sees two keys, the second three."""
    q, k = torch.zeros(1, 2, 2, 4), torch.zeros(1, 3, 1, 4)
    lse = torch.tensor([2.0, 3.0]).log()[None, :, None].expand(1, 2, 2)
    found = column_sums(q, lse, k, torch.tensor([1, 2]), torch.arange(3), scale=1.0, reduce="sum")
    torch.testing.assert_close(found, torch.tensor([[[5 / 3, 5 / 3, 2 / 3]]]))


def test_memory_stays_bounded():
    """No tensor on the way is larger than some megabytes, though all scores together would be."""

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.numbers = max(self.numbers, result.untyped_storage().nbytes() // 4)
            return result

    queries, tokens, heads = 200, 4096, 32
    q, k = torch.randn(1, queries, heads, 8), torch.randn(1, tokens, 2, 8)
    lse = torch.full((1, queries, heads), 9.0)
    slots = torch.randperm(tokens)
    with Largest() as largest:
        column_sums(q, lse, k, torch.arange(tokens - queries, tokens), torch.arange(tokens), slots=slots, scale=0.3)
    assert 0 < largest.numbers <= 1 << 20 < queries * tokens * heads // 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduce": "median"}, "reduce is 'median'; choose one of mean, max, sum"),
        ({"q": torch.zeros(2, 4, 16)}, r"q must be \[layers, queries, heads, head_dim\] .* they are \[2, 4, 16\] and"),
        (
            {"q": torch.zeros(1, 2, 3, 16)},
            r"heads a multiple of kv_heads; they are \[1, 2, 3, 16\] and \[1, 3, 2, 16\]",
        ),
        ({"k": torch.zeros(2, 3, 2, 16)}, r"they are \[1, 2, 4, 16\] and \[2, 3, 2, 16\]"),
        ({"lse": torch.zeros(1, 4, 2)}, r"lse must be \[1, 2, 4\]; it is \[1, 4, 2\]"),
        ({"q_positions": torch.arange(3)}, r"q_positions must be \[2\]; it is \[3\]"),
        ({"slots": torch.arange(2)}, r"k_positions must be \[2\]; it is \[3\]"),
        ({"k_scale": torch.ones(2)}, r"k_scale must be \[1, 2\]; it is \[2\]"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    arguments = {"q": torch.zeros(1, 2, 4, 16), "lse": torch.zeros(1, 2, 4), "k": torch.zeros(1, 3, 2, 16)}
    arguments |= {"q_positions": torch.arange(2), "k_positions": torch.arange(3), "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        column_sums(**arguments | change)


@pytest.mark.gpu
class TestOnGPU:
    """The same compiled, and what only a GPU can show: long prompts, graphs, offsets that pass 2^31."""

    @pytest.mark.parametrize("dtype", score_checks.DTYPES)
    @pytest.mark.parametrize("case", score_checks.CASES, ids=str)
    def test_sums_are_those_of_double_precision(self, case, dtype):
        score_checks.agrees(case, "cuda", dtype)

    @pytest.mark.parametrize("dtype", score_checks.DTYPES)
    def test_keys_may_have_eight_bits(self, dtype):
        score_checks.eight_bits_are_read("cuda", dtype)

    @pytest.mark.parametrize("dtype", score_checks.DTYPES)
    def test_any_view_will_do(self, dtype):
        score_checks.any_view_will_do("cuda", dtype)

    def test_who_saw_nothing_gives_nothing(self):
        score_checks.who_saw_nothing_gives_nothing("cuda")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("tree", TREES)
    @pytest.mark.parametrize(("method", "mask"), PARTITIONS)
    def test_nodes_get_their_share_of_paths(self, tree, method, mask, dtype):
        if method == "medusa" and dtype != torch.float32:
            pytest.skip("unfused, its scores and so its LSE are rounded")
        score_checks.nodes_get_their_share_of_paths(tree(), method, mask, None, "cuda", dtype)

    @pytest.mark.parametrize(("tokens", "queries"), [(200_000, 1), (20_000, 64), (5000, 1024), (2500, 2500)])
    def test_long_prompts(self, tokens, queries):
        q = torch.randn(2, queries, 8, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(2, tokens + 100, 2, 128, device="cuda", dtype=torch.bfloat16)
        lse = torch.rand(2, queries, 8, device="cuda") + 8
        at, positions = torch.arange(tokens - queries, tokens, device="cuda"), torch.arange(tokens, device="cuda")
        slots = torch.randperm(tokens + 100, device="cuda")[:tokens]
        given = (q, lse, k, at, positions)
        for reduce in ("mean", "max"):
            found = column_sums(*given, slots=slots, scale=0.08, reduce=reduce)
            expected = column_sums(*(each.cpu() for each in given), slots=slots.cpu(), scale=0.08, reduce=reduce)
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)

    def test_a_call_waits_for_nothing_and_can_be_captured(self):
        q = torch.randn(3, 20, 8, 64, device="cuda").half()
        k = torch.randn(3, 900, 2, 64, device="cuda").half()
        lse = torch.full((3, 20, 8), 7.0, device="cuda")
        at, positions = torch.arange(880, 900, device="cuda"), torch.arange(900, device="cuda")

        def call():
            return column_sums(q, lse, k, at, positions, scale=0.125)

        call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call()
        k.normal_()
        at.sub_(100)
        graph.replay()
        assert found.any() and torch.equal(found, call())

    def test_offsets_pass_two_to_the_31(self):
        slots = torch.tensor([5, 2**31 // 1024 + 7], device="cuda")
        k = torch.zeros(1, 2**31 // 1024 + 16, 8, 128, dtype=torch.float16, device="cuda")
        keys = torch.randn(1, 2, 8, 128, device="cuda").half()
        k[:, slots] = keys
        q = torch.randn(1, 3, 8, 128, device="cuda").half()
        given = (
            torch.full((1, 3, 8), 5.0, device="cuda"),
            torch.arange(3, device="cuda"),
            torch.arange(2, device="cuda"),
        )
        lse, at, positions = given
        found = column_sums(q, lse, k, at, positions, slots=slots, scale=0.1)
        assert torch.equal(found, column_sums(q, lse, keys, at, positions, scale=0.1))
