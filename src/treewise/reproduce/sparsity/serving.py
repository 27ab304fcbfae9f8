"""Many requests at a time, dense against sparse, in a pool that is too small and in one that holds all of them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

from treewise.bench.engines import OTHERS, Room
from treewise.bench.loads import Demand, Load, run_batches, run_load
from treewise.bench.runs import Facts, Run
from treewise.bench.subject import Loaded, Subject
from treewise.reproduce.figures import Panel, figure
from treewise.reproduce.report import Cell as TableCell
from treewise.reproduce.report import Compared, Figure, Section, Table
from treewise.reproduce.study import Measurement, Results
from treewise.sparsity.policy import KVSparsity

DENSE = "dense"
BEFORE = "vLLM 0.26.0, at another time"
LEVELS = "requests at a time"
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

    @classmethod
    def of(cls, key: str) -> Cell | None:
        """Return the cell whose name this is, None for other measurements."""
        kind, *words = key.split("-", 3)
        return cls(words[0], int(words[1]), words[2]) if kind == "serving" else None


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
        budget = max(window + policy.sinks + 1, round(self.scale * self.budget))
        return replace(policy, budget=budget, window=window, every=every)

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
        return cells + [
            Cell(pool, level, engine) for pool in ("starved", "ample") for engine in others for level in many
        ]

    def demand(self, pool: str) -> Demand:
        """Return what is asked of a pool's engines."""
        levels = ",".join(map(str, self.levels))
        kv_tokens = self.starved_tokens if pool == "starved" else None
        return Demand(self.input_tokens, self.output_tokens, levels, kv_tokens=kv_tokens)

    def settings(self, cell: Cell) -> Facts:
        """Return what the result of a cell depends on."""
        policy = None if cell.engine in OTHERS else self.policy(cell.engine)
        return {
            "model": self.subject.model,
            "device": self.subject.device,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "asked": self.rounds * cell.level,
            "kv_tokens": self.demand(cell.pool).num_slots(self.subject),
            "max_num_rows": self.subject.max_num_rows,
            "policy": None if policy is None else policy.key,
        }

    def seconds(self, cell: Cell) -> float:
        """Estimate what a cell takes: prompts one after the other, and steps of so many requests as there is room for.

        By what an H200 takes for an 8B model, and two cores of a CPU for one of 135 million weights.
        """
        token, step, row = (24e-6, 4.5e-3, 0.25e-3) if self.subject.device == "cuda" else (1.5e-3, 15e-3, 12e-3)
        room = self.starved_tokens // self.length if (cell.pool, cell.engine) == ("starved", DENSE) else cell.level
        rows = min(room, cell.level)
        requests = self.rounds * cell.level
        return requests * (self.input_tokens * token + self.output_tokens * (step / rows + row))

    def making(self, cell: Cell, loaded: bool) -> float:
        """Estimate what it takes to make an engine and warm it up, and to load the model if that is still to do."""
        if self.subject.device != "cuda":
            return self.seconds(replace(cell, level=self.levels[0])) / 2
        return (90.0 if cell.engine in OTHERS else 15.0) + (0.0 if loaded else 40.0)


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
        """Run the requests of a cell, and return what `run_load` or `run_batches` does, with the settings.

        Raises
        ------
        torch.OutOfMemoryError
            If the device has no room for the engine; engines made before are gone.
        """
        prompts = self.service.demand(cell.pool).prompts(
            self.service.rounds * cell.level, self._vocab_size, 0, first=1000
        )
        load = Load(cell.key, cell.level, prompts, self.service.output_tokens)
        return {**self.service.settings(cell), **self._engine(cell.pool, cell.engine)(load, 1)}

    @property
    def _vocab_size(self) -> int:
        return self.loaded[1].vocab_size

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
        service, demand = self.service, self.service.demand(pool)
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


def measurements(service: Service, loaded: Loaded | None = None) -> list[Measurement]:
    """Return what there is to measure, vLLM included where it is installed and there is a GPU."""
    serving = Serving(service, loaded)
    others = ("vllm",) if service.subject.device == "cuda" and find_spec("vllm") else ()
    made: set[tuple[str, str]] = set()
    found = []
    for cell in service.cells(others):
        seconds = service.seconds(cell) + ((cell.pool, cell.engine) not in made) * service.making(cell, bool(made))
        made.add((cell.pool, cell.engine))
        title = f"{cell.level} at once, {cell.pool} pool, {cell.engine}"
        found.append(Measurement(cell.key, title, seconds, partial(serving.run, cell), service.settings(cell)))
    return found


