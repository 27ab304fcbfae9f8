"""Empty partials, extreme scores, short rows, repeated runs and wrong input."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from matrix import PARTITIONS, TREES, dense_attention, place

from treewise.attention import TreeSpec, get_backend, plan_tree, run_plan, store_kv
from treewise.attention.reference import merge

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def pool(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 2, 16, generator=generator) for _ in range(2)]


def test_an_empty_partial_is_the_identity_of_merging():
    out, lse = torch.randn(3, 16), torch.tensor([0.5, -6e4, 3.0])
    empty, nothing = torch.zeros(3, 16), torch.full((3,), -torch.inf)
    for merged, merged_lse in (merge(out, lse, empty, nothing), merge(empty, nothing, out, lse)):
        assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
    merged, merged_lse = merge(empty, nothing, empty, nothing)
    assert torch.equal(merged, empty) and torch.equal(merged_lse, nothing)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("level", [0.0, -6e4, 6e4])
def test_scores_far_from_zero_merge_like_one_softmax(backend, level):
    tree = TreeSpec([-1, 0, 0], [40, 5, 9], [1, 2])
    k, v = pool(54)
    q = torch.randn(2, 4, 16)
    q[..., 0], k[..., 0] = 1.0, level / 0.25
    expected, expected_lse = dense_attention(tree, range(54), q, k, v, 0.25)
    for method, mask in PARTITIONS:
        plan = plan_tree(tree, method, mask=mask, chunk=3, **SHAPE)
        out, lse = run_plan(plan, q, k, v, return_lse=True, backend=backend)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2 if level else 1e-5, atol=2e-2 if level else 1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


def test_partials_merge_alike_in_any_order():
    tree = TreeSpec([-1], [40], [0])
    k, v = pool(40)
    q = torch.randn(1, 4, 16)
    k[10:20] -= 500  # one part far below the others
    whole, whole_lse = dense_attention(tree, range(40), q, k, v, 0.25)
    parts = [dense_attention(TreeSpec([-1], [10], [0]), range(s, s + 10), q, k, v, 0.25) for s in range(0, 40, 10)]
    parts.append((torch.zeros_like(whole), torch.full_like(whole_lse, -torch.inf)))
    for order in permutations(parts):
        out, lse = order[0]
        for part, part_lse in order[1:]:
            out, lse = merge(out, lse, part, part_lse)
        torch.testing.assert_close(out, whole)
        torch.testing.assert_close(lse, whole_lse)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("method", "mask"), PARTITIONS)
def test_rows_that_see_nothing_of_an_item_are_not_nan(backend, method, mask):
    # By the positions that its tokens kept, all but the last token of the second row's path is out of its window.
    tree = TreeSpec([-1, 0, -1, 0], [3, 1, 4, 0], [0, 1, 2, 3], position=[0, 1, 2, 9, 0, 1, 2, 3])
    k, v = pool(8)
    q = torch.randn(4, 4, 16)
    expected, expected_lse = dense_attention(tree, range(8), q, k, v, 0.25, window=2)
    plan = plan_tree(tree, method, mask=mask, window=2, chunk=2, **SHAPE)
    out, lse = run_plan(plan, q, k, v, return_lse=True, backend=backend)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("method", "mask"), PARTITIONS)
def test_two_equal_rows_of_one_token_give_equal_results(method, mask):
    tree = TreeSpec([-1, 0, 0], [4, 1, 1], [1, 2])  # on one part-filled page of 16
    k, v = pool(16)
    k[5], v[5] = k[4], v[4]
    q = torch.randn(1, 4, 16).repeat(2, 1, 1)
    out = run_plan(plan_tree(tree, method, mask=mask, page_size=16, **SHAPE), q, k, v)
    assert torch.equal(out[0], out[1]) and out.abs().sum() > 0
    shared = run_plan(plan_tree(TreeSpec([-1], [5], [0, 0]), method, mask=mask, **SHAPE), q, k, v)
    torch.testing.assert_close(shared, out)


def test_no_mask_outlives_its_call():
    drafted = TreeSpec([-1, 0, 0, 1, 1, 2], [3, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5])  # 5 rows: masks of odd lengths
    causal = TreeSpec([-1], [8], [0] * 5, [3, 4, 5, 6, 7])
    k, v = pool(8)
    q = torch.randn(5, 4, 16)
    for method, mask in PARTITIONS:
        plans = [plan_tree(tree, method, mask=mask, **SHAPE) for tree in (drafted, causal)]
        alone = [run_plan(plan_tree(tree, method, mask=mask, **SHAPE), q, k, v) for tree in (drafted, causal)]
        for turn in (0, 1, 1, 0):
            assert torch.equal(run_plan(plans[turn], q, k, v), alone[turn])


@pytest.mark.parametrize("tree", TREES)
def test_the_same_input_gives_the_same_bits(tree):
    spec = tree()
    slots, size = place(spec, 32, seed=4)
    k, v = pool(size)
    q = torch.randn(spec.num_queries, 4, 16)
    for method, mask in PARTITIONS:
        runs = [run_plan(plan_tree(spec, method, mask=mask, slots=slots, **SHAPE), q, k, v) for _ in range(3)]
        assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_slots_that_no_token_uses_are_never_touched():
    tree = TREES[2]()
    slots, size = place(tree, 16, seed=5)
    k, v = pool(size)
    unused = np.setdiff1d(np.arange(size), slots)
    k[unused] = v[unused] = torch.nan
    for method, mask in PARTITIONS:
        plan = plan_tree(tree, method, mask=mask, slots=slots, page_size=16, **SHAPE)
        assert run_plan(plan, torch.randn(tree.num_queries, 4, 16), k, v).isfinite().all()


@pytest.mark.parametrize("method", ["deft:flatten", "deft:node", "deft:node_chunk", "radix", "specinfer"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_tree_that_overflowed_does_not_harm_its_neighbours(method, poison):
    tree = TreeSpec([-1, 0, 0, -1, 3, 3, -1], [5, 2, 3, 6, 1, 1, 4], [1, 2, 4, 5, 6])
    k, v = pool(22)
    q = torch.randn(5, 4, 16)
    clean = run_plan(plan_tree(tree, method, **SHAPE), q, k, v)
    k[10:18], v[10:18] = poison, poison  # the second tree
    spoilt = run_plan(plan_tree(tree, method, **SHAPE), q, k, v)
    torch.testing.assert_close(spoilt[[0, 1, 4]], clean[[0, 1, 4]])


def test_a_pool_need_not_be_contiguous():
    tree = TREES[5]()
    both = torch.randn(tree.num_tokens, 2, 2, 16)  # keys and values side by side
    q = torch.randn(tree.num_queries, 4, 16)
    for method in ("deft:flatten", "radix"):
        plan = plan_tree(tree, method, **SHAPE)
        expected = run_plan(plan, q, both[:, 0].contiguous(), both[:, 1].contiguous())
        torch.testing.assert_close(run_plan(plan, q, both[:, 0], both[:, 1]), expected)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_rows_are_stored_where_they_belong(backend):
    k, v = torch.zeros(9, 2, 16), torch.zeros(9, 2, 16)
    k_new, v_new = torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    slots = torch.tensor([8, 3, 0, 0])  # the scratch slot repeats
    get_backend(backend, k.device).store((k_new, v_new), (k, v), slots)
    assert torch.equal(k[[8, 3]], k_new[:2]) and torch.equal(v[[8, 3]], v_new[:2])
    assert not k[[1, 2, 4, 5, 6, 7]].any()
    with pytest.raises(ValueError, match=r"slots must be int64; they are torch.int32"):
        store_kv(k_new, v_new, k, v, slots.int())
    with pytest.raises(ValueError, match=r"k_new and v_new must be \[rows, kv_heads, head_dim\] = \[4, 2, 16\]"):
        store_kv(k_new[:3], v_new[:3], k, v, slots)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_does_not_fit_eight_bits_becomes_the_largest_that_does(backend):
    k, v = (torch.zeros(3, 2, 16).to(torch.float8_e4m3fn) for _ in range(2))
    new = torch.tensor([1e6, -1e6, 3.0, 0.0]).repeat(2, 2, 4)
    factor = torch.tensor([2.0, 0.5])
    get_backend(backend, k.device).store((new, new), (k, v), torch.tensor([2, 0]), (factor, None))
    assert k[2, 0].float()[:4].tolist() == [448.0, -448.0, 1.5, 0.0] and k[0, 1].float()[2] == 6.0
    assert v[0].float()[:, :4].tolist() == [[448.0, -448.0, 3.0, 0.0]] * 2 and not k[1].float().any()


def test_tensors_that_do_not_fit_the_plan_are_refused():
    tree = TreeSpec([-1], [9], [0])
    plan = plan_tree(tree, **SHAPE)
    k, v = pool(9)
    q = torch.randn(1, 4, 16)
    for arguments, message in [
        ((q[:, :3], k, v), r"q must be \[queries, heads, head_dim\] = \[1, 4, 16\]; it is \[1, 3, 16\]"),
        ((q, k[:, :1], v[:, :1]), r"\['slots', 2, 16\]"),
        ((q, k[:8], v[:8]), "hold 8 slots; the plan reads up to slot 8"),
        ((q.double(), k, v), "q must be of the plan's dtype torch.float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            run_plan(plan, *arguments)
    with pytest.raises(ValueError, match="backend is 'gpu'; choose one of reference, cpu, triton, hopper"):
        run_plan(plan, q, k, v, backend="gpu")
