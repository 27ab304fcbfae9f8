"""What a server does, in numbers that Prometheus reads, under the names that vLLM's dashboards know."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from threading import Lock
from time import perf_counter
from typing import NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from treewise.engine import Engine
from treewise.server.jobs import Job, Observer

PREFIX = "treewise:"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

LOOK_SECONDS = 1.0
"""Seconds between two looks at what branches hold, which walk all nodes."""
LOOK_SHARE = 100
"""They take at most one part in so many of the time."""

_FINE = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
TICKS = tuple(round(tick * 10.0**power, 9) for power in range(-3, 3) for tick in _FINE)
"""Bounds of the buckets of seconds, from a millisecond to some minutes."""
COUNTS = tuple(float(tick * 10**power) for power in range(6) for tick in (1, 2, 5))
"""Bounds of the buckets of tokens."""
ROWS = tuple(float(2**power) for power in range(15))
"""Bounds of the buckets of rows."""

GAUGES = {
    "num_requests_running": "Requests of which some row has been computed.",
    "num_requests_waiting": "Requests that wait for their first row.",
    "kv_cache_usage_perc": "Share of the KV slots that live branches need, from 0 to 1.",
    "gpu_cache_usage_perc": "The same as kv_cache_usage_perc, under its older name.",
    "kept_kv_ratio": "Bytes of keys and values that live branches hold over what they would hold dense.",
    "live_branches": "Leaves that decode, over all trees.",
    "tree_width": "Leaves that decode in the widest tree.",
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts of requests that were begun.",
    "prompt_tokens_cached": "Prompt tokens whose keys were there already, of requests that have ended.",
    "generation_tokens": "Tokens decoded, over all branches.",
    "num_preemptions": "Times that branches gave up their slots for others.",
    "prefix_cache_queries": "Prompt tokens that the prefix cache was asked for.",
    "prefix_cache_hits": "Prompt tokens that it had.",
    "prefix_cache_evictions": "Tokens of it that gave way to others.",
    "spec_decode_num_drafts": "Token trees that were guessed, of requests that have ended.",
    "spec_decode_num_draft_tokens": "Guesses in them.",
    "spec_decode_num_accepted_tokens": "Guesses that were right.",
    "kv_read_bytes": "Bytes of keys and values that attention read, of requests that have ended.",
    "kv_per_sequence_bytes": "Bytes that it would have read for every branch on its own.",
    "kv_saved_bytes": "Bytes that it did not read, because branches share them.",
    "engine_steps": "Steps of the engine that computed rows.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request to its first token.", TICKS),
    "inter_token_latency_seconds": ("Between two steps that gave a request tokens.", TICKS),
    "time_per_output_token_seconds": ("The same as inter_token_latency_seconds, under its older name.", TICKS),
    "request_time_per_output_token_seconds": (
        "Decode time over tokens but the first, of all branches together.",
        TICKS,
    ),
    "e2e_request_latency_seconds": ("From a request to its end.", TICKS),
    "request_queue_time_seconds": ("From a request to its first row.", TICKS),
    "request_prefill_time_seconds": ("From its first row to its first token.", TICKS),
    "request_decode_time_seconds": ("From its first token to its last.", TICKS),
    "request_inference_time_seconds": ("From its first row to its last token.", TICKS),
    "request_prompt_tokens": ("Tokens of a prompt.", COUNTS),
    "request_generation_tokens": ("Tokens decoded for a request, over all branches.", COUNTS),
    "iteration_tokens_total": ("Rows of a step: tokens of prompts, decoded tokens and guesses.", ROWS),
    "engine_step_seconds": ("A step of the engine.", TICKS),
}
LABELLED = {
    "request_success": ("Requests that have ended, by how.", ("finished_reason",)),
    "strategy_requests": ("Requests that have ended, by what was asked.", ("kind", "strategy")),
    "requests_refused": ("Requests that were turned away, by why.", ("reason",)),
}
SLOTS = "kv_slots"
CACHE = "cache_config"


class Tally:
    """Counts values by bucket.

    One thread adds to it, any may read it. A step adds hundreds of values at a time, which has to take microseconds.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_all(self, values: Sequence[float]) -> None:
        """Count many values."""
        self.counts += np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.total += sum(values)

    def buckets(self) -> list[tuple[str, float]]:
        """Return the bound of each bucket, and how many values are no larger."""
        below = np.cumsum(self.counts).tolist()
        return list(zip([*map(str, self.bounds), "+Inf"], below, strict=True))


