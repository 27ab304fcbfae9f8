"""Many requests at a time, dense against sparse, in a pool that is too small and in one that holds all of them."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch

from treewise.bench.engines import OTHERS, Room
from treewise.bench.loads import Demand, Load, run_batches, run_load
from treewise.bench.runs import Facts, Run
from treewise.bench.subject import Loaded, Subject
from treewise.sparsity.policy import KVSparsity

DENSE = "dense"
WHOLE = 4000
"""Tokens of a prompt in the account; what is asked here may be scaled down."""
NEVER_AGAIN = 24
"""Tokens that each request of a warm-up decodes where nothing is thinned out while decoding."""
BEYOND = 44
"""The same, beyond those after which a policy thins out again."""


@dataclass(frozen=True)
class Cell:
    """One entry of the table.

    Attributes
    ----------
    pool : str
        ``starved`` or ``ample``.
    level : int
        Requests at a time.
    engine : str
        `DENSE`, the name of a policy, or one of `OTHERS`.
    """

    pool: str
    level: int
    engine: str

    @property
    def key(self) -> str:
        """Name of the measurement."""
        return f"serving-{self.pool}-{self.level:02}-{self.engine}"


@dataclass(frozen=True)
class Service:
    """What is asked of engines.

    Attributes
    ----------
    subject : Subject
        Model and device.
    input_tokens, output_tokens : int
        Of each request.
    starved_tokens : int
        Tokens whose keys and values the small pool holds: about 7 requests.
    budget : int
        Tokens that a sparse layer keeps of a prompt of `WHOLE` tokens; less of a shorter one, in proportion.
    levels : tuple of int
        Requests at a time, the most telling number first.
    policies : tuple of str
        Sparse engines; the first is measured at all levels and in both pools, the others where the pool is small.
    rounds : int
        Requests in all, over those at a time.
    """

    subject: Subject
    input_tokens: int = WHOLE
    output_tokens: int = 500
    starved_tokens: int = 31_000
    budget: int = 512
    levels: tuple[int, ...] = (20, 10, 40, 5, 1)
    policies: tuple[str, ...] = ("novita", "snapkv", "pyramidkv", "streaming")
    rounds: int = 2

    @classmethod
    def scaled(cls, subject: Subject, input_tokens: int, **others: Any) -> Service:
        """Ask for shorter requests, everything else in proportion."""
        scale = input_tokens / WHOLE
        output, starved = (round(scale * number) for number in (cls.output_tokens, cls.starved_tokens))
        return cls(subject, input_tokens, output, starved, **others)

    @property
    def scale(self) -> float:
        """Length of the prompts over that of the account."""
        return self.input_tokens / WHOLE

    @property
    def length(self) -> int:
        """Tokens of a request when it ends."""
        return self.input_tokens + self.output_tokens

    def policy(self, engine: str) -> KVSparsity | None:
        """Return the policy of an engine, None for `DENSE`; with shorter prompts all of its numbers are smaller."""
        if engine == DENSE:
            return None
        policy = KVSparsity.named(engine)
        every = None if policy.every is None else max(1, round(self.scale * policy.every))
        window = max(4, round(self.scale * policy.window))
        return replace(policy, budget=round(self.scale * self.budget), window=window, every=every)

    def cells(self, others: tuple[str, ...] = ()) -> list[Cell]:
        """Return what to measure, the most telling first; `others` are other engines, which come last.

        A pool that is small for many requests is ample for a few: those are measured once.
        """
        first, *policies = self.policies
        many = [level for level in self.levels if level * self.length > self.starved_tokens]
        few = [level for level in self.levels if level not in many]
        main = (DENSE, first)
        cells = [Cell("starved", level, engine) for level in many[:1] for engine in main]
        cells += [Cell("ample", level, engine) for level in many[:1] for engine in main]
        cells += [Cell("starved", level, engine) for level in (*many[1:], *few) for engine in main]
        cells += [Cell("starved", level, engine) for level in many[:1] for engine in policies]
        cells += [Cell("ample", level, engine) for level in many[1:] for engine in main]
        cells += [Cell("starved", level, engine) for level in (*many[1:], *few) for engine in policies]
        return cells + [Cell(pool, level, engine) for pool in ("starved", "ample") for engine in others for level in many]

    def seconds(self, cell: Cell) -> float:
        """Estimate what a cell takes: prompts one after the other, and steps of so many requests as there is room for.

        By what an H200 takes for an 8B model, and two cores of a CPU for one of 135 million weights.
        """
        token, step, row = (24e-6, 4.5e-3, 0.25e-3) if self.subject.device == "cuda" else (1.5e-3, 15e-3, 12e-3)
        room = self.starved_tokens // self.length if (cell.pool, cell.engine) == ("starved", DENSE) else cell.level
        rows = min(room, cell.level)
        requests = self.rounds * cell.level
        return requests * (self.input_tokens * token + self.output_tokens * (step / rows + row))


class Serving:
    """Engines around one model, each made and warmed up when it is first asked for.

    Parameters
    ----------
    service : Service
    loaded : pair of model and tokenizer, optional
        Instead of loading it.
    """

    def __init__(self, service: Service, loaded: Loaded | None = None) -> None:
        self.service = service
        self._given = loaded
        self._engines: dict[tuple[str, str], Run] = {}

    @cached_property
    def loaded(self) -> Loaded:
        """The model, with its tokenizer."""
        return self._given or self.service.subject.load()

    def run(self, cell: Cell) -> Facts:
        """Run the requests of a cell, and return what `run_load` or `run_batches` does.

        Raises
        ------
        torch.OutOfMemoryError
            If the device has no room for the engine; engines made before are gone.
        """
        prompts = self._demand(cell.pool).prompts(self.service.rounds * cell.level, self._vocab_size, 0, first=1000)
        load = Load(cell.key, cell.level, prompts, self.service.output_tokens)
        return self._engine(cell.pool, cell.engine)(load, 1)

    @property
    def _vocab_size(self) -> int:
        return self.loaded[1].vocab_size

    def _demand(self, pool: str) -> Demand:
        service = self.service
        return Demand(
            service.input_tokens,
            service.output_tokens,
            ",".join(map(str, service.levels)),
            kv_tokens=service.starved_tokens if pool == "starved" else None,
        )

    def _engine(self, pool: str, name: str) -> Run:
        if (pool, name) not in self._engines:
            try:
                made = self._make(pool, name)
            except torch.OutOfMemoryError:
                self._engines.clear()
                gc.collect()
                torch.cuda.empty_cache()
                made = self._make(pool, name)
            self._engines[pool, name] = made
        return self._engines[pool, name]

    def _make(self, pool: str, name: str) -> Run:
        service, demand = self.service, self._demand(pool)
        widest = max(service.levels)
        new_tokens = NEVER_AGAIN
        if name in OTHERS:
            room = Room(widest, service.length, demand.kv_tokens)
            run: Run = partial(run_batches, OTHERS[name](service.subject, self.loaded[0].dtype, room))
        else:
            policy = service.policy(name)
            if policy is not None and policy.every is not None:
                new_tokens = policy.every + BEYOND
            slots = demand.num_slots(service.subject)
            engine = service.subject.engine(
                self.loaded, "auto", widest, num_kv_slots=slots, enable_prefix_caching=False, kv_sparsity=policy
            )
            run = partial(run_load, engine)
        prompts = demand.prompts(service.levels[0], self._vocab_size, 0, first=0)
        run(Load("warm", service.levels[0], prompts, min(new_tokens, service.output_tokens)), 0)
        return run


def saturation(tokens_per_s: dict[int, float], gain: float = 1.1) -> int | None:
    """Return the number of requests at a time from which on more of them bring no more than a tenth.

    Parameters
    ----------
    tokens_per_s : dict of int to float
        By requests at a time.
    gain : float
        What more requests have to bring.

    Returns
    -------
    int or None
        None if it never is so, or there is nothing to compare.

    Examples
    --------
    >>> saturation({5: 761, 10: 909, 20: 909}), saturation({5: 700, 10: 1200})
    (10, None)
    """
    levels = sorted(tokens_per_s)
    for level, more in pairwise(levels):
        if all(tokens_per_s[other] < gain * tokens_per_s[level] for other in levels if other >= more):
            return level
    return None
