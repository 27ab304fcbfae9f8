"""Tell how much of the engine's steps on a CPU goes into matrix products and attention.

    python benchmarks/step_shares.py [--threads 1] [--repeats 3] [--out result.json]

The built-in model in float32. `samples` continues a prompt of 1,000 tokens by 20 sampled branches; the others are the
runs of `examples/demo.py`. The step that computes the prompt is left out, since it is nearly all products. What is
neither product nor attention is norms, rotation, activations, sampling, planning, scheduling and Python. Times are the
processor time of the thread that runs the engine, so that other programs on the machine count little; with more threads
its waiting for them is left out. Medians of the repeats; the last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from time import thread_time

import torch

from treewise import LLM, Branch, SamplingParams, generate
from treewise.bench.measure import describe_machine, report
from treewise.bench.shares import timed_parts
from treewise.engine import Program
from treewise.search import STRATEGIES

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from demo import QUESTION, RUNS

WORKED = "Question: A box holds {a} pencils. How many are in {b} boxes?\nAnswer: {a} times {b} is {c}.\n\n"
PROMPT_TOKENS, BRANCHES = 1000, 20
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, ignore_eos=True)


async def samples(root: Branch) -> list[Branch]:
    """Continue the prompt by branches that only grow."""
    return await generate(root.fork(BRANCHES), SAMPLING)


def measure(llm: LLM, program: Program, prompt: Sequence[int]) -> dict[str, float]:
    """Run a request, and return what its steps behind the prompt's took and the shares in it."""
    engine = llm.engine
    request = engine.add(program, prompt, 0)
    engine.step()
    with timed_parts(thread_time) as spent:
        start, first = thread_time(), engine.num_steps
        while not request.done:
            engine.step()
        seconds = thread_time() - start
    if request.error is not None:
        raise request.error
    shares = {part: each / seconds for part, each in spent.items()}
    return {"step_ms": seconds / (engine.num_steps - first) * 1e3, **shares, "both": sum(shares.values())}


def main() -> None:
    """Print a table, and the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engines = {
        attention: LLM("smollm2-135m", device="cpu", dtype="float32", attention=attention, enable_prefix_caching=False)
        for attention in ("auto", "deft:flatten")  # the latter is the demo's
    }
    tokenizer = engines["auto"].tokenizer
    worked = "".join(WORKED.format(a=a, b=b, c=a * b) for a in range(3, 14) for b in range(2, 9))
    question = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
    runs: dict[str, tuple[str, Program, Sequence[int]]] = {
        "samples": ("auto", samples, tokenizer.encode(worked)[:PROMPT_TOKENS]),
        **{name: ("deft:flatten", STRATEGIES[name].build(**settings), question) for name, settings in RUNS.items()},
    }
    table = []
    for name, (attention, program, prompt) in runs.items():
        measured = [measure(engines[attention], program, prompt) for _ in range(options.repeats)]
        medians = {key: statistics.median(each[key] for each in measured) for key in measured[0]}
        table.append({"run": name, "prompt_tokens": len(prompt), **medians})
    result = {"threads": options.threads, "shares": table, "machine": describe_machine(torch.device("cpu"))}
    if options.out:
        options.out.write_text(json.dumps({"bench": "step_shares", **result}, indent=1) + "\n")
    report("Shares of products and attention", table, result)


if __name__ == "__main__":
    main()
