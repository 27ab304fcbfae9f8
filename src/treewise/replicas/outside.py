"""A fleet for those who have no event loop: it has one in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from typing import Any, TypeVar

from treewise.replicas.cluster import connected
from treewise.replicas.fleet import Fleet
from treewise.replicas.mapping import Program
from treewise.replicas.settings import FleetOptions
from treewise.results import ProgramOutput
from treewise.server.settings import ServerOptions

Answer = TypeVar("Answer")

LIMITS = ServerOptions(max_running=256, max_waiting=1 << 16, time_limit=30 * 24 * 3600.0)
"""Of programs that nobody but `map_programs` starts, which counts them itself."""


class Replicas:
    """Replicas of a model, for `map_programs`; within ``with`` they are there.

    Parameters
    ----------
    llm : mapping
        Parameters of `LLM`, the same for all replicas.
    options : FleetOptions, optional

    Raises
    ------
    ValueError
        If there is no Ray, no cluster at the address, or no room in it; when it is entered.

    Examples
    --------
    >>> with Replicas({"model": "smollm2-135m"}, FleetOptions(data_parallel_size=2)) as there:  # doctest: +SKIP
    ...     for result in map_programs(program, prompts, there, output="results.jsonl"):
    ...         print(result.value)
    """

    def __init__(self, llm: Mapping[str, Any], options: FleetOptions | None = None) -> None:
        self.llm = llm
        self.options = options or FleetOptions()
        self.model_name: str = llm["model"]
        self.fleet: Fleet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="treewise-fleet", daemon=True)
        self._stack = ExitStack()

    def __enter__(self) -> Replicas:
        ranks = int(self.llm.get("tensor_parallel_size", 1))
        with ExitStack() as stack:
            stack.enter_context(connected(self.options.ray_address, self.options.data_parallel_size * ranks))
            self._thread.start()
            stack.callback(self._end)
            self.fleet = Fleet(self.llm, self.options, LIMITS)
            self._do(self.fleet.__aenter__()).result()
            stack.callback(lambda: self._do(self.fleet.__aexit__()).result())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, program: Program, prompt: Any, *, seed: int | None = None, **kwargs: Any) -> Future[ProgramOutput]:
        """Start a program on some replica; see `Fleet.run`, and `LLM.start`, which returns the same."""
        return self._do(self.fleet.run(program, prompt, seed=seed, **kwargs))

    def wait(self, futures: Collection[Future[ProgramOutput]]) -> None:
        """Come back once at least one of some futures of `start` has ended."""
        wait(futures, return_when=FIRST_COMPLETED)

    def _do(self, coroutine: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
