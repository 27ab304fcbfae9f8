"""Plans: what they cover, how rows and key tokens are laid out, what they read, and the input that is refused."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treewise.plan import METHODS, TreeSpec, partition, plan_tree
from treewise.plan.data import ENTRY, FREE_END, KV_END, KV_START, ROW_HIGH, ROW_LOW
from treewise.plan.layout import lay_out

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
PARTITIONS = [(method, "intervals") for method in METHODS] + [("deft:node", "words"), ("deft:flatten", "words")]


@st.composite
def trees(draw):
    """Draw any forest: empty nodes, queries anywhere, several at one token, nodes without readers."""
    parent = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 12)))]
    length = [draw(st.integers(0 if above >= 0 else 1, draw(st.sampled_from([2, 40])))) for above in parent]
    node = draw(st.lists(st.integers(0, len(parent) - 1), min_size=1, max_size=20))
    offset = [draw(st.integers(-1 if parent[place] >= 0 else 0, length[place] - 1)) for place in node]
    return TreeSpec(parent, length, node, offset)


def seen_by(tree, window):
    """Which token each query sees, by walking up from it."""
    first = np.cumsum(tree.length) - tree.length
    seen = np.zeros((tree.num_queries, tree.num_tokens), int)
    for query, (node, offset) in enumerate(zip(tree.query_node, tree.query_offset, strict=True)):
        path, end = [], offset + 1
        while node >= 0:
            path = [*range(first[node], first[node] + end), *path]
            node, end = tree.parent[node], tree.length[tree.parent[node]]
        seen[query, path[-window:] if window else path] = 1
    return seen


def covered(plan, num_tokens):
    """How often the items of a plan let each query see each token, whose slots are 0, 1, 2, ..."""
    count = np.zeros((plan.num_rows, num_tokens), int)
    for number, item in enumerate(plan.items):
        queries = plan.row_order[item[ROW_LOW] : item[ROW_HIGH]]
        slots = plan.kv_slots[item[KV_START] : item[KV_END]]
        np.add.at(count, (queries[:, None], slots[None, :]), plan.visible(number))
    return count


@settings(max_examples=60, deadline=None)
@given(
    tree=trees(),
    window=st.sampled_from([None, 1, 7]),
    row_tile=st.sampled_from([None, 3]),
    chunk=st.sampled_from([None, 5]),
)
def test_every_pair_that_the_tree_allows_is_covered_once(tree, window, row_tile, chunk):
    expected = seen_by(tree, window)
    for method, mask in PARTITIONS:
        plan = plan_tree(tree, method, mask=mask, window=window, row_tile=row_tile, chunk=chunk, **SHAPE)
        np.testing.assert_array_equal(covered(plan, tree.num_tokens), expected, err_msg=f"{method} {mask}")
        check_form(plan)


def depth_first(tree):
    """The same tree with its nodes depth first and what stands below each told, and where its tokens were."""
    order, below = [], []

    def visit(node):
        place = len(order)
        order.append(node)
        below.append(0)
        for child in np.flatnonzero(tree.parent == node):
            visit(child)
        below[place] = len(order) - 1 - place

    for root in np.flatnonzero(tree.parent < 0):
        visit(root)
    place = np.argsort(order)
    parent = [-1 if tree.parent[node] < 0 else place[tree.parent[node]] for node in order]
    first = np.cumsum(tree.length) - tree.length
    tokens = [token for node in order for token in range(first[node], first[node] + tree.length[node])]
    spec = TreeSpec(parent, tree.length[order], place[tree.query_node], tree.query_offset, below=below)
    return spec, tokens


@settings(max_examples=60, deadline=None)
@given(tree=trees(), window=st.sampled_from([None, 7]))
def test_nodes_that_are_said_to_come_depth_first_get_the_plan_that_is_found_otherwise(tree, window):
    told, tokens = depth_first(tree)
    for method in ("auto", "deft:flatten", "deft:node", "radix"):
        found = plan_tree(tree, method, window=window, **SHAPE)
        plan = plan_tree(told, method, window=window, slots=tokens, **SHAPE)
        for name in ("row_order", "row_position", "kv_slots", "kv_low", "kv_high", "kv_position", "items"):
            np.testing.assert_array_equal(getattr(plan, name), getattr(found, name), err_msg=f"{name} of {method}")


def wide_tree(width, steps, seed):
    """Rows that go on, fork and die at random, as beams do; nodes are numbered as they come."""
    draw = np.random.default_rng(seed)
    parent, length, tips = [-1], [draw.integers(1, 200)], [0]
    for _ in range(steps):
        children = []
        for tip, number in enumerate(np.bincount(draw.integers(len(tips), size=width), minlength=len(tips))):
            if number == 1 and len(tips) == width:
                length[tips[tip]] += 1
                children.append(tips[tip])
                continue
            for _ in range(number):
                children.append(len(parent))
                parent.append(tips[tip])
                length.append(draw.integers(1, 3))
        tips = children
    return TreeSpec(parent, length, draw.permutation(tips))


@pytest.mark.parametrize("backend", ["triton", "hopper", "cpu"])
@pytest.mark.parametrize(("width", "steps"), [(300, 12), (90, 60)])
def test_a_wide_tree_of_short_nodes_is_covered_once(backend, width, steps, monkeypatch):
    monkeypatch.setattr("treewise.plan.data.upload", lambda arrays, device: {})
    tree = wide_tree(width, steps, width)
    device = "cpu" if backend == "cpu" else "cuda"
    shape = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "device": device}
    for chunk in (None, 64):
        plan = plan_tree(tree, "deft:flatten", backend=backend, chunk=chunk, **shape)
        np.testing.assert_array_equal(covered(plan, tree.num_tokens), seen_by(tree, None))
        check_form(plan)


@pytest.mark.parametrize("copied", [partition.COPIED, 60])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("room", [0, 3])
def test_what_is_cut_for_a_gpu_covers_every_pair_once(backend, copied, room, monkeypatch):
    monkeypatch.setattr("treewise.plan.data.upload", lambda arrays, device: {})
    monkeypatch.setattr(partition, "COPIED", copied)
    shape = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "device": "cuda"}
    for tree in (
        TreeSpec([-1] + [0] * 40, [3000] + [5] * 40, range(1, 41)),
        TreeSpec([-1] + [0] * 7, [30] + [400] * 7, range(1, 8)),
        TreeSpec([-1, 0, 0, 1, 1, 2, 2], [90, 300, 7, 350, 1, 1, 9], [3, 4, 5, 6]),
        TreeSpec([-1, -1, 0, 0, 1, 1], [200, 40, 1, 1, 1, 1], [2, 3, 4, 5]),
    ):
        for method in ("deft:flatten", "deft:node_chunk", "radix", "auto"):
            plan = plan_tree(tree, method, backend=backend, room=room, **shape)
            np.testing.assert_array_equal(
                covered(plan, tree.num_tokens) if not room else covered(plan, tree.num_tokens)[:, 1:],
                seen_by(tree, None) if not room else seen_by(tree, None)[:, 1:],  # room stands for slot 0 for now
                err_msg=f"{method} for {backend}",
            )
            check_form(plan)


@pytest.mark.parametrize(
    ("tree", "packed", "copies"),
    [
        (TreeSpec([-1] + [0] * 64, [4000] + [1] * 64, range(1, 65)), 128, 2),  # wide tiles add next to nothing
        (TreeSpec([-1] + [0] * 50, [4000] + [200] * 50, range(1, 51)), 64, 4),  # wide tiles would mask more
        (TreeSpec([-1], [32768], [0] * 2048, range(30720, 32768)), 128, 1),  # too long for every tile to list it
    ],
    ids=["drafts", "samples", "prompt"],
)
def test_one_launch_along_the_paths_where_there_is_a_kernel_in_gluon(tree, packed, copies, monkeypatch):
    monkeypatch.setattr("treewise.plan.data.upload", lambda arrays, device: {})
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    plan = plan_tree(tree, "deft:flatten", backend="hopper", **shape)
    rows = plan.items[:, ROW_HIGH] - plan.items[:, ROW_LOW]
    assert plan.kernel_bounds == () and packed // 2 < rows.max() * 4 <= packed
    assert (plan.kv_slots == 0).sum() == copies
    for other in ({"window": 512}, {"dtype": torch.float32}, {"kv_dtype": torch.float8_e4m3fn}, {"head_dim": 96}):
        assert plan_tree(tree, "deft:flatten", backend="hopper", **shape | other).kernel_bounds == partition.BOUNDS


def check_form(plan):
    """Each row has one item or merges all its partial results; leading mask-free tokens really are."""
    rows = plan.items[:, ROW_HIGH] - plan.items[:, ROW_LOW]
    assert (rows > 0).all() and (plan.items[:, KV_END] > plan.items[:, KV_START]).all()
    direct = plan.items[:, ENTRY] < 0
    assert plan.items[~direct, ENTRY].tolist() == [0, *np.cumsum(rows[~direct])][:-1]
    of_items = [[*range(low, high)] for low, high in plan.items[:, [ROW_LOW, ROW_HIGH]]]
    alone = [row for item, own in zip(of_items, direct, strict=True) if own for row in item]
    owner = np.array([row for item, own in zip(of_items, direct, strict=True) if not own for row in item])
    assert sorted([*alone, *plan.reduce_rows]) == [*range(plan.num_rows)]
    for number, row in enumerate(plan.reduce_rows):
        low, high = plan.reduce_indptr[number : number + 2]
        assert plan.reduce_entries[low:high].tolist() == np.flatnonzero(owner == row).tolist()
    for number, item in enumerate(plan.items):
        assert plan.visible(number)[:, : item[FREE_END] - item[KV_START]].all()


def test_rows_are_depth_first_and_readers_are_intervals():
    tree = TreeSpec([-1, 0, 0, 1, 1], [5, 2, 3, 1, 1], [2, 4, 3, 1, 0])
    plan = plan_tree(tree, "deft:node", **SHAPE)
    assert plan.row_order.tolist() == [4, 3, 2, 1, 0]
    assert plan.row_position.tolist() == [4, 6, 7, 7, 7]
    assert plan.kv_slots.tolist() == [0, 1, 2, 3, 4, 5, 6, 10, 11, 7, 8, 9]
    assert plan.kv_low.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 3, 4, 4, 4]
    assert plan.kv_high.tolist() == [5, 5, 5, 5, 5, 4, 4, 3, 4, 5, 5, 5]
    assert (plan.items[:, FREE_END] == plan.items[:, KV_END]).all()


def test_nodes_without_readers_and_tokens_behind_the_window_are_dropped():
    tree = TreeSpec([-1, 0, 0, 2], [50, 9, 4, 6], [2])
    assert plan_tree(tree, "deft:flatten", **SHAPE).kv_slots.tolist() == [*range(50), *range(59, 63)]
    assert plan_tree(tree, "deft:flatten", window=6, **SHAPE).kv_slots.tolist() == [48, 49, *range(59, 63)]


def test_blocks_of_one_node_are_mask_free_and_small_nodes_share_one():
    tree = TreeSpec([-1] + [0] * 12, [1000] + [5] * 12, range(1, 13))
    plan = plan_tree(tree, "deft:flatten", chunk=256, **SHAPE)
    free = plan.items[:, FREE_END] == plan.items[:, KV_END]
    assert (plan.items[free, KV_END] - plan.items[free, KV_START]).tolist() == [250] * 4
    assert (plan.items[~free, KV_END] - plan.items[~free, KV_START]).tolist() == [60]


def test_a_causal_chunk_skips_what_its_rows_cannot_see():
    tree = TreeSpec([-1], [600], [0] * 400, range(200, 600))
    plan = plan_tree(tree, "deft:node", row_tile=100, **SHAPE)
    tiles = plan.items[np.argsort(plan.items[:, ROW_LOW])]
    assert tiles[:, KV_END].tolist() == [300, 400, 500, 600]
    assert tiles[:, FREE_END].tolist() == [201, 301, 401, 501]


def test_a_long_prompt_chunk_is_neither_copied_nor_cut_on_a_gpu():
    tree = TreeSpec([-1], [32768], [0] * 2048, range(30720, 32768))
    layout = lay_out(tree, np.arange(32768, dtype=np.int32), None)
    sizes = partition.blocks(torch.device("cuda"), 8, 4, None, None, False)
    cut = partition.with_keys(partition.flatten(layout, sizes, partition.STEP), None)
    assert len(cut.layout.kv_slots) == 32768
    assert cut.items[:, ROW_LOW].tolist() == [*range(0, 2048, 32)]  # one item a row tile
    assert cut.items[:, KV_END].tolist() == [*range(30752, 32769, 32)]
    few = TreeSpec([-1], [32768], [0] * 64, range(32704, 32768))  # two row tiles do not fill the machine
    layout = lay_out(few, np.arange(32768, dtype=np.int32), None)
    assert len(partition.flatten(layout, sizes, partition.STEP).items) == 16


def test_positions_may_have_gaps():
    tree = TreeSpec([-1, 0], [4, 2], [1], position=[0, 1, 90, 91, 100, 101])
    assert plan_tree(tree, "deft:node", window=12, **SHAPE).kv_slots.tolist() == [2, 3, 4, 5]


def test_bytes_are_counted_by_kind():
    width, prompt, leaf = 100, 4000, 200
    tree = TreeSpec([-1] + [0] * width, [prompt] + [leaf] * width, range(1, width + 1))
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.float16}
    token = 2 * 2 * 8 * 128
    flat = plan_tree(tree, "deft:flatten", row_tile=16, chunk=256, **shape).io()
    assert flat.kv_once == token * (prompt + width * leaf)
    assert flat.kv == token * (prompt * 7 + width * leaf)  # 100 rows read the prompt in 7 tiles
    entries = width * 16 + width  # the prompt is cut in 16
    assert flat.partials == 2 * 4 * entries * 32 * (128 + 1) and flat.scores == 0
    assert flat.queries == entries * 32 * 128 * 2 and flat.output == width * 32 * 128 * 2
    apart = plan_tree(tree, "radix", chunk=4200, **shape).io()
    assert apart.kv == apart.kv_once == token * width * (prompt + leaf) and apart.partials == apart.masks == 0
    dense = plan_tree(tree, "medusa", **shape).io()
    assert dense.scores == 8 * 2 * 32 * width * (prompt + width * leaf)
    assert dense.masks == width * (prompt + width * leaf) and dense.kv == flat.kv_once
    bits = plan_tree(tree, "specinfer", **shape).io()
    assert bits.kv == token * width * (prompt + width * leaf) and bits.masks == width * 375 * 8
    assert flat.total == sum(getattr(flat, kind) for kind in flat.__annotations__ if kind != "kv_once")
    deep = plan_tree(tree, "deft:flatten", row_tile=16, chunk=256, **shape).io(torch.float32, layers=3, heads=32)
    assert deep.kv == 2 * 3 * 4 * flat.kv and deep.partials == 3 * flat.partials


@pytest.mark.parametrize("method", METHODS)
def test_no_item_has_more_rows_than_the_row_tile(method):
    tree = TreeSpec([-1], [300], [0] * 300, range(300))
    plan = plan_tree(tree, method, row_tile=16, **SHAPE)
    rows = plan.items[:, ROW_HIGH] - plan.items[:, ROW_LOW]
    assert rows.max() <= 16 or method in ("medusa", "vanilla")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parent": [0], "length": [1], "query_node": [0]}, "parent[0] is 0; it must be -1 or an earlier node"),
        ({"parent": [-1, 2, 0], "length": [1, 1, 1], "query_node": [0]}, "parent[1] is 2; it must be -1 or an earlier"),
        ({"parent": [-1, -2], "length": [1, 1], "query_node": [0]}, "parent[1] is -2"),
        ({"parent": [-1], "length": [1, 2], "query_node": [0]}, "length must hold 1 entries, one a node; it holds 2"),
        ({"parent": [-1], "length": [-4], "query_node": [0]}, "length[0] is -4; it must be at least 0"),
        ({"parent": [-1], "length": [1.5], "query_node": [0]}, "length must be a flat list of whole numbers"),
        ({"parent": [-1], "length": [[1]], "query_node": [0]}, "length must be a flat list of whole numbers"),
        ({"parent": [-1], "length": [1], "query_node": [1]}, "query_node[0] is 1; it must be a node, 0 to 0"),
        ({"parent": [-1], "length": [1], "query_node": [-1]}, "query_node[0] is -1; it must be a node"),
        ({"parent": [-1], "length": [1], "query_node": []}, "at least one node in parent and one query"),
        ({"parent": [], "length": [], "query_node": [0]}, "at least one node in parent and one query"),
        ({"parent": [-1], "length": [2], "query_node": [0], "query_offset": [2]}, "query_offset[0] is 2; it must be"),
        (
            {"parent": [-1], "length": [2], "query_node": [0], "query_offset": [0, 1]},
            "query_offset must hold 1 entries",
        ),
        (
            {"parent": [-1], "length": [2], "query_node": [0], "position": [1]},
            "position must hold 2 entries, one a token",
        ),
        ({"parent": [-1], "length": [2], "query_node": [0], "position": [0, -1]}, "position[1] is -1"),
        (
            {"parent": [-1, 0, 0, 1], "length": [1] * 4, "query_node": [0], "below": [3, 1, 0, 0]},
            "below[3] is 0; it must count the nodes below, and nodes must come depth first",
        ),
        ({"parent": [-1, 0], "length": [1, 1], "query_node": [0], "below": [0, 0]}, "below[0] is 0; it must count"),
        ({"parent": [-1], "length": [1], "query_node": [0], "below": [0, 0]}, "below must hold 1 entries, one a node"),
    ],
)
def test_a_wrong_tree_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TreeSpec(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"method": "deft"},
            "method is 'deft'; choose one of flash_decoding, radix, medusa, specinfer, vanilla, deft:node",
        ),
        ({"num_heads": 5}, "num_heads is 5; it must be a multiple of num_kv_heads, 2"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0; it must be at least 1"),
        ({"head_dim": -1}, "head_dim is -1; it must be at least 1"),
        ({"page_size": 8}, "page_size is 8; choose one of 1, 16, 32, 64"),
        ({"mask": "dense"}, "mask is 'dense'; choose one of intervals, words"),
        ({"mask": "words", "method": "radix"}, "mask='words' is for deft:* methods"),
        ({"window": 0}, "window is 0; it must be at least 1"),
        ({"chunk": 0}, "chunk is 0; it must be at least 1"),
        ({"row_tile": -3}, "row_tile is -3; it must be at least 1"),
        ({"row_tile": 200, "device": "cuda"}, "row_tile is 200; on cuda it may hold at most 256 rows"),
        ({"slots": [0, 1]}, "slots must hold 3 entries, one a token, nodes in order; it holds 2"),
        ({"slots": [0, -1, 2]}, "slots[1] is -1; it must be 0 to 2147483647"),
        ({"slots": [0, 1, 2**31]}, "slots[2] is 2147483648; it must be 0 to 2147483647"),
    ],
)
def test_a_wrong_plan_is_refused(arguments, message):
    tree = TreeSpec([-1], [3], [0])
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_tree(tree, **{"method": "deft:flatten", **SHAPE, **arguments})


@pytest.mark.parametrize("position", [None, [0]])
def test_a_query_that_sees_no_token_is_refused(position):
    with pytest.raises(ValueError, match=re.escape("query_node[1] is 0; it must have a token on its path")):
        plan_tree(TreeSpec([-1, 0], [0, 1], [1, 0], position=position), **SHAPE)


def test_auto_and_reference_are_names_of_partitions():
    tree = TreeSpec([-1], [3], [0])
    assert plan_tree(tree, **SHAPE).method in METHODS and plan_tree(tree, **SHAPE).backend is None
    assert plan_tree(tree, "reference", **SHAPE).backend == "reference"


def test_a_thousand_nodes_deep_and_a_thousand_wide():
    chain = TreeSpec(range(-1, 999), [3] * 1000, [999, 500, 0])
    plan = plan_tree(chain, "deft:flatten", **SHAPE)
    assert plan.row_order.tolist() == [2, 1, 0] and plan.row_position.tolist() == [2, 1502, 2999]
    star = TreeSpec([-1] + [0] * 1000, [7] + [1] * 1000, range(1, 1001))
    for method, mask in itertools.product(("deft:node", "deft:flatten"), ("intervals", "words")):
        plan = plan_tree(star, method, mask=mask, **SHAPE)
        assert plan.num_rows == 1000
        check_form(plan)


@settings(max_examples=40, deadline=None)
@given(
    parent=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    leaf=st.lists(st.integers(1, 70), min_size=12, max_size=12),
    window=st.sampled_from([None, 5]),
    chunk=st.sampled_from([None, 64]),
)
def test_a_plan_that_grew_is_the_plan_of_the_grown_tree(parent, leaf, window, chunk):
    above = [-1, 0, 0, 1, 1, 2, -1, 6]
    inner = [30, 9, 4, 70, 2, 1, 5, 0]
    leaves = len(parent)
    nodes = range(8, 8 + leaves)

    def tree(step):
        return TreeSpec(above + parent, inner + [length + step for length in leaf[:leaves]], nodes)

    def slots(step):  # by node and offset, whatever else there is
        return [100 * node + offset for node, length in enumerate(tree(step).length) for offset in range(length)]

    for method in ("auto", "deft:flatten", "deft:node", "deft:node_chunk", "radix"):
        options = {"window": window, "chunk": chunk, **SHAPE}
        plan = plan_tree(tree(0), method, slots=slots(0), room=3, **options)
        for step in range(4):
            if step:
                plan.grow([100 * node + leaf[number] + step - 1 for number, node in enumerate(nodes)])
            fresh = plan_tree(tree(step), method, slots=slots(step), **options)
            seen, expected = covered(plan, 2100), covered(fresh, 2100)
            seen[:, 0] = expected[:, 0] = 0 if step < 3 else expected[:, 0]  # room has slot 0 until it is used
            np.testing.assert_array_equal(seen, expected)
            assert plan.row_position.tolist() == fresh.row_position.tolist()
            assert window or plan.method != fresh.method or plan.io().kv_once == fresh.io().kv_once
            assert plan.num_slots == fresh.num_slots
        check_form(plan)
        with pytest.raises(ValueError, match="room is used up: the plan was made for 3 more tokens a branch"):
            plan.grow([0] * leaves)


@pytest.mark.parametrize(
    ("tree", "options", "message"),
    [
        (TreeSpec([-1, 0], [3, 2], [0, 1]), {}, "query_node[0] is 0; it must be a leaf with one query, at its last"),
        (TreeSpec([-1], [3], [0, 0]), {}, "query_node[0] is 0; it must be a leaf with one query"),
        (TreeSpec([-1], [3], [0], [1]), {}, "query_node[0] is 0; it must be a leaf with one query"),
        (TreeSpec([-1], [3], [0]), {"mask": "words"}, "room is 2; it must be at least 0, and needs a method with"),
        (TreeSpec([-1], [3], [0]), {"room": -1}, "room is -1"),
    ],
)
def test_room_that_cannot_be_had_is_refused(tree, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_tree(tree, "deft:flatten", **{"room": 2, **options, **SHAPE})
