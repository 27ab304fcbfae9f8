"""Time the same requests in this process and over HTTP: what a server costs on top of its engine.

    python benchmarks/http_overhead.py [--model smollm2-135m] [--device cpu] [--concurrency 1,8,32] [--out FILE]

The same prompts of random tokens are continued by as many sampled tokens each, by an engine in this process and by a
`treewise serve` in a process of its own, turn by turn: the machine may be busier at one time than at another, so that
pairs of runs are compared, and the median of the pairs counts. `throughput_ratio` is tokens a second over HTTP over
those of the engine alone, `ttft_ms` how much later the median first token is there, `cpu_ratio` the CPU time that the
server took over that of the engine alone, which other programs touch less. The client's own CPU time, here in this
process, is not counted, but it needs a core. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any
from urllib.request import urlopen

import psutil
from prometheus_client.parser import text_string_to_metric_families

from treewise.bench.loads import Demand, Load, run_load
from treewise.bench.measure import describe_machine, progress, report
from treewise.bench.remote import Remote
from treewise.bench.runs import WARM, Facts
from treewise.bench.subject import Subject


@contextmanager
def serving(subject: Subject, num_kv_slots: int, most: int) -> Iterator[tuple[str, psutil.Process]]:
    """Serve the model as the engine here is set up; gives the URL and the process."""
    flags: dict[str, Any] = {
        **{"--model": subject.model, "--device": subject.device, "--dtype": subject.dtype, "--port": 0},
        **{"--num-kv-slots": num_kv_slots, "--max-num-rows": max(1024, most), "--max-running": most},
    }
    words = [str(word) for flag in flags.items() for word in flag]
    command = [sys.executable, "-m", "treewise", "serve", *words, "--no-enable-prefix-caching"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            if (url := re.search(r"https?://\S+", server.stdout.readline())) is None:
                raise RuntimeError("the server has not begun")
            yield url[0], psutil.Process(server.pid)
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        finally:
            server.kill()


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time that a process has taken."""
    times = process.cpu_times()
    return float(times.user + times.system)


def clocks(url: str) -> dict[str, float]:
    """Return the seconds that requests have waited so far, by the server's clock."""
    with urlopen(f"{url}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    return {
        "ttft": samples["treewise:time_to_first_token_seconds_sum"],
        "queue": samples["treewise:request_queue_time_seconds_sum"],
    }


def compare(demand: Demand, subject: Subject, repeats: int) -> list[Facts]:
    """Run every load here and there, turn by turn."""
    loaded = subject.load()
    vocab_size = loaded[1].vocab_size
    loads = demand.loads(subject, vocab_size)
    most = max(load.concurrency for load in loads)
    slots = demand.num_slots(subject)
    llm = subject.engine(loaded, "auto", widest=most, num_kv_slots=slots, enable_prefix_caching=False)
    gc.collect()
    gc.freeze()  # as `treewise serve` does
    rows: list[Facts] = []
    with serving(subject, slots, most) as (url, server), progress() as bar:
        remote = Remote(url=url)
        new_tokens = min(WARM[subject.place.type], demand.output_tokens)
        warm = Load("warm", most, demand.prompts(most, vocab_size, 0, first=0), new_tokens)
        run_load(llm, warm, 0)
        remote.run(warm, 0)
        task = bar.add_task("", total=len(loads) * repeats)
        for load in loads:
            pairs = []
            for repeat in range(repeats):
                bar.update(task, description=f"{load.name}, run {repeat + 1} of {repeats}")
                began = process_time()
                here = run_load(llm, load, repeat)
                here["cpu_s"] = process_time() - began
                began, before = cpu_seconds(server), clocks(url)
                there = remote.run(load, repeat)
                there["cpu_s"], after = cpu_seconds(server) - began, clocks(url)
                waited = {name: (after[name] - before[name]) / len(load.prompts) for name in before}
                there["outside_s"] = there["ttft_s"]["mean"] - waited["ttft"]
                there["queue_s"] = waited["queue"]
                if there["errors"]:
                    raise RuntimeError(f"requests have failed: {there['errors']}")
                pairs.append((here, there))
                bar.advance(task)
            rows.append({"case": load.name, "requests": len(load.prompts), **overhead(pairs)})
    return rows


def overhead(pairs: list[tuple[Facts, Facts]]) -> Facts:
    """Return medians over pairs of runs, without HTTP and with it."""

    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    return {
        "engine_tokens_per_s": median(here["tokens_per_s"] for here, _ in pairs),
        "http_tokens_per_s": median(there["tokens_per_s"] for _, there in pairs),
        "throughput_ratio": median(there["tokens_per_s"] / here["tokens_per_s"] for here, there in pairs),
        "engine_ttft_ms": median(here["ttft_s"]["p50"] * 1e3 for here, _ in pairs),
        "ttft_ms": median((there["ttft_s"]["p50"] - here["ttft_s"]["p50"]) * 1e3 for here, there in pairs),
        "outside_ms": median(there["outside_s"] * 1e3 for _, there in pairs),
        "queue_ms": median(there["queue_s"] * 1e3 for _, there in pairs),
        "cpu_ratio": median(there["cpu_s"] / here["cpu_s"] for here, there in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    subject = Subject(model=arguments.model, device=arguments.device, dtype=arguments.dtype)
    lengths = {"input_tokens": arguments.input_tokens, "output_tokens": arguments.output_tokens}
    demand = Demand(**lengths, concurrency=arguments.concurrency, num_prompts=arguments.num_prompts)
    demand.check(subject)
    rows = compare(demand, subject, arguments.repeats)
    result = {"bench": "http_overhead", **vars(arguments), "out": None, "results": rows}
    result["machine"] = describe_machine(subject.place)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report(f"{subject.model} on {subject.device}, over HTTP and without", rows, result)


if __name__ == "__main__":
    main()
