"""Fleets of tiny replicas to test with, in a thread of their own, with a front that listens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import httpx

from treewise.replicas.settings import FleetOptions
from treewise.server.settings import ServerOptions, Telemetry
from treewise.server.sockets import address_of, bind

KEY = "a key"
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
LONG = {"prompt": "hello", "max_tokens": 150, "ignore_eos": True, "seed": 5}
TINY = {"device": "cpu", "num_kv_slots": 4096, "capture_rows": 0}


class Fronted:
    """A fleet with its front, and clients of it."""

    def __init__(self, fleet: Any, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.fleet, self.url, self.loop = fleet, url, loop
        self.client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=120)

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 120) -> Any:
        """Have a coroutine run where the fleet lives, and return what it returns."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def post(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str = "/v1/completions", at: int = 0, then: Callable[[], Any] = int, **body: Any) -> Told:
        """Return what a stream says; after `at` of its chunks something is done."""
        told = Told()
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line:
                    told.take(line)
                    if told.chunks == at:
                        then()
        return told

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to a replica that works."""
        wait_for(lambda: any(member.calls for member in self.fleet.members))
        busy = max(self.fleet.members, key=lambda member: len(member.calls))
        os.kill(busy.facts.process_id, number)

    def whole(self) -> None:
        """Wait until all replicas are ready."""
        size = len(self.fleet.slots)
        wait_for(lambda: len(self.fleet.router.names) == size)


class Told:
    """What a client was told in a stream."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.ends: dict[int, str] = {}
        self.ids: set[str] = set()
        self.chunks = 0
        self.usage: dict[str, Any] | None = None
        self.is_over = False
        self.error: dict[str, Any] | None = None

    def take(self, line: str) -> None:
        assert not self.is_over and line.startswith("data: ")
        if line == "data: [DONE]":
            self.is_over = True
            return
        chunk = json.loads(line.removeprefix("data: "))
        self.chunks += 1
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.ids.add(chunk["id"])
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            index, said = choice["index"], choice.get("delta", choice)
            assert index not in self.ends
            self.texts[index] = self.texts.get(index, "") + (said.get("content") or said.get("text") or "")
            if choice["finish_reason"]:
                self.ends[index] = choice["finish_reason"]


def wait_for(condition: Callable[[], Any], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def fronted(folder: Any, **given: Any) -> Iterator[Fronted]:
    """A fleet of two replicas, unless anything else is given, behind a front; with the cluster that there is."""
    from treewise.replicas.fleet import Fleet
    from treewise.replicas.front import create_front
    from treewise.server.run import HttpServer

    names = [{item.name for item in fields(kind)} for kind in (FleetOptions, ServerOptions)]
    own: dict[str, Any] = {"data_parallel_size": 2, "cpus_per_replica": 1}
    limits, llm = {"api_key": (KEY,)}, {"model": str(folder), **TINY}
    for name, value in given.items():
        (own if name in names[0] else limits if name in names[1] else llm)[name] = value
    started: list[Fronted] = []
    ending: list[Any] = []

    async def run() -> None:
        options = ServerOptions(**limits)
        fleet = Fleet(llm, FleetOptions(**own), options, Telemetry())
        async with fleet:
            server = HttpServer(create_front(fleet, options))
            with bind("127.0.0.1", 0) as listener:
                ending.append(server)
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                while not server.started:
                    await asyncio.sleep(0.005)
                started.append(Fronted(fleet, address_of(listener), asyncio.get_running_loop()))
                await serving

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        while not started:
            assert thread.is_alive(), "the fleet has not started"
            time.sleep(0.01)
        with started[0].client:
            yield started[0]
    finally:
        for server in ending:
            server.should_exit = True
        thread.join()
