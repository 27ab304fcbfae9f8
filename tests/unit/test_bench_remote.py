"""What is asked of a server by URL, and what is made of its answers, good and bad."""

import asyncio
import json
from threading import Event, Thread

import pytest
from aiohttp import web

from treewise.bench.loads import Demand, Load
from treewise.bench.remote import Answer, Remote, random_words
from treewise.cli import main


class Server:
    """Answers over HTTP as OpenAI's API does, or as `reply` says; remembers what it was asked."""

    def __init__(self, reply=None):
        self.asked, self.reply, self.most, self.running = [], reply, 0, 0
        self._started, self._stopping = Event(), asyncio.Event()

    def __enter__(self):
        self.thread = Thread(target=lambda: asyncio.run(self._serve()))
        self.thread.start()
        self._started.wait()
        return self

    def __exit__(self, *error):
        self.loop.call_soon_threadsafe(self._stopping.set)
        self.thread.join()

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/{path:.*}", self._answer)])
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stopping.wait()
        await runner.cleanup()

    async def _models(self, request):
        return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})

    async def _answer(self, request):
        body = await request.json()
        self.asked.append((request.path, body, request.headers.get("Authorization")))
        if self.reply is not None and (answer := await self.reply(request, body)) is not None:
            return answer
        self.running += 1
        self.most = max(self.most, self.running)
        response = await self.stream(request)
        chat = request.path.endswith("chat/completions")
        if chat:
            await self.send(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0.01)
            await self.send(response, {"choices": [{"delta": {"content": "a"}} if chat else {"text": "a"}]})
        usage = {"prompt_tokens": 7, "completion_tokens": 2 * body["max_tokens"]}
        await self.send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self.running -= 1
        return response

    async def stream(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return response

    async def send(self, response, chunk):
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@pytest.fixture
def bench(capsys):
    def run(*words):
        small = ["--input-tokens", "12", "--output-tokens", "4", *map(str, words)]
        main(["bench", "serve", *small])
        captured = capsys.readouterr()
        return json.loads(captured.out.splitlines()[-1]), captured.err

    return run


def test_so_many_at_a_time(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    file, picture = tmp_path / "result.json", tmp_path / "result.png"
    with Server() as server:
        words = ["--url", server.url, "--concurrency", "1,3", "--num-prompts", 5]
        result, said = bench(*words, "--shared-prefix-tokens", 8, "--json", file, "--png", picture)
    assert json.loads(file.read_text()) == result and picture.read_bytes().startswith(b"\x89PNG")
    assert "sesame" not in json.dumps(result) + said
    assert [row["case"] for row in result["results"]] == ["1 at once", "3 at once"]
    for row in result["results"]:
        assert row["requests"] == 5 and row["errors"] == {} and row["prompt_tokens"] == 7
        assert row["tokens_per_s"] == pytest.approx(5 * 8 / row["whole_s"]), "the server's own count"
        assert 0.01 <= row["ttft_s"]["p50"] < row["e2e_s"]["p50"] <= row["e2e_s"]["p99"]
        assert 0 < row["tpot_ms"]["p50"] < row["itl_ms"]["max"] < row["whole_s"] * 1e3
    assert server.most == 3 and len(server.asked) == 11
    paths, bodies, keys = zip(*server.asked, strict=True)
    assert set(paths) == {"/v1/completions"} and set(keys) == {"Bearer sesame"}
    for body in bodies:
        assert body["model"] == "first" and body["stream"] and body["stream_options"] == {"include_usage": True}
        assert body["ignore_eos"] and len(body["prompt"]) == 12 and body["prompt"][:8] == bodies[0]["prompt"][:8]
    assert len({tuple(body["prompt"]) for body in bodies}) == 6, "the loads ask the same, none of it twice"
    assert "whole p50 s" in said and "errors" not in said


def test_as_they_come_by_chance_in_chat(bench):
    with Server() as server:
        result, _ = bench(
            "--url", f"{server.url}/v1/", "--rate", 200, "--num-prompts", 8, "--api", "chat", "--model", "second"
        )
    [row] = result["results"]
    assert row["case"] == "200 a second" and row["requests"] == 8 and server.most > 1
    for path, body, key in server.asked:
        [turn] = body["messages"]
        assert path == "/v1/chat/completions" and body["model"] == "second" and key is None
        assert turn["role"] == "user" and len(turn["content"].split()) == 12
    last = Load("", 8, [""] * 8, 4, 200.0).arrivals(0)[-1]
    assert row["whole_s"] > last and row["ttft_s"]["p50"] >= 0.01, "a turn without text is no token"


def test_prompts_of_a_file_come_again(bench, tmp_path):
    file = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "b"}]
    file.write_text(json.dumps({"prompt": "a"}) + "\n\n" + json.dumps({"messages": turns}) + "\n")
    words = ["--dataset-jsonl", file, "--api", "chat", "--concurrency", 1, "--num-prompts", 3]
    with Server() as server:
        result, _ = bench("--url", server.url, *words, "--extra-body", '{"n": 2}')
    asked = [body["messages"] for _, body, _ in server.asked[1:]]
    assert asked == [[{"role": "user", "content": "a"}], turns, [{"role": "user", "content": "a"}]]
    assert all(body["n"] == 2 and "ignore_eos" not in body for _, body, _ in server.asked)
    assert result["dataset_jsonl"] == str(file)


