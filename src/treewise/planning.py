"""Which parallelism suits a model on so many GPUs: memory, and the time of a step, from sizes and rates alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, NamedTuple, cast

import torch

from treewise.bench.floors import REACHED
from treewise.bench.meter import Step
from treewise.bench.steps import Weights
from treewise.config import ModelConfig, check_integer
from treewise.llm import KV_CACHE_DTYPES
from treewise.models import CausalLM
from treewise.models.load import DTYPES, peek_config
from treewise.parallel.group import Group
from treewise.parallel.model import ParallelLM, check_size
from treewise.results import format_bytes
from treewise.sizing import PARTIALS, bytes_per_token

NUM_GPUS = (1, 2, 4, 8)
MEASURED = "measured"
SHEET = "data sheet"

COPIED, MULTIPLIED = 0.883, 0.818
"""What an H200 reaches of its data sheet: 4.24 of 4.8 TB/s in a large copy, 809 of 989 TFLOP/s in a matrix product."""
OF_FLOOR = 1.19
"""How many times of its floor a decode step of an 8B model took on one H200, in the median over 41 workloads."""
SUM_SECONDS = {"NVLink": 10e-6, "PCIe": 25e-6}
"""What a sum over ranks takes at least. It is assumed: no run of ours has measured it."""
RUNTIME_BYTES = 600_000_000
"""What CUDA, its libraries and captured graphs take of a GPU. It is assumed."""


class Rates(NamedTuple):
    """Of a GPU: bytes a second of a large copy, and operations a second of a large matrix product."""

    bandwidth: float
    matrix: float


@dataclass(frozen=True)
class GPU:
    """A kind of GPU, by its data sheet.

    Attributes
    ----------
    memory : float
        Bytes.
    bandwidth : float
        Bytes a second, of its memory.
    half, single : float
        Operations a second of dense matrix products of 16 bits, and of float32.
    link : {"NVLink", "PCIe"}
        By which it reaches others of its machine.
    link_bandwidth : float
        Bytes a second, one way.
    measured : Rates or None
        For 16 bits, where it was measured in ``benchmarks/results``.
    """

    memory: float
    bandwidth: float
    half: float
    single: float
    link: str
    link_bandwidth: float
    measured: Rates | None = None

    def rates(self, dtype: torch.dtype) -> tuple[Rates, str]:
        """Return the rates for weights of a type, and where they come from."""
        if self.measured is not None and dtype.itemsize == 2:
            return self.measured, MEASURED
        peak = self.half if dtype.itemsize == 2 else self.single
        return Rates(COPIED * self.bandwidth, MULTIPLIED * peak), SHEET


GPUS = {
    "h200": GPU(141e9, 4.8e12, 989e12, 67e12, "NVLink", 450e9, Rates(4.24e12, 809e12)),
    "h100": GPU(80e9, 3.35e12, 989e12, 67e12, "NVLink", 450e9),
    "a100-80gb": GPU(80e9, 2.039e12, 312e12, 19.5e12, "NVLink", 300e9),
    "a100-40gb": GPU(40e9, 1.555e12, 312e12, 19.5e12, "NVLink", 300e9),
    "l40s": GPU(48e9, 0.864e12, 362e12, 91.6e12, "PCIe", 32e9),
    "l4": GPU(24e9, 0.3e12, 121e12, 30.3e12, "PCIe", 32e9),
    "a10": GPU(24e9, 0.6e12, 125e12, 31.2e12, "PCIe", 32e9),
    "rtx4090": GPU(24e9, 1.008e12, 165e12, 82.6e12, "PCIe", 32e9),
}
"""Kinds of GPU by name; H100 and A100 are those with NVLink (SXM)."""


@dataclass(frozen=True)
class Demand:
    """What is to run where, a flag each.

    Parameters
    ----------
    plan : str
        Tell instead which parallelism suits this model: a shape by name (llama-3-8b, llama-3-70b, …), a folder in
        Transformers' layout, a config.json, a GGUF file or a hub id. No weights are read or fetched.
    gpus : int
        GPUs of one machine: 1, 2, 4 or 8.
    gpu : str
        Their kind: h200, h100, a100-80gb, a100-40gb, l40s, l4, a10 or rtx4090.
    prompt_tokens : int
        Tokens of a prompt.
    branches : int
        Branches that a prompt is decoded in.
    new_tokens : int
        Tokens that each branch decodes.
    dtype : str
        Type of the weights: bfloat16, float16 or float32.
    kv_cache_dtype : str
        Type of keys and values: auto, that of the weights, or fp8_e4m3.
    gpu_memory_utilization : float
        Share of a GPU's memory that may be taken.
    max_num_rows : int
        The most rows of a step.
    page_size : int
        Tokens a page of keys and values.
    """

    plan: str | None = None
    gpus: int = 1
    gpu: str = "h200"
    prompt_tokens: int = 4000
    branches: int = 8
    new_tokens: int = 256
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    max_num_rows: int = 1024
    page_size: int = 16

    def check(self) -> None:
        """Refuse what cannot be.

        Raises
        ------
        ValueError
            It names the flag and the choices.
        """
        if self.plan is None:
            given = [name for name, value in asdict(self).items() if value != getattr(Demand, name)]
            for name in given:
                raise ValueError(f"{name}: it is a part of a plan; give plan too")
            return
        choices = {"gpus": NUM_GPUS, "gpu": GPUS, "dtype": DTYPES, "kv_cache_dtype": KV_CACHE_DTYPES}
        for name, among in choices.items():
            if (value := getattr(self, name)) not in among:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(str, among))}")
        for name in ("prompt_tokens", "branches", "new_tokens", "max_num_rows", "page_size"):
            check_integer(name, getattr(self, name), 1)
        if self.branches > self.max_num_rows:
            raise ValueError(f"branches: {self.branches} are more than max_num_rows ({self.max_num_rows})")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1"
            )

    @property
    def slots(self) -> int:
        """Slots of a request: the prompt once, and what each branch decodes, in whole pages."""
        pages = ceil(self.prompt_tokens / self.page_size) + self.branches * ceil(self.new_tokens / self.page_size)
        return pages * self.page_size


@dataclass(frozen=True)
class Choice:
    """One way to use the GPUs.

    Attributes
    ----------
    tensor_parallel_size, replicas : int
    refusal : str or None
        Why it cannot be; None where it can.
    weight_bytes : int
        On each GPU.
    kv_bytes_per_token : int
        On each GPU; KV heads that several ranks have are on each of them.
    kv_tokens : int
        That the pool of a replica holds.
    floor_ms, sums_ms, step_ms : float
        Of a decode step of one request, at half of its length: the larger of bytes over bandwidth and operations over
        rate; the sums over ranks, which come on top; what is expected of both.
    tokens_per_s : float
        Expected of one request alone, while it decodes.
    request_s : float
        Expected of one request alone, its prompt included.
    requests : int
        Requests that a replica has room for at a time.
    most_tokens_per_s : float
        All replicas with so many requests each, all prompts different, and each step at its floor: a bound.
    """

    tensor_parallel_size: int
    replicas: int
    refusal: str | None = None
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    kv_tokens: int = 0
    floor_ms: float = 0.0
    sums_ms: float = 0.0
    step_ms: float = 0.0
    tokens_per_s: float = 0.0
    request_s: float = 0.0
    requests: int = 0
    most_tokens_per_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """All choices, and which are best.

    Attributes
    ----------
    choices : list of Choice
        The fewest ranks first.
    latency, throughput : Choice or None
        Where one request is done soonest; where the bound of tokens a second is highest. None where nothing fits.
    """

    demand: Demand
    choices: list[Choice]
    latency: Choice | None
    throughput: Choice | None

    @property
    def origins(self) -> dict[str, str]:
        """Where each number comes from."""
        gpu, dtype = GPUS[self.demand.gpu], DTYPES[self.demand.dtype]
        rates, origin = gpu.rates(dtype)
        shares = "" if origin == MEASURED else f", times what an H200 reaches of its own ({COPIED}, {MULTIPLIED})"
        return {
            "weights, keys and values": "counted",
            "memory": f"{format_bytes(gpu.memory)} a GPU: {SHEET}; {format_bytes(RUNTIME_BYTES)} for CUDA: assumed",
            "rates": (
                f"{rates.bandwidth / 1e12:.3g} TB/s, {REACHED * rates.matrix / 1e12:.3g} TFLOP/s: {origin}{shares}"
            ),
            "sums over ranks": (
                f"{SUM_SECONDS[gpu.link] * 1e6:.0f} µs each: assumed, no run has measured it; and their bytes over "
                f"{gpu.link} of {gpu.link_bandwidth / 1e9:.0f} GB/s: {SHEET}"
            ),
            "expected": f"{OF_FLOOR} times the floor: {MEASURED}, an 8B model on one H200",
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        best = {name: choice and choice.tensor_parallel_size for name, choice in self._best().items()}
        return asdict(self.demand) | {
            "choices": [asdict(choice) for choice in self.choices],
            "best_tensor_parallel_size": best,
            "origins": self.origins,
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row of a table for each choice."""
        for choice in self.choices:
            notes = [f"best {name}" for name, best in self._best().items() if choice is best]
            fits = choice.refusal is None
            yield {
                "ranks x replicas": f"{choice.tensor_parallel_size} x {choice.replicas}",
                "weights a GPU": format_bytes(choice.weight_bytes) if choice.weight_bytes else "",
                "KV tokens": f"{choice.kv_tokens:,}" if choice.weight_bytes else "",
                "requests": choice.requests if fits else None,
                "floor ms": choice.floor_ms if fits else None,
                "sums ms": choice.sums_ms if fits else None,
                "expected ms": choice.step_ms if fits else None,
                "tokens/s alone": choice.tokens_per_s if fits else None,
                "tokens/s at most": choice.most_tokens_per_s if fits else None,
                "note": choice.refusal or ", ".join(notes),
            }

    def _best(self) -> dict[str, Choice | None]:
        return {"latency": self.latency, "throughput": self.throughput}


