"""The HTTP front as a deployment of Ray Serve, for clusters: ``serve run treewise.replicas.deployment:app model=…``."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import fields
from typing import Any

from fastapi import FastAPI
from ray import serve

from treewise.llm import LLM
from treewise.replicas.fleet import Fleet
from treewise.replicas.front import create_front
from treewise.replicas.settings import FleetOptions
from treewise.server.settings import ServerOptions, Telemetry

ELSEWHERE = ("host", "port", "allowed_origin", "ray_address", "tokenizer")
"""Fields of the options that Ray Serve has instead, or that cannot be given by name."""

MOST_REQUESTS = 1 << 20
"""That Ray Serve lets through: the fleet counts them itself, and says 429 where Ray Serve would let them wait."""


def app(args: Mapping[str, Any]) -> Any:
    """Return an application for Ray Serve: the front, which starts the replicas as actors of the same cluster.

    Parameters
    ----------
    args : mapping
        Fields of `FleetOptions`, `ServerOptions` and `Telemetry`, and parameters of `LLM`, by name. Texts are read as
        JSON where they are any, as all values on a command line are texts.

    Raises
    ------
    ValueError
        If there is no such field.
    """
    given = {name: _value(value) for name, value in args.items()}
    kinds = {kind.__name__: {item.name for item in fields(kind)} for kind in (FleetOptions, ServerOptions, Telemetry)}
    kinds["LLM"] = set(inspect.signature(LLM).parameters)
    known = set[str]().union(*kinds.values()).difference(ELSEWHERE)
    for name in given.keys() - known:
        raise ValueError(f"{name}: there is no such option; choose from {', '.join(sorted(known))}")
    chosen = {kind: {name: value for name, value in given.items() if name in names} for kind, names in kinds.items()}
    if isinstance(keys := chosen["ServerOptions"].get("api_key"), str | list):
        chosen["ServerOptions"]["api_key"] = (keys,) if isinstance(keys, str) else tuple(keys)
    options, telemetry = FleetOptions(**chosen["FleetOptions"]), Telemetry(**chosen["Telemetry"])
    limits = ServerOptions(**chosen["ServerOptions"])

    def build() -> FastAPI:
        fleet = Fleet(chosen["LLM"], options, limits, telemetry)
        front = create_front(fleet, limits)
        inner = front.router.lifespan_context

        @asynccontextmanager
        async def lifespan(application: FastAPI) -> AsyncIterator[None]:
            async with fleet, inner(application):
                yield

        front.router.lifespan_context = lifespan
        return front

    # One front is enough, as it does no more than pass on; several would not know of each other's requests.
    deployment = serve.deployment(
        serve.ingress(build)(),
        name="treewise",
        num_replicas=1,
        max_ongoing_requests=MOST_REQUESTS,
        graceful_shutdown_timeout_s=limits.drain_timeout,
        ray_actor_options={"num_cpus": 0},
    )
    return deployment.bind()


def _value(value: Any) -> Any:
    """Return what a text of a command line says."""
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value)
    return value
