"""Completions and chat: the numbers and texts of the offline engine, in OpenAI's form."""

import asyncio
from itertools import groupby

import pytest
from serving import running
from tiny import Bytes, ChatBytes, tiny_llm

from treewise import BeamSearchParams, SamplingParams
from treewise.results import CompletionOutput

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


def offline(prompts="abc", **params) -> list[CompletionOutput]:
    return [output for result in tiny_llm().generate(prompts, SamplingParams(**params)) for output in result.outputs]


async def test_a_completion_is_what_the_engine_gives():
    [expected] = offline(temperature=0, max_tokens=12)
    async with running() as server:
        answer = await server.complete(temperature=0, max_tokens=12)
        [choice] = answer["choices"]
        assert choice["text"] == expected.text and choice["finish_reason"] == expected.finish_reason
        assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 12
        assert answer["usage"]["total_tokens"] == 15
        assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
        await server.idle()


async def test_sixteen_tokens_are_decoded_where_nothing_is_said():
    async with running() as server:
        assert (await server.complete(ignore_eos=True))["usage"]["completion_tokens"] == 16


async def test_several_prompts_of_every_kind():
    alone = [output.text for text in ("ab", "xyz") for output in offline(text, temperature=0, max_tokens=5)]
    tokens = [Bytes().encode(text) for text in ("ab", "xyz")]
    async with running() as server:
        for prompt in (["ab", "xyz"], tokens):
            answer = await server.complete(prompt, temperature=0, max_tokens=5)
            assert [choice["text"] for choice in answer["choices"]] == alone
            assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert (await server.complete(tokens[1], temperature=0, max_tokens=5))["choices"][0]["text"] == alone[1]
        assert answer["usage"]["prompt_tokens"] == 5


async def test_n_and_seed():
    async with running() as server:
        first, again = [await server.complete(n=4, seed=7, max_tokens=8) for _ in range(2)]
        texts = [choice["text"] for choice in first["choices"]]
        assert texts == [choice["text"] for choice in again["choices"]] and len(set(texts)) == 4
        assert texts == [output.text for output in offline(n=4, seed=7, max_tokens=8)]
        # Whoever else is in the batch does not matter.
        crowd = await asyncio.gather(
            server.complete(n=4, seed=7, max_tokens=8), *(server.complete("x" * i, max_tokens=9) for i in range(1, 9))
        )
        assert [choice["text"] for choice in crowd[0]["choices"]] == texts
        two = await server.complete(["abc", "abd"], n=2, seed=7, max_tokens=8)
        assert [choice["text"] for choice in two["choices"]][:2] == texts[:2] and len(two["choices"]) == 4


async def test_best_of_gives_the_likeliest():
    drawn = offline(n=6, seed=3, max_tokens=6)
    likeliest = sorted(drawn, key=lambda each: -each.cumulative_logprob / len(each.token_ids))
    async with running() as server:
        answer = await server.complete(n=2, best_of=6, seed=3, max_tokens=6)
        assert [choice["text"] for choice in answer["choices"]] == [each.text for each in likeliest[:2]]
        assert answer["usage"]["completion_tokens"] == sum(len(each.token_ids) for each in drawn)


@pytest.mark.parametrize("params", [{}, {"stop": ["q", "ab"]}, {"n": 3, "temperature": 1.0, "seed": 5}, {"echo": True}])
@pytest.mark.parametrize("looks_ahead", [False, True])
async def test_a_stream_joins_to_the_whole(params, looks_ahead):
    body = {"prompt": "abc", "max_tokens": 24, "temperature": 0} | params
    async with running(tiny_llm(codec=ChatBytes(), looks_ahead=looks_ahead)) as server:
        whole = await server.complete(**body)
        chunks = await server.chunks(**body, stream_options={"include_usage": True})
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"] | {
            "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
        }
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        for choice in whole["choices"]:
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert "".join(c["text"] for c in own) == choice["text"]
            assert own[-1]["finish_reason"] == choice["finish_reason"]
            assert all(c["finish_reason"] is None for c in own[:-1])
            assert own[-1]["stop_reason"] == choice["stop_reason"]
        assert len(chunks) > 8