def plan(demand: Demand) -> Plan:
    """Compare the ways to use GPUs: ranks that share the model out, and replicas of it.

    Raises
    ------
    ValueError
        See `Demand.check`.
    FileNotFoundError, ConnectionError
        See `treewise.models.load.peek_config`.
    """
    demand.check()
    config = peek_config(cast(str, demand.plan))
    longest = demand.prompt_tokens + demand.new_tokens
    if longest > config.max_positions:
        raise ValueError(f"new_tokens: paths of {longest} tokens are longer than the model's {config.max_positions}")
    sizes = [size for size in NUM_GPUS if size <= demand.gpus]
    choices = [choose(config, demand, size) for size in sizes]
    fit = [choice for choice in choices if choice.refusal is None]
    return Plan(
        demand,
        choices,
        min(fit, key=lambda choice: choice.request_s, default=None),
        max(fit, key=lambda choice: choice.most_tokens_per_s, default=None),
    )


def choose(config: ModelConfig, demand: Demand, size: int) -> Choice:
    """Tell what `size` ranks a replica come to."""
    gpu, dtype = GPUS[demand.gpu], DTYPES[demand.dtype]
    choice = Choice(size, demand.gpus // size)
    try:
        check_size(config, size)
    except ValueError:
        return replace(choice, refusal="heads or MLP cannot be shared out over so many")
    share = empty_share(config, size, dtype)
    kv_dtype = KV_CACHE_DTYPES[demand.kv_cache_dtype] or dtype
    per_token = bytes_per_token(share, kv_dtype)
    weight_bytes = sum(weight.nbytes for weight in share.parameters())
    room = gpu.memory * demand.gpu_memory_utilization - RUNTIME_BYTES - weight_bytes
    pool = max(0, int(room - step_bytes(share, dtype, demand.max_num_rows)))
    kv_tokens = pool // (per_token * demand.page_size) * demand.page_size
    choice = replace(choice, weight_bytes=weight_bytes, kv_bytes_per_token=per_token, kv_tokens=kv_tokens)
    requests = min(kv_tokens // demand.slots, demand.max_num_rows // demand.branches)
    if room <= 0:
        return replace(choice, refusal="the weights do not fit")
    if not requests:
        return replace(choice, refusal=f"no room for a request of {demand.slots:,} tokens")

    weights, (rates, _) = Weights.of(share), gpu.rates(dtype)

    def seconds(step: Step) -> tuple[float, float]:
        return weights.floor(step, rates), sums(config, gpu, size, dtype, step)

    floor, summed = seconds(_decode(config, demand, 1, per_token * size))
    prompt = sum(seconds(_prefill(config, demand)))
    step = OF_FLOOR * floor + summed
    full = sum(seconds(_decode(config, demand, requests, per_token * size)))
    tokens = demand.branches * demand.new_tokens
    return replace(
        choice,
        requests=requests,
        floor_ms=floor * 1e3,
        sums_ms=summed * 1e3,
        step_ms=step * 1e3,
        tokens_per_s=demand.branches / step,
        request_s=OF_FLOOR * prompt + demand.new_tokens * step,
        most_tokens_per_s=choice.replicas * tokens * requests / (requests * prompt + demand.new_tokens * full),
    )


class _Place(NamedTuple):
    """Stands for a group of ranks where nothing is computed."""

    rank: int
    size: int


def empty_share(config: ModelConfig, size: int, dtype: torch.dtype) -> CausalLM:
    """Return what the first of `size` ranks has of a model, without memory for it."""
    with torch.device("meta"):
        whole = CausalLM(config) if size == 1 else ParallelLM(config, cast(Group, _Place(0, size)))
    return whole.to(dtype)


def step_bytes(share: CausalLM, dtype: torch.dtype, num_rows: int) -> int:
    """Estimate what a step of so many rows takes on a rank, where `treewise.sizing.step_bytes` would measure it.

    The logits with their log-softmax in float32, the widest layer, and partial results of attention.
    """
    config = share.config
    vocabulary = config.vocab_size * (dtype.itemsize + 8)
    layer = (3 * config.intermediate_size + 6 * config.hidden_size) * dtype.itemsize
    partials = 2 * PARTIALS * config.num_heads * (config.head_dim + 1) * 4
    return num_rows * (vocabulary + layer + partials)


def sums(config: ModelConfig, gpu: GPU, size: int, dtype: torch.dtype, step: Step) -> float:
    """Return the seconds of a step's sums over ranks, and of bringing its logits together.

    Two sums a layer and one behind the embedding, of a row's hidden state each; a ring moves ``2 (size - 1) / size`` of
    the bytes over each link (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
    """
    if size == 1:
        return 0.0
    part, count = (size - 1) / size, 2 * config.num_layers + 1
    summed = count * 2 * part * step.rows * config.hidden_size
    gathered = part * step.logit_rows * config.vocab_size
    return (count + 1) * SUM_SECONDS[gpu.link] + (summed + gathered) * dtype.itemsize / gpu.link_bandwidth


def _decode(config: ModelConfig, demand: Demand, requests: int, bytes_per_token: int) -> Step:
    """Return a decode step of so many requests, at half of what they decode."""
    own = demand.new_tokens // 2
    unique = pairs = 0
    for window in config.layer_windows:
        seen_own = own if window is None else min(own, window)
        shared = demand.prompt_tokens if window is None else min(demand.prompt_tokens, window - seen_own)
        unique += shared + demand.branches * seen_own
        pairs += demand.branches * (shared + seen_own)
    rows = requests * demand.branches
    kv_bytes = requests * unique * bytes_per_token // config.num_layers
    return Step(rows=rows, logit_rows=rows, unique_kv=kv_bytes, pairs=requests * pairs)


def _prefill(config: ModelConfig, demand: Demand) -> Step:
    """Return the step that computes a prompt; in chunks it takes as long, where chunks are wide."""
    length = demand.prompt_tokens
    pairs = 0
    for window in config.layer_windows:
        within = length if window is None else min(length, window)
        pairs += within * (within + 1) // 2 + (length - within) * within
    return Step(rows=length, logit_rows=1, pairs=pairs)
