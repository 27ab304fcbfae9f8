"""Bad requests, limits and failures: a status and a message each, and nobody else is harmed."""

import asyncio
import json
import math

import pytest
from serving import check_error, running
from tiny import Bytes, ChatBytes, tiny_llm

from treewise.server.settings import ServerOptions

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("top_k", {"top_k": 0.5}),
        ("top_k", {"top_k": -2}),
        ("top_p", {"top_p": 0}),
        ("top_p", {"top_p": 1.5}),
        ("top_p", {"top_p": -1}),
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": "hot"}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": 1.5}),
        ("max_tokens", {"max_tokens": 2**31}),
        ("max_tokens", {"max_tokens": 10**30}),
        ("n", {"n": 0}),
        ("n", {"n": 10**6}),
        ("n", {"n": True}),
        ("best_of", {"n": 3, "best_of": 2}),
        ("best_of", {"best_of": 10**6}),
        ("best_of", {"best_of": 3, "stream": True}),
        ("min_tokens", {"min_tokens": 9, "max_tokens": 3}),
        ("stop", {"stop": ""}),
        ("stop", {"stop": ["a", 1]}),
        ("stop", {"stop": ["x"] * 1000}),
        ("stop", {"stop": "x" * 100000}),
        ("stop_token_ids", {"stop_token_ids": [10**6]}),
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": True}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("logit_bias", {"logit_bias": {"999": 1}}),
        ("logit_bias", {"logit_bias": {"9" * 5000: 1}}),
        ("logit_bias", {"logit_bias": {"1": 101}}),
        ("seed", {"seed": "7"}),
        ("suffix", {"suffix": "the end"}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [""]}),
        ("prompt", {"prompt": ["fine", ""]}),
        ("prompt", {"prompt": [[1, 2], []]}),
        ("prompt", {"prompt": [1, 128]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [1.5]}),
        ("prompt", {"prompt": [1, "a"]}),
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": {"text": "x"}}),
        ("prompt", {"prompt": "x" * 600}),
        ("prompt", {"prompt": ["x"] * 300}),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("stream_options", {"stream": True, "stream_options": {"include_usage": 1}}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
        ("guided_regex", {"guided_json": {}, "guided_regex": "a"}),
        ("guided_regex", {"guided_regex": "("}),
        ("guided_choice", {"guided_choice": []}),
        ("guided_json", {"guided_json": {"type": "nonsense"}}),
        ("cache_salt", {"namespace": "a", "cache_salt": "b"}),
        ("priority", {"priority": 10**12}),
        ("nonsense", {"nonsense": 1}),
        ("max_completion_tokens", {"max_completion_tokens": 3}),
        ("search", {"search": []}),
    ],
)
async def test_a_bad_field_is_named(param, body):
    async with running() as server:
        error = await server.error(400, **({"prompt": "abc"} | body))
        assert error["param"] == param and param in error["message"]
        assert error["type"] == "invalid_request_error"
        assert server.recorder.events == [("refused", "bad_request")]
        await server.idle()


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("messages", {}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "hello"}),
        ("messages", {"messages": [{"content": "x"}]}),
        ("messages", {"messages": [{"role": 5, "content": "x"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}),
        ("messages", {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 600}]}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("tools", {"tool_choice": "required"}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("max_completion_tokens", {"max_tokens": 3, "max_completion_tokens": 3}),
        ("prompt", {"prompt": "x"}),
    ],
)
async def test_a_bad_field_of_a_chat_is_named(param, body):
    async with running() as server:
        turns = {} if param == "messages" else {"messages": [{"role": "user", "content": "x"}]}
        error = await server.error(400, CHAT, **turns, **body)
        assert error["param"] == param and param in error["message"]


async def test_fields_without_effect_are_accepted():
    ignored = {"user": "me", "metadata": {"a": 1}, "store": False, "service_tier": "auto"}
    async with running() as server:
        await server.complete(max_tokens=1, **ignored)
        await server.chat(max_tokens=1, tools=[], tool_choice="none", parallel_tool_calls=True, **ignored)
        answer = await server.post(
            CHAT,
            messages=[
                {"role": "user", "content": "x", "name": None},
                {"role": "assistant", "content": "y", "refusal": None, "tool_calls": None},
                {"role": "user", "content": "z"},
            ],
            max_tokens=1,
        )
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": "abc",}',
        b'{"prompt": "\xc4\xe3\xba\xc3"}',  # GBK
        b'\xff\xfe{\x00"\x00',
        b'{"prompt": "\\ud83d"}',
        b'{"prompt": "abc", "temperature": NaN}',
        b'{"prompt": "abc", "temperature": -Infinity}',
        b'{"prompt": "abc", "temperature": 1e999}',
        b'{"prompt": "abc", "search": {"strategy": "\\ud83d"}}',
        b'{"prompt": ' + b"[" * 100000,
        b'{"prompt": "abc", "guided_json": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"prompt": [' + b'"",' * 200000 + b"1]}",
        b'{"prompt": "abc", "seed": ' + b"9" * 10000 + b"}",
    ],
)
async def test_a_broken_body_is_refused(body):
    async with running() as server:
        response = await server.client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        check_error(response, 400)
        await server.idle()