async def test_a_stream_comes_piece_by_piece():
    async with running() as server:
        chunks = await server.chunks(prompt="abc", max_tokens=10, ignore_eos=True, temperature=0)
        assert [len(chunk["choices"][0]["text"]) for chunk in chunks] == [1] * 10
        gains = server.recorder.of("gained")
        assert [tokens for _, _, tokens, _ in gains] == [1] * 10 and gains[0][3] is None and gains[1][3] > 0


async def test_stop_strings_do_not_leak_into_streams():
    [free] = offline(temperature=0, max_tokens=24, ignore_eos=True)
    stop = free.text[9:12]
    end = free.text.index(stop)
    async with running() as server:
        for include in (False, True):
            body = {"stop": stop, "temperature": 0, "max_tokens": 24, "include_stop_str_in_output": include}
            chunks = await server.chunks(prompt="abc", logprobs=1, **body)
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert text == free.text[: end + include * len(stop)]
            assert chunks[-1]["choices"][0]["stop_reason"] == stop
            tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
            assert "".join(tokens) == text
            for chunk in chunks[:-1]:
                sent = "".join(chunk["choices"][0]["logprobs"]["tokens"])
                assert sent == chunk["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_prompt_and_completion(stream):
    [result] = tiny_llm().generate("a\nbc", SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=2))
    async with running() as server:
        body = {"prompt": "a\nbc", "temperature": 0, "max_tokens": 5, "logprobs": 2, "echo": True}
        if stream:
            choices = [chunk["choices"][0] for chunk in await server.chunks(**body)]
            text = "".join(choice["text"] for choice in choices)
            logprobs = {
                key: [item for choice in choices for item in choice["logprobs"][key]] for key in choices[0]["logprobs"]
            }
        else:
            [choice] = (await server.complete(**body))["choices"]
            text, logprobs = choice["text"], choice["logprobs"]
    assert text == "a\nbc" + result.outputs[0].text
    assert "".join(logprobs["tokens"]) == text
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token
    expected = [*result.prompt_logprobs, *result.outputs[0].logprobs]
    ids = [*result.prompt_token_ids, *result.outputs[0].token_ids]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for place in range(1, len(ids)):
        assert logprobs["token_logprobs"][place] == pytest.approx(expected[place][ids[place]].logprob)
        assert max(logprobs["top_logprobs"][place].values()) == pytest.approx(
            max(each.logprob for each in expected[place].values())
        )


