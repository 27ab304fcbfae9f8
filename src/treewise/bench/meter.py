"""Watches an engine at work: the time of each step by its parts, its rows, and the keys and values that they see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from treewise.attention import TreeSpec
from treewise.batch import Batch
from treewise.branch import BranchTree
from treewise.engine import Program
from treewise.kv import KVManager
from treewise.llm import LLM

Ints = NDArray[np.int64]


@dataclass
class Step:
    """What one step of the engine took and did.

    Attributes
    ----------
    seconds : float
        By the clock on the wall, without what the meter itself took.
    schedule, plan : float
        Seconds of choosing the rows and of planning their attention.
    forward : float
        Seconds of the forward: between events on a CUDA device, by the clock on the wall elsewhere.
    rows, logit_rows : int
        Rows computed, and those among them whose logits were wanted.
    unique_kv : int
        Bytes of keys and values that some row sees, over all layers, each counted once.
    query_kv : int
        Bytes of keys and values that each row with logits sees by itself, summed.
    read_kv : int
        Bytes of keys and values that the plan reads.
    pairs : int
        Pairs of a row and a token that it sees, over all layers.
    slots : int
        Slots in use.
    prompt : bool
        Whether keys of the prompt were computed.
    """

    seconds: float = 0.0
    schedule: float = 0.0
    plan: float = 0.0
    forward: float = 0.0
    rows: int = 0
    logit_rows: int = 0
    unique_kv: int = 0
    query_kv: int = 0
    read_kv: int = 0
    pairs: int = 0
    slots: int = 0
    prompt: bool = False


class Meter:
    """Runs requests on an engine, one after the other, and records every step.

    Parameters
    ----------
    llm : LLM
        Its scheduler and its runner are watched from now on.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._step = Step()
        self._own = 0.0  # seconds of this step that the meter itself took
        self._marks: list[tuple[Step, Any, Any]] = []
        scheduler, runner = llm.engine.scheduler, llm.engine.runner
        for owner, name, watched in (
            (scheduler, "next_batch", self._next_batch),
            (runner, "plan", self._plan),
            (runner, "forward", self._forward),
        ):
            setattr(owner, name, partial(watched, getattr(owner, name)))

    def run(self, program: Program, prompt: Sequence[int], seed: int = 0) -> list[Step]:
        """Run one request to its end.

        The seconds of the steps add up to all that the request took. The last step may have no rows.

        Raises
        ------
        Exception
            What ended the request, if it failed.
        """
        engine, steps = self.llm.engine, []
        start = perf_counter()
        request = engine.add(program, prompt, seed)
        while not request.done:
            self._step, self._own = Step(), 0.0
            try:
                engine.step()
            except BaseException:
                engine.abort(request)
                self._marks.clear()
                raise
            # Else the next step would wait for the prompt.
            if (request.done or self._step.prompt) and engine.runner.device.type == "cuda":
                torch.cuda.synchronize(engine.runner.device)
            self._step.seconds = perf_counter() - start - self._own
            steps.append(self._step)
            start = perf_counter()
        for step, begin, end in self._marks:
            step.forward = end - begin if isinstance(end, float) else begin.elapsed_time(end) * 1e-3
        self._marks.clear()
        if request.error is not None:
            raise request.error
        return steps

    # ------------------------------------------------------------------ what is put around the engine's own functions

    def _next_batch(self, next_batch: Callable[..., Any], *arguments: Any) -> Any:
        start = perf_counter()
        chosen = next_batch(*arguments)
        self._step.schedule = perf_counter() - start
        return chosen

    def _plan(self, plan: Callable[..., Any], batch: Batch, kv: KVManager) -> Any:
        start = perf_counter()
        plans = plan(batch, kv)
        end = perf_counter()
        self._step.plan = end - start
        self._count(batch, kv, plans)
        self._own += perf_counter() - end
        return plans

    def _forward(self, forward: Callable[..., Any], *arguments: Any) -> Any:
        start = self._now()
        logits = forward(*arguments)
        self._marks.append((self._step, start, self._now()))
        return logits

    def _now(self) -> Any:
        """Read the clock, or let the device read its own when it gets here."""
        if self.llm.engine.runner.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _count(self, batch: Batch, kv: KVManager, plans: Any) -> None:
        step, runner = self._step, self.llm.engine.runner
        windows = runner.model.config.layer_windows
        spec, _ = batch.tree_spec(kv)
        seen = batch.positions() + 1  # tokens on the path of each row
        wanted = seen[batch.logit_rows]
        for window, layers in Counter(windows).items():
            token = runner.kv_bytes_per_token // len(windows) * layers
            step.unique_kv += token * distinct_tokens(spec, window)
            step.query_kv += token * int(within(wanted, window).sum())
            step.pairs += layers * int(within(seen, window).sum())
        step.rows, step.logit_rows = batch.num_rows, len(batch.logit_rows)
        step.read_kv = runner.kv_bytes(plans)
        step.slots = kv.num_slots - kv.pool.num_free
        firsts = ((span.node.start + span.start, span.owner) for span in batch.spans if span.store)
        step.prompt = any(first < len(cast(BranchTree, owner).prompt_tokens) for first, owner in firsts)


def within(lengths: Ints, window: int | None) -> Ints:
    """Bound numbers of tokens by a window, if there is one."""
    return lengths if window is None else np.minimum(lengths, window)


def distinct_tokens(spec: TreeSpec, window: int | None) -> int:
    """Count the tokens that some query sees, each once.

    Examples
    --------
    >>> tree = TreeSpec(parent=[-1, 0, 0], length=[40, 2, 3], query_node=[1, 2])
    >>> distinct_tokens(tree, None), distinct_tokens(tree, 4)
    (45, 7)
    """
    if window is None:
        return spec.num_tokens
    start, parent = np.zeros(spec.num_nodes, np.int64), spec.parent.tolist()
    for node, above in enumerate(parent):
        if above >= 0:
            start[node] = start[above] + spec.length[above]
    first = np.full(spec.num_nodes, np.iinfo(np.int64).max)  # the first position that a query below each node sees
    np.minimum.at(first, spec.query_node, start[spec.query_node] + spec.query_offset + 1 - window)
    for node in range(spec.num_nodes - 1, 0, -1):
        if parent[node] >= 0:
            first[parent[node]] = min(first[parent[node]], first[node])
    return int((spec.length - np.clip(first - start, 0, spec.length)).sum())
