"""The HTTP application: its routes, who may use them, and how answers are sent."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from treewise import __version__
from treewise.server.choices import Delta, Entry
from treewise.server.description import BODIES, describe
from treewise.server.driver import ClientGone, Driver, End, Refused
from treewise.server.errors import ApiError, api_error, invalid_body
from treewise.server.orders import Order, Orders
from treewise.server.pages import add_page
from treewise.server.responses import JsonResponse, to_json, usage
from treewise.server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from treewise.server.searches import Grown, Searched, described
from treewise.server.settings import ServerOptions

OPEN_PATHS = ("/", "/health", "/ready", "/version", "/openapi.json")
"""What needs no key, nor do the files of the page."""

PATIENCE = 30.0
"""Seconds in which a body must have come."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what Prometheus reads."""

LONG = 1 << 16
"""Bytes from which on a body is understood in a thread of its own, so that it holds up nobody; grammars always are."""

TRACE = ("traceparent", "tracestate")
"""Headers of W3C Trace Context."""

SEED = "x-treewise-seed"
"""The header with the seed, an integer, that the prompts of a request without a seed of its own draw theirs from. A
request that is sent again with the same one draws the same tokens."""

Model = TypeVar("Model", bound=BaseModel)


class Gate:
    """Lets in who brings one of the keys.

    Parameters
    ----------
    app : ASGI application
    keys : sequence of str
        Without any, everybody may come in.
    refused : callable
        Told that somebody may not.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], refused: Callable[[ApiError], None]) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]
        self.refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http" or not self.keys or self._is_open(scope["path"]) or self._has_key(scope):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            "the header `Authorization: Bearer KEY` is missing, or its key is wrong",
            401,
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        self.refused(error)
        await error_response(error)(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or path.startswith("/page/")

    def _has_key(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        # All keys are compared, each in constant time, so that nothing can be learnt from how long it takes.
        matches = [hmac.compare_digest(key.strip(), each) for each in self.keys]
        return kind.lower() == b"bearer" and any(matches)


class JobResponse(Response):
    """Sends what becomes of a job, as it comes or as a whole, and ends the job when its client goes.

    Parameters
    ----------
    driver : Driver
        Has the job already.
    order : Order
    model : str
        As the client calls it.
    """

    def __init__(self, driver: Driver, order: Order, model: str) -> None:
        super().__init__()
        self.driver = driver
        self.order = order
        self.ticket = order.ticket
        self.envelope = {
            "id": order.ticket.job.id,
            "object": order.form.chunk if order.stream else order.form.whole,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"treewise-{__version__}",
        }
        self._opened_envelope = to_json(self.envelope).removesuffix(b"}")
        self._opened: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        watch = asyncio.create_task(self._until_gone(receive))
        try:
            await (self._stream(send) if self.order.stream else self._whole(scope, receive, send))
        except ClientGone:
            pass
        finally:
            watch.cancel()
            self.driver.give_up(self.ticket)

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.driver.give_up(self.ticket)

    async def _unspoilt_updates(self) -> list[Any]:
        """Wait for updates while an error can still be the whole response.

        Raises
        ------
        ApiError, ClientGone
        """
        updates = await self.ticket.updates()
        error = updates[-1].error if isinstance(updates[-1], End) else None
        if error is None:
            return updates
        raise error if isinstance(error, ClientGone) else api_error(error)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        updates = await self._unspoilt_updates()
        while not isinstance(updates[-1], End):
            updates += await self._unspoilt_updates()
        cost = self.ticket.job.usage
        body = {**self.envelope, "choices": self._choices(updates), "usage": cost and usage(cost)}
        for update in updates:
            if isinstance(update, Searched) and update.tree is not None:
                body["treewise"] = {"tree": update.tree.to_dict()}
        await JsonResponse(body, headers=self._own_headers)(scope, receive, send)

    def _choices(self, updates: Sequence[Any]) -> list[dict[str, Any]]:
        """Return whole choices out of all that was said of them."""
        parts: list[list[Delta]] = [[] for _ in range(self.order.num_choices)]
        for update in updates:
            if isinstance(update, Delta):
                parts[update.index].append(update)
            elif isinstance(update, Searched):
                parts[0].append(update.delta)
        choices = []
        for index, deltas in enumerate(parts):
            entries: list[Entry] = [entry for delta in deltas for entry in delta.entries]
            choices.append(self.order.form.choice(index, "".join(each.text for each in deltas), entries, deltas[-1]))
        return choices

    async def _stream(self, send: Send) -> None:
        """Send events.

        The first updates are waited for before anything is sent: what is wrong at once still gets a status of its own.
        """
        updates = await self._unspoilt_updates()
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        headers |= {"x-accel-buffering": "no", **self._own_headers}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})
        while True:
            events = b"".join(b"data: %b\n\n" % event for update in updates for event in self._events(update))
            over = isinstance(updates[-1], End)
            await send({"type": "http.response.body", "body": events, "more_body": not over})
            if over:
                return
            updates = await self.ticket.updates()

    def _events(self, update: Any) -> Iterator[bytes]:
        match update:
            case Delta():
                yield from self._opening(update.index)
                yield self._chunk([self.order.form.piece(update)])
            case Grown():
                yield self._chunk([], treewise={"nodes": update.nodes})
            case Searched():
                yield from self._opening(0)
                tree = update.tree and {"treewise": {"tree": update.tree.to_dict(), "chosen": update.chosen}}
                yield self._chunk([self.order.form.piece(update.delta)], **(tree or {}))
            case End(None):
                if self.order.include_usage and (cost := self.ticket.job.usage) is not None:
                    yield to_json({**self.envelope, "choices": [], "usage": usage(cost)})
                yield b"[DONE]"
            case End(Exception() as error):
                if not isinstance(error, ClientGone):
                    yield to_json(api_error(error).body)
                    yield b"[DONE]"

    def _opening(self, index: int) -> Iterator[bytes]:
        if index not in self._opened:
            self._opened.add(index)
            if (opening := self.order.form.opening(index)) is not None:
                yield self._chunk([opening])

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage_comes = {"usage": None} if self.order.include_usage else {}
        # The envelope is the same in all chunks, and larger than what most of them have to say.
        return b"%b,%b" % (self._opened_envelope, to_json({"choices": choices, **usage_comes, **more})[1:])

    @property
    def _own_headers(self) -> dict[str, str]:
        return {"x-request-id": self.ticket.job.id}


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request, which is to be JSON.

    Raises
    ------
    ApiError
        If it is said to be anything else, is too large, or does not come.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # NOTE: browsers let any page send other types to a server on the same machine without asking it first.
    if kind != "application/json":
        raise ApiError(f"content-type: {kind!r:.100} is not application/json", 415)
    data = bytearray()
    try:
        async with asyncio.timeout(PATIENCE):
            async for chunk in request.stream():
                data += chunk
                if len(data) > max_bytes:
                    raise ApiError(f"the body is larger than {max_bytes} bytes", 413)
    except ClientDisconnect:
        raise ApiError("the client has gone before all of the body had come") from None
    except TimeoutError:
        raise ApiError(f"the body has not come in {PATIENCE:g} seconds", 408) from None
    return bytes(data)


class Application:
    """What the routes do, for one engine.

    Parameters
    ----------
    driver : Driver
    options : ServerOptions
    """

    def __init__(self, driver: Driver, options: ServerOptions) -> None:
        self.driver = driver
        self.options = options
        llm = driver.llm
        self.model = options.served_model_name or Path(llm.model_name).name
        self.orders = Orders(llm, options, self.model)
        self.began = time.time()

    # ------------------------------------------------------------------ work

    async def completions(self, request: Request) -> Response:
        """Continue one text or several, given as texts or as token ids."""
        return await self._respond(request, CompletionRequest, self.orders.completion)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation, written by the model's chat template."""
        return await self._respond(request, ChatCompletionRequest, self.orders.chat)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text, or of a conversation as the chat template writes it."""
        body = await self._read(request, TokenizeRequest)
        self.orders.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("prompt: give it or messages", param="prompt")
        if body.messages is not None:
            tokens = self.orders.conversation(body.messages, body.add_generation_prompt)
        else:
            tokens = self.driver.llm.tokenizer.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens, parse_special=body.parse_special
            )
        return JsonResponse({"count": len(tokens), "max_model_len": self.driver.llm.max_model_len, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens, special ones left out."""
        body = await self._read(request, DetokenizeRequest)
        self.orders.check_model(body.model)
        return JsonResponse({"prompt": self.orders.text(body.tokens)})

    async def tokenizer_info(self) -> Response:
        """Tell the special tokens and the chat template, for clients that write conversations themselves."""
        tokenizer = self.driver.llm.tokenizer
        names = {name: tokenizer.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        return JsonResponse({**names, "chat_template": tokenizer.chat_template, "vocab_size": tokenizer.vocab_size})

    async def _respond(self, request: Request, model: type[Sampling], read: Callable[..., Order]) -> Response:
        arrived = perf_counter()
        try:
            self.driver.check_open()
            body = await self._read(request, model)
            trace = {name: value for name in TRACE if (value := request.headers.get(name))}
            seed = _seed(request.headers.get(SEED))
            if body.is_constrained or int(request.headers.get("content-length", LONG)) >= LONG:
                order = await asyncio.to_thread(read, body, arrived, trace, seed)
            else:
                order = read(body, arrived, trace, seed)
            self.driver.submit(order.ticket)
        except Exception as error:
            wrong = api_error(error)
            self.refused(wrong)
            raise wrong from error
        return JobResponse(self.driver, order, self.model)

    def refused(self, error: ApiError) -> None:
        """Tell observers of a request that did not become a job."""
        for observer in self.driver.observers:
            observer.refused(error.reason)

    async def _read(self, request: Request, model: type[Model]) -> Model:
        """Return the body of a request, checked.

        Raises
        ------
        ApiError
        """
        data = await read_body(request, self.options.max_body_bytes)
        try:
            return model.model_validate_json(data)
        except ValidationError as error:
            raise invalid_body(error.errors(include_url=False, include_context=False, include_input=False)) from None

    # ------------------------------------------------------------------ facts

    async def models(self) -> Response:
        """List the model that is served."""
        return JsonResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, model: str) -> Response:
        """Describe the model that is served."""
        self.orders.check_model(model)
        return JsonResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": int(self.began),
            "owned_by": "treewise",
            "max_model_len": self.driver.llm.max_model_len,
        }

    async def health(self) -> Response:
        """Tell whether the engine lives."""
        if self.driver.failure is not None:
            raise ApiError(f"the engine has failed: {self.driver.failure!r}", 503, code="failed")
        return JsonResponse({"status": self.driver.health})

    async def ready(self) -> Response:
        """Tell whether requests are taken."""
        if self.driver.health != "ok":
            raise ApiError(f"the server takes no requests: {self.driver.health}", 503, code=self.driver.health)
        return JsonResponse({"status": "ok"})

    async def version(self) -> Response:
        """Tell the version of treewise."""
        return JsonResponse({"version": __version__})

    async def strategies(self) -> Response:
        """List the strategies of `search` and their parameters."""
        return JsonResponse({"strategies": described()})

    async def state(self) -> Response:
        """Tell what the server does now."""
        driver = self.driver
        return JsonResponse(
            {
                "model": self.model,
                "device": str(driver.llm.engine.runner.device),
                "health": driver.health,
                "uptime_s": round(time.time() - self.began, 3),
                "running": driver.num_running,
                "waiting": driver.num_waiting,
                "requests_total": driver.num_jobs,
                "rows_last_step": driver.rows_last_step,
                "step_ms": round(1e3 * driver.step_seconds, 3),
                "tokens_per_s": round(driver.tokens_per_second, 2),
                "kv_slots": await driver.ask(self._kv_slots),
            }
        )

    def _kv_slots(self) -> dict[str, int]:
        usage, kv = self.driver.llm.kv_usage, self.driver.llm.engine.kv
        return {
            "total": kv.num_slots,
            "free": kv.num_slots - usage.slots,
            "held": usage.live_slots,
            "cached": usage.slots - usage.live_slots,
        }


