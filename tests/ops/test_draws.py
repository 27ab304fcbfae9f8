"""Fused drawing: under the interpreter in a process of its own, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draw_checks import drawn_alike, floors_alike, invalid_rows_are_told, rows_under_grammars_are_drawn_alike

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernels_are_right_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([*command, "interpreted_draws.py"], cwd=HERE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGPU:
    """The same compiled."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("vocab_size", [7, 300, 9000, 128256])
    def test_tokens_are_those_of_torch(self, vocab_size, dtype):
        drawn_alike(vocab_size, torch.device("cuda"), dtype)

    def test_cuts_are_those_of_torch(self):
        floors_alike(torch.device("cuda"))

    def test_invalid_rows_are_told(self):
        invalid_rows_are_told(torch.device("cuda"))

    def test_rows_under_grammars(self):
        rows_under_grammars_are_drawn_alike(torch.device("cuda"))
