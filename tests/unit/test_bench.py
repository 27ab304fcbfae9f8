"""Benchmarks: trees of the right shape, times in seconds, a last line of JSON."""

import json

import pytest
import torch

from treewise.bench.measure import check_device, copy_bandwidth, describe_machine, time_calls
from treewise.bench.trees import TREES, drafted_tree, find_tree, level_tree
from treewise.cli import main


def test_level_tree():
    tree = level_tree([1, 2, 4], [10, 5, 1])
    assert tree.parent.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert tree.length.tolist() == [10, 5, 5, 1, 1, 1, 1]
    assert tree.query_node.tolist() == [3, 4, 5, 6]
    assert find_tree("1/2/4:10/5/1").parent.tolist() == tree.parent.tolist()


def test_drafted_tree():
    tree = drafted_tree(100, 64)
    assert tree.num_tokens == 164 and tree.num_queries == 64
    assert all(tree.parent[node] < node for node in range(tree.num_nodes))


def test_named_trees_exist():
    assert all(find_tree(name).num_queries for name in TREES)
    for wrong in ("few", "1/2:3", "2/1:1/1", "0:1"):
        with pytest.raises(ValueError, match="few-shot"):
            find_tree(wrong)


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


def test_attention_bench_ends_in_json(capsys):
    trees, shape = ["--trees", "1/3:40/2,1/2/4:8/3/1"], ["--heads", "4,2", "--head-dim", "16"]
    main(["bench", "attention", *trees, *shape, "--methods", "all", "--repeats", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["results"]) == 16
    assert all(row["error"] < 1e-5 for row in result["results"])
    assert result["copy_gb_per_s"] > 0 and result["machine"]["versions"]["treewise"]


@pytest.mark.gpu
def test_copy_bandwidth():
    assert copy_bandwidth(torch.device("cuda")) > 1e11