class Look(NamedTuple):
    """What live branches held when somebody looked; as it is, when there are none."""

    slots: int = 0
    ratio: float = 1.0
    branches: int = 0
    widest: int = 0


class Metrics(Observer, Collector):
    """Counts what becomes of jobs and what the engine does, for ``GET /metrics``.

    What happens is counted in the engine's thread; what merely is, is read when somebody asks. What branches hold is
    looked at once a second at most, as only the engine's thread may walk over nodes.

    Parameters
    ----------
    engine : Engine
    model_name : str
        The label ``model_name`` of everything.
    registry : CollectorRegistry, optional
        Where to register; one of its own, with facts of the process, by default.
    """

    def __init__(self, engine: Engine, model_name: str, registry: CollectorRegistry | None = None) -> None:
        self.engine = engine
        self.model_name = model_name
        self.registry = CollectorRegistry() if registry is None else registry
        self._jobs: dict[Job, None] = {}
        self._look, self._due = Look(), 0.0
        self._totals = dict.fromkeys(COUNTERS, 0)
        self._tallies = {name: Tally(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._tallies["time_per_output_token_seconds"] = self._tallies["inter_token_latency_seconds"]
        self._labelled: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in LABELLED}
        self._gaps: list[float] = []
        self._refusing = Lock()
        self.registry.register(self)
        if registry is None:
            ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        """Return everything in Prometheus's format, of `CONTENT_TYPE`; any thread may ask."""
        return generate_latest(self.registry)

    # ------------------------------------------------------------------ what the driver tells

    def received(self, job: Job) -> None:
        """See `Observer.received`."""
        self._jobs[job] = None

    def gained(self, job: Job, tokens: int, gap: float | None) -> None:
        """See `Observer.gained`."""
        self._totals["generation_tokens"] += tokens
        if gap is None:
            self._begun(job)
            self._between("time_to_first_token_seconds", job.arrived, job.first)
        else:
            self._gaps.append(gap)

    def ended(self, job: Job) -> None:
        """See `Observer.ended`."""
        self._jobs.pop(job, None)
        if job.first is None and job.scheduled is not None:
            self._begun(job)
        self._labelled["request_success"][str(job.outcome),] += 1
        self._labelled["strategy_requests"][job.kind, job.strategy] += 1
        self._between("e2e_request_latency_seconds", job.arrived, job.ended)
        self._between("request_queue_time_seconds", job.arrived, job.scheduled)
        self._between("request_prefill_time_seconds", job.scheduled, job.first)
        self._between("request_decode_time_seconds", job.first, job.last)
        self._between("request_inference_time_seconds", job.scheduled, job.last)
        if job.first is not None and job.last is not None and job.tokens > 1:
            pace = (job.last - job.first) / (job.tokens - 1)
            self._tallies["request_time_per_output_token_seconds"].add(pace)
        self._tallies["request_prompt_tokens"].add(job.prompt_tokens)
        self._tallies["request_generation_tokens"].add(job.tokens)
        if (usage := job.usage) is not None:
            self._totals["prompt_tokens_cached"] += usage.cached_tokens
            self._totals["spec_decode_num_drafts"] += usage.drafts
            self._totals["spec_decode_num_draft_tokens"] += usage.drafted_tokens
            self._totals["spec_decode_num_accepted_tokens"] += usage.accepted_tokens
            self._totals["kv_read_bytes"] += usage.kv_bytes_read
            self._totals["kv_per_sequence_bytes"] += usage.kv_bytes_per_sequence
            self._totals["kv_saved_bytes"] += max(0, usage.kv_bytes_per_sequence - usage.kv_bytes_read)

    def stepped(self, engine: Engine, rows: int, seconds: float) -> None:
        """See `Observer.stepped`."""
        if rows:
            self._tallies["iteration_tokens_total"].add(rows)
            self._tallies["engine_step_seconds"].add(seconds)
        if self._gaps:
            self._tallies["inter_token_latency_seconds"].add_all(self._gaps)
            self._gaps.clear()
        if (now := perf_counter()) >= self._due:
            self._look = self._see()
            end = perf_counter()
            self._due = end + max(LOOK_SECONDS, LOOK_SHARE * (end - now))

    def refused(self, reason: str) -> None:
        """See `Observer.refused`."""
        with self._refusing:
            self._labelled["requests_refused"][reason,] += 1

    def _begun(self, job: Job) -> None:
        self._totals["prompt_tokens"] += job.prompt_tokens

    def _between(self, name: str, start: float | None, end: float | None) -> None:
        """Count a time, if it has passed."""
        if start is not None and end is not None:
            self._tallies[name].add(end - start)

    def _see(self) -> Look:
        engine = self.engine
        usage = engine.kv.usage(engine.runner.kv_bytes_per_token, engine.thinner.num_bytes)
        widths: Counter[object] = Counter()
        for run in engine.runs:
            widths[run.task.tree] += run.width
        return Look(usage.live_slots, usage.ratio, widths.total(), max(widths.values(), default=0))

    # ------------------------------------------------------------------ what Prometheus reads

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is; any thread may ask."""
        kv, pool = self.engine.kv, self.engine.kv.pool
        names, labels = ["model_name"], [self.model_name]
        look, gauges = self._gauges()
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=names)
            gauge.add_metric(labels, gauges[name])
            yield gauge
        free = pool.num_free
        slots = GaugeMetricFamily(PREFIX + SLOTS, "KV slots, by what has them.", labels=[*names, "state"])
        held = min(look.slots, kv.num_slots - free)
        for state, number in {"free": free, "held": held, "cached": kv.num_slots - free - held}.items():
            slots.add_metric([*labels, state], number)
        yield slots
        totals = self._counters()
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=names)
            counter.add_metric(labels, totals[name])
            yield counter
        for name, (text, own) in LABELLED.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=[*names, *own])
            for values, number in list(self._labelled[name].items()):
                counter.add_metric([*labels, *values], number)
            yield counter
        for name, (text, _) in HISTOGRAMS.items():
            tally = self._tallies[name]
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=names)
            histogram.add_metric(labels, tally.buckets(), tally.total)
            yield histogram
        config = {
            "block_size": pool.page_size,
            "num_gpu_blocks": kv.num_slots // pool.page_size,
            "enable_prefix_caching": kv.enable_prefix_caching,
            "cache_dtype": str(self.engine.runner.kv_dtype).removeprefix("torch."),
        }
        info = InfoMetricFamily(PREFIX + CACHE, "How the KV cache is set up.", labels=names)
        info.add_metric(labels, {name: str(value) for name, value in config.items()})
        yield info

    def _gauges(self) -> tuple[Look, dict[str, float]]:
        jobs = list(self._jobs)  # at once, whatever the engine's thread does
        look = self._look if jobs else Look()
        waiting = sum(job.scheduled is None for job in jobs)
        usage = look.slots / self.engine.kv.num_slots
        return look, {
            "num_requests_running": len(jobs) - waiting,
            "num_requests_waiting": waiting,
            "kv_cache_usage_perc": usage,
            "gpu_cache_usage_perc": usage,
            "kept_kv_ratio": look.ratio,
            "live_branches": look.branches,
            "tree_width": look.widest,
        }

    def _counters(self) -> dict[str, int]:
        engine, cache = self.engine, self.engine.kv.statistics
        return self._totals | {
            "num_preemptions": engine.scheduler.num_preemptions,
            "prefix_cache_queries": cache.query_tokens,
            "prefix_cache_hits": cache.hit_tokens,
            "prefix_cache_evictions": cache.evicted_tokens,
            "engine_steps": engine.num_steps,
        }
