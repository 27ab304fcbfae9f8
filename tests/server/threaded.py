"""A server at a port, in a thread of this process, so that tests can look at its engine too."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from tiny import idle

from treewise.llm import LLM
from treewise.server.app import create_app
from treewise.server.driver import Driver
from treewise.server.run import HttpServer
from treewise.server.settings import ServerOptions
from treewise.server.sockets import bind


class Served:
    """A server that runs.

    Attributes
    ----------
    llm : LLM
        Its own while it runs.
    driver : Driver
    host, port, url
        Where it listens.
    """

    def __init__(self, llm: LLM, driver: Driver, host: str, port: int) -> None:
        self.llm, self.driver, self.host, self.port = llm, driver, host, port
        self.url = f"http://{host}:{port}/"

    def settled(self, timeout: float = 20.0) -> dict[str, Any]:
        """Wait until nothing runs or waits, check that no slots are held, and return the state."""
        deadline = time.monotonic() + timeout
        with httpx.Client(base_url=self.url) as client:
            while True:
                state: dict[str, Any] = client.get("state").json()
                slots = state["kv_slots"]
                if not (state["running"] or state["waiting"] or slots["held"]):
                    assert state["health"] == "ok" and slots["free"] + slots["cached"] == slots["total"]
                    return state
                assert time.monotonic() < deadline, f"still at work: {state}"
                time.sleep(0.02)


@contextmanager
def served(llm: LLM, **options: Any) -> Iterator[Served]:
    """Serve a model at a free port; at the end, check that its engine has given everything back."""
    settings = ServerOptions(port=0, **options)
    driver = Driver(llm, settings.max_running, settings.max_waiting, settings.time_limit)
    server = HttpServer(create_app(driver, settings))
    with bind(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server has not started"
                time.sleep(0.005)
            yield Served(llm, driver, host, port)
        finally:
            server.should_exit = True
            thread.join()
    idle(llm)
