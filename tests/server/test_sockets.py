"""Clients over real sockets: the official one, curl, many at once, and such as go away."""

import asyncio
import json
import subprocess

import httpx
import pytest
from serving import listening
from tiny import ChatBytes, tiny_llm

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "hello"}]


def official(server, key="none", **options):
    return openai.AsyncOpenAI(base_url=f"{server.client.base_url}/v1", api_key=key, max_retries=0, **options)


async def test_the_official_client_completes():
    async with listening() as server, official(server) as client:
        answer = await client.completions.create(
            model="TinyForCausalLM", prompt="abc", max_tokens=6, temperature=0, logprobs=2, echo=True, seed=1
        )
        [choice] = answer.choices
        assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.text_offset[0] == 0
        assert answer.usage.completion_tokens == 6
        several = await client.completions.create(model="TinyForCausalLM", prompt=["a", "b"], n=2, max_tokens=3)
        assert [each.index for each in several.choices] == [0, 1, 2, 3]
        stream = await client.completions.create(
            model="TinyForCausalLM", prompt="abc", max_tokens=6, temperature=0, stream=True, echo=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == choice.text
        [model] = (await client.models.list()).data
        assert model.id == "TinyForCausalLM" and (await client.models.retrieve(model.id)).id == model.id


async def test_the_official_client_chats():
    async with listening() as server, official(server) as client:
        body = {"model": "TinyForCausalLM", "messages": MESSAGES, "max_completion_tokens": 6, "temperature": 0}
        answer = await client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
        text = answer.choices[0].message.content
        content = answer.choices[0].logprobs.content
        assert "".join(entry.token for entry in content) == text and len(content[0].top_logprobs) == 2
        stream = await client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens == 6
        again = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "and?"}]
        follow_up = await client.chat.completions.create(**body | {"messages": again})
        assert follow_up.usage.prompt_tokens > answer.usage.prompt_tokens + 6


async def test_the_official_client_has_schemas():
    pydantic = pytest.importorskip("pydantic")

    class Answer(pydantic.BaseModel):
        yes: bool

    async with listening() as server, official(server) as client:
        answer = await client.chat.completions.parse(
            model="TinyForCausalLM", messages=MESSAGES, response_format=Answer, max_tokens=40, temperature=0
        )
        assert answer.choices[0].message.parsed.yes in (True, False)


async def test_the_official_client_searches():
    search = {"strategy": "best-of-n", "n": 3, "tree": True, "max_tokens": 5}
    async with listening() as server, official(server) as client:
        body = {"model": "TinyForCausalLM", "messages": MESSAGES, "extra_body": {"search": search}, "seed": 3}
        answer = await client.chat.completions.create(**body)
        assert len(answer.treewise["tree"]["nodes"]) == 4
        nodes, text = set(), ""
        async for chunk in await client.chat.completions.create(**body, stream=True):
            nodes |= {node["id"] for node in (getattr(chunk, "treewise", None) or {}).get("nodes", ())}
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == answer.choices[0].message.content and nodes == {0, 1, 2, 3}


async def test_the_official_client_knows_the_errors():
    async with listening(api_key=("right",), max_n=4) as server:
        async with official(server, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with official(server, "right") as client:
            with pytest.raises(openai.NotFoundError) as caught:
                await client.completions.create(model="gpt-4", prompt="a")
            assert caught.value.code == "model_not_found" and caught.value.param == "model"
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="TinyForCausalLM", prompt="a", n=5)
            assert caught.value.param == "n"
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(
                    model="TinyForCausalLM", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
                )
            assert caught.value.param == "tools"


async def test_curl(tmp_path):
    async with listening() as server:

        async def curl(*arguments):
            command = ["curl", "-sS", "--max-time", "20", *arguments]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout

        url = f"{server.client.base_url}/v1/completions"
        kind = ("-H", "content-type: application/json")
        body = json.dumps({"prompt": "abc", "max_tokens": 4, "temperature": 0})
        text = json.loads(await curl(url, *kind, "-d", body))["choices"][0]["text"]
        streamed = await curl("-N", url, *kind, "-d", body[:-1] + ', "stream": true}')
        events = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text
        assert "content-type" in json.loads(await curl(url, "-d", body))["error"]["message"]
        assert json.loads(await curl(f"{server.client.base_url}/health")) == {"status": "ok"}


