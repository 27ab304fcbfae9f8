"""The ops' kernels on a CPU. Collected by `test_ops.py` in a process of its own, under TRITON_INTERPRET=1.

The interpreter cuts off what does not fit in bfloat16 instead of rounding, so that type is left to a GPU.
"""

from __future__ import annotations

import op_checks
import pytest
import torch
from model_files import run_tree, small_model

from treewise import ops

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", op_checks.SIZES)
def test_norms(size, dtype):
    op_checks.norms_agree("cpu", dtype, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [56, 576])
def test_norms_of_parts(size, dtype):
    op_checks.sums_of_parts_are_normalised("cpu", dtype, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [4, 1000, 1024, 2100])
def test_gated_activations(size, dtype):
    op_checks.activations_agree("cpu", dtype, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", op_checks.SHAPES, ids=str)
def test_rotation_and_store(shape, dtype):
    op_checks.heads_are_rotated_and_stored("cpu", dtype, shape, dtype)


@pytest.mark.parametrize("scaled", [False, True])
def test_eight_bit_pools(scaled):
    op_checks.heads_are_rotated_and_stored("cpu", torch.float16, (6, 2, 32), op_checks.FP8, scaled)


def test_a_slot_that_repeats():
    op_checks.a_slot_that_repeats_ends_with_one_of_its_rows("cpu")


def test_no_rows():
    op_checks.nothing_happens_without_rows("cpu")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_a_model_gives_the_same_logits(name, monkeypatch):
    model = small_model(name)
    fused = run_tree(model, range(12))
    monkeypatch.setattr(ops, "INTERPRETED", False)
    plain = run_tree(model, range(12))
    assert (fused - plain).norm() < 1e-5 * plain.norm()
