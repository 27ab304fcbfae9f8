"""A real server under everything at once: streams, trees, clients that go, bodies that are wrong, text of every kind.

    python -m pytest -m stress tests/server/test_soak.py -s

It takes three minutes; ``TREEWISE_SOAK_SECONDS=1800`` is half an hour. ``TREEWISE_SOAK_CLIENTS`` says how many clients
there are at a time, ``TREEWISE_SOAK_SEED`` what they draw, and ``TREEWISE_SOAK_MODEL`` may name another model.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from threading import Thread
from time import perf_counter

import aiohttp
import psutil
import pytest
from serving import process

from treewise.bench.steps import percentiles

SECONDS = float(os.environ.get("TREEWISE_SOAK_SECONDS", "180"))
CLIENTS = int(os.environ.get("TREEWISE_SOAK_CLIENTS", "24"))
SEED = int(os.environ.get("TREEWISE_SOAK_SEED", "0"))

BODY_LIMIT = 100_000
LIMITS = {
    "num-kv-slots": 16_384,
    "max-body-bytes": BODY_LIMIT,
    "max-running": 12,
    "max-waiting": 8,
    "max-n": 8,
    "time-limit": 60,
}
REFUSED = {400, 404, 413, 415, 422}
BUSY = 429
CRANKS = 12
"""Looks at the server's memory. PyTorch keeps something for every shape it has seen: some hundred megabytes in time."""
MOST_GROWTH = 96 << 20
"""Bytes that it may grow by in the last third of the looks."""
MOST_MEMORY = 1500 << 20
"""Bytes that it may have."""
MOST_THREADS = 48
"""Threads that it may have: an event loop keeps up to 32 for what takes long."""

ODD = (
    *(
        "",
        " ",
        "\n",
        "\x00",
        "\x7f",
        "é",
        "e\u0301",
        "ß",
        "İ",
        "ﬁ",
        "ж",
        "漢字",
        "한글",
        "ไทย",
        "हिन्दी",
        "العربية",
        "עברית",
    ),
    *(
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "🇨🇭",
        "\U0001f600",
        "\U0010ffff",
        "\ufffd",
        "\ufeff",
        "\u200b",
        "\u202e",
        "\u2028",
    ),
    *("Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤", "<|im_end|>", "<|endoftext|>", "</script>", "data: [DONE]\n\n", "\\u0000", "{{ 7*7 }}", "'\"`$()"),
)
BROKEN = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"0",
    b'"text"',
    b"\xff\xfe",
    b'{"prompt": "\xc3("}',
    b'{"prompt": "a", "max_tokens": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
    b"[" * 20_000,
    b'{"a":' * 9_000,
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5_000 + b"}",
)
WRONG = (
    {},
    {"prompt": None},
    {"prompt": 3},
    {"prompt": []},
    {"prompt": ""},
    {"prompt": [[]]},
    {"prompt": [-1]},
    {"prompt": [10**6]},
    {"prompt": [1, "a"]},
    {"prompt": {"a": 1}},
    {"prompt": "a", "n": 0},
    {"prompt": "a", "n": 10**9},
    {"prompt": "a", "n": 9},
    {"prompt": "a", "max_tokens": -1},
    {"prompt": "a", "max_tokens": "many"},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "top_p": 0},
    {"prompt": "a", "stop": [""] * 3},
    {"prompt": "a", "stop": ["x"] * 2_000},
    {"prompt": "a", "logit_bias": {"a": 1}},
    {"prompt": "a", "logit_bias": {"9999999": 1}},
    {"prompt": "a", "logprobs": 10**6},
    {"prompt": "a", "model": "another"},
    {"prompt": "a", "search": {"strategy": "nonsense"}},
    {"prompt": "a", "search": {"strategy": "best-of-n", "n": -1}},
    {"prompt": "a", "search": 7},
    {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
    {"prompt": "a", "guided_regex": "("},
    {"prompt": "a", "kv_sparsity": "nonsense"},
    {"prompt": "a", "unknown": True},
    {"prompt": "half a character: \ud800"},
    {"messages": [{"role": "user", "content": "\udfff"}]},
    {"prompt": "a" * 5_000},
    {"prompt": "a" * (BODY_LIMIT + 1)},
    {"messages": []},
    {"messages": "a"},
    {"messages": [{"role": "user"}, 3]},
)


