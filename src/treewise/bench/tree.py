"""Times one branching request beside Transformers, or its attention beside per-sequence attention."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from treewise.attention import plan_tree, run_plan, store_kv
from treewise.bench.measure import check_device, describe_machine, progress, report
from treewise.bench.trees import level_tree
from treewise.config import ModelConfig, SamplingParams
from treewise.llm import LLM
from treewise.models import load_tokenizer, locate, read_config
from treewise.models.tokenizer import read_json

TEXT = (
    "Tom has three boxes of apples, and each box holds twelve apples. He gives his sister five apples and eats two. "
    "Then a neighbour brings another box, from which four apples are rotten. How many good apples are there now? "
    "Think step by step, say what each step does, and write the final number on a line of its own.\n"
)

Run = Callable[[int], int]
"""From a seed to the number of tokens decoded."""


def tree(
    *,
    against: Literal["transformers", "radix", "nothing"] = "transformers",
    model: str = "smollm2-135m",
    attention: str = "deft:flatten",
    device: str = "cpu",
    prompt_tokens: int = 1000,
    branches: int = 20,
    new_tokens: int = 32,
    repeats: int = 3,
) -> None:
    """Time one prompt that is continued by many sampled branches, prompt included, in float32.

    Parameters
    ----------
    against
        transformers: `generate(num_return_sequences=…)` of Transformers on the same weights. radix: attention
        alone, all layers of all decode steps, against the method that reads each branch's keys and values on its own.
    model
        As in `treewise generate`.
    attention
        The method that is measured.
    device
        cpu or cuda.
    prompt_tokens
        Length of the prompt.
    branches
        Branches that continue it.
    new_tokens
        Tokens a branch; end of text is ignored.
    repeats
        Timed runs of each engine, turn by turn after a short one that warms up; medians are reported.
    """
    place = check_device(device)
    for name, value in {"prompt_tokens": prompt_tokens, "branches": branches, "repeats": repeats}.items():
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, not {value}")
    if new_tokens < 2:
        raise ValueError(f"new_tokens: must be at least 2, not {new_tokens}")
    result: dict[str, Any] = {
        "bench": "tree",
        "model": model,
        "against": against,
        "attention": attention,
        "dtype": "float32",
        "prompt_tokens": prompt_tokens,
        "branches": branches,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "machine": describe_machine(place),
    }
    runs: dict[str, Run]
    if against == "radix":
        config = read_config(read_json(locate(model) / "config.json"))
        tokens, shape = branches * (new_tokens - 1), (config, place, prompt_tokens, branches, new_tokens)
        runs = {name: attention_run(method, *shape) for name, method in (("treewise", attention), ("radix", "radix"))}
    else:
        tokens, prompt = branches * new_tokens, make_prompt(model, prompt_tokens)
        runs = {"treewise": treewise_run(model, attention, device, prompt, branches, new_tokens)}
        if against == "transformers":
            runs["transformers"] = transformers_run(model, device, prompt, branches, new_tokens)
    times: dict[str, list[float]] = {name: [] for name in runs}
    with progress() as bar:
        task = bar.add_task("tree", total=repeats * len(runs))
        for repeat in range(repeats):
            for name, run in runs.items():
                bar.update(task, description=f"{name}, run {repeat + 1} of {repeats}")
                start = time.perf_counter()
                decoded = run(repeat)
                times[name].append(time.perf_counter() - start)
                if decoded != tokens:
                    raise RuntimeError(f"{name} decoded {decoded} tokens, not {tokens}")
                bar.advance(task)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    rows: list[dict[str, Any]] = [
        {
            "engine": name,
            "seconds": medians[name],
            "low": min(times[name]),
            "high": max(times[name]),
            "tokens/s": tokens / medians[name],
            "times treewise": medians[name] / medians["treewise"],
        }
        for name in runs
    ]
    result["seconds"] = times
    result["median_seconds"] = medians
    result["tokens_per_second"] = {row["engine"]: row["tokens/s"] for row in rows}
    result["ratio"] = rows[-1]["times treewise"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    result["peak_memory_gb"] = peak / 1e9
    title = (
        "attention alone, " * (against == "radix")
        + f"{prompt_tokens}-token prompt, {branches} branches of {new_tokens} tokens, {model}, float32, {device}"
    )
    report(title, rows, result)


def make_prompt(model: str, length: int) -> list[int]:
    """Make a prompt of exactly `length` tokens of plain text."""
    tokens = load_tokenizer(model).encode(TEXT)
    return (tokens * (length // len(tokens) + 1))[:length]


def treewise_run(model: str, attention: str, device: str, prompt: list[int], branches: int, new_tokens: int) -> Run:
    """Load this engine, warm it up, and return what is timed. The prefix cache is off, so that no run helps another."""
    llm = LLM(
        model,
        attention=attention,
        dtype="float32",
        device=device,
        enable_prefix_caching=False,
        num_kv_slots=len(prompt) + (branches + 1) * (new_tokens + 32) + 64,
    )

    def run(seed: int, tokens: list[int] = prompt, length: int = new_tokens) -> int:
        params = SamplingParams(n=branches, temperature=1.0, max_tokens=length, ignore_eos=True, seed=seed)
        [output] = llm.generate([tokens], params)
        return sum(len(completion.token_ids) for completion in output.outputs)

    run(0, prompt[:8], 2)
    return run


def transformers_run(model: str, device: str, prompt: list[int], branches: int, new_tokens: int) -> Run:
    """Load the same weights in Transformers, warm it up, and return what is timed.

    Raises
    ------
    ValueError
        If Transformers is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise ValueError("against: transformers is not installed; pip install 'treewise[transformers]'") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    peer = AutoModelForCausalLM.from_pretrained(locate(model), dtype=torch.float32).to(device).eval()

    def run(seed: int, tokens: list[int] = prompt, length: int = new_tokens) -> int:
        torch.manual_seed(seed)
        ids = torch.tensor([tokens], device=device)
        output = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=branches,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
        )
        return int(output[:, len(tokens) :].numel())

    run(0, prompt[:8], 2)
    return run


def attention_run(
    method: str, config: ModelConfig, device: torch.device, prompt_tokens: int, branches: int, new_tokens: int
) -> Run:
    """Return all that attention does in the decode steps of such a request: plans, stores, every layer's run.

    The first token of each branch belongs to the prompt's own step and is left out.
    """
    num_slots = prompt_tokens + branches * new_tokens
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, config.head_dim, generator=generator, device=device)

    pools = [(draw(num_slots, config.num_kv_heads), draw(num_slots, config.num_kv_heads)) for _ in config.layer_windows]
    q, new = draw(branches, config.num_heads), draw(branches, config.num_kv_heads)
    prompt_slots = torch.arange(prompt_tokens)
    leaf_slots = torch.arange(prompt_tokens, num_slots).view(branches, new_tokens)

    def step(length: int) -> None:
        spec = level_tree([1, branches], [prompt_tokens, length])
        slots = torch.cat([prompt_slots, leaf_slots[:, :length].flatten()]).numpy()
        plans = {
            window: plan_tree(
                spec,
                method,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                slots=slots,
                device=device,
                window=window,
            )
            for window in set(config.layer_windows)
        }
        stored = leaf_slots[:, length - 1].to(device)
        for window, (k, v) in zip(config.layer_windows, pools, strict=True):
            store_kv(new, new, k, v, stored)
            run_plan(plans[window], q, k, v, scale=config.attention_scale)

    def run(seed: int) -> int:
        for length in range(1, new_tokens):
            step(length)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return branches * (new_tokens - 1)

    step(1)
    return run
