"""Other shapes of models: tables 8, 18, 20 and 21, from single layers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from treewise.bench.measure import time_calls
from treewise.config import ModelConfig
from treewise.layers import Attention, GatedMLP, Linear
from treewise.models.load import load_config
from treewise.replay import Schedule
from treewise.reproduce.deft import published, texts
from treewise.reproduce.deft.attention import Layer, over_runs, typical
from treewise.reproduce.deft.tables import NAMES, sign
from treewise.reproduce.deft.workloads import TITLES, Setup, Work, samples, with_prompt
from treewise.reproduce.report import Cell, Compared, Section, Table, ratio
from treewise.reproduce.study import Measurement, Result, Results

SHAPES = ("codellama-7b", "codellama-34b")
METHODS = ("radix", "deft:node_chunk", "deft:flatten")
PROMPTS = (5000, 8000)
"""Of sorting, beside its own."""


def models(setup: Setup) -> Iterator[Measurement]:
    """Measure both shapes of the paper."""
    scale = setup.scale
    for shape in SHAPES:
        config = load_config(f"shape:{shape}")
        settings = {
            **{"shape": shape, "device": setup.subject.device, "dtype": str(setup.subject.element)},
            **{"samples": scale.samples, "trees": scale.tree_samples, "repeats": scale.repeats},
            **{"share": scale.share},
        }
        wide = config.hidden_size / 4096
        seconds = 12.0 * wide if setup.subject.device == "cuda" else 40.0 * wide * scale.samples / scale.share
        yield Measurement(f"shape-{shape}", f"shape of {shape}", seconds, partial(_measure, setup, config), settings)


def _measure(setup: Setup, config: ModelConfig) -> Result:
    scale = setup.scale
    config = replace(
        config,
        num_heads=config.num_heads // scale.share,
        num_kv_heads=config.num_kv_heads // scale.share,
        intermediate_size=config.intermediate_size // scale.share,
        vocab_size=config.vocab_size // scale.share,
    )
    layer = Layer.of(setup.subject, config)
    trees = [work for work in setup.works("sorting")[: scale.tree_samples] if isinstance(work, Schedule)]
    workloads: dict[str, Sequence[Work]] = {
        "few-shot-30": setup.works("few-shot-30"),
        "sorting": trees,
        "star-64": setup.works("star-64"),
        **{f"sorting-{prompt}": [with_prompt(work, prompt) for work in trees] for prompt in PROMPTS},
    }
    found: Result = {"share": scale.share, "layers": layer.num_layers, "workloads": {}}
    times: dict[int, dict[str, float]] = {}
    for workload, works in workloads.items():
        methods = METHODS if workload in published.MODEL_SPEEDUP["codellama-7b"] else (METHODS[0], METHODS[-1])
        one = over_runs(layer, works, methods, max(1, scale.samples // 3), scale.repeats)
        rows = round(statistics.fmean(tree.num_queries for tree, _ in samples(works, scale.samples)))
        if rows not in times:
            times[rows] = _products(config, layer, rows, scale.repeats)
        found["workloads"][workload] = one | {"rows": rows, "products_s": times[rows]}
    return found


@torch.inference_mode()
def _products(config: ModelConfig, layer: Layer, rows: int, repeats: int) -> dict[str, float]:
    """Time one layer's projections around attention, its feed-forward part, and the output head."""

    def made(module: torch.nn.Module) -> torch.nn.Module:
        module = module.to_empty(device=layer.device).to(layer.dtype)
        for weight in module.parameters():
            weight.normal_(0, 0.02)
        return module

    def timed(call: Any) -> float:
        return typical(time_calls(call, layer.device, repeats), layer.device)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(rows, width, device=layer.device).to(layer.dtype)

    x, heads = draw(config.hidden_size), draw(config.num_heads * config.head_dim)
    seconds = {}
    with torch.device("meta"):
        parts = {
            "ffn": GatedMLP(config),
            "attention": Attention(replace(config, query_key_norm=False), 0),
            "head": Linear(config.hidden_size, config.vocab_size, bias=False),
        }
    for name in list(parts):
        part: Any = made(parts.pop(name))
        if name == "attention":
            seconds["projections"] = timed(partial(part.qkv, x)) + timed(partial(part.output.parts, heads))
        else:
            seconds[name] = timed(partial(part, x))
    return seconds


def sections(results: Results) -> list[Section]:
    """Report tables 8, 18, 20 and 21."""
    found = {shape: one for shape in SHAPES if "workloads" in (one := results.get(f"shape-{shape}", {}))}
    if not found:
        return []
    rows: list[Sequence[Cell]] = []
    for shape, one in found.items():
        for workload, said in published.MODEL_SPEEDUP[shape].items():
            part = one["workloads"][workload]
            speed = _decode_ratio(part, one["layers"])
            ffn = part["products_s"]["ffn"] * one["layers"] * part["steps"]
            shares = [
                Compared(
                    ratio(part["methods"][method].get("seconds"), ffn),
                    published.MODEL_ATTENTION_TO_FFN[shape, method][workload],
                )
                for method in ("radix", "deft:flatten")
            ]
            rows.append([shape, TITLES[workload], Compared(speed, said), sign(speed, said), *shares])
    columns = ["shape", "workload", "decode, Radix over flatten", "sign", "A/F, Radix", "A/F, flatten"]
    tables = [Table("Table 8: model sizes", columns, rows)]
    rows = []
    for shape, one in found.items():
        for prompt, said in published.MODEL_SPEEDUP_BY_PROMPT[shape].items():
            part = one["workloads"]["sorting" if prompt == 1000 else f"sorting-{prompt}"]
            speed = _decode_ratio(part, one["layers"])
            rows.append([shape, prompt, Compared(speed, said), sign(speed, said)])
    columns = ["shape", "prompt tokens", "decode, Radix over flatten", "sign"]
    tables.append(Table("Table 18: sorting by model and prompt length", columns, rows))
    for shape in reversed(SHAPES):
        if shape not in found:
            continue
        rows = []
        for workload in published.MODEL_SPEEDUP[shape]:
            methods = found[shape]["workloads"][workload]["methods"]
            flatten = methods["deft:flatten"].get("seconds")
            for method in METHODS:
                said_s = published.MODEL_ATTENTION_SECONDS[shape][method][workload]
                said = said_s / published.MODEL_ATTENTION_SECONDS[shape]["deft:flatten"][workload]
                ours = methods[method].get("seconds")
                over = ratio(ours, flatten)
                cells: list[Cell] = [
                    Compared(ours, said_s),
                    Compared(over, said),
                    "" if method == "deft:flatten" else sign(over, said),
                ]
                rows.append([TITLES[workload], NAMES[method], *cells])
        columns = ["workload", "method", "attention, s", "over flatten", "sign"]
        name, share = published.MODEL_TABLES[shape].capitalize(), found[shape]["share"]
        note = f"Of a layer's heads, one in {share} was measured; the seconds are of those." if share > 1 else ""
        tables.append(Table(f"{name}: attention latency, {shape}", columns, rows, note))
    return [Section("Other models (tables 8, 18, 20, 21)", texts.MODELS, tables)]


def _decode_ratio(part: Mapping[str, Any], layers: int) -> float | None:
    products = part["products_s"]
    rest = part["steps"] * (layers * (products["ffn"] + products["projections"]) + products["head"])
    seconds = [part["methods"][method].get("seconds") for method in ("radix", "deft:flatten")]
    return None if None in seconds else (rest + seconds[0]) / (rest + seconds[1])
