"""A line of JSON a request, through `logging`."""

from __future__ import annotations

import atexit
import json
import logging
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

from treewise.codec import Codec
from treewise.engine import Engine
from treewise.outputs import plain
from treewise.server.jobs import Job, Observer

LOGGER = logging.getLogger("treewise.requests")
FACTS = "facts"
"""The attribute of a log record that holds what `JSONLines` writes beside its message."""


class JSONLines(logging.Formatter):
    """Writes every record as one line of JSON: time, level, logger, message, and the record's facts if it has any.

    Examples
    --------
    >>> record = logging.makeLogRecord({"name": "treewise", "levelname": "INFO", "msg": "ready", "created": 0.0})
    >>> print(JSONLines().format(record))
    {"time": "1970-01-01T00:00:00.000+00:00", "level": "INFO", "logger": "treewise", "message": "ready"}
    """

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line |= getattr(record, FACTS, {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Journal(Observer):
    """Logs what became of every request, and of those that were turned away; not what was asked or answered.

    The logger is ``treewise.requests``; what failed is a warning, the rest information.

    Parameters
    ----------
    codec : Codec, optional
        Spells the prompts, which are logged too then.
    """

    def __init__(self, codec: Codec | None = None) -> None:
        self.codec = codec

    def received(self, job: Job) -> None:
        """See `Observer.received`."""

    def gained(self, job: Job, tokens: int, gap: float | None) -> None:
        """See `Observer.gained`."""

    def ended(self, job: Job) -> None:
        """See `Observer.ended`."""
        level = logging.WARNING if job.outcome == "error" else logging.INFO
        if LOGGER.isEnabledFor(level):
            facts = {"id": job.id, "kind": job.kind, "strategy": job.strategy, "outcome": job.outcome, **_costs(job)}
            if self.codec is not None:
                facts["prompts"] = [plain(tokens, self.codec) for tokens in job.prompts]
            LOGGER.log(level, "request ended", extra={FACTS: facts})

    def stepped(self, engine: Engine, rows: int, seconds: float) -> None:
        """See `Observer.stepped`."""

    def refused(self, reason: str) -> None:
        """See `Observer.refused`."""
        LOGGER.info("request refused", extra={FACTS: {"reason": reason}})


def write_log() -> None:
    """Write what is logged to standard error, as lines of JSON, from a thread of its own: nobody waits for a reader."""
    waiting = QueueHandler(SimpleQueue())
    waiting.setFormatter(JSONLines())
    logging.basicConfig(level=logging.WARNING, handlers=[waiting])
    logging.getLogger("treewise").setLevel(logging.INFO)
    listener = QueueListener(waiting.queue, logging.StreamHandler())
    listener.start()
    atexit.register(listener.stop)


def _costs(job: Job) -> dict[str, Any]:
    """Return tokens, and times in seconds, None for what has not happened."""
    costs: dict[str, Any] = {"prompt_tokens": job.prompt_tokens, "completion_tokens": job.tokens}
    if (usage := job.usage) is not None:
        costs |= {"cached_tokens": usage.cached_tokens, "steps": usage.steps, "rows": usage.rows}
        costs["kv_saved_bytes"] = max(0, usage.kv_bytes_per_sequence - usage.kv_bytes_read)
    times = {
        "queue_s": (job.arrived, job.scheduled),
        "ttft_s": (job.arrived, job.first),
        "decode_s": (job.first, job.last),
        "e2e_s": (job.arrived, job.ended),
    }
    for name, (start, end) in times.items():
        costs[name] = None if start is None or end is None else round(end - start, 6)
    if "traceparent" in job.trace:
        costs["traceparent"] = job.trace["traceparent"]
    return costs
