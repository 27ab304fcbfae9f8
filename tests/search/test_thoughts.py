"""The programs over thoughts: what they try next, what they give up, and how they share out their work."""

from __future__ import annotations

import doctest
import math
import string
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import EOS, dense_logits, tiny_llm, tiny_model

import treewise.search.steps
from treewise.awaitables import generate
from treewise.config import SamplingParams
from treewise.search import ALLOTMENTS, STRATEGIES
from treewise.search.monte_carlo import ConfidenceTree
from treewise.search.steps import Budget, Candidate

MODEL = tiny_model()
SETTINGS = {"stop": (), "thought_tokens": 4, "answer_tokens": 3, "temperature": 5.0, "top_p": 1.0}
PROGRAMS = ("tot", "tot_dfs", "mcts", "step_beam")


class Reward:
    """Rates texts by a function, and remembers what it was asked."""

    def __init__(self, value):
        self.value = value
        self.calls = []

    def __call__(self, texts):
        self.calls.append(texts)
        return [self.value(text) for text in texts]


def uneven(text):
    """Return some value in [0, 1) that looks like chance."""
    return sum((place + 1) * ord(letter) for place, letter in enumerate(text)) * 0.377 % 1


def run(name, reward, model=MODEL, seed=3, **settings):
    llm = tiny_llm(model, enable_prefix_caching=False)
    program = STRATEGIES[name].build(**SETTINGS | {"evaluate": reward} | settings)
    [result] = llm.run(program, ["two plus two"], seed=seed)
    llm.engine.check_integrity()
    assert not llm.engine.kv.forest.roots, "something was left in the pool"
    return result.value


def thoughts_of(answer):
    """Return the branches of the tree that are thoughts: all but the root and what was given for a conclusion."""
    return [branch for branch in answer.tree.branches() if branch.parent and branch.logprobs[0] is not None]


def ending_model():
    """Return a model that ends every text at once."""
    model = tiny_model()
    bias = float(dense_logits(model, [5])[-1].max()) + 100
    original = model.logits
    model.logits = lambda *args: original(*args).index_fill(1, torch.tensor([EOS]), bias)
    return model


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_ended_chain_goes_on_as_itself(name):
    reward = Reward(uneven)
    settings = {"threshold": -1} if name == "tot_dfs" else {}
    answer = run(name, reward, ending_model(), depth=3, width=2, **settings)
    assert answer.token_ids == [EOS]
    assert len(thoughts_of(answer)) == 2, "no branch goes on from an ended one"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_search_may_start_at_any_branch(name):
    async def program(root):
        other, start, over = await generate(root.fork(3), SamplingParams(temperature=0, max_tokens=2))
        over.append([EOS]).finish_reason = "stop"
        answer = await STRATEGIES[name].program(start, evaluate=uneven_texts, **SETTINGS)
        assert await STRATEGIES[name].program(over, evaluate=uneven_texts, **SETTINGS) is over
        assert all(branch.alive for branch in (root, other, start, over))
        return [answer, other]

    [result] = tiny_llm(MODEL).run(program, ["x"], seed=1)
    answer, other = result.value
    assert answer.path[0] == 1 and len(answer.path) > 1
    kept = [branch for branch in other.tree.branches() if not branch.pruned]
    assert kept == [other.parent, other, *answer.lineage()[1:], kept[-1]]


def uneven_texts(texts):
    return [uneven(text) for text in texts]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda texts: [0.0], "evaluate: the reward gave 1 values for"),
        (lambda texts: [math.nan] * len(texts), "evaluate: the value of .* must be a finite number, not nan"),
    ],
)
def test_a_reward_must_give_numbers(name, reward, message):
    with pytest.raises(ValueError, match=message):
        run(name, reward)


# ---------------------------------------------------------------------- Monte Carlo tree search


def by_hand(build):
    """Run `build(root)`, which makes a `ConfidenceTree` by hand, in a program and return what it returns."""

    async def program(root):
        return build(root)

    [result] = tiny_llm(MODEL).run(program, ["x"])
    return result.value


@pytest.mark.parametrize(("c", "chosen"), [(0.0, 0), (0.5, 1), (2.0, 2)])
def test_the_upper_bound_decides(c, chosen):
    # Means 0.8, 0.75 and 0.1 after 3, 2 and 1 visits of 6: with c = 0.5 the bounds are
    # 0.8 + 0.5 * sqrt(ln 6 / 3) = 1.186, 0.75 + 0.5 * sqrt(ln 6 / 2) = 1.223, 0.1 + 0.5 * sqrt(ln 6 / 1) = 0.769.
    def build(root):
        tree = ConfidenceTree(root, c)
        children = root.fork(3)
        tree.add(children, [0.8, 0.7, 0.1])
        for child, value in ((0, 0.75), (0, 0.85), (1, 0.8)):
            tree.back_up(children[child], value)
        if c == 0.5:
            assert tree.upper_bounds(root, children) == pytest.approx([1.186, 1.223, 0.769], abs=1e-3)
        return tree.choose() is children[chosen]

    assert by_hand(build)