STAGES = {
    "waiting": ({"max_tokens": 400}, lambda server, job: True),
    "in the prompt": ({"prompt": "x" * 400, "max_tokens": 50}, lambda server, job: job.scheduled),
    "decoding": ({"max_tokens": 400}, lambda server, job: job.tokens > 3),
    "between branches": ({"max_tokens": 400, "n": 6}, lambda server, job: job.tokens > 9),
    "searching": (
        {"search": {"strategy": "mcts", "iterations": 1000, "evaluate": "logprob"}},
        lambda server, job: job.tokens > 9,
    ),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("stream", [False, True])
async def test_work_ends_when_the_client_goes(stage, stream):
    body, reached = STAGES[stage]
    llm = tiny_llm(codec=ChatBytes(), max_num_rows=8)
    async with listening(llm, max_running=1 if stage == "waiting" else 8) as server:
        blocker = None
        if stage == "waiting":
            blocker = asyncio.create_task(server.complete(max_tokens=300, n=4, ignore_eos=True))
            await until(lambda: server.driver.num_running)
        known = len(server.recorder.of("received"))
        for round_ in range(1, 21):
            outside = httpx.AsyncClient(base_url=server.client.base_url)
            whole = {"prompt": "abc", "stream": stream, **body}
            whole |= {} if "search" in body else {"ignore_eos": True}
            post = asyncio.create_task(outside.post("/v1/completions", json=whole))
            await until(lambda: len(server.recorder.of("received")) == known + round_)  # noqa: B023
            job = server.recorder.of("received")[-1][1]
            await until(lambda: reached(server, job))  # noqa: B023
            post.cancel()
            await outside.aclose()
            await until(lambda: job.ended)  # noqa: B023
            assert job.outcome == "abort"
            assert job.tokens < body.get("max_tokens", 10**6) * body.get("n", 1)
            if stage == "waiting":
                assert job.scheduled is None and job.usage is None
        if blocker is not None:
            assert (await blocker)["usage"]["completion_tokens"] == 1200
        await server.idle()


async def test_a_client_that_goes_before_its_body_has_come(caplog):
    async with listening() as server:
        url = httpx.URL(server.client.base_url)
        for _ in range(5):
            _, writer = await asyncio.open_connection(url.host, url.port)
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100"
            writer.write(f'{head}\r\n\r\n{{"prompt":'.encode())
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
        await until(lambda: len(server.recorder.of("refused")) == 5)
        assert not caplog.records
        await server.idle()


async def test_requests_of_one_id_do_not_mix():
    body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}
    headers = {"x-request-id": "the same"}
    async with listening() as server:
        expected = (await server.complete(**body | {"stream": False}))["choices"][0]["text"]
        leaving = asyncio.create_task(server.client.post("/v1/completions", json=body, headers=headers))
        staying = asyncio.create_task(server.client.post("/v1/completions", json=body, headers=headers))
        await until(lambda: len(server.recorder.of("gained")) > 20)
        leaving.cancel()
        response = await staying
        chunks = [json.loads(event[6:]) for event in response.text.split("\n\n")[:-2]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        assert {chunk["id"] for chunk in chunks} == {response.headers["x-request-id"]} != {"the same"}
        await server.idle()


async def test_many_clients_stream_at_once():
    async with (
        listening(max_running=64) as server,
        httpx.AsyncClient(
            base_url=server.client.base_url, timeout=120, limits=httpx.Limits(max_connections=None)
        ) as client,
    ):

        async def one(number):
            body = {"prompt": f"{number % 7}abc", "max_tokens": 12, "seed": number, "stream": True, "ignore_eos": True}
            text = ""
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                assert line == "" or line == "data: [DONE]"
            return text

        texts = await asyncio.gather(*(one(number) for number in range(200)))
        alone = [await one(number) for number in (0, 77, 199)]
        assert alone == [texts[number] for number in (0, 77, 199)]
        await server.idle()


async def test_a_slow_reader_gets_everything():
    async with listening() as server:
        body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "stream": True, "temperature": 0}
        text = ""
        async with server.client.stream("POST", "/v1/completions", json=body) as response:
            await asyncio.sleep(1)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == (await server.complete(**body | {"stream": False}))["choices"][0]["text"]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)
