"""Time programs over many live branches: what they take themselves, beside the engine's steps.

    python benchmarks/program_overhead.py [--model smollm2-135m] [--device cpu] [--live 256] [--trees 64] [--out FILE]

Each program runs over one tree of `--live` branches, and over `--trees` trees at once that have as many together. Its
own time is all that is not a step: coroutines, forks, pruning, texts, the beginnings and ends of operations. Steps are
everything else: scheduling, plans, forwards, drawing. The share is the one over the other. The last line is the result
as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import perf_counter
from typing import Any

from treewise import LLM, Branch, SamplingParams, gather, generate, keep, stream
from treewise.bench.measure import describe_machine, report
from treewise.bench.runs import random_prompt
from treewise.bench.subject import Subject
from treewise.search import monte_carlo_tree_search, self_consistency

PROMPT_TOKENS = 64
TOKENS = 8
"""Decoded between two forks; a path has four times as many."""
STRETCH = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True)

Program = Callable[[Branch, int], Coroutine[Any, Any, Any]]


async def samples(root: Branch, width: int) -> Any:
    """Vote among answers: one operation."""
    return await self_consistency(root, n=width, max_tokens=4 * TOKENS, extract="number")


async def rounds(root: Branch, width: int) -> Any:
    """Keep a quarter of the branches after each stretch, and fork each in four."""
    branches = root.fork(width)
    for _ in range(3):
        await generate(branches, STRETCH)
        kept = keep(branches, [branch.logprob for branch in branches], width // 4)
        branches = [fork for branch in kept for fork in branch.fork(4)]
    return await generate(branches, STRETCH)


async def apart(root: Branch, width: int) -> Any:
    """Let a coroutine for each branch decode it in stretches and read its text."""

    async def one(branch: Branch) -> str:
        for _ in range(4):
            await generate([branch], STRETCH)
        return branch.text

    return await gather(*(one(branch) for branch in root.fork(width)))


async def streams(root: Branch, width: int) -> Any:
    """Let a coroutine for each branch see every token of it."""

    async def one(branch: Branch) -> int:
        return len([piece async for piece in stream(branch, SamplingParams(max_tokens=4 * TOKENS, ignore_eos=True))])

    return await gather(*(one(branch) for branch in root.fork(width)))


async def tree_search(root: Branch, width: int) -> Any:
    """Search with so many thoughts a round, rated by a function in a worker thread."""
    return await monte_carlo_tree_search(
        root,
        iterations=width,
        parallel=width // 4,
        depth=4,
        width=4,
        evaluate=lambda texts: [len(set(text)) / 100 for text in texts],
        thought_tokens=TOKENS,
        answer_tokens=TOKENS,
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


def measure(llm: LLM, program: Program, trees: int, width: int, seed: int) -> dict[str, Any]:
    """Run a program over so many trees at once."""
    engine, own, rows, live = llm.engine, 0.0, [], []
    run_programs, next_batch = engine._run_programs, engine.scheduler.next_batch

    def timed() -> None:
        nonlocal own
        start = perf_counter()
        run_programs()
        own += perf_counter() - start

    def counted(*arguments: Any) -> Any:
        chosen = next_batch(*arguments)
        if chosen[0].num_rows:
            rows.append(chosen[0].num_rows)
            live.append(len(chosen[0].logit_rows))
        return chosen

    engine._run_programs, engine.scheduler.next_batch = timed, counted  # type: ignore[method-assign]
    start = perf_counter()
    try:
        requests = [
            engine.add(
                lambda root: program(root, width), random_prompt(PROMPT_TOKENS, llm.tokenizer.vocab_size, place), seed
            )
            for place in range(trees)
        ]
        own += perf_counter() - start  # the trees are made
        while not all(request.done for request in requests):
            engine.step()
    finally:
        engine._run_programs, engine.scheduler.next_batch = run_programs, next_batch  # type: ignore[method-assign]
    for request in requests:
        if request.error is not None:
            raise request.error
    steps = perf_counter() - start - own
    return {
        "program": program.__name__,
        "trees": trees,
        "branches_a_tree": width,
        "most_live": max(live),
        "steps": len(rows),
        "rows_a_step": sum(rows) / len(rows),
        "step_ms": 1e3 * steps / len(rows),
        "program_ms_a_step": 1e3 * own / len(rows),
        "share_percent": 100 * own / steps,
    }


def main() -> None:
    """Measure all programs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--live", type=int, default=256)
    parser.add_argument("--trees", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    subject = Subject(model=options.model, device=options.device)
    loaded = subject.load()
    slots = options.trees * PROMPT_TOKENS + 8 * options.live * (4 * TOKENS + subject.page_size)
    llm = subject.engine(loaded, "auto", options.live, num_kv_slots=slots, enable_prefix_caching=False)
    results = []
    for program in PROGRAMS.values():
        measure(llm, program, 1, 4, 0)  # warm
        for trees in (1, options.trees):
            results.append(measure(llm, program, trees, max(4, options.live // trees), 1))
    machine = describe_machine(subject.place)
    result = {"bench": "program_overhead", "model": options.model, "machine": machine, "results": results}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report(f"Programs over {options.live} live branches, {options.model}, {options.device}", results, result)


if __name__ == "__main__":
    main()
