"""A span a request for OpenTelemetry, with its waiting, its prompt and its decoding below it."""

from __future__ import annotations

from time import perf_counter, time_ns
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from treewise import __version__
from treewise.engine import Engine
from treewise.server.jobs import Job, Observer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

PATH = "/v1/traces"
OPERATIONS = {"completion": "text_completion", "chat": "chat"}
"""What OpenTelemetry's conventions for generative AI call the kinds of jobs that they know."""


class Traces(Observer):
    """Sends a span for each job that has ended, as OTLP over HTTP.

    The span covers the job from its arrival to its end and belongs to the trace that the request's headers name, if
    they do. Its children ``queue``, ``prefill`` and ``decode`` cover what has happened of these. Attributes follow
    OpenTelemetry's semantic conventions for generative AI where there are such; those of the tree begin with
    ``treewise.``. Neither prompts nor answers are sent. Everything is sent from a thread of its own; where nobody
    listens, spans are dropped. The SDK's environment variables hold: ``OTEL_SERVICE_NAME``,
    ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_TRACES_SAMPLER`` and others.

    Parameters
    ----------
    endpoint : str
        The collector's URL; ``/v1/traces`` is its path if it has none.
    model_name : str
    exporter : SpanExporter, optional
        Takes the spans instead of the endpoint.

    Raises
    ------
    ValueError
        If the endpoint is no such URL, or OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, model_name: str, exporter: SpanExporter | None = None) -> None:
        url = traces_url(endpoint)
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError("traces_endpoint: needs OpenTelemetry; pip install 'treewise[traces]'") from error
        self._trace = trace
        own = Resource({"service.name": "treewise", "service.version": __version__})
        self._provider = TracerProvider(resource=Resource.create().merge(own).merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("treewise.server", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._epoch = time_ns() - round(perf_counter() * 1e9)  # when the clock of jobs showed 0

    def close(self) -> None:
        """Send what is left, and stop; waits for some seconds at most."""
        self._provider.shutdown()

    def received(self, job: Job) -> None:
        """See `Observer.received`."""

    def gained(self, job: Job, tokens: int, gap: float | None) -> None:
        """See `Observer.gained`."""

    def ended(self, job: Job) -> None:
        """See `Observer.ended`."""
        operation = OPERATIONS.get(job.kind, job.kind)
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            self._propagator.extract(job.trace),
            self._trace.SpanKind.SERVER,
            self._attributes(job, operation),
            start_time=self._time(job.arrived),
        )
        if job.outcome == "error":
            span.set_status(self._trace.StatusCode.ERROR)
        if span.is_recording():
            below = self._trace.set_span_in_context(span)
            parts = {"queue": (job.arrived, job.scheduled), "prefill": (job.scheduled, job.first)}
            for name, (start, end) in {**parts, "decode": (job.first, job.last)}.items():
                if start is not None and end is not None:
                    self._tracer.start_span(name, below, start_time=self._time(start)).end(self._time(end))
        span.end(None if job.ended is None else self._time(job.ended))

    def stepped(self, engine: Engine, rows: int, seconds: float) -> None:
        """See `Observer.stepped`."""

    def refused(self, reason: str) -> None:
        """See `Observer.refused`."""

    def _time(self, seconds: float) -> int:
        """Return a reading of the jobs' clock in nanoseconds of the epoch."""
        return self._epoch + round(seconds * 1e9)

    def _attributes(self, job: Job, operation: str) -> dict[str, str | int | float | list[str]]:
        attributes: dict[str, str | int | float | list[str]] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "treewise",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": job.id,
            "gen_ai.response.finish_reasons": [str(job.outcome)],
            "gen_ai.usage.input_tokens": job.prompt_tokens,
            "gen_ai.usage.output_tokens": job.tokens,
            "treewise.strategy": job.strategy,
        }
        if job.outcome == "error":
            attributes["error.type"] = "_OTHER"
        if job.first is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = job.first - job.arrived
        if (usage := job.usage) is not None:
            attributes |= {
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "treewise.steps": usage.steps,
                "treewise.rows": usage.rows,
                "treewise.kv.read_bytes": usage.kv_bytes_read,
                "treewise.kv.per_sequence_bytes": usage.kv_bytes_per_sequence,
            }
        return attributes


def traces_url(endpoint: str) -> str:
    """Return where spans go.

    Raises
    ------
    ValueError
        If it is no URL.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"traces_endpoint: {endpoint!r} is not a URL such as http://localhost:4318{PATH}")
    return urlunsplit(parts if parts.path.strip("/") else parts._replace(path=PATH))
