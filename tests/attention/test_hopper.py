"""The Gluon kernel: its own source on numpy, which needs no GPU, and compiled where there is a Hopper GPU."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from gluon_on_numpy import import_kernels
from matrix import TREES, place, relative_error

from treewise.attention import TreeSpec, plan_tree, run_plan
from treewise.plan.data import FREE_END, KV_END, ROW_HIGH, ROW_LOW

pytest.importorskip("triton", minversion="3.6")
HEADS = [(9, 3), (14, 2), (4, 4), (16, 1)]
NAME = "treewise.attention.hopper"
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture
def hopper(monkeypatch):
    module = import_kernels(NAME, monkeypatch)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    return module


def attend(hopper, plan, q, k, v, parts_dtype, spare=False):
    """Run all items of a plan, between items of no rows if asked, then merge them."""
    out = torch.full_like(q, torch.nan)
    parts = torch.full((plan.num_entries, *q.shape[1:]), torch.nan, dtype=parts_dtype, device=q.device)
    lse, part_lse = (torch.full(x.shape[:2], torch.nan, device=q.device) for x in (out, parts))
    tensors = plan.tensors
    if spare:
        none = torch.full((1, 8), 3, dtype=torch.int32, device=q.device)
        tensors = tensors | {"items": torch.cat((none, tensors["items"], none, none))}
    packed = int((plan.items[:, ROW_HIGH] - plan.items[:, ROW_LOW]).max()) * (plan.num_heads // plan.num_kv_heads)
    hopper.attend(
        q, k, v, out, lse, parts, part_lse, tensors, int(spare), len(plan.items) + spare, packed,
        masked=bool((plan.items[:, FREE_END] < plan.items[:, KV_END]).any()),
        ordered=bool((np.diff(plan.row_order) == 1).all()),
        scale_log2=plan.head_dim**-0.5 * float(np.log2(np.e)), overlap=True,
    )  # fmt: skip
    out, lse, parts, part_lse = (x.cpu() for x in (out, lse, parts, part_lse))
    for number, row in enumerate(plan.reduce_rows):
        entries = plan.reduce_entries[plan.reduce_indptr[number] : plan.reduce_indptr[number + 1]]
        weights = torch.softmax(part_lse[entries], 0)
        query = plan.row_order[row]
        out[query] = (weights[..., None] * parts[entries].float()).sum(0).to(out.dtype)
        lse[query] = torch.logsumexp(part_lse[entries], 0)
    return out, lse


def agrees(hopper, tree, method, rows, device="cpu", dtype=torch.float16):
    """Hold one plan, of items of that many packed rows, against the reference."""
    number = len(tree.length) + len(method) + rows // 64
    torch.manual_seed(number)
    heads, head_dim = HEADS[number % 4], (64, 128)[number % 2]
    slots, size = place(tree, 16, seed=number)
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "slots": slots, "page_size": 16}
    shape |= {"dtype": dtype, "device": device}
    tile = max(1, rows // (heads[0] // heads[1]))
    plan = plan_tree(tree, method, **shape, row_tile=tile, chunk=(100, None)[number % 2])
    q = torch.randn(tree.num_queries, heads[0], head_dim).to(device, dtype)
    k, v = (torch.full((size, heads[1], head_dim), torch.nan).to(device, dtype) for _ in range(2))
    k[slots], v[slots] = (torch.randn(len(slots), heads[1], head_dim).to(device, dtype) for _ in range(2))
    expected = run_plan(plan_tree(tree, "reference", **shape), q, k, v, return_lse=True)
    parts_dtype = torch.float32 if dtype == torch.bfloat16 or number // 2 % 2 else dtype
    out, lse = attend(hopper, plan, q, k, v, parts_dtype, spare=number % 3 == 0)
    assert relative_error(out, expected[0].cpu()) < {torch.float16: 5e-4, torch.bfloat16: 3e-3}[dtype]
    torch.testing.assert_close(lse, expected[1].cpu(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("method", ["deft:flatten", "deft:node", "radix"])
@pytest.mark.parametrize("tree", TREES)
def test_its_source_agrees_with_the_reference(hopper, tree, method, rows):
    agrees(hopper, tree(), method, rows)


def test_it_declines_what_it_cannot_serve():
    hopper = importlib.import_module(NAME)
    q, k = torch.randn(40, 8, 128).half(), torch.randn(99, 2, 128).half()
    assert not hopper.suits(q, k, k, 128)


@pytest.mark.gpu
@pytest.mark.skipif(not is_hopper, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
class TestOnGPU:
    """The same compiled, and trees long enough to fill the ring many times."""

    @pytest.mark.parametrize("rows", [64, 128])
    @pytest.mark.parametrize("method", ["deft:flatten", "deft:node", "radix"])
    @pytest.mark.parametrize("tree", TREES)
    def test_it_agrees_with_the_reference(self, tree, method, rows, dtype):
        agrees(importlib.import_module(NAME), tree(), method, rows, "cuda", dtype)

    @pytest.mark.parametrize("rows", [64, 128])
    def test_long_trees(self, rows, dtype):
        hopper = importlib.import_module(NAME)
        star = TreeSpec([-1] + [0] * 300, [3001] + [7] * 300, range(1, 301))
        causal = TreeSpec([-1], [2500], [0] * 2500, range(2500))
        backwards = TreeSpec([-1], [700], [0] * 700, range(699, -1, -1))
        for tree in (star, causal, backwards):
            for method in ("deft:node", "deft:flatten"):
                agrees(hopper, tree, method, rows, "cuda", dtype)

    def test_it_serves_common_shapes_only(self, dtype):
        hopper = importlib.import_module(NAME)
        q, k = torch.randn(40, 8, 128, device="cuda").to(dtype), torch.randn(99, 2, 128, device="cuda").to(dtype)
        assert hopper.suits(q, k, k, 128) and not hopper.suits(q, k, k, 256)
        odd = torch.randn(99, 2, 129, device="cuda").to(dtype)[..., :128]
        assert not hopper.suits(q, odd, odd, 128) and not hopper.suits(q, k.float(), k.float(), 128)
