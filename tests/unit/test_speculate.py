"""Guesses by themselves: token trees, the index of prompt lookup, what a grammar leaves, and how many pay."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treewise import Speculation
from treewise.config import MAX_TREE_SIZE
from treewise.speculate.ngram import SuffixAutomaton
from treewise.speculate.pace import FORGOTTEN, LONGEST_REST, TRIALS, Pace
from treewise.speculate.trees import EMPTY, TokenTree, Topology, best_first

MEDUSA = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [0, 0, 1]]


def random_tree(draw: random.Random, size: int, tokens: int = 4) -> TokenTree:
    parents = [draw.randrange(-1, node) for node in range(size)]
    return TokenTree.of([draw.randrange(tokens) for _ in parents], parents, [draw.random() for _ in parents])


# ------------------------------------------------------------------ trees


def test_a_tree_knows_depth_and_reach_of_its_nodes():
    tree = TokenTree.of([1, 2, 3, 4], [-1, 0, 1, 0], [0.5, 0.5, 1.0, 0.25])
    assert tree.depths.tolist() == [1, 2, 3, 2] and tree.reach.tolist() == [0.5, 0.25, 0.25, 0.125]
    assert tree.path(2) == [1, 2, 3] and len(EMPTY) == 0 and EMPTY.accepted([5]) == []


@pytest.mark.parametrize(("tokens", "parents"), [([1, 2], [-1]), ([1], [0]), ([1, 2], [1, -1]), ([1], [-2])])
def test_trees_out_of_order_are_refused(tokens, parents):
    with pytest.raises(ValueError, match="parents"):
        TokenTree.of(tokens, parents)


def test_the_accepted_path_may_go_through_any_children():
    tree = TokenTree.of([5, 6, 7, 8, 9, 7], [-1, -1, 1, 1, 3, 0])
    assert tree.accepted([6, 0, 8, 0, 9, 3, 0]) == [1, 3, 4]  # second child, second child, first child
    assert tree.accepted([5, 1, 0, 0, 0, 0, 0]) == [0]
    assert tree.accepted([1, 5, 5, 5, 5, 5, 5]) == []


def test_of_twins_the_first_is_accepted():
    tree = TokenTree.of([5, 5, 6], [-1, -1, 1])
    assert tree.accepted([5, 6, 6, 0]) == [0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40), st.integers(1, 6))
def test_the_best_part_of_a_tree_is_a_tree_and_the_best(seed, nodes, size, room):
    tree = random_tree(random.Random(seed), nodes)
    best = tree.best(size, room)
    TokenTree.of(best.tokens, best.parents, best.probabilities)
    possible = np.sort(tree.reach[tree.depths <= room])[::-1]
    assert len(best) == min(size, len(possible))
    assert np.allclose(np.sort(best.reach)[::-1], possible[:size])
    paths = {tuple(tree.path(node)) for node in range(len(tree))}
    assert {tuple(best.path(node)) for node in range(len(best))} <= paths


def test_a_template_is_filled_by_rank():
    topology = Topology(MEDUSA)
    tree = topology.fill([[10, 11, 12], [20, 21, 22], [30, 31, 32]], [[0.5, 0.25, 0.125]] * 3)
    assert [tree.path(node) for node in range(len(tree))] == [
        [10], [10, 20], [11], [10, 21], [12], [10, 20, 30], [11, 20], [10, 22], [10, 20, 31],
    ]  # fmt: skip
    assert tree.reach[5] == 0.125 and (topology.depth, topology.width) == (3, 3)


def test_templates_are_checked_against_the_heads():
    deep = Topology([[0] * depth for depth in range(1, 6)])
    with pytest.raises(ValueError, match="5 tokens, but there are only 3 heads"):
        deep.fill([[1, 2]] * 3)
    with pytest.raises(ValueError, match="3 tokens at a place, but there are only 2"):
        Topology([[0], [2]]).fill([[1, 2]] * 3)
    with pytest.raises(ValueError, match="must come after"):
        Topology([[0, 0], [0]])
    with pytest.raises(ValueError, match="twice"):
        Topology([[0], [0]])
    with pytest.raises(ValueError, match="at least 0"):
        Topology([[-1]])
    with pytest.raises(ValueError, match=f"more than {MAX_TREE_SIZE}"):
        Topology([[rank] for rank in range(MAX_TREE_SIZE + 1)])


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_the_tree_of_independent_places_is_the_likeliest_of_its_size(size):
    draw = np.random.default_rng(size)
    likely = -np.sort(-draw.random((4, 5)) * 0.6, axis=1)
    tree = best_first(np.arange(20).reshape(4, 5), likely, size)
    reaches, level = [], np.ones(1)
    for row in likely:
        level = np.outer(level, row).ravel()
        reaches.append(level)
    every = np.sort(np.concatenate(reaches))[::-1]
    assert len(tree) == min(size, len(every)) and np.allclose(np.sort(tree.reach)[::-1], every[:size])
    assert all(token // 5 == depth - 1 for token, depth in zip(tree.tokens, tree.depths, strict=True))


def test_certain_and_impossible_tokens():
    assert best_first([[1, 2]], [[1.0, 0.0]], 5).tokens.tolist() == [1, 2]
    assert best_first([[1, 2]] * 2, [[0.0, 0.0]] * 2, 3).tokens.tolist() == [1, 1]
    assert len(best_first(np.zeros((0, 3)), np.zeros((0, 3)), 4)) == 0


# ------------------------------------------------------------------ prompt lookup


def longest_known_ending(text: list[int]) -> int:
    """How long the longest ending is that also stands earlier in the text."""
    for length in range(len(text) - 1, 0, -1):
        ending = text[-length:]
        if any(text[end - length : end] == ending for end in range(length, len(text))):
            return length
    return 0


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40))
def test_the_automaton_knows_the_longest_ending_that_was_there_before(text):
    automaton, state = SuffixAutomaton(), 0
    for length, token in enumerate(text, 1):
        state = automaton.append(state, token)
        assert automaton.length[state] == length
        assert automaton.length[automaton.link[state]] == longest_known_ending(text[:length])
    assert len(automaton) <= 2 * len(text) + 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 2), max_size=8)), max_size=8))
def test_forks_share_what_they_have_in_common(forks):
    """Texts that branch off anywhere: all their substrings are there, and nothing else."""
    automaton = SuffixAutomaton()
    texts: list[tuple[list[int], list[int]]] = [([], [0])]  # tokens, and the state behind each
    for origin, tokens in forks:
        above, states = texts[origin % len(texts)]
        at = origin % len(states)
        text, own = above[:at], states[: at + 1]
        for token in tokens:
            own.append(automaton.append(own[-1], token))
            text = [*text, token]
        texts.append((text, own))
        assert [automaton.length[state] for state in own] == list(range(len(own)))
    known = {tuple(text[i:j]) for text, _ in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    reached, stack = set(), [((), 0)]
    while stack:
        text, state = stack.pop()
        for token, below in automaton.following[state].items():
            reached.add((*text, token))
            stack.append(((*text, token), below))
    assert reached == known


def test_what_followed_most_often_comes_first_then_what_followed_last():
    automaton = SuffixAutomaton()
    end = automaton.extend(0, [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2])
    tree = automaton.guess(end, 4, 1)
    assert tree.tokens.tolist()[:2] == [3, 4] and set(tree.parents.tolist()) == {-1}
    end = automaton.extend(0, [5, 6, 1, 5, 6, 2, 5, 6])
    assert automaton.guess(end, 2, 1).tokens.tolist() == [2, 1]


def test_a_repeated_text_is_guessed_in_one_chain():
    automaton, text = SuffixAutomaton(), list(range(100, 160))
    end = automaton.extend(0, [*text, 7, *text[:20]])
    tree = automaton.guess(end, 16, 100)
    assert tree.path(15) == text[20:36] and tree.reach[0] > 0.8
    assert automaton.guess(end, 16, 3).depths.tolist() == [1, 2, 3]
    assert len(automaton.guess(automaton.append(end, 999), 8, 8)) == 0  # never seen


def test_long_runs_of_one_token_take_no_longer():
    automaton = SuffixAutomaton()
    state = automaton.extend(0, [1] * 20_000)
    assert len(automaton) == 20_001
    assert automaton.guess(state, 8, 8).path(7) == [1] * 8


# ------------------------------------------------------------------ how many pay


def measured(costs: dict[int, float]) -> Pace:
    pace = Pace()
    for size, seconds in costs.items():
        for _ in range(TRIALS):
            pace.stepped(size, seconds)
    return pace


def test_as_many_guesses_as_bring_most_tokens_a_second():
    reach = np.array([0.9**depth for depth in range(1, 16)])
    flat = dict.fromkeys((1, 2, 3, 4, 6, 8, 12, 16), 1.0)
    assert measured(flat).choose(reach, 1, 1) == 15
    assert measured(flat | {16: 5.0, 12: 5.0}).choose(reach, 1, 1) == 7
    assert measured({size: float(size) for size in flat}).choose(reach, 1, 1) == 0
    assert measured(flat).choose(np.zeros(0), 1, 1) == 0


def test_sizes_that_were_never_seen_are_tried_step_by_step():
    reach = np.full(63, 0.5)
    pace, sizes = Pace(), []
    for _ in range(60):
        rows = 1 + pace.choose(reach, 1, 1)
        sizes.append(rows)
        pace.stepped(rows, 1.0 + 0.01 * rows)
    assert sizes[:4] == [2, 2, 2, 4] and sizes[-1] == 64
    assert all(after <= 2 * before for before, after in pairwise(sizes))
    pace, sizes = Pace(), []
    for _ in range(60):
        rows = 1 + pace.choose(reach, 1, 1)
        sizes.append(rows)
        pace.stepped(rows, 1.0 if rows <= 8 else rows / 2)
    assert max(sizes) <= 16 and sizes[-1] == 8 and sizes.count(16) <= TRIALS


def test_what_is_not_seen_for_long_is_forgotten():
    pace = measured({1: 1.0, 2: 9.0})  # something held up the steps of two rows
    reach = np.array([0.9])
    assert pace.choose(reach, 1, 1) == 0
    for _ in range(FORGOTTEN + 1):
        pace.stepped(1, 1.0)
    assert pace.choose(reach, 1, 1) == 1


def test_a_drafter_whose_word_does_not_come_true_is_asked_less_and_less():
    pace, asked = measured({1: 1.0, 2: 1.5, 4: 1.6, 8: 1.8}), []
    reach = np.full(7, 0.5)
    for step in range(2000):
        if pace.resting:
            pace.pass_by()
            continue
        if count := pace.choose(reach, 1, 1):
            asked.append(step)
            pace.verified([reach[:count]], [0])
    assert pace.trust < 0.1 and len([step for step in asked if step > 1000]) <= 1000 // LONGEST_REST + 1
    assert any(step > 1000 for step in asked)  # it is tried again now and then
    while pace.choose(reach, 1, 1) == 0:
        while pace.resting:
            pace.pass_by()
        for _ in range(60):  # now it is right
            pace.verified([reach], [4])
    assert pace.trust > 0.9


def test_time_for_guessing_counts():
    pace = measured({1: 1.0, 2: 1.1})
    reach = np.array([0.5])
    for _ in range(100):
        assert pace.choose(reach, 1, 1) == 1 and not pace.resting
    pace.drafted(0.9)
    while not pace.resting:
        assert pace.choose(reach, 1, 1) == 1  # they are there now, but no more are to be made


def test_a_weak_guess_now_and_then_is_no_reason_to_rest():
    pace = measured({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3})
    for step in range(300):
        count = pace.choose(np.array([0.05] if step % 3 else [0.9, 0.8, 0.7]), 1, 1)
        assert count == (0 if step % 3 else 3) and not pace.resting


def test_rest_that_is_faster_than_steps_without_guesses_is_taken():
    """As on a GPU, where a step of rest begins before the last one has ended."""
    pace, reach = measured({1: 1.0, 2: 1.4}), np.array([0.2])
    for _ in range(TRIALS):
        pace.stepped(1, 1.3, bare=True)
    steps = 0
    while not pace.resting:
        assert pace.choose(reach, 1, 1) == 0
        steps += 1
    assert steps < 20


def test_settings_are_checked():
    assert Speculation("ngram", 256).tree_size == 256
    for size in (0, 257, 2.5):
        with pytest.raises(ValueError, match="tree_size"):
            Speculation("ngram", size)
