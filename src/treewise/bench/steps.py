"""Sums up the steps of a request, and bounds their time from below."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treewise.bench.floors import REACHED, Machine, Rates
from treewise.bench.meter import Step
from treewise.models import CausalLM

PARTS = ("schedule", "plan", "forward")


@dataclass(frozen=True)
class Weights:
    """What a step reads and multiplies with besides keys and values, on one device.

    Attributes
    ----------
    nbytes : int
        Of the weights that a step reads: all but an embedding table that is not the output head too.
    body, head : int
        Elements of the matrices that every row is multiplied with, and rows with logits.
    pair : int
        Operations of attention for a row and a token that it sees, in one layer.
    num_ranks : int
        Devices that the model is shared out over: each reads its part of the keys and values, too.
    """

    nbytes: int
    body: int
    head: int
    pair: int
    num_ranks: int = 1

    @classmethod
    def of(cls, model: CausalLM) -> Weights:
        """Count a model's."""
        config, table = model.config, model.embedding.weight
        head = table if config.tie_embeddings else model.head.weight
        parameters = list(model.parameters())
        matrices = sum(each.numel() for each in parameters if each.ndim > 1)
        return cls(
            nbytes=sum(each.nbytes for each in parameters) - (0 if config.tie_embeddings else table.nbytes),
            body=matrices - head.numel() - (0 if config.tie_embeddings else table.numel()),
            head=head.numel(),
            pair=4 * config.num_heads * config.head_dim,
            num_ranks=model.num_ranks,
        )

    def floor(self, step: Step, machine: Rates) -> float:
        """Return the seconds that a step takes at least.

        The larger of the weights and the keys and values, each read once at the bandwidth of a large copy, and the
        products at nine tenths of the rate of a large matrix product.
        """
        flops = 2 * (step.rows * self.body + step.logit_rows * self.head) + step.pairs * self.pair
        nbytes = self.nbytes + step.unique_kv / self.num_ranks
        return max(nbytes / machine.bandwidth, flops / (REACHED * machine.matrix))


def summarise(steps: Sequence[Step], weights: Weights, machine: Machine | None) -> dict[str, Any]:
    """Sum up a request.

    Parameters
    ----------
    steps : sequence of Step
        All of it, the prompt first.
    weights : Weights
    machine : Machine or None
        For the floors; without one they are None.

    Returns
    -------
    dict
        ``whole_s``: everything. ``prefill_s``: the steps that computed the prompt. ``decode_s``: all others; ``steps``
        counts those with rows, whose times are ``step_ms`` and whose bytes of keys and values ``*_kv_gb`` are.
        ``forward_s``, ``schedule_s``, ``plan_s`` are parts of ``decode_s``, and ``*_share`` their shares in it;
        ``floor_s`` and ``of_floor``: the sum of the floors of the counted steps and how many times of it they took,
        ``forward_of_floor`` the same for their forwards.
    """
    whole = sum(step.seconds for step in steps)
    prefill = sum(step.seconds for step in steps if step.prompt)
    decoding = [step for step in steps if step.rows and not step.prompt]
    facts: dict[str, Any] = {"whole_s": whole, "prefill_s": prefill, "decode_s": whole - prefill}
    facts["steps"] = len(decoding)
    facts["peak_slots"] = max(step.slots for step in steps)
    for part in PARTS:
        facts[f"{part}_s"] = sum(getattr(step, part) for step in decoding)
        facts[f"{part}_share"] = facts[f"{part}_s"] / facts["decode_s"] if decoding else None
    milliseconds = [step.seconds * 1e3 for step in decoding]
    facts["step_ms"] = percentiles(milliseconds)
    for kind in ("unique", "query", "read"):
        facts[f"{kind}_kv_gb"] = sum(getattr(step, f"{kind}_kv") for step in decoding) / 1e9
    facts |= dict.fromkeys(("floor_s", "of_floor", "forward_of_floor"))
    if machine is not None and decoding:
        floor = sum(weights.floor(step, machine) for step in decoding)
        facts |= {"floor_s": floor, "of_floor": sum(milliseconds) * 1e-3 / floor}
        facts["forward_of_floor"] = facts["forward_s"] / floor
    return facts


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median, 90th and 99th percentile and the largest; None of nothing."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"mean": statistics.fmean(values), "p50": p50, "p90": p90, "p99": p99, "max": max(values)}
