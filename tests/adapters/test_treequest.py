"""Searches of treequest over a tiny engine."""

import copy
import random

import pytest
from tiny import idle, tiny_llm

from treewise import SamplingParams
from treewise.adapters.treequest import Thought, TreeQuestGenerator

PROMPT = "Name three colours of fruit, one a line:"
ACTIONS = {
    "draw": SamplingParams(temperature=1.0, max_tokens=12, stop="\n"),
    "best": SamplingParams(temperature=0.0, max_tokens=6),
}


def reward(texts):
    return [len(set(text)) / 128 for text in texts]


def generator(llm=None, **options):
    return TreeQuestGenerator(llm or tiny_llm(), PROMPT, reward, ACTIONS, **options)


@pytest.mark.parametrize("name", ["ABMCTSA", "StandardMCTS"])
def test_a_search_generates_its_budget_and_keeps_the_best(name):
    treequest = pytest.importorskip("treequest")
    random.seed(0)
    llm = tiny_llm()
    algorithm = getattr(treequest, name)()
    state = generator(llm, between="\nBetter: ").search(algorithm, budget=10, batch_size=4)
    pairs = algorithm.get_state_score_pairs(state)
    assert len(pairs) == 10
    [(best, value)] = treequest.top_k(state, algorithm, k=1)
    assert value == max(value for _, value in pairs) == pytest.approx(reward([best.text])[0])
    idle(llm)


def test_steps_of_an_algorithm_grow_a_tree_whose_children_go_on_from_their_parents():
    treequest = pytest.importorskip("treequest")
    algorithm = treequest.ABMCTSA()
    state = algorithm.init_tree()
    functions = generator().functions
    for _ in range(8):
        state = algorithm.step(state, functions)  # copies the state each time
    nodes = state.tree.get_nodes()
    assert len(nodes) == 9
    for node in nodes[1:]:
        above = () if node.parent.state is None else node.parent.state.token_ids
        assert node.state.token_ids[: len(above)] == above
        assert node.state.text.endswith(node.state.new)


def test_children_compute_only_what_is_new():
    llm = tiny_llm()
    maker = generator(llm, between="|")
    [(parent, _)] = maker.generate([(None, "draw")])
    before = copy.copy(llm.cache_statistics)
    children = maker.generate([(parent, "draw"), (parent, "best"), (None, "draw")])
    after = llm.cache_statistics
    # All but what stands between is known, and the parent's last token, which nobody has computed.
    known = len(PROMPT) + len(parent.token_ids) - 1
    assert after.hit_tokens - before.hit_tokens >= 2 * known + len(PROMPT) - 1
    for child, _ in children[:2]:
        assert child.token_ids[: len(parent.token_ids) + 1] == (*parent.token_ids, ord("|"))
        assert child.text.startswith(parent.text)


def test_a_node_is_what_a_single_completion_of_its_path_is():
    llm = tiny_llm()
    maker = generator(llm)
    [(parent, _)] = maker.generate([(None, "draw")])
    [(child, value), _] = maker.generate([(parent, "best"), (parent, "draw")])
    path = [*PROMPT.encode(), *parent.token_ids]
    [alone] = tiny_llm().generate([path], ACTIONS["best"])
    assert list(child.token_ids[len(parent.token_ids) :]) == [token for token in alone.outputs[0].token_ids if token]
    assert child.new == alone.outputs[0].text
    assert value == reward([child.text])[0]


def test_nodes_of_one_parent_differ_and_the_same_seed_draws_them_again():
    drawn = [[thought.text for thought, _ in generator(seed=seed).generate([(None, "draw")] * 4)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 1


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="actions: name at least one"):
        TreeQuestGenerator(tiny_llm(), PROMPT, reward, {})
    with pytest.raises(ValueError, match="'draw' must have n=1 and no seed"):
        TreeQuestGenerator(tiny_llm(), PROMPT, reward, {"draw": SamplingParams(seed=3)})
    with pytest.raises(ValueError, match="action is 'guess'; choose one of draw, best"):
        generator().generate([(Thought((), "", "", False), "guess")])
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1"):
        generator().search(None, 1, 0)
    broken = TreeQuestGenerator(tiny_llm(), PROMPT, lambda texts: [float("nan")] * len(texts), ACTIONS)
    with pytest.raises(ValueError, match="reward: it must give 1 finite numbers"):
        broken.generate([(None, "best")])
