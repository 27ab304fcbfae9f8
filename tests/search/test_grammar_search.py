"""Search under grammars: whatever is drawn, the text that a strategy answers with is one that the grammar has."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tiny import EOS, dense_logits, idle, tiny_llm, tiny_model

from treewise.config import BeamSearchParams
from treewise.grammar import Grammar
from treewise.search import STRATEGIES, self_certainty

pytest.importorskip("llguidance")

MODEL = tiny_model()
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}


def is_pet(text):
    pet = json.loads(text)
    return list(pet) == ["age", "kind"] and 0 <= pet["age"] <= 99 and pet["kind"] in ("cat", "dog")


GRAMMARS = {
    "json": (Grammar.json_schema(SCHEMA | {"x-guidance": {"whitespace_pattern": ""}}), is_pet),
    "regex": (Grammar.regex(r"[a-c]{2,5}-\d{1,4}x?"), re.compile(r"[a-c]{2,5}-\d{1,4}x?").fullmatch),
    "choice": (Grammar.choice(["red", "green", "re"]), ["red", "green", "re"].__contains__),
    "lark": (Grammar.lark('start: word ("," word)~1..3\nword: /[ab]/'), re.compile("[ab](,[ab]){1,3}").fullmatch),
}
THOUGHTS = ("tot", "tot_dfs", "mcts", "step_beam")
IN_STEPS = {"depth": 2, "width": 2, "thought_tokens": 4, "stop": " ", "evaluate": "logprob"}
SETTINGS = {
    "best_of_n": {"n": 4, "temperature": 1.5},
    "self_consistency": {"n": 4, "temperature": 1.5, "borda": 1.0},
    "beam": {"beam_width": 3},
    "rollouts": {"widths": [4], "at": []},
    "tot": IN_STEPS,
    "tot_dfs": IN_STEPS | {"threshold": -99},
    "mcts": IN_STEPS,
    "step_beam": IN_STEPS,
}


def run(name, model=MODEL, seed=3, **settings):
    llm = tiny_llm(model)
    [result] = llm.run(STRATEGIES[name].build(**SETTINGS[name] | settings), ["two plus two"], seed=seed)
    idle(llm)
    return result


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("name", ["best_of_n", "self_consistency", "beam", "rollouts"])
def test_every_answer_satisfies_the_grammar(name, kind):
    grammar, satisfies = GRAMMARS[kind]
    result = run(name, grammar=grammar)
    texts = [each.text for each in (result.value if name == "rollouts" else result.outputs)]
    assert texts and all(map(satisfies, texts)), texts


@pytest.mark.parametrize("kind", GRAMMARS)
def test_samples_that_branch_go_on_in_the_grammar(kind):
    grammar, satisfies = GRAMMARS[kind]
    trajectories = run("rollouts", widths=[2, 2, 2], at=[2, 3], grammar=grammar, temperature=2.0).value
    assert all(satisfies(each.text) for each in trajectories), [each.text for each in trajectories]
    assert any(each.shared for each in trajectories)


@pytest.mark.parametrize("name", THOUGHTS)
def test_the_next_thought_ends_one_that_was_cut_off(name):
    grammar = Grammar.regex("[ab]{7};")
    answer = run(name, thought_grammar=grammar, thought_tokens=5, conclude="=", stop=(), answer_tokens=1).value
    assert re.match("[ab]{7};=", answer.text), answer.text


def test_self_certainty_is_of_the_models_own_distributions():
    result = run("best_of_n", grammar=GRAMMARS["regex"][0], by="self_certainty", temperature=2.0)
    answers = [branch for branch in result.value.tree.branches() if branch.parent]
    assert len({answer.text for answer in answers}) > 1
    for answer in answers:
        logits = dense_logits(MODEL, answer.path_tokens)[-1 - len(answer.token_ids) : -1]
        assert answer.score == pytest.approx(float(self_certainty(torch.log_softmax(logits, dim=-1)).mean()), rel=1e-4)


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("name", THOUGHTS)
def test_the_answer_behind_the_thoughts_satisfies_the_grammar(name, kind):
    grammar, satisfies = GRAMMARS[kind]
    answer = run(name, grammar=grammar, conclude="=").value
    before, equals, text = answer.new.partition("=")
    assert (before, equals) == ("", "=") and satisfies(text), answer.new


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_satisfy_a_grammar_of_their_own(name):
    step = re.compile(r"[a-c]{1,2}\d;")
    grammar = Grammar.regex(step.pattern)
    answer = run(name, thought_grammar=grammar, thought_tokens=9, grammar=Grammar.regex("[xy]{3}"), conclude="=").value
    thoughts = [branch for branch in answer.tree.branches() if branch.parent and branch.logprobs[0] is not None]
    assert len(thoughts) >= 4
    assert all(step.fullmatch(thought.new) for thought in thoughts)
    # A thought that is complete is not the end of its chain.
    assert re.fullmatch(rf"(?:{step.pattern}){{2}}=[xy]{{3}}", answer.text), answer.text
    assert len({thought.new for thought in thoughts}) > 1


@pytest.mark.parametrize("name", THOUGHTS)
def test_an_ended_chain_is_asked_for_its_answer_too(name):
    # Unless a grammar forbids it, this model ends every text at once.
    model = tiny_model()
    bias = float(dense_logits(model, [5])[-1].max()) + 100
    original = model.logits
    model.logits = lambda *args: original(*args).index_fill(1, torch.tensor([EOS]), bias)
    answer = run(name, model, grammar=Grammar.choice(["yes", "no"]), conclude="=").value
    assert answer.text in ("=yes", "=no")
    assert EOS not in answer.token_ids, "the answer stands in the place of the end token"
    kept = [branch for branch in answer.tree.branches() if not branch.pruned]
    assert kept == answer.lineage()


def test_beams_are_the_engines_own():
    grammar = GRAMMARS["regex"][0]
    result = run("beam", grammar=grammar, length_penalty=0.5)
    [other] = tiny_llm(MODEL).beam_search(
        ["two plus two"], BeamSearchParams(3, max_tokens=64, length_penalty=0.5, grammar=grammar)
    )
    assert [branch.token_ids for branch in result.value] == [output.token_ids for output in other.outputs]
    assert [branch.score for branch in result.value] == [output.score for output in other.outputs]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("best_of_n", {"grammar": "[ab]+"}, r"grammar must be a Grammar or None, not '\[ab\]\+'"),
        ("beam", {"grammar": "[ab]+"}, "grammar must be a Grammar or None"),
        ("tot", {"grammar": "[ab]+"}, "grammar must be a Grammar or None"),
        ("mcts", {"thought_grammar": 3}, "thought_grammar must be a Grammar or None, not 3"),
    ],
)
def test_mistakes_are_named(name, settings, message):
    with pytest.raises(ValueError, match=message):
        run(name, **settings)
