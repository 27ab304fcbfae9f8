"""Replay of recorded trees on a made-up model."""

from __future__ import annotations

import pytest
import torch
from language_model import grow, random_model

from treewise.controller import Leaf, Replay, TreeView
from treewise.replay import Schedule

MODEL = random_model(17)
NODES = [[-2, 0, [1, 2, 3]], [1, 1, []], [1, 3, [4, 5]], [1, 6, []], [4, 5, []], [4, 7, []]]
SCHEDULE = Schedule.from_json(NODES)


def greedy_path(tokens, count):
    for _ in range(count):
        tokens = [*tokens, int(MODEL(tokens).argmax())]
    return tokens


def test_a_recorded_tree_is_repeated_branch_by_branch():
    seen = []

    def watched(tokens):
        seen.append(tuple(tokens))
        return MODEL(tokens)

    finished, live = grow(watched, Replay(SCHEDULE), [1, 2, 3])
    assert not finished
    [leaf] = live  # the last one of the recording stays
    assert leaf.path[1:] == (1, 1)
    # Steps 0 to 7: the prompt, then as many leaves as spans are under way.
    lengths = [len(tokens) - 3 for tokens in seen]
    assert [lengths.count(depth) for depth in range(8)] == [1, 3, 2, 2, 3, 3, 2, 1]
    first = MODEL([1, 2, 3]).topk(3).indices.tolist()
    trunk = greedy_path([1, 2, 3, first[1]], 2)
    second = MODEL(trunk).topk(2).indices.tolist()
    assert [1, 2, 3, *leaf.tokens] == greedy_path([*trunk, second[1]], 3)
    assert tuple(greedy_path([*trunk, second[0]], 1)) in seen
    assert tuple(greedy_path([1, 2, 3, first[2]], 5)) in seen


def test_one_object_drives_many_trees():
    controller = Replay(SCHEDULE)
    for prompt in ([1, 2, 3], [4], [5, 5]):
        assert grow(MODEL, controller, prompt)[1] == grow(MODEL, Replay(SCHEDULE), prompt)[1]


def test_a_node_without_tokens_takes_a_rank_and_no_row():
    schedule = Schedule.from_json([[0, 0, [1, 2]], [1, 0, []], [1, 2, []]])
    _, [leaf] = grow(MODEL, Replay(schedule), [1])
    assert leaf.tokens[0] == int(MODEL([1]).topk(2).indices[1])
    assert [1, *leaf.tokens] == greedy_path([1, leaf.tokens[0]], 1)


def test_a_tree_that_left_the_recording_is_refused():
    with pytest.raises(ValueError, match="1 leaves recorded at step 0, 2 in the tree"):
        grow(MODEL, Replay(SCHEDULE), [1], num_roots=2)


def test_a_long_recording_can_be_cut_short():
    finished, live = grow(MODEL, Replay(SCHEDULE, max_tokens=5), [1])
    assert not live
    assert [leaf.num_tokens for leaf in finished] == [5, 5, 5]


def test_a_node_with_more_children_than_there_are_tokens_is_refused():
    with pytest.raises(ValueError, match="Replay: a node branches in 9, more than the vocabulary's 4 tokens"):
        replay = Replay(Schedule.few_shot(5, 9, 3))
        replay.step(TreeView([Leaf()], torch.zeros(1, 4)), torch.zeros(1, 4))
