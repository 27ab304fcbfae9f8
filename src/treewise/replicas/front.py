"""The HTTP front of a fleet: the API of one server, with many replicas behind it."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from treewise.replicas.fleet import Fleet, Member, ReplicaLost, key_of
from treewise.replicas.transcript import DONE, LOST, Interrupted, Parted, Transcript
from treewise.server.app import LONG, METRICS_TYPE, SEED, TRACE, assemble, error_response, read_body
from treewise.server.errors import RETRY, ApiError, api_error
from treewise.server.metrics import PREFIX
from treewise.server.responses import JsonResponse, to_json
from treewise.server.settings import ServerOptions

logger = logging.getLogger("treewise.replicas")

CONNECT_SECONDS = 5.0
"""Seconds in which a replica has to take a connection."""
KEPT_SECONDS = 15.0
"""Seconds that a connection without a request is kept: fewer than replicas keep theirs."""
LOOK_SECONDS = 5.0
"""Seconds in which a replica has to tell its metrics or its state."""
EXPECTED_TOKENS = 256
"""What a request is expected to decode at most, whatever it allows: most texts end of themselves."""

PASSED_ON = ("content-type", "x-request-id", "retry-after", "x-should-retry", "cache-control", "x-accel-buffering")
"""Headers of a replica's response that the client gets."""


class Want(NamedTuple):
    """What a router has to know of a request.

    Attributes
    ----------
    prompt : str or list of int
        The first of several.
    decode : int
        Tokens that it is expected to decode.
    namespace : str
    """

    prompt: str | Sequence[int] = ""
    decode: int = 0
    namespace: str = ""

    @classmethod
    def of(cls, data: bytes) -> Want:
        """Return what a body wants, as far as it can be read: what is wrong with it a replica will say."""
        try:
            body = json.loads(data)
            prompts = body.get("messages") or body["prompt"]
            if not isinstance(prompts, list) or not isinstance(prompts[0], str | list):
                prompts = [prompts]
            limit = body.get("max_completion_tokens") or body.get("max_tokens") or EXPECTED_TOKENS
            decode = int(min(limit, EXPECTED_TOKENS) * (body.get("n") or 1) * len(prompts))
            namespace = body.get("namespace") or body.get("cache_salt") or ""
            return cls(key_of(prompts[0]), max(0, decode), str(namespace))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            return cls()


class Forwarded(Response):
    """Sends what a replica answers, from another one where that is lost, and ends the work when its client goes.

    Parameters
    ----------
    front : Front
    path : str
    data : bytes
        The body.
    headers : mapping of str to str
        For the replica.
    want : Want
    """

    def __init__(self, front: Front, path: str, data: bytes, headers: Mapping[str, str], want: Want) -> None:
        super().__init__()
        self.front, self.path, self.data, self.want = front, path, data, want
        self.own_headers = headers
        self.transcript = Transcript()
        self.has_begun = False
        self._unsent: list[bytes] = []  # events that the transcript has, and the client has not

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        answering = asyncio.create_task(self._answer(scope, receive, send))
        watching = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            answering.cancel()  # which closes the connection to the replica, which then ends the work
            with suppress(asyncio.CancelledError):
                await answering

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        fleet = self.front.fleet
        try:
            with fleet.admitted():

                async def on(member: Member) -> None:
                    await self._attempt(member, scope, receive, send)

                await fleet.anywhere(on, *self.want)
        except Exception as error:
            wrong = _wrong(error)
            if self.has_begun:
                self._unsent += [b"data: " + to_json(wrong.body), DONE]
                await self._send(send, more=False)
            else:
                self.front.refused(wrong)
                await error_response(wrong)(scope, receive, send)

    async def _attempt(self, member: Member, scope: Scope, receive: Receive, send: Send) -> None:
        """Have one replica answer.

        Raises
        ------
        ReplicaLost
        """
        self.transcript.repeat()
        await self._send(send)
        async with self.front.asked(member, "POST", self.path, self.data, self.own_headers) as response:
            if response.content_type == "text/event-stream":
                await self._stream(response, send)
            elif self.has_begun:
                error = json.loads(await response.read())["error"]
                raise ApiError(error["message"], response.status, error["param"], error["code"])
            else:
                await (await self.front.whole(response))(scope, receive, send)

    async def _stream(self, response: aiohttp.ClientResponse, send: Send) -> None:
        if not self.has_begun:
            pairs = [(name.encode(), value.encode()) for name, value in _passed_on(response).items()]
            await send({"type": "http.response.start", "status": 200, "headers": pairs})
            self.has_begun = True
        rest = b""
        async for data in response.content.iter_any():
            *events, rest = (rest + data).split(b"\n\n")
            try:
                self._unsent += [news for event in events if (news := self.transcript.take(event)) is not None]
            except Interrupted as error:
                raise ReplicaLost(str(error)) from None
            await self._send(send, more=not self.transcript.is_over)
        if not self.transcript.is_over:
            raise ReplicaLost("it has closed a stream before its end")

    async def _send(self, send: Send, more: bool = True) -> None:
        """Send the client what it has not got; where this is interrupted while the client is slow, it still has not."""
        if self._unsent:
            events = b"".join(event + b"\n\n" for event in self._unsent)
            await send({"type": "http.response.body", "body": events, "more_body": more})
            self._unsent.clear()


