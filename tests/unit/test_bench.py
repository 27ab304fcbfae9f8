"""Benchmarks: trees of the right shape, times in seconds, a last line of JSON."""

import importlib.util
import json
import math
import sys

import numpy as np
import pytest
import torch

from treewise.bench.floors import Machine
from treewise.bench.measure import check_device, copy_bandwidth, describe_machine, time_calls
from treewise.bench.peers import PEERS, FlashInferCascade
from treewise.bench.summary import add_ratios, geometric_means
from treewise.bench.trees import TREES, drafted_tree, find_trees, level_tree, paths, visible_lengths, visible_slots
from treewise.cli import main

SMALL = {"--trees": "1/3:40/2,1/2/4:8/3/1", "--heads": "4,2", "--head-dim": "16", "--repeats": "1"}


def test_level_tree():
    tree = level_tree([1, 2, 4], [10, 5, 1])
    assert tree.parent.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert tree.length.tolist() == [10, 5, 5, 1, 1, 1, 1]
    assert tree.query_node.tolist() == [3, 4, 5, 6]
    assert find_trees("1/2/4:10/5/1")["1/2/4:10/5/1"].parent.tolist() == tree.parent.tolist()


def test_drafted_tree():
    tree = drafted_tree(100, 64)
    assert tree.num_tokens == 164 and tree.num_queries == 64
    assert all(tree.parent[node] < node for node in range(tree.num_nodes))


def test_named_trees_exist():
    assert {name: len(find_trees(name)) for name in TREES} == {name: len(trees) for name, trees in TREES.items()}
    assert len(TREES["fasttree"]) == 13 and len(TREES["deft"]) == 8
    for large in find_trees("large").values():
        assert 2 * large.num_tokens * 8 * 128 * 2 > 100e6
    assert len(find_trees("fasttree,deft,prefill,large,unshared,drafted,4000+64")) == 27  # the last two are in deft
    for wrong in ("few", "1/2:3", "2/1:1/1", "0:1", "causal:0", "0+4", "4+0", ""):
        with pytest.raises(ValueError, match="few-shot"):
            find_trees(wrong)


def test_what_queries_see():
    tree = level_tree([1, 2, 4], [3, 2, 1])
    assert paths(tree) == [[0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 6]]
    assert [slots.tolist() for slots in visible_slots(tree)][1:3] == [[0, 1, 2, 3, 4, 8], [0, 1, 2, 5, 6, 9]]
    prompt = find_trees("causal:5")["causal:5"]
    assert visible_lengths(prompt).tolist() == [1, 2, 3, 4, 5] == [len(slots) for slots in visible_slots(prompt)]


def test_levels_of_a_cascade():
    tree = level_tree([1, 2, 4], [3, 2, 1])
    rows, pages, slots, last = FlashInferCascade()._level(tree, np.array([1, 1, -1, -1, 2]))
    assert rows.tolist() == [0, 2, 3, 4, 5] and pages.tolist() == [0, 2, 2, 2, 4]
    assert slots.tolist() == [3, 4, 5, 6] and last.tolist() == [1, 0, 0, 1]


def test_timing():
    calls = []
    seconds = time_calls(lambda: calls.append(1), torch.device("cpu"), 3)
    assert len(seconds) == 3 and len(calls) == 5
    assert all(0 <= value < 1 for value in seconds)


def test_machine():
    assert describe_machine(torch.device("cpu"))["versions"]["torch"] == torch.__version__
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cpu"):
            check_device("cuda")


def bench_attention(*arguments):
    """Run the benchmark on small trees, unless the arguments say otherwise."""
    flags = SMALL | dict(zip(arguments[::2], arguments[1::2], strict=True))
    main(["bench", "attention", *(word for flag in flags.items() for word in flag)])


def run_attention(capsys, *arguments):
    """Run the benchmark; return its last line, read, and what it said on standard error."""
    bench_attention(*arguments)
    captured = capsys.readouterr()
    return json.loads(captured.out.splitlines()[-1]), captured.err


def test_attention_bench_ends_in_json(capsys, tmp_path):
    result, table = run_attention(capsys, "--methods", "all", "--peers", "sdpa", "--json", str(tmp_path / "x.json"))
    assert json.loads((tmp_path / "x.json").read_text()) == result
    assert len(result["results"]) == 18 and "geometric mean of 2" in table
    assert all(row["error"] < 1e-5 and row["note"] is None for row in result["results"])
    assert result["copy_gb_per_s"] > 0 and result["machine"]["versions"]["treewise"]
    ours = next(row for row in result["results"] if row["method"] == "deft:flatten")
    theirs = next(row for row in result["results"] if row["method"] == "sdpa")
    assert ours["best_peer"] == "sdpa" and ours["plan_us"] > 0 and theirs["plan_us"] is None
    assert ours["why"] == "asked for by name"
    assert ours["against_peer"] == pytest.approx(theirs["run_us"] / ours["run_us"])
    assert ours["of_floor"] == pytest.approx(ours["run_us"] / ours["practical_floor_us"])
    assert ours["practical_floor_us"] >= ours["flop_floor_us"] > 0 < ours["floor_us"]
    assert result["geometric_means"]["deft:flatten"]["trees"] == 2