def sections(results: Results, published: Mapping[str, Any]) -> list[Section]:
    """Report what was measured beside the account's table 1 and what vLLM took."""
    cells = {cell: result for key, result in results.items() if (cell := Cell.of(key)) is not None}
    measured = {cell: result for cell, result in cells.items() if "tokens_per_s" in result}
    heading = "Throughput and the wait for the first token"
    account = published["account"]
    lead = (
        f"What the account's table 1 is about: {account['input_tokens']:,} tokens in, {account['output_tokens']} out, "
        f"so many requests at a time. {account['tables']} It says: {account['times_dense']} times the throughput, the "
        f"first token after less than {account['ttft_p50_below_s']:g} s in the median, the dense engine saturated at "
        f"{account['dense_saturates_at']} requests at a time, the sparse one stable at {account['sparse_stable_at']}."
    )
    if not measured:
        return [Section(heading, lead + "\n\nNothing was measured.")]
    facts = next(iter(measured.values()))
    whole = facts["input_tokens"] == WHOLE
    lead += (
        f"\n\nOurs is {facts['model']}, {facts['input_tokens']:,} tokens in and {facts['output_tokens']} out"
        + ("" if whole else f": **scaled down** by {WHOLE / facts['input_tokens']:.3g}, budgets and pool with it")
        + ". The starved pool holds about 7 requests, as a card of 24 GB does beside an 8B model; the ample one holds "
        "all. Where few requests run at a time both are the same, and measured once. No two prompts are alike, and the "
        "prefix cache is off. Every engine was warmed up."
    )
    parts: list[Table | Figure] = [_versus(measured, account, whole), _everything(cells, published["vllm"], whole)]
    known = published["vllm"]["results"] if whole and facts["device"] == "cuda" else []
    parts += figure(
        "Throughput and first token over concurrency",
        list(panels(measured, known)),
        "Output tokens a second and median seconds to the first token over requests at a time, a line an engine, for "
        "the starved and the ample pool.",
        "vLLM: " + published["vllm"]["source"] + "." if known else "",
    )
    return [Section(heading, lead + "\n\n" + _verdict(measured, account), parts)]


def times_dense(measured: Mapping[Cell, Facts], cell: Cell) -> float | None:
    """Return an engine's tokens a second over those of the dense one, None where that was not measured."""
    dense = measured.get(replace(cell, engine=DENSE))
    return measured[cell]["tokens_per_s"] / dense["tokens_per_s"] if dense else None


