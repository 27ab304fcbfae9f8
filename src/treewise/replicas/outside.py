"""A fleet for those who have no event loop: it has one in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from treewise.replicas.cluster import connected, import_ray
from treewise.replicas.mapping import Program
from treewise.replicas.settings import FleetOptions
from treewise.results import ProgramOutput
from treewise.server.driver import Refused, TimeUp
from treewise.server.settings import ServerOptions

if TYPE_CHECKING:
    from treewise.replicas.fleet import Fleet

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
        If there is no Ray; when it is entered, if there is no cluster at the address, or no room in it.

    Examples
    --------
    .. code-block:: python

        with Replicas({"model": "smollm2-135m"}, FleetOptions(data_parallel_size=2)) as there:
            for result in map_programs(program, prompts, there, output="results.jsonl"):
                print(result.value)
    """

    def __init__(self, llm: Mapping[str, Any], options: FleetOptions | None = None) -> None:
        import_ray()
        self.llm = llm
        self.options = options or FleetOptions()
        self.model_name: str = llm["model"]
        self.fleet: Fleet
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Event
        self._stack = ExitStack()

    def __enter__(self) -> Replicas:
        ranks = int(self.llm.get("tensor_parallel_size", 1))
        with ExitStack() as stack:
            stack.enter_context(connected(self.options.ray_address, self.options.data_parallel_size * ranks))
            ready: Future[None] = Future()
            thread = threading.Thread(target=lambda: asyncio.run(self._live(ready)), name="treewise-fleet", daemon=True)
            thread.start()
            stack.callback(thread.join)
            ready.result()
            stack.callback(lambda: self._loop.call_soon_threadsafe(self._over.set))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    async def _live(self, ready: Future[None]) -> None:
        """Have the fleet, from when `ready` is to when it is over."""
        from treewise.replicas.fleet import Fleet

        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with Fleet(self.llm, self.options, LIMITS) as self.fleet:
                ready.set_result(None)
                await self._over.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    def start(self, program: Program, prompt: Any, *, seed: int | None = None, **kwargs: Any) -> Future[ProgramOutput]:
        """Start a program on some replica; see `Fleet.run`, and `LLM.start`, which returns the same."""
        running = self.fleet.run(program, prompt, seed=seed, **kwargs)
        return asyncio.run_coroutine_threadsafe(running, self._loop)

    def wait(self, futures: Collection[Future[ProgramOutput]]) -> None:
        """Come back once at least one of some futures of `start` has ended.

        Raises
        ------
        Refused, TimeUp
            If there is no replica and none can be started, which is no program's fault.
        """
        for future in wait(futures, return_when=FIRST_COMPLETED).done:
            if isinstance(error := future.exception(), Refused | TimeUp):
                raise error
