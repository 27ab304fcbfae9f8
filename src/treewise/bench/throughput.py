"""Times many requests that decode side by side: tokens a second, and how long each request waits."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal

from cyclopts import Parameter

from treewise.awaitables import generate
from treewise.bench.compare import measure, notes
from treewise.bench.engines import OTHERS, OtherEngine, Room, check_installed
from treewise.bench.measure import describe_machine, peak_memory, report
from treewise.bench.runs import WARM, Facts, Run, random_prompt
from treewise.bench.steps import percentiles
from treewise.bench.subject import Subject, read_methods
from treewise.branch import Branch
from treewise.config import SamplingParams, check_integer
from treewise.engine import Request
from treewise.llm import LLM
from treewise.results import json_safe


def throughput(
    *,
    input_tokens: int = 4000,
    output_tokens: int = 500,
    concurrency: str = "1,5,10,20",
    shared_prefix_tokens: int = 0,
    num_prompts: int | None = None,
    kv_tokens: int | None = None,
    attention: str = "auto",
    repeats: int = 1,
    against: Literal["transformers", "vllm", "nothing"] = "nothing",
    json_file: Annotated[Path | None, Parameter("--json")] = None,
    subject: Annotated[Subject | None, Parameter("*", group="Model and engine")] = None,
) -> None:
    """Time requests of equal lengths, so many of them at a time: where one ends, the next begins.

    Every request decodes one sampled sequence of random tokens, whatever ends the text. The prefix cache is on, and
    empty at the start of each run.

    Parameters
    ----------
    input_tokens
        Tokens of each prompt.
    output_tokens
        Tokens decoded for each.
    concurrency
        Requests at a time, several numbers with commas between.
    shared_prefix_tokens
        Tokens that all prompts begin with; behind them no two are alike.
    num_prompts
        Requests in all; 4 times the concurrency if left out.
    kv_tokens
        Tokens whose keys and values the pool holds; enough for all that run at a time and one more if left out.
    attention
        The methods that are measured, with commas between.
    repeats
        Timed runs of each, turn by turn; the median run is reported.
    against
        Run another engine too: transformers or vllm. It gets as many requests at a time as one batch after the other.
    json_file
        Write the result here too.
    """
    subject = subject or Subject()
    place, methods = subject.place, read_methods(attention)
    check_integer("input_tokens", input_tokens, 1)
    check_integer("output_tokens", output_tokens, 2)
    check_integer("shared_prefix_tokens", shared_prefix_tokens, 0, input_tokens - 1)
    check_integer("repeats", repeats, 1)
    length = input_tokens + output_tokens
    if length > (limit := subject.config().max_positions):
        raise ValueError(f"output_tokens: paths of {length} tokens are longer than the model's context, {limit}")
    levels = [_read_level(word) for word in concurrency.split(",")]
    if num_prompts is not None:
        check_integer("num_prompts", num_prompts, 1)
    if kv_tokens is not None:
        check_integer("kv_tokens", kv_tokens, length)
    if against in OTHERS:
        check_installed(against)
    loaded = subject.load()
    vocab_size = loaded[1].vocab_size
    common = random_prompt(shared_prefix_tokens, vocab_size, 0)

    def make_load(level: int, first: int, count: int, new_tokens: int) -> Load:
        own = [random_prompt(input_tokens - shared_prefix_tokens, vocab_size, first + i + 1) for i in range(count)]
        return Load(f"{level} at once", level, [common + rest for rest in own], new_tokens)

    page = subject.page_size
    ample = (max(levels) + 1) * (-(-length // page) * page) + page
    slots = ample if kv_tokens is None else -(-kv_tokens // page) * page + page  # one page is scratch
    runs: dict[str, Run] = {}
    for method in methods:
        runs[method] = partial(serve, subject.engine(loaded, method, max(levels), num_kv_slots=slots))
    if against in OTHERS:
        runs[against] = partial(
            serve_batches, OTHERS[against](subject, loaded[0].dtype, Room(max(levels), length, kv_tokens))
        )
    for run in runs.values():
        run(make_load(max(levels), 0, max(levels), min(WARM, output_tokens)), 0)
    loads = [make_load(level, 1000, num_prompts or 4 * level, output_tokens) for level in levels]
    rows = measure(loads, runs, repeats)
    result: Facts = {
        "bench": "throughput",
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "shared_prefix_tokens": shared_prefix_tokens,
        "kv_tokens": kv_tokens,
        **asdict(subject),
        "dtype": str(loaded[0].dtype).removeprefix("torch."),
        "against": against,
        "repeats": repeats,
        "machine": describe_machine(place),
        "results": rows,
        "peak_memory_gb": peak_memory(place) / 1e9,
    }
    if json_file is not None:
        json_file.write_text(json.dumps(json_safe(result), indent=1) + "\n", encoding="utf-8")
    print(*notes(rows), sep="\n", file=sys.stderr)
    title = f"{input_tokens} tokens in, {output_tokens} out, {subject.model}, {result['dtype']}, {subject.device}"
    report(title, [_line(row) for row in rows], result)


@dataclass(frozen=True)
class Load:
    """Prompts, and how many of them are worked on at a time."""

    name: str
    concurrency: int
    prompts: Sequence[Sequence[int]]
    new_tokens: int


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


def serve(llm: LLM, load: Load, seed: int) -> Facts:
    """Run a load on our engine."""
    engine = llm.engine
    engine.kv.clear_cache()
    preempted = engine.scheduler.num_preemptions
    params = SamplingParams(temperature=1.0, max_tokens=load.new_tokens, ignore_eos=True)

    async def program(root: Branch) -> list[Branch]:
        return await generate([root], params)

    clients: list[Client] = []
    running: list[Client] = []
    start = now = perf_counter()
    while running or len(clients) < len(load.prompts):
        for prompt in load.prompts[len(clients) : len(clients) + load.concurrency - len(running)]:
            running.append(Client(engine.add(program, prompt, seed + len(clients)), now))
            clients.append(running[-1])
        engine.step()
        now = perf_counter()
        for client in running:
            if client.request.error is not None:
                raise client.request.error
            if client.first is None and client.decoded:
                client.first = now
            if client.decoded == load.new_tokens:
                client.last = now
        running = [client for client in running if client.last is None]
    seconds = now - start
    engine.step()  # the programs of the last requests return
    waits = [client.first - client.asked for client in clients if client.first is not None]
    steps = [(client.last - client.first) / (load.new_tokens - 1) for client in clients if client.first and client.last]
    cached = sum(client.request.tree.cached_tokens for client in clients)
    return {
        **_rates(load, seconds),
        "ttft_s": percentiles(waits),
        "tpot_ms": percentiles([step * 1e3 for step in steps]),
        "prefix_hits": cached / sum(map(len, load.prompts)),
        "preemptions": engine.scheduler.num_preemptions - preempted,
    }


def serve_batches(engine: OtherEngine, load: Load, seed: int) -> Facts:
    """Run a load on another engine, one batch after the other."""
    start = perf_counter()
    decoded = 0
    for first in range(0, len(load.prompts), load.concurrency):
        batch = load.prompts[first : first + load.concurrency]
        decoded += engine.generate(batch, 1, load.new_tokens, seed + first)
    seconds = perf_counter() - start
    if decoded != len(load.prompts) * load.new_tokens:
        raise RuntimeError(f"{decoded} tokens were decoded, not {len(load.prompts) * load.new_tokens}")
    return _rates(load, seconds)


def _rates(load: Load, seconds: float) -> Facts:
    requests = len(load.prompts)
    return {
        "requests": requests,
        "whole_s": seconds,
        "tokens_per_s": requests * load.new_tokens / seconds,
        "requests_per_s": requests / seconds,
    }


def _read_level(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"concurrency: {word!r} is not a number of requests; 1,5,10 are three")
    return int(word)


def _line(row: Facts) -> Facts:
    waits, steps = row.get("ttft_s") or {}, row.get("tpot_ms") or {}
    return {
        "requests": row["case"],
        "engine": row["engine"],
        "tokens/s": row.get("tokens_per_s"),
        **{f"TTFT {name} s": waits.get(name) for name in ("p50", "p99")},
        **{f"TPOT {name} ms": steps.get(name) for name in ("p50", "p99")},
        "hits": row.get("prefix_hits"),
        "preempted": row.get("preemptions"),
        "times first": row.get("times_first"),
    }
