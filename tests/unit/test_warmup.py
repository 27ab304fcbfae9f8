"""What is captured before the first request: usual trees find what they need among it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import tiny_llm, tiny_model

from treewise import plan, warmup
from treewise.config import SamplingParams
from treewise.graphs import GraphCache, Kind
from treewise.kv import KVManager, make_pool
from treewise.plan import TreeSpec, data, plan_tree
from treewise.sparsity.policy import KVSparsity
from treewise.tree import Forest
from treewise.warmup import common_trees, sizes, thinned_out

ROOM = 32


@pytest.mark.parametrize("rows", [1, 2, 24, 96])
def test_common_trees_have_a_query_a_row(rows):
    for tree, grows in common_trees(rows):
        assert tree.num_queries == rows
        if grows:  # room is for leaves of one query each
            assert len(set(tree.query_node.tolist())) == rows and not np.isin(tree.query_node, tree.parent).any()


def test_sizes_serve_any_number_of_rows():
    assert sizes(1) == [1]
    assert sizes(256)[-3:] == [128, 192, 256]
    assert max(sizes(200)) == 256


@pytest.mark.parametrize("wrong", [-1, 2.0, None])
def test_rows_to_capture_are_checked(wrong):
    with pytest.raises(ValueError, match="capture_rows must be an integer of at least 0"):
        tiny_llm(tiny_model(), capture_rows=wrong)


@pytest.mark.parametrize("name", ["snapkv", "novita", "pyramidkv", "adakv"])
def test_steps_behind_what_is_kept_are_those_of_requests(name, monkeypatch):
    monkeypatch.setattr(warmup, "PROMPT", 60)
    monkeypatch.setattr(warmup, "TAIL", 9)
    model = tiny_model(windows=(None, 11, None, None, None))
    policy = KVSparsity.named(name, budget=16, window=4, sinks=1, **({"first_full": 1} if name == "novita" else {}))
    llm = tiny_llm(model, kv_sparsity=policy)
    runner, wanted = llm.engine.runner, set()
    plan_of = runner.plan
    with monkeypatch.context() as patch:
        patch.setattr(runner, "plan", lambda *given: (plans := plan_of(*given), wanted.add(frozenset(plans)))[0])
        llm.generate([list(range(1, 61)), [7, 5, 3] * 20], SamplingParams(max_tokens=4, ignore_eos=True))
    kv = KVManager(Forest(), make_pool("paged", runner.k.shape[1], 16), False, runner.k.shape[2])
    counts = llm.engine.thinner.kept_of(policy, 60)
    for rows in (1, 2, 5):
        shapes = []
        for batch in thinned_out(rows, counts, kv):
            assert batch.num_rows == rows and batch.can_grow and batch.is_decoding
            assert frozenset(runner.plan(batch, kv)) in wanted
            shapes.append(sum(node.sealed for node in kv.forest))
            kv.check_integrity()
        assert shapes == ([1] if rows == 1 else [rows, 1])
        assert not list(kv.forest) and kv.pool.num_free == kv.num_slots
    small = KVManager(Forest(), make_pool("paged", 64, 16), False, runner.k.shape[2])
    assert len(list(thinned_out(5, counts, small))) == 0, "there is no room for them"
    assert not list(small.forest) and small.pool.num_free == small.num_slots


class TestOnALargeGPU:
    """Plans as they are made for an H200, on whatever machine."""

    @pytest.fixture
    def make(self, monkeypatch):
        buffers = pytest.importorskip("treewise.attention.buffers", reason="needs triton", exc_type=ImportError)

        def upload(arrays, device):
            return {name: torch.from_numpy(array) for name, array in arrays.items()}

        for module in (data, buffers):
            monkeypatch.setattr(module, "upload", upload)
        monkeypatch.setattr(plan, "default_backend", lambda device: "hopper" if device.type == "cuda" else "cpu")

        def make(tree, room, method="auto", open_tokens=0):
            slots = np.arange(tree.num_tokens)
            slots[tree.num_tokens - open_tokens :] = -1 - np.arange(open_tokens)
            made = plan_tree(
                tree,
                method,
                num_heads=32,
                num_kv_heads=8,
                head_dim=128,
                slots=slots,
                page_size=16,
                dtype=torch.bfloat16,
                device="cuda",
                room=room,
                open_tokens=open_tokens,
            )
            made.device = torch.device("cpu")  # where its arrays are
            return {Kind(None): made}

        return make

    @pytest.fixture
    def graphs(self, make):
        graphs = GraphCache(lambda rows, *_: rows[:, None], 0, capture=lambda function: (lambda: None, function()))
        for rows in reversed(sizes(64)):
            for tree, grows in common_trees(rows):
                graphs.make_ready(rows, 3, make(tree, ROOM * grows))
        return graphs

    def test_usual_steps_need_no_other_capture(self, make, graphs):
        captures = graphs.num_captures
        assert captures < 50
        trees = [shared(count, 4000, length) for count in (1, 5, 20, 50, 64) for length in (1, 100, 390)]
        trees += [shared(count, 600, 200) for count in (1, 4, 10, 30)]
        trees += [TreeSpec([-1] * count, [4000] * count, range(count)) for count in (1, 10, 20)]
        trees += [searched(count, order) for count in (6, 11, 40) for order in (1, -1)]
        for number, tree in enumerate(trees):
            plans = make(tree, ROOM)
            found = graphs.run(torch.zeros((3, tree.num_queries), dtype=torch.int64), plans)
            assert found is not None, f"tree {number}: {plans[None].items.shape}"
        assert graphs.num_captures == captures and graphs.num_replays == len(trees)

    @pytest.mark.parametrize("guesses", [4, 31, 63])
    def test_nor_do_guesses(self, make, graphs, guesses):
        """As `treewise.stems` plans them."""
        tree = TreeSpec([-1, 0], [2000 + 64, guesses], [0] + [1] * guesses, [1999 + 64] + [guesses - 1] * guesses)
        plans = make(tree, 0, open_tokens=guesses)
        assert graphs.run(torch.zeros((3, guesses + 1), dtype=torch.int64), plans) is not None

    def test_of_several_captures_the_nearest_is_taken(self, make, graphs):
        for rows in (20, 24):
            wide, narrow = (make(shared(rows, *lengths), ROOM) for lengths in ((4000, 1), (1000, 400)))
            for wanted in (wide, narrow, wide):
                graphs.run(torch.zeros((3, rows), dtype=torch.int64), wanted)
                [[is_other, packed, *_]] = graphs._graphs[-1].excess(wanted)
                assert not is_other and packed == 0


def shared(count, prompt, length):
    return TreeSpec([-1] + [0] * count, [prompt] + [length] * count, range(1, count + 1))


def searched(count, order):
    """Branches that fork from each other, each with a leaf."""
    parent = [-1] + [number // 2 for number in range(count)]
    leaves = list(range(len(parent), len(parent) + count))
    lengths = [4000] + [30] * count + [7] * count
    return TreeSpec([*parent, *range(1, count + 1)], lengths, leaves[::order])