def test_virtual_losses_spread_the_leaves_under_way():
    def build(root):
        tree = ConfidenceTree(root, c=0.0)
        good, fair, bad = root.fork(3)
        tree.add([good, fair, bad], [0.9, 0.7, 0.1])
        best, second = good.fork(2)
        tree.add([best, second], [0.9, 0.85])
        chosen = [tree.choose() for _ in range(5)]
        assert [tree.land(), tree.land()] == [best, fair]
        chosen.append(tree.choose())
        names = {best: "best", second: "second", fair: "fair", bad: "bad", None: "none"}
        return [names[leaf] for leaf in chosen]

    # After the first choice, "good" stands at (0.9 + 0.9 + 0.85 + 0.1) / 4 = 0.6875, below "fair".
    assert by_hand(build) == ["best", "fair", "second", "bad", "none", "fair"]


def test_every_iteration_follows_the_formula():
    reward, c, depth = Reward(uneven), 0.6, 3
    answer = run("mcts", reward, iterations=12, parallel=1, depth=depth, width=2, c=c)
    branches = {branch.text: branch for branch in thoughts_of(answer)}
    assert len(branches) == len(thoughts_of(answer)), "this seed draws no text twice"
    children, values = {}, {}

    def known_below(branch):
        found = [values[branch]] if branch in values else []
        return found + [value for child in children.get(branch, []) for value in known_below(child)]

    def bound(parent, child):
        own, all_values = known_below(child), known_below(parent)
        return sum(own) / len(own) + c * math.sqrt(math.log(len(all_values)) / len(own))

    # This oracle knows no leaf that is visited twice, so it stops at the first leaf at the limit.
    checked = 0
    for texts in reward.calls[:-1]:
        leaf = answer.tree.root
        while leaf in children:
            leaf = max(children[leaf], key=lambda child, parent=leaf: bound(parent, child))
        if len(leaf.path) == depth:
            break
        children[leaf] = [branches[text] for text in texts]
        assert [child.parent for child in children[leaf]] == [leaf, leaf]
        values |= {child: uneven(child.text) for child in children[leaf]}
        checked += 1
    assert checked > 4


@pytest.mark.parametrize("parallel", [1, 4])
def test_visits_add_up(parallel):
    answer = run("mcts", Reward(uneven), iterations=20, parallel=parallel, depth=2, width=3)
    root, thoughts = answer.tree.root, thoughts_of(answer)
    for branch in [root, *thoughts]:
        below = [child for child in thoughts if child.parent is branch]
        own = branch.note.visits - sum(child.note.visits for child in below)
        assert own == 0 if branch is root else own == 1 if len(branch.path) < 2 else own >= 1
        total = sum(child.note.total for child in below) + (own * uneven(branch.text) if own else 0)
        assert branch.note.total == pytest.approx(total)
        assert branch.score == pytest.approx(branch.note.total / branch.note.visits)
    extended = {thought.parent for thought in thoughts}
    visited_again = root.note.visits - len(thoughts)
    assert len(extended) + visited_again == 20


def test_the_drawing_has_the_visits():
    async def program(root):
        return await STRATEGIES["mcts"].program(root, evaluate=uneven_texts, iterations=6, width=2, **SETTINGS)

    [result] = tiny_llm(MODEL).run(program, ["two plus two"], seed=3)
    visits = {branch.text: branch.note.visits for branch in thoughts_of(result.value)}
    drawn = [node.visits for node in result.tree.nodes[1:] if node.visits is not None]
    assert sorted(drawn) == sorted(visits.values())
    assert result.tree.nodes[0].visits == result.value.tree.root.note.visits == 12


def extended(**settings):
    """Return the leaves that a search extended in each of its steps, none where it did something else."""
    llm = tiny_llm(MODEL, enable_prefix_caching=False)
    program = STRATEGIES["mcts"].build(**SETTINGS | {"evaluate": "logprob", "width": 3, "depth": 9} | settings)
    request = llm.engine.add(program, [1, 2], seed=3)
    leaves = []
    while not request.done:
        leaves.append({event.branch.parent for gain in llm.engine.step() for event in gain.events()})
    assert request.error is None
    return leaves


def test_so_many_leaves_are_extended_at_a_time():
    leaves = extended(iterations=9, parallel=4)
    # The root alone, then three leaves, as there are no more, then four, then the last; and the answer.
    assert list(map(len, leaves)) == [1] * 4 + [3] * 4 + [4] * 4 + [1] * 4 + [1] * 3 + [0]


