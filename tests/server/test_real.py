"""A server around the small real model: what only a real vocabulary shows."""

import asyncio
import math

import pytest
from serving import listening, running

from treewise.llm import LLM

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m", device="cpu", num_kv_slots=8192)


def joined(chunks, index=0):
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


async def test_a_stop_string_over_several_tokens_does_not_leak(llm):
    body = {"prompt": "Here is the English alphabet: ABC", "temperature": 0, "stop": "DEFGHIJ", "max_tokens": 24}
    async with running(llm) as server:
        [whole] = (await server.complete(**body))["choices"]
        chunks = await server.chunks(**body)
        assert joined(chunks) == whole["text"] and not whole["text"].startswith("D")
        # Text that only might have become a stop string is told after all.
        body["stop"] = "DEFGHIX"
        [whole] = (await server.complete(**body))["choices"]
        assert joined(await server.chunks(**body)) == whole["text"] and whole["text"].startswith("DEFGHIJ")


@pytest.mark.parametrize("text", ["👍", "你好", "ď"])
async def test_characters_of_several_tokens(llm, text):
    async with running(llm) as server:
        tokens = len(llm.tokenizer.encode(text))
        for limit in range(1, tokens + 1):
            body = {"prompt": "x", "guided_choice": [text], "max_tokens": limit, "logprobs": 1}
            [whole] = (await server.complete(**body))["choices"]
            chunks = await server.chunks(**body)
            pieces = [c["text"] for chunk in chunks for c in chunk["choices"]]
            assert "".join(pieces) == whole["text"] == "".join(whole["logprobs"]["tokens"])
            assert all("\ufffd" not in piece for piece in pieces[:-1])
            assert whole["text"] == text or limit < tokens


async def test_scores_across_a_join_of_tokens(llm):
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'treewise[eval]'")
    from test_lm_eval_over_http import api, instances

    pairs = [("Ans", "wer"), ("hello wor", "ld"), ("The capital of France is", " Paris"), ("", "Hello")]
    async with listening(llm) as server:

        def scores():
            lm = api(server, model="smollm2-135m", batch_size=2)
            return lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)

        found = await asyncio.to_thread(scores)
        assert all(math.isfinite(logprob) for logprob, _ in found)
        assert found[2][1] and found[2][0] > -1  # it knows
        await server.driver._idle.wait()


async def test_echo_and_offsets(llm):
    async with running(llm) as server:
        [choice] = (await server.complete("\n1. Carol has 20", echo=True, logprobs=1, max_tokens=5))["choices"]
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"] and choice["text"].startswith("\n1. Carol has 20")
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset : offset + len(token)] == token
        answer = await server.complete("\n1. Carol has 20", echo=True, logprobs=1, top_k=1, temperature=1)
        assert all(
            value is None or math.isfinite(value) for value in answer["choices"][0]["logprobs"]["token_logprobs"]
        )


async def test_a_chat_about_a_schema(llm):
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    async with running(llm) as server:
        wanted = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema, "strict": True}}
        answer = await server.chat("Name a colour as JSON.", response_format=wanted, temperature=0, max_tokens=40)
        assert '"colour"' in answer["choices"][0]["message"]["content"]


async def test_names_of_special_tokens_in_prompts(llm):
    async with running(llm) as server:
        text = "<|im_start|>user\nhi<|im_end|>"
        plain = await server.complete(text, max_tokens=1)
        special = await server.complete(text, max_tokens=1, parse_special=True)
        assert special["usage"]["prompt_tokens"] == 5 < plain["usage"]["prompt_tokens"]
        info = (await server.client.get("/tokenizer_info")).json()
        assert info["eos_token"] == "<|im_end|>" and "im_start" in info["chat_template"]
