"""Time the products of a decoding step with few rows against PyTorch's, on a Hopper GPU.

    python benchmarks/products.py [--rows 1,8,20,50,64,128] [--out FILE]

Each time is the mean over a captured graph that multiplies with many matrices in turn, so that none is in the L2 cache;
the median of some replays. What a norm adds up where a product comes in parts is not in it, what activates gates is.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from treewise import ops
from treewise.ops.products import of_few_rows

LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
CACHE = 200 << 20
"""Bytes of matrices that are read before one is read again."""


def seconds(calls: Sequence[Callable[[], Tensor]], rounds: int = 3, replays: int = 15) -> float:
    """Return what a call takes, all of them captured one after the other."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in list(calls) * rounds:
            call()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / (rounds * len(calls)))
    return statistics.median(times)


def measure(name: str, outputs: int, inputs: int, rows: int) -> dict[str, object]:
    """Time one product both ways."""
    count = max(2, -(-CACHE // (2 * outputs * inputs)))
    matrices = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    gated = name == "gate_up"
    if (kernels := of_few_rows(x, matrices[0], gated=gated)) is None:
        raise SystemExit(f"{rows} rows: this needs a GPU of compute capability 9.0, Triton 3.6 and 1 to 128 rows")

    def torch_call(weight: Tensor) -> Tensor:
        product = F.linear(x, weight)
        return ops.gated_activation(product, "silu") if gated else product

    own = seconds([lambda w=w: kernels.multiply(x, w, activation="silu" if gated else "") for w in matrices])
    theirs = seconds([lambda w=w: torch_call(w) for w in matrices])
    read = 2 * outputs * inputs
    return {"product": name, "rows": rows, "us": own * 1e6, "torch_us": theirs * 1e6, "TB_per_s": read / own * 1e-12}


def main() -> None:
    """Measure the products of a layer of Llama-3-8B's shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,8,20,50,64,128")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU of compute capability 9.0; there is none here")
    results = []
    for rows in map(int, arguments.rows.split(",")):
        for name, (outputs, inputs) in LLAMA_8B.items():
            results.append(measure(name, outputs, inputs, rows))
            print({key: round(value, 2) if isinstance(value, float) else value for key, value in results[-1].items()})
    if arguments.out is not None:
        report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