def test_another_leaf_is_extended_while_those_chosen_before_are():
    leaves = extended(iterations=16, parallel=3, stop=list(string.printable), thought_tokens=12)
    assert any(now & before and now - before for before, now in pairwise(leaves))
    assert max(map(len, leaves)) == 3


@pytest.mark.parametrize("rows", [8192, 7])
def test_the_tree_does_not_hang_on_what_is_computed_when(rows):
    delays = iter([0.02, 0.0, 0.01] * 20)

    def slow(texts):
        time.sleep(next(delays))
        return uneven_texts(texts)

    llm = tiny_llm(MODEL, max_num_rows=rows)
    settings = {**SETTINGS, "iterations": 12, "depth": 4, "stop": list(string.printable), "thought_tokens": 9}
    program = STRATEGIES["mcts"].build(**settings, evaluate=slow)
    alone = run("mcts", Reward(uneven), **settings)
    [result, _] = llm.run(program, ["two plus two", "one"], seed=3)
    assert [branch.text for branch in thoughts_of(result.value)] == [branch.text for branch in thoughts_of(alone)]


def test_the_answer_comes_from_the_most_visited_chain():
    answer = run("mcts", Reward(uneven), iterations=16, parallel=2, depth=3, width=2)
    for branch in answer.lineage()[1:-1]:
        siblings = branch.parent.all_children
        assert branch.note.visits == max(sibling.note.visits for sibling in siblings)
        assert all(sibling.pruned for sibling in siblings if sibling is not branch)


# ---------------------------------------------------------------------- depth first


def full_tree(width, depth):
    """Return the thoughts of the whole tree by path; a seed draws the same in whatever order they are tried."""
    settings = {"depth": depth, "width": width, "threshold": -1, "budget": 999, "solutions": 999}
    answer = run("tot_dfs", Reward(uneven), **settings)
    thoughts = {branch.path: branch.text for branch in thoughts_of(answer)}
    assert len(thoughts) == len(set(thoughts.values())) == sum(width**level for level in range(1, depth + 1))
    return thoughts


def test_depth_first_goes_back_and_finds_the_good_leaf():
    thoughts = full_tree(width=3, depth=2)
    planted = {(1,): 0.9, (2,): 0.7, (2, 0): 0.6, (0,): 0.55}  # the children of (1,) are all bad
    values = {text: planted.get(path, 0.1) for path, text in thoughts.items()}
    reward = Reward(lambda text: values.get(text, 1.0))
    answer = run("tot_dfs", reward, depth=2, width=3, threshold=0.5)
    assert answer.parent.path == (2, 0)
    tried = [(), (1,), (2,)]
    assert reward.calls == [[thoughts[*path, i] for i in range(3)] for path in tried] + [[answer.text]]
    assert not any(branch.alive or not branch.pruned for branch in thoughts_of(answer) if branch.path[0] != 2)


def test_depth_first_prefers_the_best_of_several_solutions():
    thoughts = full_tree(width=2, depth=2)
    planted = {(0,): 0.9, (1,): 0.8, (0, 0): 0.6, (0, 1): 0.3, (1, 0): 0.7, (1, 1): 0.65}
    values = {text: planted[path] for path, text in thoughts.items()}
    for solutions, path in ((1, (0, 0)), (2, (0, 0)), (3, (1, 0)), (9, (1, 0))):
        reward = Reward(lambda text: values.get(text, 1.0))
        answer = run("tot_dfs", reward, depth=2, width=2, threshold=-1, solutions=solutions)
        assert answer.parent.path == path


@pytest.mark.parametrize("budget", [1, 4, 5, 20])
def test_depth_first_keeps_to_its_budget(budget):
    reward = Reward(uneven)
    answer = run("tot_dfs", reward, depth=9, width=3, threshold=-1, budget=budget)
    assert sum(map(len, reward.calls[:-1])) == len(thoughts_of(answer)) == budget
    # The deepest chain, of equals the best, is what the answer comes from.
    deepest = max(thoughts_of(answer), key=lambda branch: (len(branch.path), branch.score))
    assert answer.parent is deepest


def test_depth_first_answers_from_the_prompt_where_all_is_given_up():
    answer = run("tot_dfs", Reward(uneven), threshold=1)
    assert answer.parent is answer.tree.root
    assert len(thoughts_of(answer)) == 3 and all(branch.pruned for branch in thoughts_of(answer))


