"""Many requests at a time: what is asked of engines, and what it took them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Annotated, Any, Literal

import numpy as np
from cyclopts import Parameter

from treewise.awaitables import generate
from treewise.bench.compare import measure, notes
from treewise.bench.engines import OTHERS, OtherEngine, Room, check_installed
from treewise.bench.measure import describe_machine, peak_memory, report
from treewise.bench.runs import WARM, Facts, Run, random_prompt
from treewise.bench.steps import percentiles
from treewise.bench.subject import Loaded, Subject
from treewise.branch import Branch
from treewise.config import SamplingParams, check_integer
from treewise.engine import Request
from treewise.llm import LLM
from treewise.results import json_safe

LOOK = 13
"""Steps between two looks at what keys and values take, which cost a little; a prime, so that requests of round lengths
are not always seen at the same place."""


@dataclass(frozen=True)
class Demand:
    """Requests of equal lengths, a flag each.

    Parameters
    ----------
    input_tokens : int
        Tokens of each prompt.
    output_tokens : int
        Tokens decoded for each.
    concurrency : str
        Requests at a time, several numbers with commas between: where one ends, the next begins. 1,5,10,20,40 if left
        out; 1,2 on a CPU.
    rate : str
        Requests that come a second, however many are under way, several numbers with commas between; instead of so
        many at a time. They come by chance, as a Poisson process.
    num_prompts : int
        Requests in all; if left out 4 times the concurrency, once on a CPU, or 40 of those that come by chance.
    kv_tokens : int
        Tokens whose keys and values the pool holds; enough for all that may run at a time and one more if left out.
    repeats : int
        Timed runs of each, turn by turn; the median run is reported.
    against : str
        Run another engine too: transformers or vllm. It gets as many requests at a time as one batch after the other.
    """

    input_tokens: int = 4000
    output_tokens: int = 500
    concurrency: str | None = None
    rate: str | None = None
    num_prompts: int | None = None
    kv_tokens: Annotated[int | None, Parameter(("--kv-tokens", "--pool-tokens"))] = None
    repeats: int = 1
    against: Literal["transformers", "vllm", "nothing"] = "nothing"

    @property
    def length(self) -> int:
        """Tokens of a request when it ends."""
        return self.input_tokens + self.output_tokens

    def check(self, subject: Subject | None = None) -> None:
        """Refuse what cannot be asked of a model; None for one that is somewhere else.

        Raises
        ------
        ValueError
            It names the field.
        """
        check_integer("input_tokens", self.input_tokens, 1)
        check_integer("output_tokens", self.output_tokens, 2)
        check_integer("repeats", self.repeats, 1)
        if subject is not None and self.length > (limit := subject.config().max_positions):
            raise ValueError(
                f"output_tokens: paths of {self.length} tokens are longer than the model's context, {limit}"
            )
        if self.num_prompts is not None:
            check_integer("num_prompts", self.num_prompts, 1)
        if self.kv_tokens is not None:
            check_integer("kv_tokens", self.kv_tokens, self.length)
        self.levels(subject)
        if self.against in OTHERS:
            if self.rate is not None:
                raise ValueError(f"rate: {self.against} gets one batch after the other, whose requests come together")
            check_installed(self.against)

    def levels(self, subject: Subject | None = None) -> list[tuple[str, int, float | None]]:
        """Return name, requests and rate of each load; requests that come at a rate may all be under way."""
        if self.rate is not None:
            count = 40 if self.num_prompts is None else self.num_prompts
            return [(f"{word} a second", count, _read_rate(word)) for word in self.rate.split(",")]
        on_cpu = subject is not None and subject.place.type == "cpu"
        words = self.concurrency or ("1,2" if on_cpu else "1,5,10,20,40")
        return [(f"{count} at once", count, None) for count in map(_read_count, words.split(","))]

    def loads(self, subject: Subject, vocab_size: int, shared: int = 0) -> list[Load]:
        """Make the loads; all prompts begin with `shared` tokens, and no two are alike behind them."""
        made, rounds = [], 1 if subject.place.type == "cpu" else 4
        for name, most, rate in self.levels(subject):
            count = self.num_prompts or (rounds * most if rate is None else most)
            prompts = self.prompts(count, vocab_size, shared, first=1000)
            made.append(Load(name, most, prompts, self.output_tokens, rate))
        return made

    def prompts(self, count: int, vocab_size: int, shared: int, first: int) -> list[list[int]]:
        """Draw prompts, of which others have other numbers from `first` on."""
        common, own = random_prompt(shared, vocab_size, 0), self.input_tokens - shared
        return [common + random_prompt(own, vocab_size, first + i + 1) for i in range(count)]

    def num_slots(self, subject: Subject) -> int:
        """Return how many slots the pool has, one page of which is scratch."""
        page_size = subject.page_size
        most = max(count for _, count, _ in self.levels(subject))
        tokens = (most + 1) * _whole_pages(self.length, page_size) if self.kv_tokens is None else self.kv_tokens
        return _whole_pages(tokens, page_size) + page_size


@dataclass(frozen=True)
class Load:
    """Prompts, how many of them are worked on at a time, and perhaps how many come a second.

    An engine takes prompts of token ids, a server text and messages too.
    """

    name: str
    concurrency: int
    prompts: Sequence[Any]
    new_tokens: int
    rate: float | None = None

    def arrivals(self, seed: int) -> list[float]:
        """Return when each request comes, in seconds from the start; without a rate all are there at once."""
        if self.rate is None:
            return [0.0] * len(self.prompts)
        drawn = np.random.default_rng(seed).exponential(1 / self.rate, len(self.prompts))
        times: list[float] = np.cumsum(drawn).tolist()
        return times


@dataclass
class Client:
    """Waits for one request; times are readings of `perf_counter`."""

    request: Request
    asked: float
    first: float | None = None
    last: float | None = None

    @property
    def decoded(self) -> int:
        """Tokens so far."""
        tree = self.request.tree
        return len(tree.root.tokens) - len(tree.prompt_tokens)


def compare_engines(
    demand: Demand, subject: Subject, loaded: Loaded, options: Mapping[str, Mapping[str, Any]], shared: int = 0
) -> list[Facts]:
    """Run every load on our engine with each of the `options` of `Subject.engine`, and on the other one asked for.

    Returns
    -------
    list of dict
        See `measure`.
    """
    loads = demand.loads(subject, loaded[1].vocab_size, shared)
    widest = max(load.concurrency for load in loads)
    slots = demand.num_slots(subject)
    runs: dict[str, Run] = {
        name: partial(run_load, subject.engine(loaded, widest=widest, num_kv_slots=slots, **own))
        for name, own in options.items()
    }
    if demand.against in OTHERS:
        room = Room(widest, demand.length, demand.kv_tokens)
        runs[demand.against] = partial(run_batches, OTHERS[demand.against](subject, loaded[0].dtype, room))
    prompts = demand.prompts(widest, loaded[1].vocab_size, shared, first=0)
    for run in runs.values():
        run(Load("warm", widest, prompts, min(WARM[subject.place.type], demand.output_tokens)), 0)
    return measure(loads, runs, demand.repeats)


def run_load(llm: LLM, load: Load, seed: int) -> Facts:
    """Run a load on our engine.

    Returns
    -------
    dict
        What it took, and of memory ``peak_slots``, the most slots in use, and ``kv_ratio``, what live requests held
        over what they would have held dense, in the mean over the run.
    """
    engine = llm.engine
    engine.kv.clear_cache()
    engine.kv.peak_slots = 0
    preempted = engine.scheduler.num_preemptions
    params = SamplingParams(temperature=1.0, max_tokens=load.new_tokens, ignore_eos=True)

    async def program(root: Branch) -> list[Branch]:
        return await generate([root], params)

    clients: list[Client] = []
    running: list[Client] = []
    arrivals = load.arrivals(seed)
    held = dense = steps = 0
    start = now = perf_counter()
    try:
        while running or len(clients) < len(load.prompts):
            for i in range(len(clients), len(load.prompts)):
                if len(running) >= load.concurrency or start + arrivals[i] > now:
                    break
                request = engine.add(program, load.prompts[i], seed + i, sparsity=llm.kv_sparsity)
                running.append(Client(request, now if load.rate is None else start + arrivals[i]))
                clients.append(running[-1])
            if not running:
                sleep(max(0.0, start + arrivals[len(clients)] - perf_counter()))
                now = perf_counter()
                continue
            engine.step()
            now = perf_counter()
            for client in running:
                if client.request.error is not None:
                    raise client.request.error
                if client.first is None and client.decoded:
                    client.first = now
                if client.decoded == load.new_tokens:
                    client.last = now
            if steps % LOOK == 0:
                usage = llm.kv_usage
                held, dense = held + usage.live_bytes, dense + usage.dense_bytes
            steps += 1
            running = [client for client in running if client.last is None]
    finally:
        for client in running:  # none are left unless one has failed
            engine.abort(client.request)
    seconds = now - start
    engine.step()  # the programs of the last requests return
    waits = [client.first - client.asked for client in clients if client.first is not None]
    paces = [(client.last - client.first) / (load.new_tokens - 1) for client in clients if client.first and client.last]
    cached = sum(client.request.tree.cached_tokens for client in clients)
    return {
        **rates(len(load.prompts), len(load.prompts) * load.new_tokens, seconds),
        "ttft_s": percentiles(waits),
        "tpot_ms": percentiles([pace * 1e3 for pace in paces]),
        "prefix_hits": cached / sum(map(len, load.prompts)) if engine.kv.enable_prefix_caching else None,
        "preemptions": engine.scheduler.num_preemptions - preempted,
        "peak_slots": engine.kv.peak_slots,
        "kv_ratio": held / dense if dense else None,
    }


def run_batches(engine: OtherEngine, load: Load, seed: int) -> Facts:
    """Run a load on another engine, one batch after the other."""
    start = perf_counter()
    decoded = 0
    for first in range(0, len(load.prompts), load.concurrency):
        batch = load.prompts[first : first + load.concurrency]
        decoded += engine.generate(batch, 1, load.new_tokens, seed + first)
    seconds = perf_counter() - start
    if decoded != len(load.prompts) * load.new_tokens:
        raise RuntimeError(f"{decoded} tokens were decoded, not {len(load.prompts) * load.new_tokens}")
    return rates(len(load.prompts), decoded, seconds)


def about(subject: Subject, loaded: Loaded) -> Facts:
    """Tell what the engines were that results are of."""
    return {
        **asdict(subject),
        "dtype": str(loaded[0].dtype).removeprefix("torch."),
        "machine": describe_machine(subject.place),
        "peak_memory_gb": peak_memory(subject.place) / 1e9,
    }


def publish(demand: Demand, facts: Facts, title: str, json_file: Path | None) -> Facts:
    """Print the table and the line of JSON of what was measured, and return the latter.

    Parameters
    ----------
    demand : Demand
    facts : dict
        What else the result says; its ``results`` are the rows.
    title : str
        Whom they are of.
    json_file : Path or None
        Write the result here too.
    """
    result: Facts = {**facts, **asdict(demand)}
    if json_file is not None:
        json_file.write_text(json.dumps(json_safe(result), indent=1) + "\n", encoding="utf-8")
    rows = result["results"]
    print(*notes(rows), sep="\n", file=sys.stderr)
    lines = [_line(row) for row in rows]
    shown = [{name: line[name] for name in line if any(each[name] is not None for each in lines)} for line in lines]
    report(f"{demand.input_tokens} tokens in, {demand.output_tokens} out, {title}", shown, result)
    return result


def rates(requests: int, tokens: int, seconds: float) -> Facts:
    """Return what so many requests, and so many decoded tokens of them, are a second."""
    return {
        "requests": requests,
        "whole_s": seconds,
        "tokens_per_s": tokens / seconds,
        "requests_per_s": requests / seconds,
    }


def _whole_pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


def _read_count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"concurrency: {word!r} is not a number of requests; 1,5,10 are three")
    return int(word)


def _read_rate(word: str) -> float:
    try:
        rate = float(word)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate: {word!r} is not a number of requests a second; 0.5,2 are two")
    return rate


def _line(row: Facts) -> Facts:
    waits, paces, gaps = row.get("ttft_s") or {}, row.get("tpot_ms") or {}, row.get("itl_ms") or {}
    return {
        "requests": row["case"],
        "engine": row["engine"],
        "tokens/s": row.get("tokens_per_s"),
        **{f"TTFT {name} s": waits.get(name) for name in ("p50", "p99")},
        **{f"TPOT {name} ms": paces.get(name) for name in ("p50", "p99")},
        "ITL p99 ms": gaps.get("p99"),
        **{f"whole {name} s": (row.get("e2e_s") or {}).get(name) for name in ("p50", "p99")},
        "errors": sum(row["errors"].values()) if row.get("errors") else None,
        "hits": row.get("prefix_hits"),
        "preempted": row.get("preemptions"),
        "slots": row.get("peak_slots"),
        "of dense KV": row.get("kv_ratio"),
        "times first": row.get("times_first"),
    }
