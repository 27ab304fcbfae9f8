"""A server as a process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from treewise.llm import LLM
from treewise.server.app import create_app
from treewise.server.driver import Driver
from treewise.server.jobs import Observer
from treewise.server.journal import Journal, write_log
from treewise.server.metrics import Metrics
from treewise.server.settings import ServerOptions, Telemetry
from treewise.server.traces import Traces

logger = logging.getLogger("treewise.server")

KEEP_ALIVE = 30
"""Seconds that a connection without a request is kept."""

LAST_WORDS = 5
"""Seconds that responses get to be sent once their jobs have ended."""


class Worker(Protocol):
    """What works for an application."""

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""

    async def drain(self, timeout: float) -> bool:
        """Take no new requests, and end what is left after so many seconds; whether nothing was."""


def make_app(llm: LLM, options: ServerOptions, telemetry: Telemetry) -> tuple[FastAPI, Driver]:
    """Return the application that serves a model, and what works for it."""
    name = options.served_model_name or Path(llm.model_name).name
    metrics = Metrics(llm.engine, name)
    observers: list[Observer] = [metrics]
    if telemetry.log_json:
        write_log()
        observers.append(Journal(llm.tokenizer if telemetry.log_prompts else None))
    if telemetry.traces_endpoint is not None:
        observers.append(Traces(telemetry.traces_endpoint, name))
    driver = Driver(llm, options.max_running, options.max_waiting, options.time_limit, observers)
    return create_app(driver, options, metrics.text), driver


def serve(
    app: FastAPI,
    worker: Worker,
    options: ServerOptions,
    listener: socket.socket,
    ready: Callable[[], Any],
    around: AbstractAsyncContextManager[Any] | None = None,
) -> int:
    """Serve until a signal comes, and return the exit code.

    The first SIGTERM or SIGINT lets running requests finish, see `ServerOptions`; a second one ends the process at
    once.

    Parameters
    ----------
    app : FastAPI
    worker : Worker
    options : ServerOptions
    listener : socket
        Of `bind`.
    ready : callable
        Called when requests are taken.
    around : async context manager, optional
        Entered before anything is served, and left at the end.
    """
    server = HttpServer(app)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, worker, options, listener, ready, around or nullcontext()))
    return 0


class HttpServer(uvicorn.Server):
    """Speaks HTTP for an application, and leaves signals to others."""

    def __init__(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,  # its records go where ours go
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=LAST_WORDS,
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


async def _serve(
    server: uvicorn.Server,
    worker: Worker,
    options: ServerOptions,
    listener: socket.socket,
    ready: Callable[[], Any],
    around: AbstractAsyncContextManager[Any],
) -> None:
    async with around:
        await _serve_until_signal(server, worker, options, listener, ready)


async def _serve_until_signal(
    server: uvicorn.Server,
    worker: Worker,
    options: ServerOptions,
    listener: socket.socket,
    ready: Callable[[], Any],
) -> None:
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Task[None]] = []

    async def end() -> None:
        logger.info("ending; %d requests have %g seconds to finish", worker.num_open, options.drain_timeout)
        if not await worker.drain(options.drain_timeout):
            logger.warning("not all requests have finished in time")
        server.should_exit = True

    def on_signal() -> None:
        if ending:
            os._exit(1)
        ending.append(asyncio.create_task(end()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    if server.started:
        ready()
    await serving
