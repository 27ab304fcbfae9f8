"""One thread that owns the engine, and what passes between it and the server's event loop."""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, Protocol, TypeVar

from treewise.branch import BranchTree
from treewise.budgets import Budget
from treewise.engine import Program, Request
from treewise.llm import LLM
from treewise.operations import Gain
from treewise.results import Usage
from treewise.server.jobs import Job, Observer, Outcome
from treewise.sparsity.policy import KVSparsity
from treewise.turns import Conversation

logger = logging.getLogger("treewise.server")

Answer = TypeVar("Answer")

RATE_WINDOW = 5.0
"""Seconds over which decoded tokens a second are counted."""


class Refused(Exception):
    """A job is not taken, or not finished.

    Attributes
    ----------
    reason : {"queue_full", "draining", "failed"}
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineFailed(Exception):
    """The engine has failed, and with it all that it worked on."""


class TimeUp(Exception):
    """A job has taken longer than it may."""


class ClientGone(Exception):
    """Nobody waits for a job any more."""


@dataclass(frozen=True)
class Part:
    """One prompt of a job, and the program that runs over it.

    Attributes
    ----------
    program : async function
    prompt_tokens : list of int
    seed : int or None
    token_budget : int or None
        Tokens that the program may decode.
    turns : list of Conversation
        What the prompt is known to say, see `Branch.message`.
    """

    program: Program
    prompt_tokens: list[int]
    seed: int | None = None
    token_budget: int | None = None
    turns: Sequence[Conversation] = ()


class Watcher(Protocol):
    """Makes of what a job's branches gain, and of what its programs return, what its client is to be told.

    It is called in the engine's thread, between two steps. Its updates may be of any type; what it raises is the job's
    error.
    """

    def gained(self, part: int, request: Request, gain: Gain) -> list[Any]:
        """Return updates about a step in which branches of a part gained tokens."""

    def ended(self, part: int, request: Request) -> list[Any]:
        """Return updates about the end of a part."""

    @property
    def outcome(self) -> Outcome:
        """How the job ended, once all parts have."""


@dataclass(frozen=True)
class End:
    """The last update of a job.

    Attributes
    ----------
    error : Exception or None
        What has gone wrong, if anything has.
    """

    error: Exception | None = None


@dataclass(eq=False)
class Ticket:
    """A job as the event loop sees it: it is submitted, and told of in updates, of which an `End` is the last.

    Attributes
    ----------
    job : Job
    parts : sequence of Part
    watcher : Watcher
    priority, namespace, sparsity
        See `Engine.add`.
    """

    job: Job
    parts: Sequence[Part]
    watcher: Watcher
    priority: int = 0
    namespace: str = ""
    sparsity: KVSparsity | None = None
    requests: list[Request] = field(default_factory=list, init=False)  # of the engine, one a part once it has begun
    over: bool = field(default=False, init=False)
    _updates: list[Any] = field(default_factory=list, init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def updates(self) -> list[Any]:
        """Wait for updates, and return all there are."""
        await self._news.wait()
        self._news.clear()
        updates, self._updates = self._updates, []
        return updates

    def tell(self, updates: Sequence[Any]) -> None:
        """Take updates."""
        self._updates += updates
        self._news.set()


class Driver:
    """Runs an engine in a thread of its own, on behalf of a server.

    Its public methods are for the event loop. What they ask for reaches the thread between two steps; what a step has
    brought, for all jobs, reaches the event loop in one call.

    Parameters
    ----------
    llm : LLM
        Nobody else may use it from `start` on.
    max_running, max_waiting, time_limit
        See `ServerOptions`.
    observers : sequence of Observer

    Attributes
    ----------
    failure : Exception or None
        What the engine has failed with. It is not used any more then.
    draining : bool
        Whether no new jobs are taken.
    num_jobs : int
        Jobs taken so far.
    num_open : int
        Of these, jobs that have not ended.
    rows_last_step : int
    step_seconds : float
        How long the last step took.
    """

    def __init__(
        self,
        llm: LLM,
        max_running: int,
        max_waiting: int,
        time_limit: float,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.llm = llm
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.time_limit = time_limit
        self.observers = tuple(observers)
        self.failure: Exception | None = None
        self.draining = False
        self.num_jobs = 0
        self.rows_last_step = 0
        self.step_seconds = 0.0
        # The event loop's own:
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_open = 0
        self._idle = asyncio.Event()
        # Left for the thread, under the lock of `_news`:
        self._news = threading.Condition()
        self._submitted: list[Ticket] = []
        self._given_up: list[Ticket] = []
        self._questions: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._stopping = False
        # The thread's own:
        self._thread = threading.Thread(target=self._run, name="treewise-engine", daemon=True)
        self._order = count()
        self._waiting: list[tuple[int, int, Ticket]] = []  # a heap; those that have ended stay until their turn comes
        self._running: dict[Ticket, None] = {}
        self._parts: dict[BranchTree, tuple[Ticket, int, Request]] = {}
        self._decoded: deque[tuple[float, int]] = deque()  # when, and how many tokens
        self._outbox: dict[Ticket, list[Any]] = {}

    # ------------------------------------------------------------------ in the event loop

    def start(self) -> None:
        """Start the thread; it tells the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Jobs that the engine works on."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Jobs that have not begun."""
        return max(0, self.num_open - self.num_running)

    @property
    def health(self) -> str:
        """``"ok"``, ``"draining"`` or ``"failed"``."""
        return "failed" if self.failure is not None else "draining" if self.draining else "ok"

    @property
    def tokens_per_second(self) -> float:
        """Tokens decoded a second, of late."""
        begin = perf_counter() - RATE_WINDOW
        return sum(tokens for when, tokens in list(self._decoded) if when > begin) / RATE_WINDOW

    def check_open(self) -> None:
        """Refuse what comes where no job would be taken.

        Raises
        ------
        Refused
        """
        if self.failure is not None:
            raise Refused("failed", f"the engine has failed: {self.failure!r}")
        if self.draining:
            raise Refused("draining", "the server is about to end and takes no new requests")
        if self.num_open >= self.max_running + self.max_waiting:
            raise Refused("queue_full", f"{self.num_waiting} requests are waiting already; try again later")

    def submit(self, ticket: Ticket) -> None:
        """Have the engine do a job.

        Raises
        ------
        Refused
            If it is not taken.
        """
        self.check_open()
        self.num_jobs += 1
        self.num_open += 1
        self._idle.clear()
        self._leave(self._submitted, ticket)

    def give_up(self, ticket: Ticket) -> None:
        """End a job, as nobody waits for it any more; nothing happens where it has ended."""
        if not ticket.over:
            self._leave(self._given_up, ticket)

    async def ask(self, question: Callable[[], Answer]) -> Answer:
        """Call a function in the engine's thread, between two steps, and return what it returns.

        Raises
        ------
        Refused
            If the thread has ended, or is about to.
        """
        if self._stopping:
            raise Refused("draining", "the server is about to end")
        answer: Future[Answer] = Future()
        self._leave(self._questions, (question, answer))
        return await asyncio.wrap_future(answer)

    async def drain(self, timeout: float) -> bool:
        """Take no new jobs, wait for those there are, and end what is left after so many seconds.

        Returns
        -------
        bool
            Whether all have come to their ends.
        """
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            self._stop()
            await self._idle.wait()
            return False
        return True

    async def stop(self) -> None:
        """End all jobs, and the thread."""
        self._stop()
        await asyncio.to_thread(self._thread.join)

    def _leave(self, box: list[Any], item: Any) -> None:
        """Leave something for the thread."""
        with self._news:
            box.append(item)
            self._news.notify()

    def _stop(self) -> None:
        with self._news:
            self._stopping = True
            self._news.notify()

    def _deliver(self, outbox: dict[Ticket, list[Any]]) -> None:
        """Hand over what the thread has for jobs."""
        for ticket, updates in outbox.items():
            if isinstance(updates[-1], End):
                ticket.over = True
                self.num_open -= 1
            ticket.tell(updates)
        if not self.num_open:
            self._idle.set()

    # ------------------------------------------------------------------ in the engine's thread

    def _run(self) -> None:
        going_on = True
        while going_on:
            try:
                going_on = self._take_orders()
                if going_on and self._has_work:
                    self._enforce_deadlines()
                    self._begin()
                    if self._running:
                        self._step()
            except Exception as error:
                self._fail(error)
            self._send()

    def _take_orders(self) -> bool:
        """Wait until there is something to do, and do what the event loop has left; whether to go on."""
        with self._news:
            while not (self._submitted or self._given_up or self._questions or self._stopping or self._has_work):
                self._news.wait()
            submitted, given_up, questions = self._submitted[:], self._given_up[:], self._questions[:]
            for box in (self._submitted, self._given_up, self._questions):
                box.clear()
        for ticket in submitted:
            self._tell("received", ticket.job)
            heapq.heappush(self._waiting, (-ticket.priority, next(self._order), ticket))
            if self.failure is not None:
                self._end(ticket, "error", EngineFailed(repr(self.failure)))
        for ticket in given_up:
            self._end(ticket, "abort", ClientGone())
        for question, answer in questions:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)
        if not self._stopping:
            return True
        for ticket in self._open_tickets():
            self._end(ticket, "abort", Refused("draining", "the server has ended before this request has"))
        return False

    @property
    def _has_work(self) -> bool:
        return self.failure is None and bool(self._running or self._waiting)

    def _open_tickets(self) -> list[Ticket]:
        return [*self._running, *(ticket for *_, ticket in self._waiting if ticket.job.ended is None)]

    def _enforce_deadlines(self) -> None:
        begin = perf_counter() - self.time_limit
        for ticket in self._open_tickets():
            if ticket.job.arrived < begin:
                self._end(ticket, "abort", TimeUp(f"the request has taken longer than {self.time_limit:g} seconds"))

    def _begin(self) -> None:
        """Let the engine have jobs that wait, as many as may run side by side."""
        while self._waiting and len(self._running) < self.max_running:
            *_, ticket = heapq.heappop(self._waiting)
            if ticket.job.ended is not None:
                continue
            self._running[ticket] = None
            try:
                for number, part in enumerate(ticket.parts):
                    request = self.llm.engine.add(
                        part.program,
                        part.prompt_tokens,
                        part.seed,
                        priority=ticket.priority,
                        namespace=ticket.namespace,
                        budget=None if part.token_budget is None else Budget(part.token_budget),
                        sparsity=ticket.sparsity,
                    )
                    request.tree.root.conversations += part.turns
                    ticket.requests.append(request)
                    self._parts[request.tree] = ticket, number, request
            except Exception as error:
                self._end(ticket, "error", error)

    def _step(self) -> None:
        """Step the engine, and see what has come of it."""
        engine = self.llm.engine
        began, rows = perf_counter(), engine.num_rows
        gains = engine.step()
        now = perf_counter()
        rows = engine.num_rows - rows
        for ticket in self._running:
            if ticket.job.scheduled is None and any(request.rows for request in ticket.requests):
                ticket.job.scheduled = began
        self._take_gains(gains, now)
        for ticket, number, request in list(self._parts.values()):
            if request.done and ticket.job.ended is None:
                self._take_end(ticket, number, request)
        if rows:  # else it has only let programs go on
            self.rows_last_step, self.step_seconds = rows, now - began
            self._tell("stepped", engine, rows, now - began)

    def _take_gains(self, gains: Sequence[Gain], now: float) -> None:
        tokens: Counter[Ticket] = Counter()
        for gain in gains:
            if not gain.num_tokens or (found := self._parts.get(gain.tree)) is None:
                continue
            ticket, number, request = found
            tokens[ticket] += gain.num_tokens
            self._update(ticket, partial(ticket.watcher.gained, number, request, gain))
        for ticket, gained in tokens.items():
            job = ticket.job
            if job.ended is not None:
                continue
            gap = None if job.last is None else now - job.last
            job.first, job.last, job.tokens = job.first or now, now, job.tokens + gained
            self._tell("gained", job, gained, gap)
        self._decoded.append((now, tokens.total()))
        while self._decoded[0][0] < now - RATE_WINDOW:
            self._decoded.popleft()

    def _take_end(self, ticket: Ticket, number: int, request: Request) -> None:
        """Note that a part has ended, and perhaps the job with it."""
        del self._parts[request.tree]
        if request.error is not None:
            error = request.error if isinstance(request.error, Exception) else RuntimeError(repr(request.error))
            self._end(ticket, "error", error)
            return
        self._update(ticket, partial(ticket.watcher.ended, number, request))
        if ticket.job.ended is None and not any(each.tree in self._parts for each in ticket.requests):
            self._end(ticket, ticket.watcher.outcome)

    def _update(self, ticket: Ticket, watch: Callable[[], list[Any]]) -> None:
        """Have something to tell the client of a job."""
        try:
            if updates := watch():
                self._outbox.setdefault(ticket, []).extend(updates)
        except Exception as error:
            self._end(ticket, "error", error)

    def _end(self, ticket: Ticket, outcome: Outcome, error: Exception | None = None) -> None:
        """End a job, whatever its state is; nothing happens where it has ended."""
        job = ticket.job
        if job.ended is not None:
            return
        self._running.pop(ticket, None)
        for request in ticket.requests:
            self._parts.pop(request.tree, None)
            if self.failure is None:
                self.llm.engine.abort(request)
        job.ended, job.outcome = perf_counter(), outcome
        job.usage = _sum([request.usage() for request in ticket.requests]) if ticket.requests else None
        self._outbox.setdefault(ticket, []).append(End(error))
        self._tell("ended", job)

    def _fail(self, error: Exception) -> None:
        """End everything, as nobody knows what the engine would do."""
        logger.critical("the engine has failed", exc_info=error)
        self.failure = error
        for ticket in self._open_tickets():
            self._end(ticket, "error", EngineFailed(repr(error)))

    def _send(self) -> None:
        if self._outbox and self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, self._outbox)
            self._outbox = {}

    def _tell(self, event: str, *facts: Any) -> None:
        for observer in self.observers:
            try:
                getattr(observer, event)(*facts)
            except Exception:  # they must not, but what they watch is worth more than they are
                logger.exception("an observer has failed")


def _sum(usages: Sequence[Usage]) -> Usage:
    """Return what several requests have cost together; those that ran side by side took as long as the longest."""
    total = {item.name: sum(getattr(usage, item.name) for usage in usages) for item in fields(Usage)}
    return Usage(**total | {"seconds": max(usage.seconds for usage in usages)})
