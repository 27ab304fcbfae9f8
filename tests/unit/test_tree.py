"""The forest: links, cuts, matches."""

import pytest

from treewise.tree import Forest


def build() -> tuple[Forest, dict]:
    forest = Forest()
    root = forest.add(None, [1, 2, 3, 4])
    left, right = forest.add(root, [5, 6]), forest.add(root, [5, 7, 8])
    return forest, {"root": root, "left": left, "right": right}


def test_positions_follow_the_path():
    forest, nodes = build()
    assert nodes["right"].start == 4 and nodes["right"].end == 7
    assert forest.path_tokens(nodes["right"]) == [1, 2, 3, 4, 5, 7, 8]
    forest.check_integrity()


def test_split_keeps_every_path_and_the_lower_node_keeps_its_identity():
    forest, nodes = build()
    nodes["root"].computed = 3
    nodes["root"].holders = 1
    upper = forest.split(nodes["root"], 2)
    assert (upper.tokens, upper.computed, upper.holders) == ([1, 2], 2, 0)
    assert (nodes["root"].tokens, nodes["root"].computed, nodes["root"].holders) == ([3, 4], 1, 1)
    assert forest.path_tokens(nodes["left"]) == [1, 2, 3, 4, 5, 6]
    assert forest.roots == [upper]


@pytest.mark.parametrize("at", [0, 4, -1, 9])
def test_split_outside_the_node_is_refused(at):
    forest, nodes = build()
    with pytest.raises(ValueError, match="at:"):
        forest.split(nodes["root"], at)


def test_extend_grows_in_place_only_for_a_single_holder_without_children():
    forest, nodes = build()
    left = nodes["left"]
    left.holders = 1
    assert forest.extend(left, [9]) is left and left.tokens == [5, 6, 9]
    left.holders = 2
    child = forest.extend(left, [10])
    assert child.parent is left and left.tokens == [5, 6, 9]
    left.holders = 1  # it has a child now
    assert forest.extend(left, [11]) is not left


def test_match_takes_the_longest_of_several_children_that_agree():
    forest, nodes = build()
    assert forest.match([1, 2, 3, 4, 5, 7, 9]) == (nodes["right"], 2, 6)
    assert forest.match([1, 2, 9]) == (nodes["root"], 2, 2)
    assert forest.match([1, 2, 3, 4, 5, 6, 7]) == (nodes["left"], 2, 6)
    assert forest.match([2]) == (None, 0, 0)


def test_remove_refuses_what_is_in_use():
    forest, nodes = build()
    with pytest.raises(ValueError, match="in use"):
        forest.remove(nodes["root"])
    nodes["left"].holders = 1
    with pytest.raises(ValueError, match="in use"):
        forest.remove(nodes["left"])
    forest.remove(nodes["right"])
    assert [node.id for node in forest] == [nodes["root"].id, nodes["left"].id]


def test_a_node_holds_at_least_one_token():
    with pytest.raises(ValueError, match="tokens"):
        Forest().add(None, [])
