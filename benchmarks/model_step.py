"""Time a model's step beside its matrix products alone, and each element-wise op beside plain torch.

    python benchmarks/model_step.py [--config config.json] [--rows 1 20 50] [--layers 32] [--device cuda] [--repeats 20]

The weights are random. A step is a whole forward with logits of every row, keys and values stored, but without
attention: queries stand in for its output. Times are of CUDA graphs on a GPU. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from treewise import ops
from treewise.bench.measure import check_device, describe_machine, report, time_calls
from treewise.layers import Linear
from treewise.models import CausalLM, read_config
from treewise.models.shapes import find_shape, random_model
from treewise.ops import Heads, plain

CALLS = 32
"""Calls of an op that are timed together, as many as a step may have."""


def step(model: CausalLM, rows: int) -> Callable[[], object]:
    """Return the forward of some rows, all it needs in place."""
    config, device = model.config, model.device
    shape = (2, config.num_layers, rows + 1, config.num_kv_heads, config.head_dim)
    pools = torch.zeros(shape, dtype=model.dtype, device=device)
    everything = torch.arange(rows, device=device)

    def attend(layer: int, heads: Heads) -> torch.Tensor:
        return ops.rotate_and_store(heads, pools[0, layer], pools[1, layer], everything)

    return lambda: model.logits(model(everything, everything, attend))


def products(model: CausalLM, rows: int) -> Callable[[], object]:
    """Return the matrix products of that forward and nothing else."""
    maps = [(module.weight, module.bias) for module in model.modules() if isinstance(module, Linear)]
    if model.config.tie_embeddings:
        maps.append((model.head_weight, None))
    widths = {weight.shape[1] for weight, _ in maps}
    inputs = {width: torch.randn(rows, width, dtype=model.dtype, device=model.device) for width in widths}

    def run() -> None:
        for weight, bias in maps:
            ops.linear(inputs[weight.shape[1]], weight, bias)

    return run


def element_wise(model: CausalLM, rows: int) -> dict[str, Callable[[ModuleType], object]]:
    """Return each op, to be called with what computes it: the ops as they are, or plain torch."""
    config, device, dtype = model.config, model.device, model.dtype

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, dtype=dtype, device=device)

    x, residual, gate_up = random(config.hidden_size), random(config.hidden_size), random(2 * config.intermediate_size)
    stacked = random(config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    slots = torch.arange(rows, device=device)
    heads = Heads(stacked, *model.ropes[0](slots, dtype))
    k, v = torch.zeros(2, rows + 1, config.num_kv_heads, config.head_dim, dtype=dtype, device=device)
    norm = model.norm
    return {
        "norm": lambda by: by.rms_norm(x, norm.weight, norm.eps, norm.offset, residual),
        "activation": lambda by: by.gated_activation(gate_up, config.activation),
        "rotation": lambda by: by.rotate_and_store(heads, k, v, slots, k_scale=None, v_scale=None),
    }


@torch.inference_mode()
def main() -> None:
    """Print a table of steps and ops, and the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, help="a config.json of Transformers; default the shape of Llama-3-8B")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 20, 32, 50, 64, 128, 256, 1024])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    device = check_device(options.device)
    raw = json.loads(options.config.read_text()) if options.config else find_shape("llama-3-8b")
    config = read_config(raw | ({"num_hidden_layers": options.layers} if options.layers else {}))
    model = random_model(config, getattr(torch, options.dtype), device)
    model.pack()

    def seconds(function: Callable[[], object]) -> float:
        return statistics.median(time_calls(function, device, options.repeats))

    table = []
    for rows in options.rows:
        alone, whole = seconds(products(model, rows)), seconds(step(model, rows))
        times = {"rows": rows, "products_ms": alone * 1e3, "step_ms": whole * 1e3}
        times["rest_us_a_layer"] = (whole - alone) / config.num_layers * 1e6
        for name, call in element_wise(model, rows).items():
            for kind, by in (("", ops), ("_plain", plain)):
                times[f"{name}{kind}_us"] = seconds(lambda: [call(by) for _ in range(CALLS)]) / CALLS * 1e6  # noqa: B023
        table.append(times)
    shape = {"config": raw, "layers": config.num_layers, "dtype": options.dtype}
    report("Steps without attention", table, {**shape, "steps": table, "machine": describe_machine(device)})


if __name__ == "__main__":
    main()
