"""The verb `serve`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from treewise.cli.options import ModelOptions
from treewise.config import SparsityOptions
from treewise.server.settings import ServerOptions, Telemetry
from treewise.server.sockets import bind

KEYS = "TREEWISE_API_KEY"


def serve(
    model: str | None = None,
    /,
    *,
    server: Annotated[ServerOptions | None, Parameter("*", group="Server")] = None,
    options: Annotated[ModelOptions | None, Parameter("*", group="Model and engine")] = None,
    sparsity: Annotated[SparsityOptions | None, Parameter("*", group="KV sparsity")] = None,
    telemetry: Annotated[Telemetry | None, Parameter("*", group="Logs and traces")] = None,
) -> None:
    """Serve a model over OpenAI's API, until SIGTERM or Ctrl-C: running requests finish then.

    Parameters
    ----------
    model
        A folder in Transformers' layout, a GGUF file, a hub id, or a built-in name; another way to give --model.
    """
    server, options, telemetry = server or ServerOptions(), options or ModelOptions(), telemetry or Telemetry()
    if keys := os.environ.get(KEYS):
        server = replace(server, api_key=(*server.api_key, *(key.strip() for key in keys.split(","))))
    if model is not None:
        options = replace(options, model=model)
    with bind(server.host, server.port) as listener:  # before torch is imported, which takes seconds
        try:
            from treewise.server.app import create_app
            from treewise.server.driver import Driver
            from treewise.server.jobs import Observer
            from treewise.server.journal import Journal, write_log
            from treewise.server.metrics import Metrics
            from treewise.server.run import serve
            from treewise.server.traces import Traces
        except ImportError as error:
            raise ValueError(f"serve: needs a web server; pip install 'treewise[server]' ({error})") from None

        llm = options.load(sparsity)
        name = server.served_model_name or Path(llm.model_name).name
        metrics = Metrics(llm.engine, name)
        observers: list[Observer] = [metrics]
        if telemetry.log_json:
            write_log()
            observers.append(Journal(llm.tokenizer if telemetry.log_prompts else None))
        if telemetry.traces_endpoint is not None:
            observers.append(Traces(telemetry.traces_endpoint, name))
        driver = Driver(llm, server.max_running, server.max_waiting, server.time_limit, observers)
        app = create_app(driver, server, metrics.text)
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

        def ready() -> None:
            print(f"Serving {options.model} at {address}", flush=True)

        sys.exit(serve(app, driver, server, listener, ready))