def test_what_fails_is_counted_by_how_it_did(bench):
    async def reply(request, body):
        number = body["seed"] if body["max_tokens"] > 2 else 9
        if number == 0:
            return web.json_response({"error": {"message": "full\nup"}}, status=429)
        if number in (1, 2, 3):
            response = await server.stream(request)
            await server.send(response, {"choices": [{"text": "a"}]})
            if number == 1:
                await server.send(response, {"error": {"message": "it broke"}})
                await response.write(b"data: [DONE]\n\n")
            if number == 2:
                await response.write(b"data: {nonsense\n\n")
            return response
        return None

    with Server(reply) as server:
        result, said = bench("--url", server.url, "--concurrency", 2, "--num-prompts", 6)
    [row] = result["results"]
    assert row["requests"] == 2 and row["tpot_ms"] is not None
    found = sorted(row["errors"])
    assert sum(row["errors"].values()) == 4 and "errors" in said
    assert found[0].startswith('429: {"error": {"message": "full') and found[1].startswith("JSONDecodeError")
    assert found[2:] == ["it broke", "the stream ended before [DONE]"]


def test_a_server_that_refuses_everything_is_a_line(capsys, bench):
    async def reply(request, body):
        return web.Response(status=400, text="ignore_eos: unknown field")

    with Server(reply) as server, pytest.raises(SystemExit):
        bench("--url", server.url)
    assert "every request to" in (said := capsys.readouterr().err) and "400: ignore_eos: unknown field" in said


def test_pieces_count_where_the_server_does_not():
    answer = Answer(asked=0.0)
    for text in ("a", "", "b", "c"):
        answer.take(json.dumps({"choices": [{"text": text}]}).encode())
    assert answer.num_tokens == 3 and len(answer.gaps()) == 2 and not answer.done


def test_words_are_a_matter_of_their_number():
    assert random_words(50, 3) == random_words(50, 3) != random_words(50, 4) and len(random_words(50, 3)) == 50
    texts = Remote(url="http://x", prompts="text", shared_prefix_tokens=4).prompts_of(Demand(input_tokens=9), 2, 0)
    (first, second) = (text.split() for text in texts)
    assert first[:4] == second[:4] and first[4:] != second[4:] and len(first) == len(second) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "localhost:8000"], "url: 'localhost:8000' is not a URL such as http://localhost:8000"),
        (["--url", "http://127.0.0.1:9"], "url: http://127.0.0.1:9/v1/models lists no model (ClientConnectorError"),
        (["--api", "chat"], "url: what a server is asked needs the URL of one"),
        (["--url", "http://x", "--api", "chat", "--prompts", "tokens"], "prompts: chat takes no token ids"),
        (["--url", "http://x", "--extra-body", "[1]"], "extra_body: '[1]' is not a JSON object"),
        (["--url", "http://x", "--kv-sparsity", "snapkv"], "url: KV sparsity and the engine are the server's own"),
        (["--url", "http://x", "--page-size", "8"], "url: KV sparsity and the engine are the server's own"),
        (["--url", "http://x", "--kv-tokens", "5000"], "kv_tokens: with --url"),
        (["--url", "http://x", "--against", "vllm"], "against: with --url"),
        (["--url", "http://x", "--shared-prefix-tokens", "12"], "shared_prefix_tokens must be an integer"),
        (["--url", "http://x", "--request-timeout", "0"], "request_timeout must be positive"),
        (["--url", "http://x", "--dataset-jsonl", "/nowhere"], "No such file"),
    ],
)
def test_mistakes_name_the_field(capsys, bench, arguments, message):
    with pytest.raises(SystemExit):
        bench(*arguments)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", '{"prompt": ""}'])
def test_lines_without_a_prompt_are_told(capsys, bench, tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(SystemExit):
        bench("--url", "http://x", "--dataset-jsonl", file)
    assert f"dataset_jsonl: line 2 of {file} is no JSON object with prompt" in capsys.readouterr().err
