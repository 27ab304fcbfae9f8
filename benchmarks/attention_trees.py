"""Time tree attention on 21 trees of decoding, speculation and search, in CUDA-graph replay with a cold L2 cache.

    python benchmarks/attention_trees.py [--heads 32,8] [--dtype float16] [--method deft:flatten] [--out result.json]

Checks each result against float64. The trees are FastTree's published set and the workloads of the DeFT paper.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from itertools import accumulate
from pathlib import Path

import torch

from treewise.attention import TreeSpec, plan_tree, run_plan
from treewise.bench.measure import copy_bandwidth, describe_machine, time_calls

LEVELS = [
    ("1,2,64", "8,256,32"),
    ("1,4,256", "8,256,32"),
    ("1,4,8,256", "8,256,256,32"),
    ("1,256", "256,32"),
    ("1,1024", "2048,32"),
    ("1,16,64", "1024,256,32"),
    ("1,4,16,512", "1024,256,128,32"),
    ("1,4,16,64,256,1024", "256,8,256,64,32,256"),
    ("1,10", "4000,400"),
    ("1,2,4,8,16,32,64,128,1024", "16,16,16,16,16,16,16,16,16"),
    ("1,2,4,8,16,32,64,128,1024", "256,128,64,16,16,16,16,16,16"),
    ("1,8,16,32,64,128,1024", "256,128,64,16,16,16,16"),
    ("1,16,32,64,128,1024", "256,128,64,16,16,16"),
    ("1,20", "4000,200"),
    ("1,30", "4000,200"),
    ("1,50", "4000,200"),
    ("1,10,100", "1000,300,150"),
]
DRAFTED = [(64, 4000), (128, 4000), (256, 4000), (64, 16000)]


def level_tree(counts: list[int], lengths: list[int]) -> TreeSpec:
    """Build a tree of even levels, a query at each node of the last."""
    first = [0, *accumulate(counts)]
    parent = [-1] * counts[0]
    for level in range(1, len(counts)):
        parent += [first[level - 1] + j * counts[level - 1] // counts[level] for j in range(counts[level])]
    length = [tokens for count, tokens in zip(counts, lengths, strict=True) for _ in range(count)]
    return TreeSpec(parent, length, range(first[-2], first[-1]))


def drafted_tree(size: int, prompt: int) -> TreeSpec:
    """Build a token tree below a prompt, wide at the top and for likely tokens, a query at each token."""
    parent, frontier, width = [0], [1], 10
    while len(parent) < size:
        following = []
        for rank, node in enumerate(frontier):
            for _ in range(min(max(1, width // (rank + 1)), size - len(parent))):
                parent.append(node)
                following.append(len(parent))
        frontier, width = following, max(1, width - 3)
    return TreeSpec([-1, *parent], [prompt] + [1] * size, range(1, size + 1))


def main() -> None:
    """Time every tree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="32,8")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--method", default="deft:flatten")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    heads, kv_heads = map(int, options.heads.split(","))
    dtype, device = getattr(torch, options.dtype), torch.device("cuda")
    trees = [
        (f"{counts} x {lengths}", level_tree(*([int(n) for n in text.split(",")] for text in (counts, lengths))))
        for counts, lengths in LEVELS
    ]
    trees += [(f"draft of {size} below {prompt}", drafted_tree(size, prompt)) for size, prompt in DRAFTED]
    bandwidth = copy_bandwidth(device)
    rows = []
    for name, tree in trees:
        q = torch.randn(tree.num_queries, heads, 128, device=device, dtype=dtype)
        k, v = (torch.randn(tree.num_tokens, kv_heads, 128, device=device, dtype=dtype) for _ in range(2))
        shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128, "device": device}
        exact = run_plan(plan_tree(tree, "reference", dtype=torch.float64, **shape), q.double(), k.double(), v.double())
        start = time.perf_counter()
        plan = plan_tree(tree, options.method, dtype=dtype, **shape)
        planned = time.perf_counter() - start
        error = (run_plan(plan, q, k, v).double() - exact).norm() / exact.norm()
        seconds = statistics.median(time_calls(lambda p=plan, q=q, k=k, v=v: run_plan(p, q, k, v), device, 51))
        rows.append(
            {
                "tree": name,
                "queries": tree.num_queries,
                "tokens": tree.num_tokens,
                "us": round(seconds * 1e6, 1),
                "copy_floor_us": round(2 * k.nbytes / bandwidth * 1e6, 1),
                "error": float(f"{error:.2e}"),
                "partials_a_query": round(plan.num_entries / plan.num_rows, 2),
                "plan_ms": round(planned * 1e3, 2),
            }
        )
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    mean = math.exp(statistics.mean(math.log(row["us"]) for row in rows))
    print(f"heads {options.heads} {options.dtype}: geometric mean {mean:.2f} us, copy {bandwidth / 1e12:.2f} TB/s")
    if options.out:
        setting = {"heads": [heads, kv_heads], "head_dim": 128, "dtype": options.dtype, "method": options.method}
        machine = describe_machine(device)
        result = {"bench": "attention_trees", "machine": machine, **setting, "copy_tb_per_s": bandwidth / 1e12}
        options.out.write_text(json.dumps(result | {"geometric_mean_us": mean, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
