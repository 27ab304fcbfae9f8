"""Conversations that grow on branches, in the chat templates of real models."""

import pytest

from treewise import LLM, SamplingParams, generate
from treewise.models import load_tokenizer
from treewise.turns import next_turn

pytestmark = pytest.mark.slow

HELLO = {"role": "user", "content": "Name a colour, please."}
BLUE = {"role": "assistant", "content": "Blue, I'd say!"}
WHY = {"role": "user", "content": "Why?\n\nAnd what else?"}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("name", ["smollm2", "qwen2"])
def test_turns_are_those_of_the_template(name, stopped, model_path):
    tokenizer = load_tokenizer(model_path(name))
    path, conversation = next_turn(tokenizer, None, [], HELLO, True)
    assert path == tokenizer.apply_chat_template([HELLO])
    path += tokenizer.encode(BLUE["content"], add_special_tokens=False)
    if stopped:
        path.append(tokenizer.apply_chat_template([HELLO, BLUE], add_generation_prompt=False)[len(path)])
        assert path[-1] in tokenizer.eos_token_ids
    for turn, turns, reply in (
        (WHY, [HELLO, BLUE, WHY], True),
        (BLUE, [HELLO, BLUE, WHY, BLUE], False),
        (WHY, [HELLO, BLUE, WHY, BLUE, WHY], True),
    ):
        new, conversation = next_turn(tokenizer, conversation, path, turn, reply)
        path += new
        assert path == tokenizer.apply_chat_template(turns, reply)


def test_a_real_model_without_a_template_says_so(model_path):
    with pytest.raises(ValueError, match="no chat template"):
        next_turn(load_tokenizer(model_path("gemma3")), None, [], HELLO, True)


@pytest.mark.parametrize("known", [False, True])
def test_what_a_real_model_said_is_its_turn(known, model_path):
    llm = LLM(str(model_path("smollm2")), num_kv_slots=2048)
    template = llm.tokenizer.apply_chat_template

    async def program(root):
        answers = await generate(root.fork(1), SamplingParams(temperature=0, max_tokens=24))
        turns = [{"role": "assistant", "content": answer.text} for answer in answers]
        return [
            (answer.message("user", WHY["content"]).path_tokens, turn)
            for answer, turn in zip(answers, turns, strict=True)
        ]

    [result] = llm.run(program, [[HELLO] if known else template([HELLO])], seed=0)
    for path, turn in result.value:
        assert path == template([HELLO, turn, WHY])
