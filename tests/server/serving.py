"""Servers to test with: in this process around a tiny model, or as a process of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
from tiny import ChatBytes, tiny_llm

from treewise.llm import LLM
from treewise.server.app import create_app
from treewise.server.driver import Driver
from treewise.server.run import HttpServer
from treewise.server.settings import ServerOptions
from treewise.server.sockets import bind


class Recorder:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def received(self, job):
        self.events.append(("received", job))

    def gained(self, job, tokens, gap):
        self.events.append(("gained", job, tokens, gap))

    def ended(self, job):
        self.events.append(("ended", job, job.outcome))

    def stepped(self, engine, rows, seconds):
        self.events.append(("stepped", rows, seconds))

    def refused(self, reason):
        self.events.append(("refused", reason))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [event for event in self.events if event[0] == kind]


class Server:
    """A server in this process, and a client of it."""

    def __init__(self, driver: Driver, recorder: Recorder, client: httpx.AsyncClient, app: Any) -> None:
        self.driver, self.recorder, self.client, self.app = driver, recorder, client, app

    @property
    def llm(self) -> LLM:
        return self.driver.llm

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def complete(self, prompt: Any = "abc", **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, text: str = "hello", **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def chunks(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """Return the chunks of a stream, which must end as streams do."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return read_events(response.text)

    async def error(self, status: int, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        """Return the error that a request ends with, which must have this status and the usual form."""
        return check_error(await self.post(path, **body), status)

    async def idle(self) -> None:
        """Wait until nothing runs, and check that nothing is held and a request is answered as ever."""
        await self.driver._idle.wait()
        await self.driver.ask(self._check_idle)
        assert (await self.complete("abc", max_tokens=3, temperature=0))["usage"]["completion_tokens"] == 3

    def _check_idle(self) -> None:
        engine = self.llm.engine
        engine.check_integrity()
        assert not engine.requests and not engine.runs
        usage = self.llm.kv_usage
        assert usage.live_slots == 0
        engine.kv.clear_cache()
        assert engine.kv.pool.num_free == engine.kv.num_slots


def read_events(text: str) -> list[dict[str, Any]]:
    *events, last, rest = text.split("\n\n")
    assert rest == "" and last == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    return body["error"]


@asynccontextmanager
async def running(llm: LLM | None = None, metrics: Any = None, **options: Any) -> AsyncIterator[Server]:
    """A server around `llm`, or around a tiny one."""
    llm = llm or tiny_llm(codec=ChatBytes())
    settings = ServerOptions(**options)
    recorder = Recorder()
    driver = Driver(llm, settings.max_running, settings.max_waiting, settings.time_limit, [recorder])
    app = create_app(driver, settings, metrics)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            yield Server(driver, recorder, client, app)


@asynccontextmanager
async def listening(llm: LLM | None = None, **options: Any) -> AsyncIterator[Server]:
    """The same, at a port of its own; its client's base URL has the address."""
    llm = llm or tiny_llm(codec=ChatBytes())
    settings = ServerOptions(**options)
    recorder = Recorder()
    driver = Driver(llm, settings.max_running, settings.max_waiting, settings.time_limit, [recorder])
    app = create_app(driver, settings)
    with bind("127.0.0.1", 0) as listener:
        server = HttpServer(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield Server(driver, recorder, client, app)
        server.should_exit = True
        await serving


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``treewise serve``, and give the process with its address once it is ready."""
    command = [sys.executable, "-m", "treewise", "serve", "--port", "0", *arguments]
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    try:
        line = started.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match, line + started.stderr.read()
        yield started, match[0]
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()
