"""The file of recorded trees can be made from the authors' own."""

import importlib.util
import json
from pathlib import Path

from treewise.replay import load_recordings

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "record_trees.py"
SPEC = importlib.util.spec_from_file_location("record_trees", SCRIPT)
record_trees = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(record_trees)


def node(number, start, end, children=()):
    return {"id": number, "value": end - start + 1, "start": start, "end": end, "children": list(children)}


def test_shapes_are_read_from_a_checkout_of_the_authors_repository(tmp_path):
    trees, drafted = (tmp_path / "dataset" / "generation" / name for name in ("Reasoning", "Speculative_Decoding"))
    for folder in (trees, drafted):
        folder.mkdir(parents=True)
    nodes = {"1": node(1, 1, 3), "0": node(0, -4, 0, (1, 2)), "2": node(2, 1, 5)}
    recorded = [{"incompleted": True, "data": {}}, *[{"incompleted": False, "prompt": "?", "data": nodes}] * 12]
    for name in record_trees.TASKS.values():
        (trees / f"{name}.json").write_text(json.dumps(recorded), encoding="utf-8")
    for size in record_trees.SIZES:
        record = {"Tree_Structure": [[0], [1], [0, 0]], "Records": [{"Accept_length": [1, 4, 2]}]}
        (drafted / f"APPS_tree_size{size}.json").write_text(json.dumps(record), encoding="utf-8")
    file = tmp_path / "trees.json"
    file.write_text(json.dumps(record_trees.read(tmp_path)), encoding="utf-8")
    found = load_recordings(file)
    assert {task: len(trees) for task, trees in found.reasoning.items()} == dict.fromkeys(record_trees.TASKS, 10)
    tree = found.reasoning["set"][0]
    assert tree.prompt_tokens == 5 and tree.at(2).length.tolist() == [5, 2, 2] and tree.pruned(3) == [1]
    assert found.topologies == {size: [-1, -1, 0] for size in record_trees.SIZES} and found.accepted == [1, 4, 2]
