"""The choice of ``"auto"``: by the data of the device, from estimates that agree with real partitions, and told."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from treewise.attention import run_plan
from treewise.bench.fit import Measured, fit, fit_costs, judge, non_negative_least_squares
from treewise.bench.trees import find_trees
from treewise.plan import cost, partition, plan_tree
from treewise.plan.cost import COEFFICIENTS, FEATURES, MARGIN, Costs, Layer, costs_for, read_costs
from treewise.plan.cut import Task, cut
from treewise.plan.cut import _rows_and_chunk as rows_and_chunk
from treewise.plan.layout import lay_out

SHAPE = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
TREES = find_trees("1/20:500/16,1/2/4/8/16/32/64/128:16/8/4/4/4/4/4/4,8:300,1:2000,300+20,1/3/40:500/80/3,causal:90")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for the user's data; what was read before is forgotten, and again afterwards."""
    monkeypatch.setenv("TREEWISE_CACHE", str(tmp_path))
    costs_for.cache_clear()
    yield tmp_path / "costs"
    costs_for.cache_clear()


def write(folder, name="cpu.json", kind="cpu", device="cpu", size=0, **coefficients):
    folder.mkdir(exist_ok=True)
    content = {"device": device, "kind": kind, "multiprocessors": size}
    content["microseconds"] = dict.fromkeys(COEFFICIENTS[kind], 0.0) | coefficients
    (folder / name).write_text(json.dumps(content))
    costs_for.cache_clear()
    return content


def test_the_pick_follows_the_data_and_says_why(folder):
    tree = TREES["1/20:500/16"]
    assert plan_tree(tree, **SHAPE).method == "deft:flatten"
    write(folder, partials=1000.0, merge=1.0, item_products=0.1)  # nothing is dear but partial results
    plan = plan_tree(tree, **SHAPE)
    assert plan.method == "radix"
    told = re.fullmatch(
        r"radix: predicted deft:flatten ([\d.]+) us, deft:node_chunk ([\d.]+) us, radix ([\d.]+) us "
        r"\(the first unless another needs 20% less\), from times measured on cpu",
        plan.why,
    )
    assert told and float(told[3]) < 0.9 * float(told[1]) and float(told[3]) < float(told[2])
    write(folder, item_keys=1000.0, batch_keys=1000.0)
    assert plan_tree(tree, **SHAPE).method.startswith("deft:")
    assert plan_tree(tree, "radix", **SHAPE).why == "asked for by name"


def test_words_are_only_for_methods_that_have_them(folder):
    write(folder, partials=1000.0)
    plan = plan_tree(TREES["1/20:500/16"], mask="words", **SHAPE)
    assert plan.method.startswith("deft:") and "radix" not in plan.why


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": ""}, "device is ''; it must be a name"),
        ({"kind": "tpu"}, "kind is 'tpu'; it must be one of cuda, cpu"),
        ({"multiprocessors": 1.5}, "multiprocessors is 1.5; it must be a whole number of at least 0"),
        ({"microseconds": [1]}, "microseconds is [1]; it must be an object with a number for each feature"),
        ({"microseconds": {"item": -2.0}}, "microseconds.item is -2.0; it must be a number of at least 0"),
        ({"microseconds": {"item": float("nan")}}, "microseconds.item is nan; it must be a number of at least 0"),
        ({"microseconds": {"item": None}}, "microseconds.item is None; it must be a number of at least 0"),
        ({"microseconds": {"items": 2.0}}, "microseconds.items is 2.0; it must be one of call, row, item,"),
    ],
)
def test_malformed_data_are_refused(folder, change, message):
    content = write(folder)
    if isinstance(change.get("microseconds"), dict):
        change = {"microseconds": content["microseconds"] | change["microseconds"]}
    path = folder / "cpu.json"
    path.write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        plan_tree(TREES["8:300"], **SHAPE)


def test_data_that_are_cut_short_are_refused(folder):
    content = write(folder)
    path = folder / "cpu.json"
    path.write_text(json.dumps(content)[:-9])
    with pytest.raises(ValueError, match=re.escape(f"{path}: not JSON: ")):
        read_costs(path)
    del content["microseconds"]["item"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(f"{path}: microseconds.item is None")):
        read_costs(path)