def create_app(driver: Driver, options: ServerOptions, metrics: Callable[[], bytes] | None = None) -> FastAPI:
    """Return the application around an engine, which it starts and ends.

    Parameters
    ----------
    driver : Driver
        Not started; has the observers.
    options : ServerOptions
    metrics : callable, optional
        Returns what `/metrics` says.
    """
    application = Application(driver, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        driver.start()
        try:
            yield
        finally:
            await driver.stop()

    async def metrics_route() -> Response:
        """Return counters and histograms for Prometheus."""
        assert metrics is not None
        return Response(metrics(), media_type=METRICS_TYPE)

    endpoints: dict[str, Callable[..., Any]] = {
        "/v1/completions": application.completions,
        "/v1/chat/completions": application.chat_completions,
        "/v1/models": application.models,
        "/v1/models/{model:path}": application.one_model,
        "/tokenize": application.tokenize,
        "/detokenize": application.detokenize,
        "/tokenizer_info": application.tokenizer_info,
        "/health": application.health,
        "/ready": application.ready,
        "/version": application.version,
        "/strategies": application.strategies,
        "/state": application.state,
        **({} if metrics is None else {"/metrics": metrics_route}),
    }
    return assemble(endpoints, options, lifespan, application.refused)


def assemble(
    endpoints: Mapping[str, Callable[..., Any]],
    options: ServerOptions,
    lifespan: Callable[[FastAPI], Any],
    refused: Callable[[ApiError], None],
) -> FastAPI:
    """Return an application of endpoints: with the page, its description, and those kept out who have no key.

    Parameters
    ----------
    endpoints : mapping of str to async function
        By path; those in `BODIES` take POST, the others GET.
    options : ServerOptions
    lifespan : callable
        See FastAPI.
    refused : callable
        Told that somebody may not come in.
    """
    app = FastAPI(title="treewise", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    for path, endpoint in endpoints.items():
        app.add_api_route(path, endpoint, methods=["POST" if path in BODIES else "GET"], response_model=None)
    add_page(app)
    app.openapi = cache(partial(describe, app, bool(options.api_key)))  # type: ignore[method-assign]
    app.add_middleware(Gate, keys=options.api_key, refused=refused)
    if options.allowed_origin:
        app.add_middleware(
            CORSMiddleware, allow_origins=options.allowed_origin, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(Refused, _on_error)
    app.add_exception_handler(ValueError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)
    return app


def _seed(text: str | None) -> int | None:
    """Read the header `SEED`.

    Raises
    ------
    ApiError
    """
    if text is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,20}", text):
        raise ApiError(f"{SEED}: {text!r:.100} is not an integer of at most 20 digits")
    return int(text)


async def _on_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # no such path, or method
        error = ApiError(str(error.detail), error.status_code, headers=error.headers)
    return error_response(api_error(error))


def error_response(error: ApiError) -> Response:
    """Return the response that tells a client of an error."""
    return JsonResponse(error.body, error.status, headers=error.headers)