@pytest.mark.parametrize("trees", ["32+6", "causal:30", "3:20"])
def test_sdpa_serves_every_tree(capsys, trees):
    result, _ = run_attention(capsys, "--methods", "auto", "--peers", "sdpa", "--trees", trees)
    assert [row["method"] for row in result["results"]] == ["auto", "sdpa"]
    assert "predicted" in result["results"][0]["why"]
    assert all(row["error"] < 1e-5 for row in result["results"])


def test_methods_run_on_the_backends_that_are_asked_for(capsys):
    result, _ = run_attention(capsys, "--methods", "radix,auto", "--backends", "cpu,reference", "--trees", "1/4:20/5")
    names = [row["method"] for row in result["results"]]
    assert names == ["radix on cpu", "radix on reference", "auto on cpu", "auto on reference"]
    assert all(row["error"] < 1e-5 for row in result["results"])


def test_what_cannot_run_is_said(capsys, monkeypatch):
    monkeypatch.setattr("treewise.bench.attention.MOST_PAIRS", 10)
    monkeypatch.setattr("treewise.bench.peers.COPY_LIMIT", {"cpu": 0})
    result, said = run_attention(capsys, "--methods", "medusa,radix", "--peers", "sdpa")
    assert "medusa did not run on 1/3:40/2" in said
    assert [row["note"] is None for row in result["results"]] == [False, True, False] * 2
    assert "reads scores of every pair" in result["results"][0]["note"] and "copy" in result["results"][2]["note"]
    assert result["geometric_means"]["medusa"] == {"trees": 0, "run_us": None, "of_floor": None, "against_peer": None}


def test_a_missing_peer_is_reported(capsys, monkeypatch):
    result, said = run_attention(capsys, "--methods", "radix", "--peers", "all")
    assert set(result["missing"]) == set(PEERS) - {"sdpa"}
    assert "sglang is left out: needs a CUDA device" in said
    monkeypatch.setattr(PEERS["fasttree"], "module", "no_such_module", raising=False)
    assert "no_such_module" in PEERS["fasttree"].missing(torch.device("cuda"))


def test_peers_are_found_in_folders_of_the_path(capsys, monkeypatch, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "found_only_there.py").write_text("")
    monkeypatch.setattr("sys.path", [*sys.path])
    run_attention(capsys, "--methods", "radix", "--peers-path", str(tmp_path))
    assert importlib.util.find_spec("found_only_there")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "fast"], "peers: 'fast' is not one of all, sdpa, fasttree"),
        (["--methods", "best"], "methods: 'best' is not one of all, flash_decoding"),
        (["--heads", "3,2"], "3 query heads cannot share 2 KV heads evenly"),
        (["--peers-path", "nowhere"], "peers-path: 'nowhere' is no folder"),
    ],
)
def test_wrong_words_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit):
        bench_attention(*arguments)
    assert message in capsys.readouterr().err


def test_ratios_leave_out_what_is_wrong():
    facts = {"tree": "one", "practical_floor_us": 10.0}
    rows = [
        {"method": "ours", "peer": False, "run_us": 20.0, "error": 0.0, **facts},
        {"method": "right", "peer": True, "run_us": 30.0, "error": 1e-4, **facts},
        {"method": "wrong", "peer": True, "run_us": 1.0, "error": math.nan, **facts},
        {"method": "broken", "peer": True, "run_us": None, "error": None, **facts},
    ]
    add_ratios(rows)
    assert rows[0]["against_peer"] == 1.5 and rows[0]["of_floor"] == 2 and rows[3]["of_floor"] is None
    mean = {"trees": 1, "run_us": 20, "of_floor": 2, "against_peer": 1.5}
    assert geometric_means(rows)["ours"] == pytest.approx(mean)


def test_a_chart_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    run_attention(capsys, "--methods", "radix,auto", "--peers", "sdpa", "--png", str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_needs_matplotlib(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench_attention("--png", "x.png")
    assert "pip install 'treewise[bench]'" in capsys.readouterr().err


@pytest.mark.gpu
def test_rates_of_a_gpu():
    place = torch.device("cuda")
    assert copy_bandwidth(place) > 1e11
    machine = Machine(place, torch.float16)
    assert 1e-6 < machine.read_time(2**12) < machine.read_time(2**28) < 2**28 / 1e11