def test_an_unknown_device_gets_the_data_of_the_nearest_one_and_says_so(folder, monkeypatch):
    gpu = torch.device("cuda")
    write(folder, "small.json", "cuda", "Small", 10, launch=1.0)
    write(folder, "large.json", "cuda", "Large", 200, launch=2.0)
    monkeypatch.setattr(cost, "describe", lambda device: ("Odd", 30))
    costs, source = costs_for(gpu)
    assert (costs.device, source) == ("Small", "Small, of what is known nearest to Odd")
    monkeypatch.setattr(cost, "describe", lambda device: ("Large", 200))
    costs_for.cache_clear()
    assert costs_for(gpu)[1] == "Large"
    write(folder, "nvidia-h200.json", "cuda", "NVIDIA H200", 132, launch=77.0)  # the user's comes first
    monkeypatch.setattr(cost, "describe", lambda device: ("NVIDIA H200", 132))
    assert costs_for(gpu)[0].microseconds["launch"] == 77.0


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_estimates_agree_with_the_partitions(tree, device):
    spec = TREES[tree]
    layout = lay_out(spec, np.arange(spec.num_tokens, dtype=np.int32), None)
    layer = Layer(torch.device(device), 32, 8, 128, torch.float16, torch.float16, "triton")
    task = Task(layout, layer, None, None, None)
    step = partition.cutting_step(layer.device, None)
    by_node, by_query = (rows_and_chunk(method, task) for method in ("deft:node_chunk", "radix"))
    for estimate, made in (
        (cost.work_by_node(layout, *by_node), partition.by_node(layout, None, *by_node, step)),
        (cost.work_by_query(layout, None, *by_query), partition.by_query(layout, None, *by_query, step)),
    ):
        guess = FEATURES[device](estimate, layer)
        real = FEATURES[device](cost.work_of_items(made.items, spec.num_tokens, made.bounds), layer)
        assert sorted(guess) == sorted(COEFFICIENTS[device])
        for name in guess:
            if name != "masked":
                slack = 1.0 if tree == "causal:90" else 0.35  # what a causal chunk does not see is not estimated
                assert guess[name] == pytest.approx(real[name], rel=slack, abs=0.02), name


@pytest.mark.parametrize("tree", ["1:16000", "8:2000", "32:1000", "64:200"])
@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (16, 1)])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_where_nothing_is_shared_a_gpu_decodes_plainly(tree, heads, backend):
    spec = find_trees(tree)[tree]
    layout = lay_out(spec, np.arange(spec.num_tokens, dtype=np.int32), None)
    layer = Layer(torch.device("cuda"), *heads, 128, torch.float16, torch.float16, backend)
    task = Task(layout, layer, None, None, None)
    chosen = cut("auto", task, "intervals").partition
    lone = chosen.items[:, :2]
    assert (lone[:, 1] - lone[:, 0] == 1).all()  # a sequence an item
    assert (chosen.items[:, 4] == chosen.items[:, 3]).all()  # and no mask


@pytest.mark.parametrize(
    ("tree", "heads", "expected"),
    [
        ("1/4:100/10", (9, 3), "deft:flatten"),  # measured: 173 us, radix 278
        ("1/4:100/10", (14, 2), "deft:flatten"),  # measured: 169 us, radix 230
        ("1/128:16/8", (9, 3), "radix"),  # measured: 1.4 ms, flatten 1.6
        ("1/2/4/8/16/32/64/128:16/8/4/4/4/4/4/4", (8, 8), "deft:flatten"),  # measured: 1.9 ms, radix 3.6
        ("1/20:500/16", (9, 3), "deft:flatten"),
    ],
)
def test_a_cpu_gets_what_was_measured_to_be_faster_there(tree, heads, expected):
    plan = plan_tree(find_trees(tree)[tree], num_heads=heads[0], num_kv_heads=heads[1], head_dim=64)
    assert plan.method == expected, plan.why


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("favoured", ["item_products", "batch", "item_keys"])
def test_whatever_is_chosen_is_right(folder, tree, favoured):
    write(folder, **{favoured: 1.0})
    spec = TREES[tree]
    q = torch.randn(spec.num_queries, 9, 64)
    k, v = (torch.randn(spec.num_tokens, 3, 64) for _ in range(2))
    out = run_plan(plan_tree(spec, **SHAPE), q, k, v)
    torch.testing.assert_close(out, run_plan(plan_tree(spec, "reference", **SHAPE), q, k, v), rtol=1e-5, atol=1e-5)


def test_the_fit_finds_the_coefficients_that_made_the_times():
    rng = np.random.default_rng(0)
    names = COEFFICIENTS["cpu"]
    truth = rng.uniform(0.5, 5, len(names))
    truth[2] = 0
    rows = []
    for number in range(60):
        amounts = rng.uniform(0, 10, len(names))
        method = ("radix", "deft:flatten")[number % 2]
        features = dict(zip(names, amounts.tolist(), strict=True))
        rows.append(Measured("9,3", str(number // 2), method, features, float(amounts @ truth)))
    found = fit_costs("cpu", rows)
    assert [found[name] for name in names] == pytest.approx(truth, rel=1e-2, abs=1e-2)
    quality, table = judge(Costs("cpu", "cpu", 0, found), rows)
    assert quality["worst_error"] < 0.01 and quality["worst_loss"] < 1 / (1 - MARGIN["cpu"]) - 1 and len(table) == 30
    negative = non_negative_least_squares(np.array([[1.0, 2.0], [1.0, 1.0], [0.0, 1.0]]), np.array([1.0, 1.0, -1.0]))
    assert negative.tolist() == pytest.approx([1.0, 0.0])


def test_the_command_measures_fits_and_keeps_what_auto_then_uses(folder, capsys):
    fit(trees="1:20,1/4:20/5,2/6:30/4", heads="4,2 3,3", repeats=5)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["measured"]) == 3 * 2 * 3 and result["file"] == str(folder / "cpu.json")
    costs_for.cache_clear()
    assert dict(costs_for(torch.device("cpu"))[0].microseconds) == result["microseconds"]
    for arguments, message in (
        ({"device": "tpu"}, "device: 'tpu' is not one of"),
        ({"dtype": "int8"}, "dtype: 'int8'"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(**arguments)