def test_depth_first_frees_what_it_gives_up_at_once():
    living = []

    async def program(root):
        def reward(texts):
            living.append(len(root.tree.alive))
            return uneven_texts(texts)

        return await STRATEGIES["tot_dfs"].program(
            root, depth=4, width=3, threshold=0.5, budget=60, solutions=99, evaluate=reward, **SETTINGS
        )

    [result] = tiny_llm(MODEL).run(program, ["x"], seed=5)
    assert len(thoughts_of(result.value)) > 20
    # The root; on each level the chain and what is hopeful beside it; one spared chain.
    assert max(living) <= 1 + 4 * 3 + 4


# ---------------------------------------------------------------------- step-wise beam search


def candidates_of(*values, subtrees=None, ended=()):
    subtrees = subtrees or [0] * len(values)
    return [Candidate(value, subtrees[i], i in ended) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("allot", "candidates", "allotted"),
    [
        # The softmax at temperature 0.5 of 8 thoughts: 4.845, 2.177 and 0.978.
        ("rebase", candidates_of(0.9, 0.5, 0.1), [5, 2, 1]),
        ("rebase", candidates_of(-1e9, 0.0), [0, 8]),
        ("rebase", candidates_of(0.9, 0.5, 0.1, ended=[2]), [5, 2, 1]),
        ("rebase", candidates_of(0.1, 0.1, 0.9, 0.2, ended=[2, 3]), [3, 3, 1, 1]),
        ("rebase", candidates_of(0.1, 0.9, ended=[0, 1]), [1, 1]),
        ("top", candidates_of(0.1, 0.5, 0.9, 0.5, 0.7), [0, 2, 3, 0, 3]),
        ("top", candidates_of(0.1, 0.5, 0.9, 0.6, ended=[0, 2]), [0, 3, 1, 4]),
        ("dvts", candidates_of(0.9, 0.8, 0.2, 0.1, 0.3, 0.0, subtrees=[0, 0, 1, 1, 2, 2]), [3, 0, 3, 0, 2, 0]),
        ("dvts", candidates_of(0.1, 0.8, 0.2, 0.5, subtrees=[0, 1, 2, 0], ended=[3]), [0, 3, 2, 1]),
    ],
)
def test_thoughts_are_allotted(allot, candidates, allotted):
    assert ALLOTMENTS[allot](candidates, Budget(width=8, beam=3, balance=0.5)) == allotted


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12),
    width=st.integers(1, 64),
    balance=st.floats(1e-3, 1e3),
    allot=st.sampled_from(list(ALLOTMENTS)),
)
def test_an_allotment_is_the_width(values, width, balance, allot):
    beam = min(3, width, len(values))
    candidates = candidates_of(*values, subtrees=[i % beam for i in range(len(values))])
    allotted = ALLOTMENTS[allot](candidates, Budget(width, beam, balance))
    assert sum(allotted) == width and min(allotted) >= 0
    if allot == "rebase":
        weights = [math.exp((value - max(values)) / balance) for value in values]
        for given_thoughts, weight in zip(allotted, weights, strict=True):
            assert abs(given_thoughts - width * weight / sum(weights)) < 1 + 1e-9


def rounds(answer, depth):
    return [[branch for branch in thoughts_of(answer) if len(branch.path) == level] for level in range(1, depth + 1)]


@pytest.mark.parametrize("allot", ALLOTMENTS)
def test_a_round_draws_as_many_thoughts_as_there_are(allot):
    answer = run("step_beam", Reward(uneven), depth=3, width=7, beam=3, allot=allot)
    levels = rounds(answer, 3)
    assert [len(level) for level in levels] == [7, 7, 7]
    assert answer is max((b for b in answer.tree.branches() if len(b.path) == 4), key=lambda b: b.score)
    for level in levels[:-1]:
        candidates = [Candidate(branch.score, branch.path[0] % 3, False) for branch in level]
        expected = ALLOTMENTS[allot](candidates, Budget(7, 3, 0.1))
        assert [len(branch.all_children) for branch in level] == expected


def test_subtrees_never_mix():
    # The first subtree is rated far above the others, which go on all the same.
    first = run("step_beam", Reward(uneven), depth=1, width=6, beam=3)
    favoured = tuple(branch.text for branch in thoughts_of(first) if branch.path[0] % 3 == 0)
    reward = Reward(lambda text: uneven(text) + 100 * text.startswith(favoured))
    answer = run("step_beam", reward, depth=3, width=6, beam=3, allot="dvts")
    for level in rounds(answer, 3):
        for subtree in range(3):
            members = [branch for branch in level if branch.path[0] % 3 == subtree]
            assert len(members) == 2
            best = max(members, key=lambda branch: branch.score)
            assert [bool(branch.all_children) for branch in members] == [branch is best for branch in members]
    assert answer.path[0] % 3 == 0


def test_examples():
    assert doctest.testmod(treewise.search.steps).failed == 0
