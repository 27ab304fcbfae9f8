"""Products of few rows: the Gluon kernel's own source on numpy, which needs no GPU; `test_ops.py` has it compiled."""

from __future__ import annotations

import importlib

import pytest
import torch
from gluon_on_numpy import import_kernels

from treewise.ops import ACTIVATIONS, plain

pytest.importorskip("triton", minversion="3.6")
NAME = "treewise.ops.hopper"


@pytest.fixture
def hopper(monkeypatch):
    module = import_kernels(NAME, monkeypatch)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 9)
    return module


def operands(rows, outputs, inputs, seed=0):
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, inputs) / inputs**0.5, torch.randn(outputs, inputs)
    return x.half(), weight.half(), torch.randn(outputs).half()


# Shared out among 4, 2 and 1 programs; as many steps as a ring has places, more, and fewer.
@pytest.mark.parametrize(("outputs", "inputs", "parts"), [(128, 2048, 4), (192, 1024, 2), (512, 768, 1), (64, 128, 1)])
@pytest.mark.parametrize("rows", [1, 16, 37, 128])
def test_products(hopper, rows, outputs, inputs, parts):
    x, weight, bias = operands(rows, outputs, inputs)
    assert hopper.suits(x, weight)
    for added in (None, bias):
        product = hopper.multiply(x, weight, added)
        assert product.shape == ((rows, outputs) if parts == 1 else (parts, rows, outputs))
        assert product.dtype == (torch.float16 if parts == 1 else torch.float32)
        exact = x.double() @ weight.double().T + (0 if added is None else added.double())
        found = product if parts == 1 else product.sum(0)
        torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [2, 65])
def test_gated_products(hopper, rows, activation):
    x, weight, bias = operands(rows, 256, 896)
    assert hopper.suits(x, weight, gated=True)
    for added in (None, bias):
        exact = x.double() @ weight.double().T + (0 if added is None else added.double())
        expected = plain.gated_activation(exact.half(), activation)
        torch.testing.assert_close(hopper.multiply(x, weight, added, activation), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype"),
    [(0, 64, 64, torch.half), (129, 64, 64, torch.half), (3, 96, 64, torch.half), (3, 64, 96, torch.half),
     (3, 64, 64, torch.float32)],
)  # fmt: skip
def test_it_declines_what_it_cannot_serve(rows, outputs, inputs, dtype):
    hopper = importlib.import_module(NAME)
    x, weight, _ = operands(rows, outputs, inputs)
    assert not hopper.suits(x.to(dtype), weight.to(dtype))
    assert not hopper.suits(x.half()[:, ::2], weight.half()[:, ::2])
