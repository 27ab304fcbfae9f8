"""One replica: a process with an engine of its own, which runs programs and may speak HTTP. Ray makes it an actor."""

from __future__ import annotations

import asyncio
import io
import os
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import cloudpickle
import torch

from treewise import __version__
from treewise.branch import Branch
from treewise.engine import Request
from treewise.llm import LLM, Prompt, Sparsity, sparsity_policy
from treewise.operations import Gain
from treewise.outputs import completions
from treewise.sampler import row_key
from treewise.server.driver import Driver, End, Part, Refused, Ticket
from treewise.server.jobs import Job, Outcome
from treewise.server.settings import ServerOptions, Telemetry

LOOK_SECONDS = 0.25
"""Seconds between two looks at whether the engine has failed."""

NO_LIMIT = 1 << 30
"""Requests that may wait in a replica: the fleet has counted them already."""


@dataclass(frozen=True)
class Errand:
    """A program that is to run over a prompt.

    Attributes
    ----------
    program : async function
        Takes the root `Branch`, and `arguments` by name.
    prompt : str, list of int, or list of messages
    seed : int
        Where it is run again, it draws the same.
    priority, namespace, kv_sparsity, token_budget
        See `LLM.run`.
    arguments : mapping of str to object
    """

    program: Callable[..., Coroutine[Any, Any, Any]]
    prompt: Prompt
    seed: int
    priority: int = 0
    namespace: str = ""
    kv_sparsity: Sparsity = None
    token_budget: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What a replica tells of itself once it is ready.

    Attributes
    ----------
    url : str or None
        Where it speaks HTTP, if it does.
    kv_tokens : int
        Tokens that its pool of keys and values holds.
    process_id : int
    version : str
        Of treewise.
    """

    url: str | None
    kv_tokens: int
    process_id: int
    version: str


class Replica:
    """An engine with a thread of its own, and perhaps a server in front of it.

    Parameters
    ----------
    llm : mapping
        Parameters of `LLM`.
    options : ServerOptions
        Limits; of its addresses and keys nothing counts.
    threads : int
        Of the processor, for each rank.
    telemetry : Telemetry, optional
        Has it speak HTTP, to whoever brings `key`.
    key : str
    home : str
        The node of whoever asks, by Ray's id: on that one it is reached by the loopback address alone.
    """

    def __init__(
        self,
        llm: Mapping[str, Any],
        options: ServerOptions,
        threads: int,
        telemetry: Telemetry | None = None,
        key: str = "",
        home: str = "",
    ) -> None:
        self.settings = llm
        self.threads = threads
        self.options = replace(options, port=0, api_key=(key,) * bool(key), allowed_origin=(), max_waiting=NO_LIMIT)
        self.telemetry = telemetry
        self.home = home
        self.llm: LLM
        self.driver: Driver

    async def start(self) -> Facts:
        """Load the model, begin to take requests, and tell where.

        Raises
        ------
        ValueError
            If the model cannot be loaded as it was asked for.
        """
        # The ranks of a replica are processes that it starts, which read this.
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        torch.set_num_threads(self.threads)
        self.llm = LLM(**self.settings)
        url = None
        if self.telemetry is None:
            self.driver = Driver(self.llm, self.options.max_running, NO_LIMIT, self.options.time_limit)
            self.driver.start()
        else:
            url = await self._listen(self.telemetry)
        return Facts(url, self.llm.engine.kv.num_slots, os.getpid(), __version__)

    async def _listen(self, telemetry: Telemetry) -> str:
        import ray

        from treewise.server.run import HttpServer, make_app
        from treewise.server.sockets import address_of, bind

        is_home = ray.get_runtime_context().get_node_id() == self.home
        app, self.driver = make_app(self.llm, self.options, telemetry)
        listener = bind("127.0.0.1" if is_home else ray.util.get_node_ip_address(), 0)
        server = HttpServer(app)
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
            if self._serving.done():
                self._serving.result()
        return address_of(listener)

    async def life(self) -> str:
        """Wait until the engine has failed, and return with what; the end of the process ends the waiting, too."""
        while self.driver.failure is None:
            await asyncio.sleep(LOOK_SECONDS)
        return repr(self.driver.failure)

    async def ping(self) -> None:
        """Return at once, unless the process hangs."""

    async def run(self, errand_bytes: bytes) -> bytes:
        """Run the program of an `Errand`, and return its `ProgramOutput`, or its error; all in pickled form.

        Branches in what the program returned arrive as `CompletionOutput`.
        """
        try:
            errand: Errand = cloudpickle.loads(errand_bytes)
            tokens, turns = self.llm.encode(errand.prompt)
            kept = errand.kv_sparsity
            policy = self.llm.kv_sparsity if kept is None else sparsity_policy(kept, self.llm.kv_budget)
        except Exception as error:
            return pickled(error)
        name = getattr(errand.program, "__name__", "program")
        job = Job(f"run-{uuid.uuid4().hex}", "program", name, len(tokens), perf_counter())

        def program(root: Branch) -> Coroutine[Any, Any, Any]:
            return errand.program(root, **errand.arguments)

        part = Part(program, tokens, row_key(errand.seed, (0,)), errand.token_budget, turns)
        ticket = Ticket(job, [part], _Whole(self.llm, name), errand.priority, errand.namespace, policy)
        try:
            self.driver.submit(ticket)
        except Refused as error:
            return pickled(error)
        results: list[Any] = []
        try:
            while not (results and isinstance(results[-1], End)):
                results += await ticket.updates()
        finally:
            self.driver.give_up(ticket)
        [*results, end] = results
        return b"".join(results) if end.error is None else pickled(end.error)


class _Whole:
    """Watches a program, see `Watcher`: all that is told is its result, in pickled form."""

    outcome: Outcome = "stop"

    def __init__(self, llm: LLM, name: str) -> None:
        self.llm = llm
        self.name = name

    def gained(self, part: int, request: Request, gain: Gain) -> list[bytes]:
        """See `Watcher.gained`."""
        return []

    def ended(self, part: int, request: Request) -> list[bytes]:
        """See `Watcher.ended`."""
        return [pickled(self.llm.program_output(request, self.name))]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes branches as what they have decoded: their tree stays where it is."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Branch):
            return itself, (completions([value])[0],)
        if isinstance(value, BaseException) and type(value).__module__ != "builtins":
            return restored, (type(value), value.args, vars(value))
        return super().reducer_override(value)


def itself(value: Any) -> Any:
    """Return what it is given; by this a branch becomes its output in another process."""
    return value


def restored(kind: type[BaseException], arguments: tuple[Any, ...], state: Mapping[str, Any]) -> BaseException:
    """Return an error as it was in another process.

    Its ``__init__``, which may want other arguments than those of `BaseException`, is not called.
    """
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update(state)
    return error


def pickled(value: Any) -> bytes:
    """Return an object in pickled form.

    Raises
    ------
    TypeError
        If it holds what cannot leave its process.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:
        raise TypeError(f"the result cannot leave the replica: {error}") from error
    return buffer.getvalue()