async def test_scoring_only():
    async with running() as server:
        whole = await server.complete("Yes", echo=True, logprobs=1, max_tokens=0)
        [choice] = whole["choices"]
        assert choice["text"] == "Yes" and choice["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == 0 and len(choice["logprobs"]["tokens"]) == 3
        assert (await server.complete("Yes", echo=True, max_tokens=0))["choices"][0]["text"] == "Yes"
        assert (await server.complete("Yes", max_tokens=0))["choices"][0]["text"] == ""
        assert (await server.complete("Yes", max_tokens=1))["usage"]["completion_tokens"] <= 1
        chunks = await server.chunks(prompt="Yes", max_tokens=0, echo=True, logprobs=0)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Yes"
        await server.idle()


async def test_a_vocabulary_that_puts_a_space_before_a_text():
    class Spaced(ChatBytes):
        def encode(self, text, **options):
            return super().encode(" " + text, **options)

    async with running(tiny_llm(codec=Spaced())) as server:
        [choice] = (await server.complete("abc", echo=True, logprobs=0, max_tokens=2))["choices"]
        logprobs = choice["logprobs"]
        assert choice["text"].startswith("abc") and "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4]


async def test_characters_of_several_tokens():
    class Latin(ChatBytes):
        """Token ``i`` is a byte from a text of two-byte characters."""

        def token_bytes(self, token):
            return b"" if token == 0 else bytes([0xC3 if token % 2 else 0x80 + token // 2])

    async with running(tiny_llm(codec=Latin())) as server:
        for tokens in range(1, 12):
            body = {"prompt": [3, 4, 5], "max_tokens": tokens, "temperature": 1.0, "seed": tokens, "logprobs": 1}
            [choice] = (await server.complete(**body))["choices"]
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            chunks = await server.chunks(**body)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
            streamed = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
            assert streamed == choice["logprobs"]["tokens"]


async def test_chat():
    prompt = ChatBytes().apply_chat_template([{"role": "user", "content": "hello"}])
    [expected] = offline([prompt], temperature=0, max_tokens=9)
    async with running() as server:
        answer = await server.chat(temperature=0, max_tokens=9)
        [choice] = answer["choices"]
        assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == expected.text
        assert answer["object"] == "chat.completion" and answer["usage"]["prompt_tokens"] == len(prompt)
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        response = await server.post(
            CHAT, messages=[{"role": "user", "content": parts}], temperature=0, max_completion_tokens=9
        )
        assert response.json()["choices"][0]["message"]["content"] == expected.text


async def test_a_chat_without_a_limit_ends_with_the_context():
    async with running(tiny_llm(codec=ChatBytes(), max_model_len=40)) as server:
        answer = await server.chat(temperature=0, ignore_eos=True)
        assert answer["usage"]["total_tokens"] == 40 and answer["choices"][0]["finish_reason"] == "length"


async def test_chat_streams_with_logprobs():
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "n": 2, "seed": 1}
    body |= {"logprobs": True, "top_logprobs": 3}
    async with running() as server:
        whole = (await server.post(CHAT, **body)).json()
        chunks = await server.chunks(CHAT, **body)
        for choice in whole["choices"]:
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
            content = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert [entry["token"] for entry in content] == [e["token"] for e in choice["logprobs"]["content"]]
            for entry in content:
                assert len(entry["top_logprobs"]) == 3 and bytes(entry["bytes"]).decode() == entry["token"]
                ranked = [each["logprob"] for each in entry["top_logprobs"]]
                assert ranked == sorted(ranked, reverse=True) and entry["logprob"] <= ranked[0]


async def test_penalties_and_biases_are_the_engines():
    params = {"temperature": 0, "max_tokens": 12, "frequency_penalty": 1.5, "presence_penalty": 1.0}
    params |= {"repetition_penalty": 1.2, "min_p": 0.1, "top_k": 5}
    [expected] = offline(**params, logit_bias={97: -100})
    async with running() as server:
        answer = await server.complete(**params, logit_bias={"97": -100})
        assert answer["choices"][0]["text"] == expected.text and "a" not in expected.text
        forced = await server.complete(logit_bias={"98": 100}, temperature=0, max_tokens=3)
        assert forced["choices"][0]["text"] == "bbb"


async def test_beam_search():
    [expected] = tiny_llm().beam_search("abc", BeamSearchParams(4, max_tokens=6, num_return_sequences=2))
    async with running() as server:
        body = {"use_beam_search": True, "n": 2, "beam_width": 4, "max_tokens": 6}
        answer = await server.complete(**body)
        assert [choice["text"] for choice in answer["choices"]] == [each.text for each in expected.outputs]
        chunks = await server.chunks(prompt="abc", **body)
        for index, output in enumerate(expected.outputs):
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert "".join(c["text"] for c in own) == output.text
        assert server.recorder.of("ended")[0][1].strategy == "beam"
        error = await server.error(400, prompt="abc", use_beam_search=True, n=2, top_p=0.5)
        assert error["param"] == "top_p"
        assert (await server.error(400, prompt="abc", length_penalty=2.0))["param"] == "length_penalty"


@pytest.mark.parametrize(
    "wanted",
    [
        {"structured_outputs": {"regex": "[0-9]{3}"}},
        {"guided_regex": "[0-9]{3}"},
        {"structured_outputs": {"choice": ["123", "456"]}},
        {"guided_choice": ["123", "456"]},
        {"guided_grammar": 'start: "1" /[0-9]/ /[0-9]/'},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [123, 456]}}}},
        {"guided_json": {"enum": [123]}},
        {"structured_outputs": {"json": '{"enum": [123]}'}},
    ],
)
async def test_what_the_text_must_be(wanted):
    async with running() as server:
        [choice] = (await server.complete(max_tokens=20, seed=1, **wanted))["choices"]
        assert len(choice["text"]) == 3 and choice["text"].isdigit() and choice["finish_reason"] == "stop"


async def test_json_objects():
    async with running() as server:
        answer = await server.chat(
            max_tokens=60, temperature=0, response_format={"type": "json_object"}, logit_bias={"125": 100}
        )
        assert answer["choices"][0]["message"]["content"].startswith("{")
        assert (await server.chat(response_format={"type": "text"}, max_tokens=1))["choices"]


