"""The verb `serve`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from treewise.cli.options import ModelOptions
from treewise.config import SparsityOptions
from treewise.replicas.settings import FleetOptions
from treewise.server.settings import ServerOptions, Telemetry
from treewise.server.sockets import address_of, bind

KEYS = "TREEWISE_API_KEY"


def serve(
    model: str | None = None,
    /,
    *,
    server: Annotated[ServerOptions | None, Parameter("*", group="Server")] = None,
    options: Annotated[ModelOptions | None, Parameter("*", group="Model and engine")] = None,
    sparsity: Annotated[SparsityOptions | None, Parameter("*", group="KV sparsity")] = None,
    telemetry: Annotated[Telemetry | None, Parameter("*", group="Logs and traces")] = None,
    replicas: Annotated[FleetOptions | None, Parameter("*", group="Replicas")] = None,
) -> None:
    """Serve a model over OpenAI's API, until SIGTERM or Ctrl-C: running requests finish then.

    Parameters
    ----------
    model
        A folder in Transformers' layout, a GGUF file, a hub id, or a built-in name; another way to give --model.
    """
    server, options, telemetry = server or ServerOptions(), options or ModelOptions(), telemetry or Telemetry()
    replicas = replicas or FleetOptions()
    if keys := os.environ.get(KEYS):
        server = replace(server, api_key=(*server.api_key, *(key.strip() for key in keys.split(","))))
    if model is not None:
        options = replace(options, model=model)
    with bind(server.host, server.port) as listener:  # before torch is imported, which takes seconds
        try:
            from treewise.server.journal import write_log
            from treewise.server.run import make_app, serve
        except ImportError as error:
            raise ValueError(f"serve: needs a web server; pip install 'treewise[server]' ({error})") from None

        def ready() -> None:
            print(f"Serving {options.model} at {address_of(listener)}", flush=True)

        if not replicas.are_wanted:
            app, worker = make_app(options.load(sparsity), server, telemetry)
            sys.exit(serve(app, worker, server, listener, ready))
        from treewise.replicas.cluster import connected

        with connected(replicas.ray_address, replicas.data_parallel_size * options.tensor_parallel_size):
            from treewise.replicas.fleet import Fleet
            from treewise.replicas.front import create_front

            if telemetry.log_json:
                write_log()
            fleet = Fleet(options.parameters(sparsity), replicas, server, telemetry)
            sys.exit(serve(create_front(fleet, server), fleet, server, listener, ready, fleet))
