"""The pass over logits, on a CPU: collected by `test_peaks.py` in a process under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from peak_checks import found_alike, half_precision_is_summed_in_float32, invalid_rows_are_told

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [7, 128, 300, 9000, 20000])
def test_likeliest_tokens_are_those_of_torch(vocab_size):
    found_alike(vocab_size, CPU)


def test_invalid_rows_are_told():
    invalid_rows_are_told(CPU)


def test_half_precision_is_summed_in_float32():
    half_precision_is_summed_in_float32(CPU)
