"""Recorded trees: their schedules, the input that is refused, and the published bytes of keys and values."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
import torch

from treewise.plan import plan_tree
from treewise.replay import Schedule, drafted_parents, load_recordings, total_io

SHARED = Path(os.environ.get("TREEWISE_SHARED", Path(__file__).parents[2].parent / "shared"))
RECORDINGS = SHARED / "data" / "deft_trees.json.gz"
needs_recordings = pytest.mark.skipif(not RECORDINGS.exists(), reason="the recorded trees are not beside the checkout")

# As the paper counts: two bytes, all query heads, 32 layers, re-reads left out.
PAPER = {"num_heads": 32, "num_kv_heads": 32, "head_dim": 128, "dtype": torch.float16}
SMALL = [[-2, 0, [1, 2]], [1, 1, []], [1, 2, [3, 4]], [3, 4, []], [3, 3, []]]


def terabytes(schedules, method):
    mean = sum(total_io(schedule, method, **PAPER).kv_once for schedule in schedules) / len(schedules)
    return 32 * mean / 1e12


def test_a_schedule_tells_who_lives_branches_and_ends():
    schedule = Schedule.from_json(SMALL)
    assert (schedule.prompt_tokens, schedule.num_steps) == (3, 4)
    assert schedule.branches(0) == {0: (1, 2)} and schedule.branches(2) == {2: (3, 4)}
    assert schedule.pruned(1) == [1] and schedule.pruned(4) == [3]
    assert [schedule.live(step) for step in range(1, 5)] == [[1, 2], [2], [3, 4], [3]]
    assert list(schedule.phases()) == [(1, 1), (2, 2), (3, 3), (4, 4)]
    tree = schedule.at(3)
    assert tree.parent.tolist() == [-1, 0, 1, 1] and tree.length.tolist() == [3, 2, 1, 1]
    assert tree.query_node.tolist() == [2, 3]
    assert schedule.at(4).length.tolist() == [3, 2, 2]


def test_phases_give_what_every_step_gives():
    schedule = Schedule.from_json(
        [[-9, 0, [1, 2, 3]], [1, 40, []], [1, 7, [4, 5]], [1, 19, []], [8, 30, []], [8, 8, []]]
    )
    for method in ("deft:node", "radix"):
        steps = [schedule.at(step) for step in range(1, schedule.num_steps + 1)]
        expected = sum(plan_tree(tree, method, **PAPER).io().kv_once for tree in steps)
        assert total_io(schedule, method, **PAPER).kv_once == expected


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "needs a first node"),
        ({}, "must be a list"),
        ([[0, 1, []]], "node 0 is the prompt"),
        ([[0, 0, [1]], [1, "2", []]], r"node 1 must be \[start, end, children\]"),
        ([[0, 0, [1]], [1, 2.5, []]], r"node 1 must be \[start, end, children\]"),
        ([[0, 0, [1]]], "node 0 names child 1; nodes are 0 to 0"),
        ([[0, 0, [1]], [2, 3, []]], "node 1 must start at 1"),
        ([[0, 0, [1]], [1, -3, []]], "node 1 must end at its start"),
        ([[0, 0, [1, 1]], [1, 3, []]], "node 1 must come after its one parent"),
        ([[0, 0, []], [1, 3, []]], "node 1 is no node's child"),
    ],
)
def test_a_wrong_recording_is_refused(nodes, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_json(nodes)


def test_a_step_without_leaves_is_refused():
    with pytest.raises(ValueError, match="live in steps 1 to 4"):
        Schedule.from_json(SMALL).at(5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", "cannot read recordings"),
        (gzip.compress(b"{}", mtime=0)[:-4], "cannot read recordings"),
        (b'{"reasoning": {}}', "must hold 'reasoning' and 'speculative'"),
        (
            json.dumps(
                {
                    "reasoning": {"sort": [SMALL, [[0, 0, [7]]]]},
                    "speculative": {"topologies": {}, "accepted_lengths": [], "prompt_tokens": 1},
                }
            ).encode(),
            "tree 1 of sort: node 0 names child 7",
        ),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, content, message):
    path = tmp_path / ("trees.json.gz" if content[:2] == b"\x1f\x8b" else "trees.json")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_recordings(path)
    with pytest.raises(ValueError, match="cannot read recordings"):
        load_recordings(tmp_path / "missing.json")


def test_paths_of_ranks_become_parents():
    assert drafted_parents([[0], [1], [0, 0], [1, 0], [0, 0, 3]]) == [-1, -1, 0, 1, 2]
    with pytest.raises(ValueError, match=r"path \[1, 0\]"):
        drafted_parents([[0], [1, 0]])


@pytest.mark.parametrize(("width", "shared", "apart"), [(20, 1.68, 17.62), (30, 2.10, 26.43), (50, 2.94, 44.05)])
def test_few_shot_reads_the_published_bytes(width, shared, apart):
    schedule = [Schedule.few_shot(4000, width)]
    assert round(terabytes(schedule, "deft:flatten"), 2) == shared
    assert round(terabytes(schedule, "radix"), 2) == apart


@needs_recordings
@pytest.mark.parametrize(
    ("task", "steps", "shared", "apart"),
    [
        ("sorting", 4164.0, 12.40, 59.94),
        ("document", 2846.5, 10.57, 39.73),
        ("keyword", 525.6, 0.58, 4.68),
        ("set", 768.3, 1.04, 7.01),
    ],
)
def test_reasoning_reads_the_published_bytes(task, steps, shared, apart):
    schedules = load_recordings(RECORDINGS).reasoning[task]
    assert sum(schedule.num_steps for schedule in schedules) / len(schedules) == pytest.approx(steps)
    assert round(terabytes(schedules, "deft:node"), 2) == shared
    assert round(terabytes(schedules, "deft:flatten"), 2) == shared
    assert round(terabytes(schedules, "radix"), 2) == apart


@needs_recordings
@pytest.mark.parametrize(
    ("width", "shared", "apart"),
    [(32, 2.954, 93.735), (64, 2.979, 187.471), (128, 3.030, 374.942), (256, 3.131, 749.884)],
)
def test_speculation_on_a_star_reads_the_published_bytes(width, shared, apart):
    star = load_recordings(RECORDINGS).speculation([-1] * width)
    assert star.num_steps == 1507
    assert [tree.length[0] for tree in star][-1] + width == 5999 + width
    assert round(terabytes([star], "deft:flatten"), 3) == shared
    assert round(terabytes([star], "radix"), 3) == apart


@needs_recordings
def test_real_topologies_make_real_trees():
    recordings = load_recordings(RECORDINGS)
    for size, parents in recordings.topologies.items():
        assert len(parents) == size - 1
        tree = next(iter(recordings.speculation([-1, *(parent + 1 for parent in parents)])))
        assert tree.num_queries == size and tree.num_nodes == size + 1
