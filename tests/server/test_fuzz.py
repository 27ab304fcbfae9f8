"""Tens of thousands of bad and odd inputs: each is answered or refused, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from bodies import FIELDS, bodies, strange
from starlette.types import ASGIApp, Message
from tiny import ChatBytes, idle, tiny_llm

from treewise.config import BeamSearchParams, SamplingParams
from treewise.server.app import create_app
from treewise.server.driver import Driver
from treewise.server.settings import ServerOptions

AT_ONCE = 32
PLAIN = b'{"prompt": "hello", "max_tokens": 5, "temperature": 0}'


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Send a request through the application, without a socket between."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    begun = False
    status, parts = 0, []

    async def receive() -> Message:
        nonlocal begun
        if begun:
            await asyncio.Event().wait()  # the client stays
        begun = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        parts.append(message.get("body", b""))

    try:
        async with asyncio.timeout(60):
            await app(scope, receive, send)
    except Exception as error:
        error.add_note(f"asked for by {body[:1000]!r}")
        raise
    return status, b"".join(parts)


def check(status: int, answer: bytes, body: bytes) -> None:
    """Check the form of an answer."""
    told = f"{body[:500]!r} -> {status} {answer[:500]!r}"
    assert 200 <= status < 300 or 400 <= status < 500, told
    if status == 200 and answer.startswith(b"data: "):
        events = answer.decode().removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]", told
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        for chunk in chunks:
            # What goes wrong under way is told in the stream: it must still be the request's fault.
            assert "choices" in chunk or chunk["error"]["type"] == "invalid_request_error", told
        return
    content = json.loads(answer)
    if status == 200:
        assert all(choice["finish_reason"] in ("stop", "length") for choice in content["choices"]), told
    else:
        assert content["error"]["message"] and content["error"]["type"], told


async def flood(app: ASGIApp, requests: Iterator[tuple[str, bytes]]) -> Counter[int]:
    """Send requests, some at once, and count the statuses."""
    statuses: Counter[int] = Counter()

    async def client() -> None:
        for path, body in requests:
            status, answer = await post(app, path, body)
            check(status, answer, body)
            statuses[status] += 1

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return statuses


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_every_body_is_answered_or_refused(kind):
    llm = tiny_llm(codec=ChatBytes(), num_kv_slots=8192)
    options = ServerOptions(max_waiting=AT_ONCE)
    app = create_app(Driver(llm, options.max_running, options.max_waiting, options.time_limit), options)
    path = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}[kind]

    async def run() -> tuple[Counter[int], bytes, bytes]:
        async with app.router.lifespan_context(app):
            _, before = await post(app, "/v1/completions", PLAIN)
            statuses = await flood(app, iter([(path, body) for body in bodies(kind, 4500, seed=1)]))
            _, after = await post(app, "/v1/completions", PLAIN)
            return statuses, before, after

    statuses, before, after = asyncio.run(run())
    assert statuses.total() == 4500
    assert statuses[200] > 500 and statuses[400] > 1000, statuses
    texts = [json.loads(answer)["choices"][0]["text"] for answer in (before, after)]
    assert texts[0] == texts[1] != ""
    idle(llm)


def test_parameters_are_taken_or_refused():
    draw = random.Random(7)
    taken = 0
    for made in (SamplingParams, BeamSearchParams):
        names = [item.name for item in fields(made)]
        for _ in range(6000):
            given: dict[str, Any] = {"beam_width": 2} if made is BeamSearchParams else {}
            for name in draw.sample(names, draw.randint(1, 4)):
                given[name] = draw.choice(FIELDS[name]) if name in FIELDS and draw.random() < 0.6 else strange(draw)
            try:
                made(**given)
            except ValueError as error:
                assert any(name in str(error) for name in names), (given, error)
            else:
                taken += 1
    assert 1000 < taken < 9000
