"""The kernels that draw tokens, on a CPU: collected by `test_draws.py` in a process under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from draw_checks import drawn_alike, floors_alike, invalid_rows_are_told, rows_under_grammars_are_drawn_alike


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 300, 9000])
def test_tokens_are_those_of_torch(vocab_size, dtype):
    drawn_alike(vocab_size, torch.device("cpu"), dtype)


def test_cuts_are_those_of_torch():
    floors_alike(torch.device("cpu"))


def test_invalid_rows_are_told():
    invalid_rows_are_told(torch.device("cpu"))


def test_rows_under_grammars():
    rows_under_grammars_are_drawn_alike(torch.device("cpu"))
