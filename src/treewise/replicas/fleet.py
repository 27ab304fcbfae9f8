"""A fleet: replicas of one model that are started, watched, replaced when they die, and given requests."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from treewise import __version__
from treewise.llm import Prompt, Sparsity
from treewise.replicas.cluster import import_ray
from treewise.replicas.replica import Errand, Facts, Replica
from treewise.replicas.routing import Router
from treewise.replicas.settings import FleetOptions
from treewise.results import ProgramOutput
from treewise.server.driver import EngineFailed, Refused, TimeUp
from treewise.server.settings import ServerOptions, Telemetry

logger = logging.getLogger("treewise.replicas")

Answer = TypeVar("Answer")

ROOM_SECONDS = 60.0
"""Seconds within which a cluster has to find room for a replica."""
PING_SECONDS = 2.0
"""Seconds between two looks at whether a replica answers."""
RESERVE = 16
"""Calls of an actor beside those of requests: life, pings."""
SILENCE = 20.0
"""Seconds without an answer after which a replica is taken for dead, and ended."""
LONGEST_PAUSE = 30.0
"""The most seconds between two attempts to start a replica that fails to."""


class ReplicaLost(Exception):
    """A replica has ended, or does not do what it should; what it worked on can be done elsewhere."""


@dataclass(eq=False)
class Member:
    """A replica from its start to its end; another one takes its name and its place then.

    Attributes
    ----------
    name : str
    actor : handle of Ray
    facts : Facts
    is_suspect : Event
        Set when somebody doubts that it lives.
    end : Future of str
        Why it ends, or has ended, once it does.
    is_planned : bool
        Whether it ends because it is restarted.
    """

    name: str
    actor: Any
    facts: Facts
    is_suspect: asyncio.Event = field(default_factory=asyncio.Event)
    end: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_planned: bool = False
    calls: set[asyncio.Timeout] = field(default_factory=set)  # under way on it
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # from its place


@dataclass(eq=False)
class Slot:
    """The place of a replica: what is reserved for it, and who is there now.

    Attributes
    ----------
    name : str
    group : placement group of Ray
        Keeps its devices when a replica ends, for the next one.
    member : Member or None
    starts : int
        Replicas that have been ready here.
    error : Exception or None
        Why the last attempt to start one has failed.
    """

    name: str
    group: Any
    member: Member | None = None
    starts: int = 0
    error: Exception | None = None

    @property
    def state(self) -> str:
        """``"ready"``, ``"restarting"``, ``"starting"``, or ``"failed"`` where it could not be started."""
        if self.member is not None:
            return "restarting" if self.member.is_planned else "ready"
        return "starting" if self.error is None else "failed"


class Fleet:
    """Replicas of a model, each with an engine and devices of its own, and one door to them.

    Within ``async with`` the replicas are there, all of them when it begins. Its methods are for the event loop that
    has entered it. This process must be connected to Ray, see `treewise.replicas.cluster.connected`.

    A replica that dies, fails or hangs is replaced; what it worked on is done again elsewhere. As the same seed gives
    the same tree whatever else runs, that brings what the lost one would have: every request is given a seed before it
    is sent anywhere. A program may so run more than once, though it returns once: what it does outside of its tree
    should bear that.

    NOTE: Ray could restart actors and retry their methods itself, but only in the same place, after its restart.

    Parameters
    ----------
    llm : mapping
        Parameters of `LLM`, the same for all replicas; ``tensor_parallel_size`` says how many devices each has.
    options : FleetOptions, optional
    limits : ServerOptions, optional
        How many requests run and wait, all replicas together, and how long: ``max_running`` in each of them,
        ``max_waiting``, ``time_limit``.
    telemetry : Telemetry, optional
        Has replicas speak HTTP, too, to those who bring `key`.
    router : Router, optional
        By default one of the kind that `options` name.

    Attributes
    ----------
    key : str
        What the replicas' own servers ask for; only this process knows it.
    num_open : int
        Requests that have not ended.
    num_requests, num_resent, num_lost : int
        So far: requests taken, attempts that were repeated elsewhere, replicas that have died.

    Examples
    --------
    >>> async def main():  # doctest: +SKIP
    ...     with connected():
    ...         async with Fleet({"model": "smollm2-135m"}, FleetOptions(data_parallel_size=2)) as fleet:
    ...             outputs = await asyncio.gather(*(fleet.run(program, prompt) for prompt in prompts))
    """

    def __init__(
        self,
        llm: Mapping[str, Any],
        options: FleetOptions | None = None,
        limits: ServerOptions | None = None,
        telemetry: Telemetry | None = None,
        router: Router | None = None,
    ) -> None:
        self.ray = import_ray()
        self.llm = dict(llm)
        if isinstance(model := self.llm.get("model"), str) and Path(model).exists():
            self.llm["model"] = str(Path(model).resolve())  # as processes of Ray may work elsewhere
        self.options = options or FleetOptions()
        self.limits = limits or ServerOptions()
        self.telemetry = telemetry
        self.router = router or self.options.router()
        self.key = secrets.token_urlsafe(32)
        self.draining = False
        self._has_ended = False
        self.num_open = self.num_requests = self.num_resent = self.num_lost = 0
        self.slots: list[Slot] = []
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._news = asyncio.Condition()  # of replicas
        self._keepers: list[asyncio.Task[None]] = []
        self._restarting = asyncio.Lock()

    # ------------------------------------------------------------------ the whole

    async def __aenter__(self) -> Fleet:
        try:
            await self._reserve()
            self._keepers = [asyncio.create_task(self._keep(slot)) for slot in self.slots]
            await self._until(lambda: all(slot.member or slot.error for slot in self.slots))
            for slot in self.slots:
                if slot.error is not None:
                    raise slot.error
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stop()
        for slot in self.slots:
            with suppress(Exception):
                self.ray.util.remove_placement_group(slot.group)

    @property
    def members(self) -> list[Member]:
        """Replicas that live, those that are about to be restarted included."""
        return [slot.member for slot in self.slots if slot.member is not None]

    @property
    def health(self) -> str:
        """``"ok"``, ``"draining"``, or ``"failed"`` where no replica lives or can be started."""
        if self.draining:
            return "draining"
        return "failed" if self.slots and all(slot.state == "failed" for slot in self.slots) else "ok"

    @property
    def num_waiting(self) -> int:
        """Requests beyond those that all replicas work on side by side."""
        return max(0, self.num_open - self.limits.max_running * len(self.router.names))

    async def drain(self, timeout: float) -> bool:
        """Take no new requests, wait for those there are, and end what is left after so many seconds.

        Returns
        -------
        bool
            Whether all have come to their ends.
        """
        self.draining = True
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout)
        except TimeoutError:
            await self._stop()
            return False
        return True

    async def _stop(self) -> None:
        """End all replicas, and let go those who wait for them or for new ones."""
        self.draining = self._has_ended = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for slot in self.slots:
            if slot.member is not None:
                self._dismiss(slot, slot.member, "the fleet has ended")
        await self._tell()

    async def restart(self) -> None:
        """Replace one replica after the other, when its requests have ended or ``restart_timeout`` has passed.

        Requests that have not ended by then go on elsewhere.

        Raises
        ------
        ReplicaLost
            If a new one cannot be started; the others go on as they are.
        """
        async with self._restarting:
            for slot in self.slots:
                await self._until_whole()
                if (member := slot.member) is None:  # it has died a moment ago, and so is about to be replaced
                    continue
                member.is_planned = True
                self.router.remove(slot.name)
                if member.calls:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(member.is_idle.wait(), self.options.restart_timeout)
                self._end(member, "it is restarted")
                await member.gone.wait()
            await self._until_whole()

    async def _until_whole(self) -> None:
        """Wait until all replicas are there.

        Raises
        ------
        ReplicaLost
            If one cannot be started, or the fleet has ended.
        """
        await self._until(lambda: self._has_ended or all(slot.member or slot.error for slot in self.slots))
        if self._has_ended:
            raise ReplicaLost("the fleet has ended")
        for slot in self.slots:
            if slot.error is not None:
                raise ReplicaLost(f"replica {slot.name} cannot be started: {slot.error}") from slot.error

    # ------------------------------------------------------------------ requests

    def check_open(self) -> None:
        """Refuse what comes where no request would be taken.

        Raises
        ------
        Refused
        """
        if self.draining:
            raise Refused("draining", "the server is about to end and takes no new requests")
        if self.health == "failed":
            raise Refused("failed", f"no replica can be started: {self.slots[0].error}")
        # While replicas are replaced, what they would work on may wait for them.
        if self.num_open >= self.limits.max_running * len(self.slots) + self.limits.max_waiting:
            raise Refused("queue_full", f"{self.num_waiting} requests are waiting already; try again later")

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request as open within this.

        Raises
        ------
        Refused
            If it is not taken.
        """
        self.check_open()
        self.num_open += 1
        self.num_requests += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._is_idle.set()

    async def run(
        self,
        program: Callable[..., Coroutine[Any, Any, Any]],
        prompt: Prompt,
        *,
        seed: int | None = None,
        priority: int = 0,
        namespace: str = "",
        kv_sparsity: Sparsity = None,
        token_budget: int | None = None,
        **kwargs: Any,
    ) -> ProgramOutput:
        """Run ``program(root, **kwargs)`` over a tree on some replica; the same as ``LLM.run`` does with one prompt.

        Parameters
        ----------
        program : async function
            Travels by cloudpickle, and so do its arguments and what it returns: by value where it is defined in
            ``__main__``, else by its module's name, which replicas must be able to import.
        prompt : str, list of int, or list of messages
        seed : int, optional
            The same seed gives the same tree, on whatever replica.
        priority, namespace, kv_sparsity, token_budget
            See `LLM.run`.

        Returns
        -------
        ProgramOutput
            Branches in its `value` have become `CompletionOutput`.

        Raises
        ------
        Refused
            If too many wait already, or the fleet is about to end.
        ReplicaLost
            If the program has lost ``max_attempts`` replicas.
        Exception
            What the program raised; it is not run again then.
        """
        seed = secrets.randbits(63) if seed is None else seed
        errand = Errand(program, prompt, seed, priority, namespace, kv_sparsity, token_budget, kwargs)
        errand_bytes = cloudpickle.dumps(errand)

        async def on(member: Member) -> Any:
            reference = member.actor.run.remote(errand_bytes)
            try:
                result = cloudpickle.loads(await reference)
            except asyncio.CancelledError:
                self.ray.cancel(reference)
                raise
            except self.ray.exceptions.RayTaskError:
                raise
            except self.ray.exceptions.RayError as error:
                raise ReplicaLost(_first_line(error)) from error
            if isinstance(result, EngineFailed | Refused):
                raise ReplicaLost(str(result))
            return result

        with self.admitted():
            result = await self.anywhere(on, key_of(prompt), decode=token_budget or 0, namespace=namespace)
        if isinstance(result, BaseException):
            raise result
        output: ProgramOutput = result
        return output

    async def anywhere(
        self,
        call: Callable[[Member], Awaitable[Answer]],
        prompt: str | Sequence[int] = "",
        decode: int = 0,
        namespace: str = "",
    ) -> Answer:
        """Return what a call on some replica brings; where that is lost meanwhile, on another one.

        Parameters
        ----------
        call : async function
            Raises `ReplicaLost` where its replica fails it. It may be called again then.
        prompt, decode, namespace
            See `Router.route`.

        Raises
        ------
        ReplicaLost
            If too many replicas were lost over it.
        TimeUp
            If no replica was ready within ``time_limit``.
        Refused
            If the fleet has ended.
        Exception
            What else the call raised.
        """
        lost: list[str] = []
        while True:
            async with self._chosen(prompt, decode, namespace, lost) as member:
                try:
                    async with asyncio.timeout(None) as alarm:
                        member.calls.add(alarm)
                        try:
                            return await call(member)
                        finally:
                            member.calls.discard(alarm)
                            if not member.calls:
                                member.is_idle.set()
                except ReplicaLost as error:
                    reason = str(error)
                except TimeoutError:
                    if not alarm.expired():
                        raise
                    reason = member.end.result()
            self.num_resent += 1
            if not member.is_planned:
                self._doubt(member)
                lost.append(member.name)
                if len(lost) >= self.options.max_attempts:
                    raise ReplicaLost(f"{len(lost)} replicas were lost over the request, the last one: {reason}")

    @asynccontextmanager
    async def _chosen(
        self, prompt: str | Sequence[int], decode: int, namespace: str, avoid: Collection[str]
    ) -> AsyncIterator[Member]:
        """Choose a replica, and count what is done within this as its load."""
        try:
            async with asyncio.timeout(self.limits.time_limit):
                await self._until(lambda: self.router.names or self._has_ended)
        except TimeoutError:
            raise TimeUp(f"no replica was ready in {self.limits.time_limit:g} seconds") from None
        if self._has_ended:
            raise Refused("draining", "the server has ended before this request has")
        route = self.router.route(prompt, decode=decode, namespace=namespace, avoid=avoid)
        [member] = [member for member in self.members if member.name == route.name]
        member.is_idle.clear()
        self.router.began(route)
        try:
            yield member
        finally:
            self.router.ended(route)

    def _doubt(self, member: Member) -> None:
        """Give a replica no more requests until it has shown that it lives."""
        if not member.end.done() and not member.is_planned:
            self.router.remove(member.name)
            member.is_suspect.set()

    # ------------------------------------------------------------------ replicas

    async def _reserve(self) -> None:
        """Reserve what each replica needs; it stays reserved while they are replaced.

        Raises
        ------
        ValueError
            If the cluster has no room for them.
        """
        size, ranks = self.options.data_parallel_size, int(self.llm.get("tensor_parallel_size", 1))
        total, free = self.ray.cluster_resources(), self.ray.available_resources()
        device = self.llm.get("device", "auto")
        gpus = ranks if device == "cuda" or (device == "auto" and total.get("GPU", 0)) else 0
        cores = min((node["Resources"].get("CPU", 0) for node in self.ray.nodes() if node["Alive"]), default=0)
        shared = ranks if gpus else max(ranks, int(min(free.get("CPU", 0) / size, cores)))
        cpus = self.options.cpus_per_replica or shared
        self.llm["device"] = "cuda" if gpus else "cpu"
        self._home = self.ray.get_runtime_context().get_node_id()
        self._threads = int(os.environ.get("OMP_NUM_THREADS", max(1, cpus // ranks)))
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        for number in range(size):
            group = self.ray.util.placement_group([bundle], strategy="STRICT_PACK")
            self.slots.append(Slot(str(number), group))
        for slot in self.slots:
            if not await asyncio.to_thread(slot.group.wait, ROOM_SECONDS):
                there = {name: total.get(name, 0) for name in ("CPU", "GPU")}
                raise ValueError(
                    f"data_parallel_size: there is no room for {size} replicas that take {bundle} each; of {there} in "
                    f"the cluster, { ({name: free.get(name, 0) for name in there}) } is free"
                )

    async def _keep(self, slot: Slot) -> None:
        """Have a replica at a place, one after the other."""
        pause = 1.0
        while True:
            try:
                slot.member = await self._start(slot)
            except Exception as error:
                logger.error("replica %s cannot be started: %s", slot.name, error)
                slot.error = error
                await self._tell()
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            slot.error, pause = None, 1.0
            slot.starts += 1
            member = slot.member
            logger.info("replica %s is ready, process %d", slot.name, member.facts.process_id)
            await self._admit(member)
            reason = await self._watch(member)
            if not member.is_planned:
                self.num_lost += 1
                logger.error("replica %s is lost: %s", slot.name, reason)
            self._dismiss(slot, member, reason)
            await self._tell()

    async def _start(self, slot: Slot) -> Member:
        """Start a replica, and wait until it is ready."""
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        bundle = slot.group.bundle_specs[0]
        actor = (
            self.ray.remote(Replica)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=self.limits.max_running * len(self.slots) + self.limits.max_waiting + RESERVE,
                scheduling_strategy=strategy(placement_group=slot.group, placement_group_bundle_index=0),
            )
            .remote(self.llm, self.limits, self._threads, self.telemetry, self.key, self._home)
        )
        try:
            async with asyncio.timeout(self.options.start_timeout):
                facts: Facts = await actor.start.remote()
            if facts.version != __version__:
                raise RuntimeError(f"its node has treewise {facts.version}, this one {__version__}")
        except BaseException as error:
            self.ray.kill(actor)
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, Exception) else error from None
        return Member(slot.name, actor, facts)

    async def _watch(self, member: Member) -> str:
        """Wait until a replica has ended, or should, and return why."""
        life = asyncio.create_task(_life(member.actor))
        try:
            while True:
                member.is_suspect.clear()
                ping = asyncio.create_task(_ping(member.actor))
                await _first({life, ping, member.end}, SILENCE)
                for end in (member.end, life):
                    if end.done():
                        return end.result()
                if not ping.done():
                    ping.cancel()
                    return f"it has not answered for {SILENCE:g} seconds"
                if (trouble := ping.result()) is not None:
                    return trouble
                if not member.is_suspect.is_set():
                    await self._admit(member)
                    doubt = asyncio.create_task(member.is_suspect.wait())
                    await _first({life, doubt, member.end}, PING_SECONDS)
                    doubt.cancel()
        finally:
            life.cancel()

    async def _admit(self, member: Member) -> None:
        """Let a replica have requests, if it has none."""
        if member.name not in self.router.names and not member.is_planned:
            self.router.add(member.name, member.facts.kv_tokens)
            await self._tell()

    def _end(self, member: Member, reason: str) -> None:
        """End a replica, and let go those who wait for it."""
        if member.end.done():
            return
        member.end.set_result(reason)
        self.router.remove(member.name)
        self.ray.kill(member.actor)
        for alarm in member.calls:
            alarm.reschedule(asyncio.get_running_loop().time())

    def _dismiss(self, slot: Slot, member: Member, reason: str) -> None:
        self._end(member, reason)
        slot.member = None
        member.gone.set()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def _until(self, condition: Callable[[], Any]) -> None:
        """Wait until something holds of the replicas."""
        async with self._news:
            await self._news.wait_for(condition)


async def _life(actor: Any) -> str:
    """Wait until a replica has ended, and return why."""
    try:
        return str(await actor.life.remote())
    except Exception as error:
        return _first_line(error)


async def _ping(actor: Any) -> str | None:
    """Return once a replica has answered, None; or why it does not."""
    try:
        await actor.ping.remote()
    except Exception as error:
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    """Return what an error says, without the pages that Ray puts behind it."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


async def _first(futures: Collection[asyncio.Future[Any]], timeout: float) -> None:
    """Wait until one of several has come, but only so many seconds."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def key_of(prompt: Prompt) -> str | Sequence[int]:
    """Return what a router knows a prompt by: conversations by what is said in them."""
    if isinstance(prompt, str):
        return prompt
    turns = [turn for turn in prompt if isinstance(turn, Mapping)]
    if turns:
        return "".join(f"{turn.get('role')}\n{turn.get('content')}\n" for turn in turns)
    return [int(token) for token in prompt if isinstance(token, Integral)]
