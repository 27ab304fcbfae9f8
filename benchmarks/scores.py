"""Time the column sums of attention, all layers in one call, against causal attention over the same prompt.

    python benchmarks/scores.py [--tokens 1000,4000,32000] [--queries 16,64,256] [--out FILE]
    python benchmarks/scores.py --device cpu --dtype float32 --tokens 300 --queries 16 --layers 2 --repeats 1

Layers have the shape of Llama-3-8B's, keys lie in pages of 16 all over the pool. `attention_ms` is what PyTorch's own
causal attention over the prompt takes in as many layers, `share` how much of that the sums of its last queries take;
`TB_per_s` counts every key once. On a GPU a call is a replayed graph that starts with a cold L2 cache. The last line is
the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F

from treewise.attention.scores import column_sums
from treewise.bench.measure import check_device, describe_machine, report, time_calls

PAGE = 16


def attention_seconds(tokens: int, options: argparse.Namespace) -> float:
    """Return what causal attention over a prompt takes in all layers."""
    shape = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    q = torch.randn(1, options.heads, tokens, options.head_dim, **shape)
    k, v = torch.randn(2, 1, options.kv_heads, tokens, options.head_dim, **shape)

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return options.layers * statistics.median(time_calls(attend, q.device, options.repeats))


def measure(tokens: int, queries: int, attention: float, options: argparse.Namespace) -> dict[str, float]:
    """Time the sums of the last queries of a prompt."""
    shape = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    pages = -(-tokens // PAGE)
    q = torch.randn(options.layers, queries, options.heads, options.head_dim, **shape)
    k = torch.randn(options.layers, pages * PAGE, options.kv_heads, options.head_dim, **shape)
    lse = torch.rand(options.layers, queries, options.heads, device=q.device) + 8
    slots = torch.randperm(pages, device=q.device)[:, None] * PAGE + torch.arange(PAGE, device=q.device)
    slots = slots.flatten()[:tokens]
    positions = torch.arange(tokens, device=q.device)

    def score() -> torch.Tensor:
        return column_sums(q, lse, k, positions[-queries:], positions, slots=slots, scale=options.head_dim**-0.5)

    seconds = statistics.median(time_calls(score, q.device, options.repeats))
    read = options.layers * tokens * options.kv_heads * options.head_dim * k.element_size()
    return {
        "tokens": tokens,
        "queries": queries,
        "ms": seconds * 1e3,
        "attention_ms": attention * 1e3,
        "share": seconds / attention,
        "TB_per_s": read / seconds * 1e-12,
    }


def main() -> None:
    """Print a table, and the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="1000,4000,32000")
    parser.add_argument("--queries", default="16,64,256")
    for name, default in (("layers", 32), ("heads", 32), ("kv-heads", 8), ("head-dim", 128), ("repeats", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        device = check_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    rows = []
    for tokens in map(int, options.tokens.split(",")):
        attention = attention_seconds(tokens, options)
        for queries in map(int, options.queries.split(",")):
            rows.append(measure(tokens, min(queries, tokens), attention, options))
    shape = {name: getattr(options, name) for name in ("layers", "heads", "kv_heads", "head_dim", "dtype")}
    result = {"bench": "scores", **shape, "results": rows, "machine": describe_machine(device)}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report("Column sums of attention", rows, result)


if __name__ == "__main__":
    main()
