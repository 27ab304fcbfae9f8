"""A server as a process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from treewise.server.driver import Driver
from treewise.server.settings import ServerOptions

logger = logging.getLogger("treewise.server")

KEEP_ALIVE = 30
"""Seconds that a connection without a request is kept."""

LAST_WORDS = 5
"""Seconds that responses get to be sent once their jobs have ended."""


def serve(
    app: FastAPI, driver: Driver, options: ServerOptions, listener: socket.socket, ready: Callable[[], Any]
) -> int:
    """Serve until a signal comes, and return the exit code.

    The first SIGTERM or SIGINT lets running requests finish, see `ServerOptions`; a second one ends the process at
    once.

    Parameters
    ----------
    app : FastAPI
    driver : Driver
    options : ServerOptions
    listener : socket
        Of `bind`.
    ready : callable
        Called when requests are taken.
    """
    server = HttpServer(app)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, driver, options, listener, ready))
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
    driver: Driver,
    options: ServerOptions,
    listener: socket.socket,
    ready: Callable[[], Any],
) -> None:
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Task[None]] = []

    async def end() -> None:
        logger.info("ending; %d requests have %g seconds to finish", driver.num_open, options.drain_timeout)
        if not await driver.drain(options.drain_timeout):
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
