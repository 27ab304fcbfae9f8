"""The kernel of column sums on a CPU: collected by `test_scores.py` in a process under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import score_checks
import torch
from matrix import TREES

from treewise.attention.scores import column_sums


@pytest.mark.parametrize("case", score_checks.CASES, ids=str)
def test_sums_are_those_of_double_precision(case):
    score_checks.agrees(case)


@pytest.mark.parametrize("case", score_checks.CASES[1::4], ids=str)
def test_products_of_half_precision_are_summed_in_float32(case):
    score_checks.agrees(case, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_may_have_eight_bits(dtype):
    score_checks.eight_bits_are_read(dtype=dtype)


def test_any_view_will_do():
    score_checks.any_view_will_do()


def test_who_saw_nothing_gives_nothing():
    score_checks.who_saw_nothing_gives_nothing()


@pytest.mark.parametrize("method", ["deft:flatten", "vanilla", "specinfer"])
def test_nodes_get_their_share_of_paths(method):
    score_checks.nodes_get_their_share_of_paths(TREES[0](), method, "intervals", "triton")


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        (torch.zeros(1, 2, 4, 16), torch.zeros(1, 3, 2, 16).half(), "k of q's dtype or torch.float8_e4m3fn; they are"),
        (torch.zeros(1, 2, 4, 16).double(), torch.zeros(1, 3, 2, 16).double(), "q must be float32, float16 or"),
        (torch.zeros(1, 2, 4, 257), torch.zeros(1, 3, 2, 257), "head_dim is 257; the kernel holds up to 256"),
    ],
)
def test_what_the_kernel_cannot_hold_is_refused(q, k, message):
    with pytest.raises(ValueError, match=message):
        column_sums(q, torch.zeros(1, 2, 4), k, torch.arange(2), torch.arange(3), scale=1.0)