class Soak:
    """Clients that draw what they do.

    Attributes
    ----------
    times : dict of str to list of float
        Seconds of what has gone well, by kind.
    first : list of float
        Seconds to the first event of streams.
    seen : Counter of (str, int)
        Kinds and statuses.
    wrong : list of str
        What should not have been.
    """

    def __init__(self, url, session):
        self.url, self.session = url, session
        self.times, self.first, self.seen = defaultdict(list), [], Counter()
        self.wrong = []
        kinds = {
            self.completion: 4,
            self.stream: 6,
            self.chat: 4,
            self.search: 2,
            self.gone: 4,
            self.broken: 3,
            self.bad: 4,
            self.rude: 1,
            self.other: 3,
        }
        self.kinds, self.weights = list(kinds), list(kinds.values())

    async def client(self, number, until):
        """Do one thing after the other."""
        draw = random.Random(f"{SEED} {number} {until}")
        while perf_counter() < until and len(self.wrong) < 20:
            [kind] = draw.choices(self.kinds, self.weights)
            began = perf_counter()
            try:
                if await kind(draw):
                    self.times[kind.__name__].append(perf_counter() - began)
                else:
                    await asyncio.sleep(0.3)  # the server was busy
            except Exception as error:
                self.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    # ------------------------------------------------------------------ what is drawn

    def text(self, draw):
        """Text of up to some hundred characters of any kind."""
        pieces = [draw.choice(ODD) if draw.random() < 0.3 else self.word(draw) for _ in range(draw.randrange(1, 12))]
        return "x" + draw.choice(["", " "]).join(pieces)

    def word(self, draw):
        """A few characters from anywhere."""
        last = draw.choice([0x7F, 0x7F, 0x7FF, 0xFFFF, 0x10FFFF])
        characters = (chr(draw.randrange(last + 1)) for _ in range(draw.randrange(1, 8)))
        return "".join("?" if "\ud800" <= character <= "\udfff" else character for character in characters)

    def settings(self, draw):
        """What is asked of an answer."""
        body = {"max_tokens": draw.randrange(1, 40), "seed": draw.randrange(2**31)}
        extras = [
            {"temperature": draw.choice([0, 0.5, 1.5])},
            {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
            {"stop": [self.text(draw) for _ in range(draw.randrange(1, 4))]},
            {"stop": draw.choice(["a", "e", " ", "\n", "é"])},
            {"frequency_penalty": 1.5, "presence_penalty": -1, "repetition_penalty": 1.1},
            {"logit_bias": {str(draw.randrange(200)): draw.choice([-100, 5])}},
            {"n": draw.randrange(1, 6)},
            draw.choice([{"guided_regex": "[a-c]{1,9}"}, {"response_format": {"type": "json_object"}}]),
            {"ignore_eos": True},
            {"priority": draw.randrange(-2, 3), "namespace": draw.choice("ab")},
            {"use_beam_search": True, "beam_width": 4, "n": 2},
        ]
        for extra in draw.sample(extras, draw.choice([0, 1, 1, 2])):
            if not (extra.keys() & body.keys()):
                body |= extra
        if "use_beam_search" in body:
            body = {key: body[key] for key in ("max_tokens", "use_beam_search", "beam_width", "n")}
        return body

    # ------------------------------------------------------------------ what clients do

    async def completion(self, draw):
        """Ask for a whole completion, of one prompt or of several."""
        prompt = self.text(draw) if draw.random() < 0.8 else [self.text(draw) for _ in range(3)]
        body = {"prompt": prompt, **self.settings(draw)}
        if draw.random() < 0.3 and "use_beam_search" not in body:
            body |= {"logprobs": 2, "echo": draw.random() < 0.5}
        answer = await self.ask("completion", "/v1/completions", body)
        if answer is not None:
            wanted = body.get("n", 1) * (1 if isinstance(prompt, str) else 3)
            self.expect(len(answer["choices"]) == wanted, f"{len(answer['choices'])} choices, not {wanted}")
            self.expect(answer["usage"]["completion_tokens"] <= 40 * wanted * 4, f"usage {answer['usage']}")
        return answer is not None

    async def stream(self, draw):
        """Read a stream to its end, of text or of a conversation."""
        path, body = "/v1/completions", {"prompt": self.text(draw)}
        if draw.random() < 0.5:
            path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": self.text(draw)}]}
        body |= self.settings(draw) | {"stream": True, "stream_options": {"include_usage": True}}
        return await self.events("stream", path, body)

    async def chat(self, draw):
        """Ask for a reply."""
        turns = [
            {"role": draw.choice(["system", "user"]), "content": self.text(draw)} for _ in range(draw.randrange(1, 4))
        ]
        body = {"messages": turns, **self.settings(draw)}
        if draw.random() < 0.3 and "use_beam_search" not in body:
            body |= {"logprobs": True, "top_logprobs": 3}
        return await self.ask("chat", "/v1/chat/completions", body) is not None

    async def search(self, draw):
        """Search, and look at the tree, perhaps while it grows."""
        settings = draw.choice([{"strategy": "best-of-n", "n": 4}, {"strategy": "beam", "beam_width": 4}])
        body = {"prompt": self.text(draw), "max_tokens": 24, "search": {**settings, "tree": True}}
        if draw.random() < 0.5:
            return await self.events("search", "/v1/completions", body | {"stream": True})
        answer = await self.ask("search", "/v1/completions", body)
        if answer is not None:
            self.expect(bool(answer["treewise"]["tree"]["nodes"]), "a search without a tree")
        return answer is not None

    async def gone(self, draw):
        """Ask for much, and go at any stage."""
        body = {"prompt": self.text(draw), "max_tokens": 400, "stream": draw.random() < 0.7}
        body |= draw.choice(
            [{"n": draw.randrange(1, 5), "ignore_eos": True}, {"search": {"strategy": "best-of-n", "n": 8}}]
        )
        try:
            async with asyncio.timeout(draw.choice([0.001, 0.05, 0.5, 4])):
                async with self.session.post(self.url + "/v1/completions", data=encode(body)) as response:
                    self.note("gone", response.status, {200, BUSY})
                    if response.status == BUSY:
                        return False
                    if response.status != 200:
                        self.wrong.append(f"{shown(body)}: {await response.text()}")
                    async for _ in response.content:
                        if draw.random() < 0.1:
                            break
                    response.close()
        except TimeoutError:
            pass
        return True

    async def broken(self, draw):
        """Send what is no JSON, or not the JSON of a request."""
        path = draw.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
        raw = draw.choice(BROKEN)
        if draw.random() < 0.3:
            raw = bytearray(encode({"prompt": self.text(draw), "max_tokens": 3}))
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        async with self.session.post(self.url + path, data=bytes(raw)) as response:
            self.note("broken", response.status, REFUSED | {200, BUSY})
            await response.read()
        return True

    async def bad(self, draw):
        """Ask for what nobody can have."""
        body = draw.choice(WRONG)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        async with self.session.post(self.url + path, data=encode(body | {"stream": draw.random() < 0.3})) as response:
            self.note(f"bad {str(body)[:60]}", response.status, REFUSED | {BUSY})
            said = await response.json()
            self.expect(bool(said["error"]["message"]), f"{body} is refused without a word")
        return True

    async def rude(self, draw):
        """Say something that is hardly HTTP, and go."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        words = draw.choice(
            [
                b"",
                b"\x16\x03\x01\x02\x00",
                b"GET / HTTP/9.9\r\n\r\n",
                head,
                head + b"Content-Length: 1000\r\n\r\n{",
                head + b"Content-Length: -1\r\n\r\n",
                head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
                head + b"X: " + b"x" * 200_000,
                (head + b'Content-Length: 35\r\n\r\n{"prompt": "a", "max_tokens": 200}\n') * 3,
            ]
        )
        try:
            writer.write(words)
            await writer.drain()
            async with asyncio.timeout(draw.choice([0.01, 0.2])):
                await reader.read(100)
        except (TimeoutError, ConnectionError):
            pass
        writer.transport.abort()
        return True

    async def other(self, draw):
        """Ask for anything else that there is, or is not."""
        text = self.text(draw)
        kind = draw.randrange(7)
        if kind == 0:
            tokens = (await self.ask("tokenize", "/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]
            back = (await self.ask("detokenize", "/detokenize", {"tokens": tokens}))["prompt"]
            self.expect(back == text, f"{text!r} came back as {back!r}")
            return True
        if kind == 1:
            async with self.session.get(
                self.url + draw.choice(["/nowhere", "/v1/models/none", "/page/../x"])
            ) as response:
                self.note("nowhere", response.status, REFUSED)
            return True
        path = draw.choice(["/v1/models", "/health", "/ready", "/version", "/metrics", "/state", "/strategies"])
        async with self.session.get(self.url + path) as response:
            self.note(path, response.status, {200})
            await response.read()
        return True

    # ------------------------------------------------------------------ how they look at answers

    def expect(self, holds, what):
        """Remember what does not hold."""
        if not holds:
            self.wrong.append(what)

    def note(self, kind, status, expected):
        """Count a status, which has to be one of those expected."""
        self.seen[kind.partition(" ")[0], status] += 1
        self.expect(status in expected, f"{kind}: status {status}")

    async def ask(self, kind, path, body):
        """Return a whole answer, None if there is none."""
        async with self.session.post(self.url + path, data=encode(body)) as response:
            said = await response.json()
            self.note(kind, response.status, {200, BUSY})
            if response.status not in (200, BUSY):
                self.wrong.append(f"{shown(body)}: {said}")
            return said if response.status == 200 else None

    async def events(self, kind, path, body):
        """Read a stream; whether there was one."""
        began, ended, last = perf_counter(), False, None
        async with self.session.post(self.url + path, data=encode(body)) as response:
            self.note(kind, response.status, {200, BUSY})
            if response.status != 200:
                if response.status != BUSY:
                    self.wrong.append(f"{shown(body)}: {await response.text()}")
                return False
            async for line in response.content:
                if not line.strip():
                    continue
                if last is None:
                    self.first.append(perf_counter() - began)
                self.expect(line.startswith(b"data: ") and not ended, f"a line {line[:80]!r} in a stream")
                ended = line.strip() == b"data: [DONE]"
                if not ended:
                    last = json.loads(line[6:])
                    self.expect("error" not in last, f"{shown(body)}: {last}")
        self.expect(ended, f"a stream that ends with {last}")
        if "stream_options" in body:
            self.expect(last["usage"]["completion_tokens"] > 0, f"a stream without usage: {last}")
        return True


def encode(body):
    """Write JSON in ASCII, in which halves of characters can be written too."""
    return json.dumps(body).encode()


def shown(body):
    """Return a body as a failure names it, its settings first."""
    given = ("prompt", "messages")
    return json.dumps({key: body[key] for key in sorted(body, key=lambda key: key in given)})


async def quiet(url, session, process):
    """Wait until the server has nothing to do, and return its state and what it takes."""
    for _ in range(600):
        async with session.get(url + "/state") as response:
            state = await response.json()
        if not state["running"] and not state["waiting"]:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)
    return state, process.memory_info().rss, process.num_threads(), process.num_fds()


async def soak(url, process, seconds):
    options = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(total=120)}
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(**options, headers=headers, read_bufsize=1 << 22) as session:
        clients, looks = Soak(url, session), []
        for _ in range(CRANKS):
            until = perf_counter() + seconds / CRANKS
            await asyncio.gather(*(clients.client(number, until) for number in range(CLIENTS)))
            looks.append(await quiet(url, session, process))
            if clients.wrong:
                break
        async with session.get(url + "/metrics") as response:
            metrics = await response.text()
    return clients, looks, metrics


@pytest.mark.stress
@pytest.mark.timeout(SECONDS + 300)
def test_a_server_lives_through_everything_and_keeps_nothing(tiny_folder, capsys):
    model = os.environ.get("TREEWISE_SOAK_MODEL") or str(tiny_folder)
    flags = [str(word) for name, value in LIMITS.items() for word in (f"--{name}", value)]
    began, said = time.monotonic(), []
    with process(model, "--device", "cpu", *flags) as (server, url):
        reader = Thread(target=lambda: said.extend(server.stderr))  # else it would wait for one at last
        reader.start()
        clients, looks, metrics = asyncio.run(soak(url, psutil.Process(server.pid), SECONDS))
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        reader.join()
    states, memory, threads, files = zip(*looks, strict=True)
    report = {
        "seconds": time.monotonic() - began,
        "answers": {f"{kind} {status}": number for (kind, status), number in sorted(clients.seen.items())},
        "first_event_s": percentiles(clients.first),
        "seconds_by_kind": {kind: percentiles(times) for kind, times in sorted(clients.times.items())},
        "memory_mb": [round(size / 1e6, 1) for size in memory],
        "threads": threads,
        "files": files,
        "wrong": clients.wrong,
        "said": Counter(said).most_common(5),
    }
    with capsys.disabled():
        print("\n" + json.dumps(report, indent=1, default=str))
    assert not clients.wrong
    for state in states:
        slots = state["kv_slots"]
        assert state["running"] == state["waiting"] == slots["held"] == 0 and state["health"] == "ok"
        assert slots["free"] + slots["cached"] == slots["total"]
    third = CRANKS // 3
    assert max(memory[-third:]) - memory[-third] < MOST_GROWTH and max(memory) < MOST_MEMORY
    assert max(threads[-third:]) <= threads[-third] + 1 and max(threads) < MOST_THREADS
    assert files[-1] <= files[third] + 8
    assert len(clients.times) == len(clients.kinds), "every kind has been"
    assert 'num_requests_running{model_name="' in metrics