@pytest.mark.parametrize("text", ["a\x00b", "👩‍👩‍👧‍👦", "e" + "\u0301" * 100, "\ufeffabc", "\u202e", "\x7f"])
async def test_odd_texts_are_texts(text):
    async with running() as server:
        answer = await server.complete(text, max_tokens=2, echo=True, stop=text)
        assert answer["usage"]["prompt_tokens"] == len(Bytes().encode(text))


async def test_other_types_of_content_are_refused():
    async with running() as server:
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            response = await server.client.post(
                "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind}
            )
            check_error(response, 415)


async def test_large_bodies_are_refused():
    async with running(max_body_bytes=1000) as server:
        check_error(await server.post("/v1/completions", prompt="x" * 1000), 413)

        async def endless():
            for _ in range(100):
                yield b" " * 100

        response = await server.client.post(
            "/v1/completions", content=endless(), headers={"content-type": "application/json"}
        )
        check_error(response, 413)
        assert server.recorder.events == [("refused", "too_large")] * 2


async def test_the_model_must_be_this_one():
    async with running(served_model_name="tiny") as server:
        for name in ("nope", "", "TINY", "x" * 10000):
            error = await server.error(404, prompt="a", model=name)
            assert error["code"] == "model_not_found" and error["param"] == "model"
        assert (await server.error(400, prompt="a", model=5))["param"] == "model"
        assert (await server.complete(max_tokens=1))["model"] == "tiny"
        assert (await server.complete(max_tokens=1, model="tiny"))["model"] == "tiny"


async def test_unknown_paths_and_methods():
    async with running() as server:
        check_error(await server.client.get("/nope"), 404)
        response = await server.client.get("/v1/completions")
        check_error(response, 405)
        assert response.headers["allow"] == "POST"


async def test_a_model_without_a_chat_template():
    class Plain(Bytes):
        has_chat_template = False

    async with running(tiny_llm(codec=Plain())) as server:
        error = await server.error(400, CHAT, messages=[{"role": "user", "content": "x"}])
        assert error["param"] == "messages" and "template" in error["message"]
        await server.complete(max_tokens=1)


async def test_a_template_that_refuses():
    class Strict(ChatBytes):
        def render_chat(self, messages, add_generation_prompt=True):
            raise ValueError("the chat template refuses these messages: roles must alternate")

    async with running(tiny_llm(codec=Strict())) as server:
        error = await server.error(400, CHAT, messages=[{"role": "user", "content": "x"}])
        assert error["param"] == "messages" and "alternate" in error["message"]


async def test_prompts_at_the_limit_of_the_context():
    async with running(tiny_llm(codec=ChatBytes(), max_model_len=32)) as server:
        assert (await server.complete("x" * 31, max_tokens=16, ignore_eos=True))["usage"]["completion_tokens"] == 1
        full = await server.complete("x" * 32, max_tokens=16)
        assert full["usage"]["completion_tokens"] == 0 and full["choices"][0]["finish_reason"] == "length"
        error = await server.error(400, prompt="x" * 33)
        assert error["code"] == "context_length_exceeded"
        await server.idle()


async def test_a_prompt_larger_than_the_pool():
    async with running(tiny_llm(codec=ChatBytes(), num_kv_slots=128)) as server:
        await server.error(400, prompt="x" * 300)
        outgrown = await server.error(400, prompt="x" * 100, max_tokens=400, ignore_eos=True)
        assert "num_kv_slots" in outgrown["message"]
        await server.idle()


async def test_keys():
    async with running(api_key=("one", "two")) as server:
        for headers in (
            {},
            {"authorization": "Bearer three"},
            {"authorization": "Basic one"},
            {"authorization": "é".encode()},
        ):
            response = await server.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert check_error(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await server.client.get("/state", headers=headers)).status_code == 200
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.client.get("/metrics")).status_code == 401
        assert server.recorder.events == [("refused", "unauthorized")] * 5


async def test_pages_of_other_origins_are_let_in_where_they_are_named():
    origin = {"origin": "https://example.org", "access-control-request-method": "POST"}
    async with running() as server:
        assert "access-control-allow-origin" not in (await server.client.get("/version", headers=origin)).headers
        assert (await server.client.options("/v1/completions", headers=origin)).status_code == 405
    async with running(allowed_origin=("https://example.org",), api_key=("k",)) as server:
        for response in (
            await server.client.options("/v1/completions", headers=origin),
            await server.client.get("/state", headers=origin),
        ):
            assert response.headers["access-control-allow-origin"] == "https://example.org"


