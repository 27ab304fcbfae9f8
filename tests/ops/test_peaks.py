"""The pass over logits: under the interpreter in a process of its own, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from peak_checks import found_alike, half_precision_is_summed_in_float32, invalid_rows_are_told

HERE = Path(__file__).parent


def test_the_kernel_is_right_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([*command, "interpreted_peaks.py"], cwd=HERE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGPU:
    """The same compiled."""

    @pytest.mark.parametrize("vocab_size", [7, 128, 300, 9000, 151936])
    def test_likeliest_tokens_are_those_of_torch(self, vocab_size):
        found_alike(vocab_size, torch.device("cuda"))

    def test_invalid_rows_are_told(self):
        invalid_rows_are_told(torch.device("cuda"))

    def test_half_precision_is_summed_in_float32(self):
        half_precision_is_summed_in_float32(torch.device("cuda"))
