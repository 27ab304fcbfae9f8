"""A real vocabulary under grammars: tokens of many characters, and texts that only one way of writing is left for."""

from __future__ import annotations

import json
import re

import pytest

from treewise import LLM, BeamSearchParams, Grammar, SamplingParams

pytestmark = pytest.mark.slow

QUESTION = "Maria Lopez is a 34 year old nurse who lives in Toledo. Extract name, age and city as JSON."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 12},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m", device="cpu", num_kv_slots=2048)


def test_json_of_a_schema(llm):
    grammar = Grammar.json_schema(SCHEMA)
    params = [
        SamplingParams(temperature=0, max_tokens=80, grammar=grammar),
        SamplingParams(temperature=2, n=3, seed=1, max_tokens=80, grammar=grammar),
    ]
    greedy, sampled = llm.chat([[{"role": "user", "content": QUESTION}]] * 2, params)
    for output in greedy.outputs + sampled.outputs:
        assert output.finish_reason == "stop"
        person = json.loads(output.text)
        assert list(person) == ["name", "age", "city"]
        assert isinstance(person["age"], int) and 0 <= person["age"] <= 150
        assert max(len(person["name"]), len(person["city"])) <= 12
    assert json.loads(greedy.outputs[0].text) == {"name": "Maria Lopez", "age": 34, "city": "Toledo"}
    assert len({output.text for output in sampled.outputs}) == 3


def test_beams_and_choices(llm):
    tokenizer = llm.tokenizer
    choices = [" Madrid", " Marseille", " Paris"]
    params = BeamSearchParams(3, grammar=Grammar.choice(choices), length_penalty=0.0)
    [result] = llm.beam_search(["The capital of France is"], params)
    assert sorted(output.text for output in result.outputs) == choices
    assert result.outputs[0].text == " Paris"
    [time] = llm.generate(["The train leaves at"], SamplingParams(seed=0, grammar=Grammar.regex(r" [01]\d:[0-5]\d")))
    assert re.fullmatch(r" [01]\d:[0-5]\d", time.outputs[0].text)
    [forced] = llm.generate(["It is"], SamplingParams(temperature=2, grammar=Grammar.choice([" an unbelievable day"])))
    assert forced.outputs[0].token_ids == tokenizer.encode(" an unbelievable day", add_special_tokens=False)