class Front(Collector):
    """What the routes do, for a fleet.

    Parameters
    ----------
    fleet : Fleet
        Its replicas speak HTTP.
    options : ServerOptions
    """

    def __init__(self, fleet: Fleet, options: ServerOptions) -> None:
        self.fleet = fleet
        self.options = options
        self.began = time.time()
        self.refusals: dict[str, int] = {}
        self.client: aiohttp.ClientSession
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # ------------------------------------------------------------------ work

    async def work(self, request: Request) -> Response:
        """Have a replica complete a text, or answer a conversation."""
        try:
            self.fleet.check_open()
            data = await read_body(request, self.options.max_body_bytes)
        except Exception as error:
            wrong = api_error(error)
            self.refused(wrong)
            raise wrong from error
        want = Want.of(data) if len(data) < LONG else await asyncio.to_thread(Want.of, data)
        headers = {"content-type": "application/json", SEED: str(secrets.randbits(63))}
        headers |= {name: value for name in (SEED, *TRACE) if (value := request.headers.get(name))}
        return Forwarded(self, request.url.path, data, headers, want)

    async def passed(self, request: Request) -> Response:
        """Have some replica answer."""
        data, path = b"", quote(request.url.path)
        if request.method == "POST":
            data = await read_body(request, self.options.max_body_bytes)

        async def on(member: Member) -> Response:
            async with self.asked(member, request.method, path, data, {"content-type": "application/json"}) as response:
                return await self.whole(response)

        try:
            return await self.fleet.anywhere(on)
        except ReplicaLost as error:
            raise _wrong(error) from error

    @asynccontextmanager
    async def asked(
        self, member: Member, method: str, path: str, data: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask a replica within this, whose errors of connection are the replica's.

        Raises
        ------
        ReplicaLost
        """
        assert member.facts.url is not None
        headers = {**(headers or {}), "authorization": f"Bearer {self.fleet.key}"}
        try:
            async with self.client.request(method, member.facts.url + path, data=data, headers=headers) as response:
                yield response
        except aiohttp.ClientError as error:
            raise ReplicaLost(f"{type(error).__name__}: {error}") from error

    async def whole(self, response: aiohttp.ClientResponse) -> Response:
        """Return a replica's answer, once all of it has come.

        Raises
        ------
        ReplicaLost
            If it says that it takes no requests, or has failed.
        """
        data = await response.read()
        if response.status >= 500:
            with suppress(ValueError, LookupError, TypeError):
                if (error := json.loads(data)["error"])["code"] in LOST or response.status == 503:
                    raise ReplicaLost(error["message"])
        return Response(data, response.status, _passed_on(response))

    def refused(self, error: ApiError) -> None:
        """Count a request that no replica has worked on."""
        self.refusals[error.reason] = self.refusals.get(error.reason, 0) + 1

    # ------------------------------------------------------------------ facts

    async def health(self) -> Response:
        """Tell whether there are replicas, and how each of them is."""
        if self.fleet.health == "failed":
            raise ApiError(f"no replica can be started: {self.fleet.slots[0].error}", 503, code="failed")
        replicas = [{"name": slot.name, "state": slot.state, "starts": slot.starts} for slot in self.fleet.slots]
        return JsonResponse({"status": self.fleet.health, "replicas": replicas})

    async def ready(self) -> Response:
        """Tell whether requests are taken."""
        if self.fleet.health != "ok":
            raise ApiError(f"the server takes no requests: {self.fleet.health}", 503, code=self.fleet.health)
        if not self.fleet.router.names:
            raise ApiError("no replica is ready", 503, code="starting")
        return JsonResponse({"status": "ok"})

    async def state(self) -> Response:
        """Tell what all replicas do now, together and each."""
        states = {name: json.loads(data) for name, data in (await self._tell("/state")).items()}
        total = {
            "model": next((each["model"] for each in states.values()), self.options.served_model_name or ""),
            "device": ", ".join(f"{len(states)} × {device}" for device in {each["device"] for each in states.values()}),
            "health": self.fleet.health,
            "uptime_s": round(time.time() - self.began, 3),
            "running": sum(each["running"] for each in states.values()),
            "waiting": 0,
            "requests_total": self.fleet.num_requests,
            "rows_last_step": sum(each["rows_last_step"] for each in states.values()),
            "step_ms": max((each["step_ms"] for each in states.values()), default=0.0),
            "tokens_per_s": round(sum(each["tokens_per_s"] for each in states.values()), 2),
            "kv_slots": {
                name: sum(each["kv_slots"][name] for each in states.values())
                for name in ("total", "free", "held", "cached")
            },
        }
        total["waiting"] = max(0, self.fleet.num_open - total["running"])
        return JsonResponse({**total, "replicas": states})

    async def metrics(self) -> Response:
        """Return counters and histograms of all replicas for Prometheus, each labelled with its replica."""
        texts = await self._tell("/metrics")
        text = await asyncio.to_thread(self._merged, texts)
        return Response(text, media_type=METRICS_TYPE)

    def _merged(self, texts: Mapping[str, bytes]) -> bytes:
        families = labelled({name: text.decode() for name, text in texts.items()})
        for own in self.registry.collect():
            families.setdefault(own.name, Metric(own.name, own.documentation, own.type)).samples.extend(own.samples)
        return generate_latest(_Families(families.values()))

    async def _tell(self, path: str) -> dict[str, bytes]:
        """Return what each replica that can tell has to tell."""

        async def told(member: Member) -> bytes | None:
            with suppress(ReplicaLost, TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS), self.asked(member, "GET", path) as response:
                    if response.status == 200:
                        return await response.read()
            return None

        members = self.fleet.members
        answers = await asyncio.gather(*map(told, members))
        return {member.name: answer for member, answer in zip(members, answers, strict=True) if answer is not None}

    def collect(self) -> list[Metric]:
        """Return the front's own metrics; see `Collector.collect`."""
        replicas = GaugeMetricFamily(PREFIX + "replicas", "Replicas, by how they are.", labels=["state"])
        for state in ("ready", "starting", "restarting", "failed"):
            replicas.add_metric([state], sum(slot.state == state for slot in self.fleet.slots))
        refusals = CounterMetricFamily(PREFIX + "front_requests_refused", "Requests turned away.", labels=["reason"])
        for reason, number in self.refusals.items():
            refusals.add_metric([reason], number)
        fleet = self.fleet
        return [
            replicas,
            refusals,
            GaugeMetricFamily(PREFIX + "front_requests_open", "Requests that have not ended.", fleet.num_open),
            CounterMetricFamily(PREFIX + "replicas_lost", "Replicas that have died.", fleet.num_lost),
            CounterMetricFamily(
                PREFIX + "requests_resent", "Times that a request was sent to another replica.", fleet.num_resent
            ),
        ]


def create_front(fleet: Fleet, options: ServerOptions) -> FastAPI:
    """Return the application in front of a fleet; SIGHUP restarts one replica after the other.

    Parameters
    ----------
    fleet : Fleet
        Has ``telemetry``, so that its replicas speak HTTP; to be entered before the application is used.
    options : ServerOptions
    """
    front = Front(fleet, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as front.client:
            with _on_hangup(fleet.restart):
                yield

    endpoints: dict[str, Callable[..., Any]] = {
        "/v1/completions": front.work,
        "/v1/chat/completions": front.work,
        "/v1/models": front.passed,
        "/v1/models/{model:path}": front.passed,
        "/tokenize": front.passed,
        "/detokenize": front.passed,
        "/tokenizer_info": front.passed,
        "/health": front.health,
        "/ready": front.ready,
        "/version": front.passed,
        "/strategies": front.passed,
        "/state": front.state,
        "/metrics": front.metrics,
    }
    return assemble(endpoints, options, lifespan, front.refused)


def labelled(texts: Mapping[str, str]) -> dict[str, Metric]:
    """Return metrics by name, of texts in Prometheus's format by replica, each sample labelled with its replica."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [sample._replace(labels={**sample.labels, "replica": name}) for sample in family.samples]
    return families


class _Families(Collector):
    """Metrics that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return self.families


@contextmanager
def _on_hangup(restart: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Have SIGHUP restart replicas within this, where signals can be heard."""
    loop = asyncio.get_running_loop()
    restarts: set[asyncio.Task[None]] = set()

    def begin() -> None:
        task = asyncio.create_task(restart())
        restarts.add(task)
        task.add_done_callback(ended)

    def ended(task: asyncio.Task[None]) -> None:
        restarts.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the restart has failed: %s", error)

    is_heard = threading.current_thread() is threading.main_thread()
    if is_heard:
        loop.add_signal_handler(signal.SIGHUP, begin)
    try:
        yield
    finally:
        if is_heard:
            loop.remove_signal_handler(signal.SIGHUP)
        for task in restarts:
            task.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _passed_on(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: value for name in PASSED_ON if (value := response.headers.get(name)) is not None}


def _wrong(error: Exception) -> ApiError:
    """Return what a client is told of an error."""
    if isinstance(error, ReplicaLost | Parted):
        return ApiError(str(error), 503, code="replica_lost", headers=RETRY)
    return api_error(error)
