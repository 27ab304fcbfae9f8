"""What the fused ops must do on a GPU and under the interpreter alike, against plain torch on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from treewise import ops
from treewise.ops import ACTIVATIONS, Heads, fused, plain

FP8 = torch.float8_e4m3fn
SIZES = (1, 56, 576, 4096, 5000)
SHAPES = ((32, 8, 128), (9, 3, 64), (8, 4, 256), (5, 1, 80), (6, 2, 8), (3, 3, 20))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor, *, ulps: int = 2) -> None:
    """Compare with a bound of a few units in the last place of numbers about as large as the largest."""
    found, expected = found.cpu(), expected.cpu()
    assert found.dtype == expected.dtype and found.shape == expected.shape
    # An order of summation and a last bit of an exponential are free: in half precision they show now and then.
    unit = max(torch.finfo(found.dtype).eps, 1e-6)
    torch.testing.assert_close(found, expected, rtol=ulps * unit, atol=ulps * unit)


def norms_agree(device: str, dtype: torch.dtype, size: int, rows: int = 5) -> None:
    x, residual = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    before = x.clone()
    for offset in (False, True):
        for stream in (None, residual):
            expected = plain.rms_norm(x, weight, 1e-5, offset, stream)
            moved = None if stream is None else stream.to(device)
            normed, total = fused.rms_norm(x.to(device), weight.to(device), 1e-5, offset, moved)
            close(normed, expected[0])
            assert torch.equal(total.cpu(), expected[1]) and torch.equal(x, before)


def sums_of_parts_are_normalised(device: str, dtype: torch.dtype, size: int, rows: int = 5, parts: int = 4) -> None:
    x, residual = random(parts, rows, size, dtype=torch.float32), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    for stream in (None, residual):
        summed = x[0] + x[1] + x[2] + x[3]
        expected = plain.rms_norm(summed.to(dtype), weight, 1e-5, False, stream)
        moved = None if stream is None else stream.to(device)
        found = fused.rms_norm(x.to(device), weight.to(device), 1e-5, False, moved)
        for one, other in zip(found, expected, strict=True):
            close(one, other)


def products_agree(device: str, dtype: torch.dtype, inputs: int, outputs: int, rows: int) -> None:
    """Whole, in parts and gated, whatever computes them."""
    ulps = 8 if dtype == torch.float32 else 2  # thousands of products in another order
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=1)
    x = random(rows, inputs, dtype=dtype, seed=2) / inputs**0.5
    for added in (None, bias):
        exact = x.double() @ weight.double().T + (0 if added is None else added.double())
        moved = x.to(device), weight.to(device), None if added is None else added.to(device)
        close(ops.linear(*moved), exact.to(dtype), ulps=ulps)
        parts = ops.linear_parts(*moved)
        close((parts if parts.dim() == 2 else parts.sum(0)).to(dtype), exact.to(dtype), ulps=ulps)
        for activation in ACTIVATIONS:
            # A last bit of what is activated shows as a few of the result's.
            close(ops.gated_linear(*moved, activation), plain.gated_activation(exact.to(dtype), activation), ulps=16)


def activations_agree(device: str, dtype: torch.dtype, size: int, rows: int = 3) -> None:
    gate_up = random(rows, 2 * size, dtype=dtype) * 4
    gate_up[0, :8] = torch.tensor([0, -0.0, 1e-4, -1e-4, 50, -50, 10, -10])[: min(8, 2 * size)]
    for activation in ACTIVATIONS:
        expected = plain.gated_activation(gate_up, activation)
        close(fused.gated_activation(gate_up.to(device), activation), expected, ulps=4)


def heads_for(shape: tuple[int, int, int], dtype: torch.dtype, normed: bool, offset: bool, rows: int = 7) -> Heads:
    num_heads, num_kv_heads, dim = shape
    angles = torch.arange(rows)[:, None] * 0.7 ** torch.arange(dim // 2)
    norms = [random(dim, dtype=dtype, seed=seed) for seed in (3, 4)] if normed else [None, None]
    stacked = random(rows, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    return Heads(stacked, angles.cos().to(dtype), angles.sin().to(dtype), *norms, 1e-6, offset)


def on(device: str, heads: Heads) -> Heads:
    return Heads(*(part.to(device) if isinstance(part, Tensor) else part for part in heads))


def heads_are_rotated_and_stored(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int], kv_dtype: torch.dtype, scaled: bool = False
) -> None:
    """Queries, and the whole of pools that lie in larger ones: what no slot names must stay."""
    _, num_kv_heads, dim = shape
    scales = [torch.rand(num_kv_heads) + 0.5 for _ in range(2)] if scaled else [None, None]
    for normed, offset, slot_type in (
        (False, False, torch.int64),
        (True, True, torch.int32),
        (True, False, torch.int64),
    ):
        heads = heads_for(shape, dtype, normed, offset)
        heads.stacked[0, -1, 0] = 1000.0  # does not fit in 8 bits
        slots = torch.tensor([11, 2, 3, 19, 0, 8, 7], dtype=slot_type)
        # Keys of the middle one of three layers; values with the heads outermost.
        pools = (
            torch.zeros(3, 20, num_kv_heads, dim, dtype=kv_dtype),
            torch.zeros(num_kv_heads, 20, dim, dtype=kv_dtype),
        )
        moved = [pool.to(device) for pool in pools]
        expected = plain.rotate_and_store(heads, pools[0][1], pools[1].transpose(0, 1), slots, *scales)
        factors = [None if scale is None else scale.to(device) for scale in scales]
        there = slots.to(device)
        q = fused.rotate_and_store(on(device, heads), moved[0][1], moved[1].transpose(0, 1), there, *factors)
        close(q, expected, ulps=8)
        out = torch.empty_like(q)
        fused.rotate_and_store(on(device, heads), moved[0][1], moved[1].transpose(0, 1), there, *factors, out)
        assert torch.equal(out, q)
        for found, pool in zip(moved, pools, strict=True):
            if kv_dtype == FP8:  # neighbours at most, but for small differences of larger numbers rounded to bfloat16
                torch.testing.assert_close(found.float().cpu(), pool.float(), rtol=0.13, atol=2**-6)
            else:
                close(found, pool, ulps=8)


def a_slot_that_repeats_ends_with_one_of_its_rows(device: str) -> None:
    heads = heads_for((4, 2, 16), torch.float32, False, False)
    k, v = (torch.zeros(9, 2, 16, device=device) for _ in range(2))
    fused.rotate_and_store(on(device, heads), k, v, torch.tensor([5, 5, 1, 5, 2, 5, 5], device=device), None, None)
    _, keys, values = plain.rotate(heads, 2)
    close(k[[1, 2]], keys[[2, 4]])
    close(v[[1, 2]], values[[2, 4]])
    assert any(torch.equal(v[5].cpu(), values[row]) for row in (0, 1, 3, 5, 6))
    assert not k[[0, 3, 4, 6, 7, 8]].any()


def nothing_happens_without_rows(device: str) -> None:
    empty = torch.empty(0, 64, device=device)
    weight = torch.ones(64, device=device)
    assert fused.rms_norm(empty, weight, 1e-6, False, empty)[0].shape == (0, 64)
    assert fused.gated_activation(empty, "silu").shape == (0, 32)
    heads = on(device, heads_for((4, 2, 16), torch.float32, False, False, rows=0))
    k, v = (torch.ones(3, 2, 16, device=device) for _ in range(2))
    slots = torch.empty(0, dtype=torch.int64, device=device)
    assert fused.rotate_and_store(heads, k, v, slots, None, None).shape == (0, 4, 16)
    assert k.all() and v.all()