async def test_guesses_can_be_declined():
    llm = tiny_llm(codec=ChatBytes(), speculate="ngram")
    async with running(llm) as server:
        prompt = "abcabcabcabc"
        texts = {
            speculate: (await server.complete(prompt, speculate=speculate, temperature=0, max_tokens=40))["choices"]
            for speculate in (None, True, False)
        }
        assert texts[None] == texts[True] == texts[False]
        drafts = [job.usage.drafts for _, job, _ in server.recorder.of("ended")]
        assert drafts[2] == 0
    async with running() as server:
        assert (await server.error(400, prompt="a", speculate=True))["param"] == "speculate"


async def test_namespaces_do_not_share_cached_prefixes():
    async with running() as server:

        async def cached(**body):
            answer = await server.complete("x" * 100, max_tokens=1, **body)
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await cached(namespace="a") == 0
        assert await cached(namespace="a") > 90
        assert await cached(cache_salt="b") == 0 and await cached(cache_salt="b") > 90
        assert await cached() == 0


async def test_keys_can_be_given_up():
    async with running() as server:
        body = {"prompt": "x" * 200, "max_tokens": 4, "temperature": 0}
        await server.complete(**body, kv_sparsity="streaming", kv_budget=60)
        assert (await server.error(400, **body, kv_sparsity="nonsense"))["param"] == "kv_sparsity"
        assert (await server.error(400, **body, kv_sparsity="streaming", kv_budget=1))["param"] == "kv_sparsity"
        assert (await server.error(400, **body, kv_budget=60))["param"] == "kv_budget"
        await server.idle()


async def test_priorities_go_first():
    async with running(max_running=1) as server:
        ordinary = [asyncio.create_task(server.complete(max_tokens=20, ignore_eos=True)) for _ in range(4)]
        await asyncio.sleep(0.01)
        urgent = asyncio.create_task(server.complete("urgent", max_tokens=1, priority=5))
        await asyncio.gather(urgent, *ordinary)
        ended = [job.prompt_tokens for _, job, _ in server.recorder.of("ended")]
        assert ended.index(6) <= 1


async def test_observers_are_told_the_whole_story():
    async with running() as server:
        response = await server.client.post(
            "/v1/completions",
            json={"prompt": "abc", "max_tokens": 5, "ignore_eos": True},
            headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        )
        [(_, job)] = server.recorder.of("received")
        assert response.json()["id"] == job.id == response.headers["x-request-id"]
        assert job.kind == "completion" and job.strategy == "generate" and job.prompt_tokens == 3
        assert job.arrived <= job.scheduled <= job.first < job.last <= job.ended
        assert job.outcome == "length" and job.tokens == 5 and job.usage.completion_tokens == 5
        assert job.trace["traceparent"].startswith("00-0af7")
        kinds = [kind for kind, _ in groupby(event[0] for event in server.recorder.events)]
        assert kinds[0] == "received" and kinds.count("ended") == 1
        assert sum(rows for _, rows, _ in server.recorder.of("stepped")) == 3 + 4


async def test_tokens_and_texts():
    async with running() as server:
        tokens = (await server.post("/tokenize", prompt="abc")).json()
        assert tokens == {"count": 3, "max_model_len": 512, "tokens": [97, 98, 99]}
        assert (await server.post("/detokenize", tokens=tokens["tokens"])).json() == {"prompt": "abc"}
        turns = [{"role": "user", "content": "hi"}]
        chat = (await server.post("/tokenize", messages=turns)).json()
        assert chat["tokens"] == ChatBytes().apply_chat_template(turns)
        assert (await server.error(400, "/tokenize"))["param"] == "prompt"
        assert (await server.error(400, "/detokenize", tokens=[1000]))["param"] == "tokens"


async def test_facts_about_the_server():
    async with running(served_model_name="tiny", metrics=lambda: b"up 1\n") as server:
        models = (await server.client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        assert (await server.client.get("/v1/models/tiny")).json() == models["data"][0]
        assert (await server.client.get("/v1/models/other")).status_code == 404
        for path in ("/health", "/ready", "/version"):
            assert (await server.client.get(path)).status_code == 200
        assert (await server.client.get("/metrics")).text == "up 1\n"
        await server.complete(max_tokens=4)
        state = (await server.client.get("/state")).json()
        assert state["model"] == "tiny" and state["health"] == "ok" and state["requests_total"] == 1
        slots = state["kv_slots"]
        assert slots["held"] == 0 and slots["free"] + slots["cached"] == slots["total"] and slots["cached"] > 0
        assert state["tokens_per_s"] > 0 and state["running"] == state["waiting"] == 0