async def test_the_queue_has_an_end():
    async with running(max_running=2, max_waiting=3) as server:
        busy = [asyncio.create_task(server.complete(max_tokens=60, ignore_eos=True)) for _ in range(5)]
        while server.driver.num_open < 5:
            await asyncio.sleep(0.001)
        response = await server.post("/v1/completions", prompt="a")
        assert check_error(response, 429)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) > 0
        assert server.recorder.of("refused") == [("refused", "queue_full")]
        await asyncio.gather(*busy)
        assert max(server.recorder.of("stepped"))[1] <= 6
        await server.idle()


async def test_time_is_limited():
    async with running(time_limit=0.15, max_running=1) as server:
        slow = {"max_tokens": 500, "ignore_eos": True}
        responses = await asyncio.gather(*(server.post("/v1/completions", prompt="a", **slow) for _ in range(3)))
        late = [response for response in responses if response.status_code != 200]
        assert late, "three requests of 500 steps cannot be done in that time"
        for response in late:
            assert check_error(response, 504)["code"] == "time_limit"
        assert {job.outcome for _, job, _ in server.recorder.of("ended")} <= {"abort", "length"}
        await server.driver._idle.wait()
        assert not server.llm.engine.requests


async def test_an_engine_that_fails_says_so():
    async with running() as server:
        forward = server.llm.engine.runner.forward

        def broken(*arguments):
            if server.llm.engine.num_steps > 6:
                raise RuntimeError("the device is gone")
            return forward(*arguments)

        server.llm.engine.runner.forward = broken
        body = {"max_tokens": 30, "ignore_eos": True}
        whole, stream = await asyncio.gather(
            server.post("/v1/completions", prompt="abc", **body),
            server.post("/v1/completions", prompt="abd", stream=True, **body),
        )
        assert check_error(whole, 500)["code"] == "engine_failed"
        assert stream.status_code == 200
        *_, last, done, _ = stream.text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert done == "data: [DONE]"
        check = check_error(await server.client.get("/health"), 503)
        assert "the device is gone" in check["message"]
        check_error(await server.client.get("/ready"), 503)
        response = await server.post("/v1/completions", prompt="abc")
        assert check_error(response, 503)["code"] == "failed"
        state = (await server.client.get("/state")).json()
        assert state["health"] == "failed" and state["running"] == 0
        assert (await server.client.get("/v1/models")).status_code == 200


async def test_logits_that_are_no_numbers_fail_alone():
    async with running() as server:
        runner = server.llm.engine.runner
        forward = runner.forward

        def poisoned(batch, *arguments):
            logits = forward(batch, *arguments)
            owners = {tenant.prompt_tokens[0] for tenant in batch.rows_of_owners}
            return logits * math.nan if owners == {ord("!")} else logits

        runner.forward = poisoned
        error = await server.error(500, prompt="!bc", max_tokens=4)
        assert error["code"] == "internal_error"
        await server.idle()


async def test_an_observer_that_fails_does_no_harm():
    class Broken:
        def __getattr__(self, name):
            raise RuntimeError(name)

    async with running() as server:
        server.driver.observers = (Broken(), server.recorder)
        await server.complete(max_tokens=2)
        assert len(server.recorder.of("ended")) == 1


async def test_drained_servers_finish_what_runs():
    async with running() as server:
        running_one = asyncio.create_task(server.complete(max_tokens=60, ignore_eos=True))
        while not server.driver.num_running:
            await asyncio.sleep(0.001)
        drain = asyncio.create_task(server.driver.drain(30))
        await asyncio.sleep(0)
        assert check_error(await server.post("/v1/completions", prompt="a"), 503)["code"] == "draining"
        check_error(await server.client.get("/ready"), 503)
        assert (await server.client.get("/health")).status_code == 200
        assert await drain
        assert (await running_one)["usage"]["completion_tokens"] == 60


async def test_what_does_not_finish_in_time_is_ended():
    async with running() as server:
        post = asyncio.create_task(server.post("/v1/completions", prompt="a", max_tokens=500, ignore_eos=True))
        while not server.driver.num_running:
            await asyncio.sleep(0.001)
        assert not await server.driver.drain(0.01)
        assert check_error(await post, 503)["code"] == "draining"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("max_running", 0),
        ("max_waiting", -1),
        ("max_prompt_tokens", 0),
        ("time_limit", 0),
        ("time_limit", math.nan),
        ("drain_timeout", -1),
        ("api_key", ("",)),
    ],
)
async def test_a_wrong_option_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        ServerOptions(**{field: value})


async def test_the_description_is_true():
    async with running() as server:
        description = (await server.client.get("/openapi.json")).json()
        paths = set(description["paths"])
        assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health", "/state"} <= paths
        for path, operations in description["paths"].items():
            [(method, operation)] = operations.items()
            if method == "post":
                reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                assert reference.rpartition("/")[2] in description["components"]["schemas"]
                assert {"400", "413", "415"} <= set(operation["responses"])
            elif "{" not in path:
                response = await server.client.get(path)
                required = operation["responses"]["200"]["content"]["application/json"]["schema"]["required"]
                assert set(required) <= set(response.json())
