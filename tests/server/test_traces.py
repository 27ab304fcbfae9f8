"""What collectors of traces and readers of logs get."""

from __future__ import annotations

import gzip
import json
import logging
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from time import perf_counter, time

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serving import process
from tiny import Bytes

from treewise.results import Usage
from treewise.server.jobs import Job
from treewise.server.journal import LOGGER, Journal, JSONLines
from treewise.server.metrics import CONTENT_TYPE
from treewise.server.settings import Telemetry
from treewise.server.traces import Traces, traces_url

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def job(**changes):
    now = perf_counter()
    facts = {
        "scheduled": now - 0.9,
        "first": now - 0.7,
        "last": now - 0.1,
        "ended": now,
        "outcome": "stop",
        "tokens": 13,
        "usage": Usage(7, 13, 4, 19, kv_bytes_read=100, kv_bytes_per_sequence=250, cached_tokens=5),
        "trace": {"traceparent": f"00-{TRACE}-{PARENT}-01"},
    }
    return Job("chatcmpl-1", "chat", "best-of-n", 7, now - 1, **(facts | changes))


@pytest.fixture
def spans():
    def of(*jobs):
        exporter = InMemorySpanExporter()
        traces = Traces("http://localhost:4318", "tiny", exporter)
        for each in jobs:
            traces.ended(each)
        traces.close()
        return exporter.get_finished_spans()

    return of


def test_a_tree_is_a_span_in_the_clients_trace(spans):
    *parts, whole = spans(job())
    assert whole.name == "chat tiny" and whole.kind.name == "SERVER" and whole.status.is_ok
    assert f"{whole.context.trace_id:032x}" == TRACE and f"{whole.parent.span_id:016x}" == PARENT
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    lengths = [round((part.end_time - part.start_time) * 1e-9, 3) for part in (*parts, whole)]
    assert lengths == [0.1, 0.2, 0.6, 1.0] and abs(whole.end_time * 1e-9 - time()) < 10
    assert dict(whole.attributes) | {"gen_ai.response.time_to_first_chunk": 0.3} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "treewise",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 0.3,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 13,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "treewise.strategy": "best-of-n",
        "treewise.steps": 4,
        "treewise.rows": 19,
        "treewise.kv.read_bytes": 100,
        "treewise.kv.per_sequence_bytes": 250,
    }
    assert whole.resource.attributes["service.name"] == "treewise"


def test_a_job_that_failed_before_its_first_row(spans):
    [whole] = spans(job(scheduled=None, first=None, last=None, tokens=0, usage=None, outcome="error", trace={}))
    assert whole.parent is None and not whole.status.is_ok and whole.attributes["error.type"] == "_OTHER"


def test_what_the_client_does_not_sample_is_not_sent(spans):
    assert spans(job(trace={"traceparent": f"00-{TRACE}-{PARENT}-00"})) == ()


def test_headers_that_are_no_trace_begin_one(spans):
    *_, whole = spans(job(trace={"traceparent": "nonsense", "tracestate": "\0"}))
    assert whole.parent is None


def test_names_of_the_service_are_the_environments(spans, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "trees")
    *_, whole = spans(job())
    assert whole.resource.attributes["service.name"] == "trees"


@pytest.fixture
def collector():
    """The URL of a collector, and what it has got."""
    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent = ExportTraceServiceRequest.FromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
            spans = [span for part in sent.resource_spans for scope in part.scope_spans for span in scope.spans]
            got.append((self.path, spans))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()
        thread.join()


def test_a_collector_gets_them_over_http(collector):
    url, got = collector
    traces = Traces(url, "tiny")
    traces.ended(job())
    traces.close()
    [(path, sent)] = got
    assert path == "/v1/traces" and [span.name for span in sent] == ["queue", "prefill", "decode", "chat tiny"]


def test_a_server_process_tells_all_of_it(collector, tiny_folder):
    endpoint, got = collector
    flags = ["--device", "cpu", "--num-kv-slots", "4096", "--log-json", "--traces-endpoint", endpoint]
    with process(str(tiny_folder), *flags, "--served-model-name", "small") as (server, url):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"prompt": "hush", "max_tokens": 5, "n": 2, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).json()
        assert httpx.post(f"{url}/v1/completions", json={"prompt": 3}).status_code == 400
        told = httpx.get(f"{url}/metrics")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        lines = [json.loads(line) for line in server.stderr]
    assert told.headers["content-type"] == CONTENT_TYPE
    assert 'treewise:generation_tokens_total{model_name="small"} 10.0' in told.text
    assert 'treewise:requests_refused_total{model_name="small",reason="bad_request"} 1.0' in told.text
    ended, refused = (line for line in lines if line["logger"] == "treewise.requests")
    assert ended["id"] == answer["id"] and ended["completion_tokens"] == 10 and ended["outcome"] == "length"
    assert refused["reason"] == "bad_request" and "hush" not in json.dumps(lines)
    [whole] = [span for _, sent in got for span in sent if span.name == "text_completion small"]
    assert whole.trace_id.hex() == TRACE and whole.parent_span_id.hex() == PARENT


def test_nothing_is_made_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"traces_endpoint: needs OpenTelemetry; pip install 'treewise\[traces\]'"):
        Traces("http://localhost:4318", "tiny")


def test_endpoints():
    assert traces_url("http://host:4318") == traces_url("http://host:4318/") == "http://host:4318/v1/traces"
    assert traces_url("https://host/otlp/v1/traces") == "https://host/otlp/v1/traces"
    for wrong in ("localhost:4318", "", "grpc://host", "http://"):
        with pytest.raises(ValueError, match=r"traces_endpoint: .* is not a URL"):
            traces_url(wrong)


# ---------------------------------------------------------------------- logs


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, LOGGER.name)
    return lambda: [json.loads(JSONLines().format(record)) for record in caplog.records]


def test_a_request_is_a_line_of_json(lines):
    Journal().ended(job())
    [line] = lines()
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "INFO",
        "logger": "treewise.requests",
        "message": "request ended",
        "id": "chatcmpl-1",
        "kind": "chat",
        "strategy": "best-of-n",
        "outcome": "stop",
        "prompt_tokens": 7,
        "completion_tokens": 13,
        "cached_tokens": 5,
        "steps": 4,
        "rows": 19,
        "kv_saved_bytes": 150,
        "queue_s": 0.1,
        "ttft_s": 0.3,
        "decode_s": 0.6,
        "e2e_s": 1.0,
        "traceparent": f"00-{TRACE}-{PARENT}-01",
    }


def test_prompts_are_logged_if_asked_for(lines):
    asked = job(prompts=[[72, 105], [33]])
    Journal().ended(asked)
    Journal(Bytes()).ended(asked)
    without, with_prompts = lines()
    assert "prompts" not in without and with_prompts["prompts"] == ["Hi", "!"]
    with pytest.raises(ValueError, match="log_prompts: there are no lines to have them in; give log_json too"):
        Telemetry(log_prompts=True)


def test_failures_are_warnings_and_refusals_have_reasons(lines):
    journal = Journal()
    journal.ended(job(outcome="error", first=None, last=None, usage=None))
    journal.refused("queue_full")
    failed, refused = lines()
    assert failed["level"] == "WARNING" and failed["ttft_s"] is None and "steps" not in failed
    assert refused["message"] == "request refused" and refused["reason"] == "queue_full"


def test_other_records_are_lines_of_json_too(lines):
    try:
        raise RuntimeError("a\nb")
    except RuntimeError:
        LOGGER.exception("it %s\n", "broke")
    [line] = lines()
    assert line["message"] == "it broke\n" and "RuntimeError: a\nb" in line["error"]
