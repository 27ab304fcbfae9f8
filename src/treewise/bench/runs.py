"""What runs a request for the benchmark of whole requests: our engine, attention alone, another engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from treewise.bench.alone import attention_alone
from treewise.bench.case import Case
from treewise.bench.engines import OTHERS, Room
from treewise.bench.floors import Machine
from treewise.bench.meter import Meter, Step
from treewise.bench.steps import Weights, summarise
from treewise.bench.subject import Loaded, Subject
from treewise.bench.workloads import samples
from treewise.config import MAX_TREE_SIZE
from treewise.speculate.speculator import Speculator

Facts = dict[str, Any]
Run = Callable[[Any, int], Facts]
"""From what is to be run, such as a `Case`, and a seed to what was measured, ``whole_s`` at least."""

WARM = {"cuda": 40, "cpu": 4}
"""Most tokens a sequence of the request that warms up an engine: on a GPU they outlive a plan's room."""


class Watched:
    """Our engine with one attention method, warmed up; the prefix cache is off, so that no run helps another.

    `options` are those of `Subject.engine`.

    Attributes
    ----------
    first : list of Step
        Decode steps of the first request that was run.
    tokens : dict of str to (int, int)
        By request, tokens whose keys its decode steps read: each once a step, and by each query.
    """

    def __init__(
        self,
        method: str,
        subject: Subject,
        loaded: Loaded,
        cases: Sequence[Case],
        machine: Machine | None,
        **options: Any,
    ) -> None:
        widest, prompt = max(case.widest for case in cases), max(case.prompt_tokens for case in cases)
        longest = max(case.longest - case.prompt_tokens for case in cases)
        warm = samples(prompt, widest, min(WARM[subject.place.type], longest))
        slots = max(case.num_slots(subject.page_size) for case in (*cases, warm))
        if any(case.work is None for case in cases):  # beams share more than is known in advance
            slots = min(slots, subject.default_slots(loaded, widest))
        llm = subject.engine(loaded, method, widest, num_kv_slots=slots, enable_prefix_caching=False, **options)
        self.engine = llm.engine
        self.runner = llm.engine.runner
        self.meter = Meter(llm)
        self.machine = machine
        self.weights = Weights.of(loaded[0])
        self.vocab_size = loaded[1].vocab_size
        self.full = all(window is None for window in loaded[0].config.layer_windows)
        self.first: list[Step] = []
        self.tokens: dict[str, tuple[int, int]] = {}
        self.meter.run(warm.program, random_prompt(prompt, self.vocab_size, 0))

    def run(self, case: Case, seed: int) -> Facts:
        """Run a request; ``as_recorded`` says whether its steps read what its recording says, None if there is none."""
        prompt = random_prompt(case.prompt_tokens, self.vocab_size, seed)
        captured, replayed = self.graph_counts()
        self.engine.speculator = None
        if case.drafter is not None:
            self.engine.speculator = Speculator(case.drafter(), self.engine.kv, MAX_TREE_SIZE, adaptive=False)
        steps = self.meter.run(case.program, prompt, seed)
        decoding = [step for step in steps if step.rows and not step.prompt]
        self.first = self.first or decoding
        token = self.runner.kv_bytes_per_token
        read = [sum(getattr(step, f"{kind}_kv") for step in decoding) // token for kind in ("unique", "query")]
        self.tokens[case.name] = read[0], read[1]
        expected = case.kv_tokens() if self.full else None
        same = None if expected is None else self.tokens[case.name] == expected
        facts = summarise(steps, self.weights, self.machine)
        facts |= {"tokens_per_s": case.decoded / facts["whole_s"], "as_recorded": same}
        captures, replays = self.graph_counts()
        return facts | {"graph_captures": captures - captured, "graph_replays": replays - replayed}

    def graph_counts(self) -> tuple[int, int]:
        """Return how many graphs were captured, and how many steps replayed one."""
        graphs = self.runner.graphs
        return (0, 0) if graphs is None else (graphs.num_captures, graphs.num_replays)

    def floors(self) -> list[float]:
        """Return the least seconds of each step of the first request, nothing where that is not known."""
        return [self.weights.floor(step, self.machine) for step in self.first] if self.machine else []

    def rates(self) -> dict[str, float]:
        """Return the rates that the floors were reckoned with, nothing where there are none."""
        if self.machine is None:
            return {}
        return {"copy_gb_per_s": self.machine.bandwidth / 1e9, "matrix_tflop_per_s": self.machine.matrix / 1e12}


def alone(method: str, subject: Subject) -> Run:
    """Return what times attention alone; see `attention_alone`."""
    config, dtype = subject.config(), subject.element

    def run(case: Case, seed: int) -> Facts:
        seconds = attention_alone(method, config, dtype, subject.place, case)()
        return {"whole_s": seconds, "tokens_per_s": case.decoded / seconds}

    return run


def other(name: str, subject: Subject, loaded: Loaded, case: Case, settings: dict[str, Any]) -> Run:
    """Load another engine, warm it up, and return what times its samples."""
    branches, new_tokens = settings["branches"], settings["new_tokens"]
    engine = OTHERS[name](subject, loaded[0].dtype, Room(branches, case.longest))
    warm = min(WARM[subject.place.type], new_tokens)
    engine.generate([random_prompt(case.prompt_tokens, loaded[1].vocab_size, 0)], branches, warm, 0)

    def run(case: Case, seed: int) -> Facts:
        prompt = random_prompt(case.prompt_tokens, loaded[1].vocab_size, seed)
        start = perf_counter()
        decoded = engine.generate([prompt], branches, new_tokens, seed)
        if subject.place.type == "cuda":
            torch.cuda.synchronize(subject.place)
        seconds = perf_counter() - start
        if decoded != case.decoded:
            raise RuntimeError(f"{name} decoded {decoded} tokens, not {case.decoded}")
        return {"whole_s": seconds, "tokens_per_s": decoded / seconds}

    return run


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    """Draw token ids: what they stand for takes no time."""
    drawn: list[int] = np.random.default_rng(seed).integers(vocab_size, size=length).tolist()
    return drawn
