"""Time a trace of shared prefixes over replicas, routed by prefix affinity and in turn.

    python benchmarks/prefix_affinity.py [--replicas 4] [--documents 16] [--rounds 6] [--repeats 2] [--out FILE]

Requests are questions about documents: each is a document's tokens, a question of its own, and a few tokens to
decode. Documents come in random order, as often each. The replicas' caches together have room for all documents, but
one of them has not: in turn, a replica sees every document and forgets most before they come again. A number of clients
ask, each its next question when the last is answered. Each run has a server of its own, `treewise serve
--data-parallel-size`, that has seen none of it before; runs of both kinds take turns. All replicas are on this machine:
they share its cores, so what is compared is the work that they have to do. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp

from treewise.bench.measure import describe_machine, progress, report
from treewise.bench.subject import Subject

ROUTINGS = ("round_robin", "prefix")
LOWEST, HIGHEST = 1000, 40000  # token ids that any vocabulary has, and that end no text


@contextmanager
def serving(arguments: argparse.Namespace, routing: str) -> Iterator[str]:
    """Serve the model by replicas; gives the URL."""
    command = [sys.executable, "-m", "treewise", "serve", arguments.model, "--device", arguments.device, "--port", "0"]
    command += ["--data-parallel-size", str(arguments.replicas), "--routing", routing]
    command += ["--num-kv-slots", str(arguments.num_kv_slots)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            if (url := re.search(r"https?://\S+", server.stdout.readline())) is None:
                raise RuntimeError("the server has not begun")
            yield url[0]
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        finally:
            server.kill()


def make_trace(arguments: argparse.Namespace) -> list[list[int]]:
    """Return the prompts in the order in which they are asked."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(LOWEST, HIGHEST) for _ in range(count)]

    documents = [tokens(arguments.document_tokens) for _ in range(arguments.documents)]
    asked = documents * arguments.rounds
    rng.shuffle(asked)
    return [document + tokens(arguments.question_tokens) for document in asked]


async def ask_all(url: str, trace: list[list[int]], clients: int, output_tokens: int) -> dict[str, Any]:
    """Ask everything, so many at a time, and return how it went."""
    waiting, answers = iter(trace), []

    async def client(session: aiohttp.ClientSession) -> None:
        for prompt in waiting:
            began = perf_counter()
            body = {"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "seed": 0}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                answers.append((perf_counter() - began, (await response.json())["usage"]))

    began = perf_counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    seconds = perf_counter() - began
    usages = [usage for _, usage in answers]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {
        "seconds": seconds,
        "requests_per_s": len(answers) / seconds,
        "tokens_per_s": sum(usage["total_tokens"] for usage in usages) / seconds,
        "latency_p50_s": statistics.median(latency for latency, _ in answers),
        "cached_share": cached / sum(usage["prompt_tokens"] for usage in usages),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--document-tokens", type=int, default=512)
    parser.add_argument("--question-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--num-kv-slots", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    trace = make_trace(arguments)
    runs: dict[str, list[dict[str, Any]]] = {routing: [] for routing in ROUTINGS}
    with progress() as bar:
        task = bar.add_task("", total=arguments.repeats * len(ROUTINGS))
        for repeat in range(arguments.repeats):
            for routing in ROUTINGS:
                bar.update(task, description=f"{routing}, run {repeat + 1} of {arguments.repeats}")
                with serving(arguments, routing) as url:
                    runs[routing].append(asyncio.run(ask_all(url, trace, arguments.clients, arguments.output_tokens)))
                bar.advance(task)
    rows = [
        {
            "case": routing,
            **{name: statistics.median(run[name] for run in runs[routing]) for name in runs[routing][0]},
            "throughput_ratio": statistics.median(
                run["requests_per_s"] / base["requests_per_s"]
                for run, base in zip(runs[routing], runs[ROUTINGS[0]], strict=True)
            ),
        }
        for routing in ROUTINGS
    ]
    result = {"bench": "prefix_affinity", **vars(arguments), "out": None, "results": rows}
    result["machine"] = describe_machine(Subject(model=arguments.model, device=arguments.device).place)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report(f"{arguments.model} on {arguments.replicas} replicas, {len(trace)} requests", rows, result)


if __name__ == "__main__":
    main()
