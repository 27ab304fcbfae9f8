"""Time programs over many live branches: what they take themselves, and how long the device waits for that.

    python benchmarks/program_overhead.py [--model smollm2-135m] [--device cpu] [--live 256] [--trees 64] [--out FILE]
    python benchmarks/program_overhead.py --model shape:llama-3-8b --device cuda --tokens 32 --repeats 2

Each program runs over one tree of `--live` branches, and over `--trees` trees at once that have as many together. Its
own time is all that is not a step: coroutines, forks, pruning, texts, functions that are waited for, the beginnings and
ends of operations. Steps are everything else: scheduling, plans, forwards, drawing.

A GPU works on while a program runs, unless the program has to see the last tokens first. So of a program's own time
between two forwards only that counts as delay for which the device did nothing, by its own clock; a CPU does nothing
all that time. The share is the delay over the steps. What a program costs in all, its operations' many ends and the
device's pauses behind them included, shows beside `samples`, which is a plain decoding: `times_samples` compares the
whole time a step, for programs that have as many rows. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

import treewise.engine
from treewise import LLM, Branch, SamplingParams, gather, generate, keep, stream
from treewise.bench.measure import describe_machine, report
from treewise.bench.runs import random_prompt
from treewise.bench.subject import Subject
from treewise.search import monte_carlo_tree_search, self_consistency

PROMPT_TOKENS = 64

Program = Callable[[Branch, int, int], Coroutine[Any, Any, Any]]
"""Runs over a root with so many branches, and so many tokens between two forks; a path has four times as many."""


def stretch(tokens: int) -> SamplingParams:
    """Decode so many tokens."""
    return SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)


async def samples(root: Branch, width: int, tokens: int) -> Any:
    """Vote among answers: one operation."""
    return await self_consistency(root, n=width, max_tokens=4 * tokens, extract="number")


async def rounds(root: Branch, width: int, tokens: int) -> Any:
    """Keep a quarter of the branches after each stretch, and fork each in four."""
    branches = root.fork(width)
    for _ in range(3):
        await generate(branches, stretch(tokens))
        kept = keep(branches, [branch.logprob for branch in branches], width // 4)
        branches = [fork for branch in kept for fork in branch.fork(4)]
    return await generate(branches, stretch(tokens))


async def apart(root: Branch, width: int, tokens: int) -> Any:
    """Let a coroutine for each branch decode it in stretches and read its text."""
    params = stretch(tokens)

    async def one(branch: Branch) -> str:
        for _ in range(4):
            await generate([branch], params)
        return branch.text

    return await gather(*(one(branch) for branch in root.fork(width)))


async def streams(root: Branch, width: int, tokens: int) -> Any:
    """Let a coroutine for each branch see every token of it."""
    params = stretch(4 * tokens)

    async def one(branch: Branch) -> int:
        return len([piece async for piece in stream(branch, params)])

    return await gather(*(one(branch) for branch in root.fork(width)))


async def tree_search(root: Branch, width: int, tokens: int) -> Any:
    """Search with so many thoughts a round, rated by a function in a worker thread."""
    return await monte_carlo_tree_search(
        root,
        iterations=width,
        parallel=width // 4,
        depth=4,
        width=4,
        evaluate=lambda texts: [len(set(text)) / 100 for text in texts],
        thought_tokens=tokens,
        answer_tokens=tokens,
        stop=(),
        conclude="",
    )


PROGRAMS: dict[str, Program] = {
    "samples": samples,
    "rounds": rounds,
    "apart": apart,
    "streams": streams,
    "tree_search": tree_search,
}


class Watch:
    """Watches an engine while it is entered.

    Attributes
    ----------
    rows, live : list of int
        Of each step: rows, and those whose logits are wanted.
    own : float
        Seconds that programs have taken since the last forward.
    """

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.device = llm.engine.runner.device
        self.rows: list[int] = []
        self.live: list[int] = []
        self.own = 0.0
        self._ended: Any = None  # the last forward and the drawing from it
        self._spans: list[tuple[float, Any, Any]] = []  # before each forward

    def __enter__(self) -> Watch:
        """Watch."""
        self._patches = ExitStack()
        for owner, name, watched in (
            (self.engine, "_run_programs", self._timed),
            (treewise.engine, "wait", self._timed),
            (self.engine.scheduler, "next_batch", self._counted),
            (self.engine.runner, "forward", self._forward),
            (treewise.engine, "draw", self._drawn),
        ):
            self._patches.enter_context(patch.object(owner, name, partial(watched, getattr(owner, name))))
        return self

    def __exit__(self, *error: object) -> None:
        """Watch no more."""
        self._patches.close()

    def seconds(self) -> tuple[float, float]:
        """Return what programs have taken themselves, and for how much of it the device did nothing."""
        taken = sum(own for own, _, _ in self._spans) + self.own
        return taken, sum(min(own, self._between(*times)) for own, *times in self._spans) + self.own

    def _timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        start = perf_counter()
        result = function(*arguments)
        self.own += perf_counter() - start
        return result

    def _counted(self, next_batch: Callable[..., Any], *arguments: Any) -> Any:
        chosen = next_batch(*arguments)
        if chosen[0].num_rows:
            self.rows.append(chosen[0].num_rows)
            self.live.append(len(chosen[0].logit_rows))
        return chosen

    def _forward(self, forward: Callable[..., Any], *arguments: Any) -> Any:
        self._spans.append((self.own, self._ended, self._now()))
        self.own = 0.0
        return forward(*arguments)

    def _drawn(self, draw: Callable[..., Any], *arguments: Any) -> Any:
        drawn = draw(*arguments)
        self._ended = self._now()
        return drawn

    def _now(self) -> Any:
        """Read the clock, or let the device read its own when it gets here."""
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if start is None:  # nothing was computed before
            return inf
        return end - start if isinstance(end, float) else start.elapsed_time(end) * 1e-3


def measure(llm: LLM, program: Program, trees: int, width: int, tokens: int, seed: int) -> dict[str, Any]:
    """Run a program over so many trees at once."""
    engine = llm.engine
    with Watch(llm) as watch:
        start = perf_counter()
        requests = [
            engine.add(
                lambda root: program(root, width, tokens),
                random_prompt(PROMPT_TOKENS, llm.tokenizer.vocab_size, place),
                seed,
            )
            for place in range(trees)
        ]
        watch.own = perf_counter() - start  # the trees are made
        while not all(request.done for request in requests):
            engine.step()
        whole = perf_counter() - start
    for request in requests:
        if request.error is not None:
            raise request.error
    if watch.device.type == "cuda":
        torch.cuda.synchronize(watch.device)
    own, delay = watch.seconds()
    steps = len(watch.rows)
    return {
        "program": program.__name__,
        "trees": trees,
        "branches_a_tree": width,
        "tokens": tokens,
        "most_live": max(watch.live),
        "steps": steps,
        "rows_a_step": sum(watch.rows) / steps,
        "step_ms": 1e3 * (whole - delay) / steps,
        "program_ms_a_step": 1e3 * own / steps,
        "delay_ms_a_step": 1e3 * delay / steps,
        "share_percent": 100 * delay / (whole - delay),
        "wall_ms_a_step": 1e3 * whole / steps,
    }


def main() -> None:
    """Measure all programs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--live", type=int, default=256)
    parser.add_argument("--trees", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8, help="decoded between two forks")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, the last of which counts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    subject = Subject(model=options.model, device=options.device)
    loaded = subject.load()
    slots = options.trees * PROMPT_TOKENS + 8 * options.live * (4 * options.tokens + subject.page_size)
    llm = subject.engine(loaded, "auto", options.live, num_kv_slots=slots, enable_prefix_caching=False)
    gc.freeze()  # as a long-lived process does: the collector need not look through all modules again and again
    results = []
    for name in options.programs:
        measure(llm, PROGRAMS[name], 1, 4, options.tokens, 0)  # warm
        for trees in (1, options.trees):
            for seed in range(1, options.repeats + 1):
                result = measure(llm, PROGRAMS[name], trees, max(4, options.live // trees), options.tokens, seed)
            results.append(result)
    plain = {result["trees"]: result["wall_ms_a_step"] for result in results if result["program"] == "samples"}
    for result in results:
        trees = result["trees"]
        result["times_samples"] = result["wall_ms_a_step"] / plain[trees] if trees in plain else None
    machine = describe_machine(subject.place)
    result = {"bench": "program_overhead", "model": options.model, "machine": machine, "results": results}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report(f"Programs over {options.live} live branches, {options.model}, {options.device}", results, result)


if __name__ == "__main__":
    main()
