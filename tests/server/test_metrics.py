"""What is counted of real requests, while somebody reads it, and what the dashboard asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Event, Thread
from time import perf_counter

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from tiny import tiny_llm

from treewise import BeamSearchParams, SamplingParams, generate
from treewise.search.beams import beams
from treewise.server.jobs import Job
from treewise.server.metrics import COUNTERS, GAUGES, HISTOGRAMS, LABELLED, PREFIX, ROWS, Metrics, Tally

ROOT = Path(__file__).parents[2]


def read(metrics):
    """Everything that is exported: value by name, or by name and own label."""
    values = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            own = tuple(value for name, value in sample.labels.items() if name != "model_name")
            assert sample.labels.get("model_name", "tiny") == "tiny" or not sample.name.startswith(PREFIX)
            values[sample.name.removeprefix(PREFIX), *own] = sample.value
    return values


class Play:
    """Requests on a real engine, told to an observer as a driver tells it."""

    def __init__(self, **options):
        self.llm = tiny_llm(**options)
        self.engine = self.llm.engine
        self.metrics = Metrics(self.engine, "tiny")
        self.jobs = {}

    def add(self, program, prompt, strategy="generate"):
        request = self.engine.add(program, prompt, 0)
        job = Job(f"cmpl-{request.id}", "completion", strategy, len(prompt), perf_counter())
        self.jobs[request] = job
        self.metrics.received(job)
        return request

    def step(self):
        start, before = perf_counter(), {request: request.rows for request in self.jobs}
        gained = {gain.tree: gain.num_tokens for gain in self.engine.step()}
        now = perf_counter()
        for request, job in list(self.jobs.items()):
            job.scheduled = start if job.scheduled is None and request.rows else job.scheduled
            if tokens := gained.get(request.tree):
                gap = None if job.last is None else now - job.last
                job.first, job.last, job.tokens = job.first or now, now, job.tokens + tokens
                self.metrics.gained(job, tokens, gap)
            if request.done:
                job.ended, job.usage = now, request.usage()
                job.outcome = "length" if request.error is None else "abort"
                self.metrics.ended(self.jobs.pop(request))
        self.metrics.stepped(self.engine, sum(r.rows - b for r, b in before.items()), now - start)

    def finish(self):
        while self.jobs:
            self.step()


def sampled(n, tokens):
    async def program(root):
        return await generate(root.fork(n), SamplingParams(max_tokens=tokens, ignore_eos=True))

    return program


def wide(width, tokens):
    async def program(root):
        return await beams(root, BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True))

    return program


def test_what_real_requests_did_is_told():
    play = Play()
    requests = [play.add(sampled(n, 6), list(range(1, 41))) for n in (1, 4)]
    for _ in range(3):
        play.step()
    told = read(play.metrics)
    assert told["num_requests_running",] == 2 and told["num_requests_waiting",] == 0
    requests.append(play.add(sampled(1, 6), [5] * 9))
    assert read(play.metrics)["num_requests_waiting",] == 1
    play.finish()
    usages = [request.usage() for request in requests]
    told = read(play.metrics)
    assert told["request_success_total", "length"] == 3 == told["strategy_requests_total", "completion", "generate"]
    assert told["prompt_tokens_total",] == 89 and told["generation_tokens_total",] == 6 * 6
    assert told["time_to_first_token_seconds_count",] == 3 == told["e2e_request_latency_seconds_count",]
    assert told["inter_token_latency_seconds_count",] == 3 * 5
    assert told["request_generation_tokens_bucket", "20.0"] == 2 and told["request_generation_tokens_sum",] == 36
    assert told["engine_steps_total",] == play.engine.num_steps == told["iteration_tokens_total_count",]
    assert told["iteration_tokens_total_sum",] == sum(usage.rows for usage in usages)
    assert told["kv_read_bytes_total",] == sum(usage.kv_bytes_read for usage in usages)
    assert told["kv_per_sequence_bytes_total",] == sum(usage.kv_bytes_per_sequence for usage in usages)
    # Who shares nothing reads the ends of its pages too.
    saved = [usage.kv_bytes_per_sequence - usage.kv_bytes_read for usage in usages]
    assert saved[0] > 0 > saved[2] and told["kv_saved_bytes_total",] == saved[0] + saved[1]
    statistics = play.llm.cache_statistics
    assert told["prefix_cache_queries_total",] == statistics.query_tokens == 89
    assert told["prefix_cache_hits_total",] == statistics.hit_tokens
    assert told["num_requests_running",] == told["kv_cache_usage_perc",] == told["live_branches",] == 0
    states = {state: told["kv_slots", state] for state in ("free", "held", "cached")}
    assert states["held"] == 0 < states["cached"] and sum(states.values()) == play.engine.kv.num_slots


def test_what_live_branches_hold_is_looked_at(monkeypatch):
    monkeypatch.setattr("treewise.server.metrics.LOOK_SECONDS", 0)
    monkeypatch.setattr("treewise.server.metrics.LOOK_SHARE", 0)
    play = Play()
    play.add(sampled(3, 8), [7] * 20)
    play.add(wide(12, 8), [9] * 20, "beam")
    for _ in range(5):
        play.step()
    told, usage = read(play.metrics), play.llm.kv_usage
    assert told["tree_width",] == 12 and told["live_branches",] == 15
    assert told["kv_slots", "held"] == usage.live_slots and told["kept_kv_ratio",] == usage.ratio
    assert told["kv_cache_usage_perc",] == usage.live_slots / play.engine.kv.num_slots == told["gpu_cache_usage_perc",]
    play.finish()
    assert read(play.metrics)["kept_kv_ratio",] == 1


def test_guesses_and_what_gives_way_are_told():
    play = Play(speculate="ngram", num_kv_slots=160)
    requests = [play.add(sampled(1, 60), [i + 1, i + 2, i + 3] * 10) for i in range(3)]
    play.finish()
    told, usages = read(play.metrics), [request.usage() for request in requests]
    assert told["num_preemptions_total",] == play.engine.scheduler.num_preemptions > 0
    assert told["spec_decode_num_drafts_total",] == sum(usage.drafts for usage in usages) > 0
    assert told["spec_decode_num_draft_tokens_total",] == sum(usage.drafted_tokens for usage in usages)
    assert told["spec_decode_num_accepted_tokens_total",] == sum(usage.accepted_tokens for usage in usages)


def test_what_never_came_to_a_token_is_told_too():
    play = Play()
    request = play.add(sampled(1, 6), [3] * 10)
    play.engine.abort(request)
    [job] = play.jobs.values()
    job.ended, job.outcome = perf_counter(), "abort"
    play.metrics.ended(job)
    play.metrics.refused("queue_full")
    told = read(play.metrics)
    assert told["request_success_total", "abort"] == told["requests_refused_total", "queue_full"] == 1
    assert told["prompt_tokens_total",] == told["time_to_first_token_seconds_count",] == 0
    assert told["e2e_request_latency_seconds_count",] == 1 and told["num_requests_waiting",] == 0


def test_anybody_reads_while_the_engine_steps():
    play, over, seen, errors = Play(), Event(), [], []

    def scrape():
        try:
            while not over.is_set():
                seen.append(read(play.metrics))
        except BaseException as error:
            errors.append(error)

    reader = Thread(target=scrape)
    reader.start()
    for number in range(30):
        play.add(sampled(number % 3 + 1, 8), [number + 1] * (number + 5), f"strategy {number}")
        play.metrics.refused(f"reason {number}")
        play.step()
    play.finish()
    over.set()
    reader.join()
    assert not errors and seen
    for before, after in zip(seen, [*seen[1:], read(play.metrics)], strict=True):
        for name, value in before.items():
            if name[0].endswith(("_total", "_count", "_bucket", "_sum")) and not name[0].startswith("process"):
                assert after[name] >= value, name


def test_a_tally_counts_as_numbers_fall():
    values = np.random.default_rng(0).integers(1, 5000, 400).astype(float).tolist()
    one, many = Tally(ROWS), Tally(ROWS)
    for value in values:
        one.add(value)
    many.add_all(values)
    assert one.buckets() == many.buckets() and one.total == many.total == sum(values)
    for bound, count in many.buckets():
        assert count == sum(value <= float(bound) for value in values)


def exported():
    return {sample[0] for sample in read(Play().metrics)} | {f"{name}_total" for name in LABELLED}


def test_the_dashboard_asks_for_what_there_is():
    dashboard = json.loads((ROOT / "docker" / "grafana" / "treewise.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    asked = {name for query in queries for name in re.findall(r"treewise:(\w+)", query)}
    assert len(queries) > 20 and asked and asked <= exported()
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(places)) == len(set(ids)) == len(places)


def test_the_documentation_has_every_metric():
    page = (ROOT / "docs" / "metrics.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)", page, re.MULTILINE))
    named = {*GAUGES, *HISTOGRAMS, *(f"{name}_total" for name in (*COUNTERS, *LABELLED)), "kv_slots"}
    assert listed == named | {"cache_config_info"}