def _ordered(cells: Iterable[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: (cell.pool != "starved", cell.level, cell.engine != DENSE))


def _versus(measured: Mapping[Cell, Facts], account: Mapping[str, Any], whole: bool) -> Table:
    rows: list[list[TableCell]] = []
    for cell in _ordered(measured):
        if cell.engine == DENSE or (ratio := times_dense(measured, cell)) is None:
            continue
        said = account["times_dense"] if cell.engine == "novita" and not fits(cell, measured[cell]) else None
        rows.append([cell.pool, cell.level, cell.engine, Compared(ratio, said)])
    return Table(
        "Sparse against dense",
        ["pool", "requests at a time", "engine", "tokens a second over those of the dense engine"],
        rows,
        f"Published: {account['source']}; of which number of requests it is, is not said. It stands where the pool "
        "does not hold all requests."
        + ("" if whole else " Requests so short, on a processor whose limit is arithmetic, gain little from room."),
    )


def _everything(cells: Mapping[Cell, Facts], vllm: Mapping[str, Any], whole: bool) -> Table:
    known = {(row["pool"], row["level"]): row for row in vllm["results"]} if whole else {}
    rows: list[list[TableCell]] = []
    for cell in _ordered(cells):
        facts = cells[cell]
        label: list[TableCell] = [cell.pool, cell.level, cell.engine]
        if "tokens_per_s" not in facts:
            rows.append([*label, "out of memory" if facts.get("out_of_memory") else "failed", *[None] * 8])
            continue
        waits, paces = facts.get("ttft_s") or {}, facts.get("tpot_ms") or {}
        other = known.get((cell.pool, cell.level), {})
        rows.append(
            [
                *label,
                facts["tokens_per_s"],
                *(waits.get(name) for name in ("p50", "p90", "p99")),
                paces.get("p50"),
                facts.get("kv_ratio"),
                facts.get("preemptions"),
                other.get("tokens_per_s"),
                other.get("ttft_p50_s"),
            ]
        )
    columns = ["pool", "at a time", "engine", "tokens/s", "TTFT p50, s", "p90, s", "p99, s", "TPOT p50, ms"]
    columns += ["of dense KV", "preempted", "vLLM, tokens/s", "vLLM, TTFT p50, s"]
    kept = [place for place in range(len(columns)) if any(row[place] is not None for row in rows)]
    return Table(
        "Every engine",
        [columns[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
        "TTFT: seconds until the first token. TPOT: milliseconds between tokens. Of dense KV: bytes that live requests "
        "hold over those that they would hold dense, over all layers, in the mean over the run. Preempted: requests "
        "that gave way to others and began again." + (f" vLLM: {vllm['source']}." if known else ""),
    )


def _verdict(measured: Mapping[Cell, Facts], account: Mapping[str, Any]) -> str:
    lines = []
    for pool in ("starved", "ample"):
        for engine in (DENSE, "novita"):
            rates = {
                cell.level: facts["tokens_per_s"]
                for cell, facts in measured.items()
                if cell.engine == engine and _counts(cell, facts, pool)
            }
            if len(rates) > 1:
                level = saturation(rates)
                said = f"saturated from {level} requests at a time on" if level else "not saturated by any number here"
                lines.append(f"- {engine}, {pool} pool: {said}, at most {max(rates.values()):,.0f} tokens a second")
    for cell in _ordered(measured):
        ratio = times_dense(measured, cell)
        if cell.engine == "novita" and ratio is not None and not fits(cell, measured[cell]):
            sign = "the sign" if ratio > 1 else "not the sign"
            lines.append(
                f"- novita over dense, {cell.level} at a time, {cell.pool} pool: {ratio:.2f}, {sign} that was published"
            )
        if (cell.pool, cell.engine, cell.level) == ("starved", "novita", account["sparse_stable_at"]):
            wait = measured[cell]["ttft_s"]
            below = "less" if wait["p50"] < account["ttft_p50_below_s"] else "not less"
            lines.append(
                f"- first token at {cell.level} at a time, starved pool, novita: {wait['p50']:.2f} s in the median, "
                f"{below} than the published {account['ttft_p50_below_s']:g} s; {wait['p99']:.2f} s for the slowest 1 %"
            )
    return "\n".join(lines)


def _counts(cell: Cell, facts: Facts, pool: str) -> bool:
    """Whether a cell says something of a pool: where the small one holds all requests, of the ample one too."""
    return cell.pool == pool or (cell.pool == "starved" and fits(cell, facts))


def fits(cell: Cell, facts: Facts) -> bool:
    """Whether the pool holds all requests of a cell, were they dense, so that no larger one would be any better."""
    return bool(cell.level * (facts["input_tokens"] + facts["output_tokens"]) <= facts["kv_tokens"])


def panels(measured: Mapping[Cell, Facts], vllm: Iterable[Mapping[str, Any]]) -> Iterator[Panel]:
    """Yield charts of tokens a second and of waits, for each pool; `vllm` are rows of what was measured before."""
    engines = dict.fromkeys(cell.engine for cell in _ordered(measured))
    for pool in ("starved", "ample"):
        speeds: dict[str, dict[int, float]] = {engine: {} for engine in engines}
        waits: dict[str, dict[int, float]] = {engine: {} for engine in engines}
        for cell in _ordered(measured):
            facts = measured[cell]
            if _counts(cell, facts, pool):
                speeds[cell.engine][cell.level] = facts["tokens_per_s"]
                if facts.get("ttft_s"):
                    waits[cell.engine][cell.level] = facts["ttft_s"]["p50"]
        for row in vllm:
            if row["pool"] == pool:
                speeds.setdefault(BEFORE, {})[row["level"]] = row["tokens_per_s"]
                waits.setdefault(BEFORE, {})[row["level"]] = row["ttft_p50_s"]
        yield Panel(f"{pool} pool", LEVELS, "output tokens a second", _lines(speeds))
        yield Panel(f"{pool} pool", LEVELS, "seconds to the first token, median", _lines(waits), log_y=True)


def _lines(values: Mapping[str, Mapping[int, float]]) -> dict[str, tuple[list[float], list[float]]]:
    return {
        name: (list(map(float, sorted(own))), [own[level] for level in sorted(own)])
        for name, own in values.items()
        if own
    }
