"""Plans for a model on some GPUs: sizes are those of real models, times are those of the floors."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_here import SIZES, on_ranks, save_model
from tiny import Bytes

from treewise.bench.measure import _cell
from treewise.bench.meter import Step
from treewise.bench.steps import Weights
from treewise.cli import main
from treewise.llm import LLM
from treewise.models import load_decoder, read_config
from treewise.models.load import load_config, peek_config
from treewise.models.shapes import SHAPES
from treewise.parallel.follower import load_share
from treewise.planning import (
    COPIED,
    GPUS,
    MULTIPLIED,
    NUM_GPUS,
    OF_FLOOR,
    RUNTIME_BYTES,
    Demand,
    choose,
    empty_share,
    plan,
    step_bytes,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ENGINE = json.loads((RESULTS / "engine_h200.json").read_text("utf-8"))["runs"]
CPU = torch.device("cpu")


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_what_a_rank_has_is_counted_as_it_is(tmp_path, size, changes):
    folder = save_model(tmp_path, intermediate_size=96, **changes)
    shares = [load_decoder(folder)]
    if size > 1:
        shares = on_ranks(size, lambda group: load_share(str(folder), "float32", CPU, group))
    share = empty_share(read_config({**SIZES, **changes}), size, torch.float32)
    counted = sum(weight.nbytes for weight in share.parameters())
    assert share.device == torch.device("meta")
    assert [sum(weight.nbytes for weight in real.parameters()) for real in shares] == [counted] * size
    assert share.config.num_kv_heads == shares[0].config.num_kv_heads == max(1, 2 // size)


def test_a_plan_counts_what_an_engine_tells(tmp_path):
    folder = save_model(tmp_path)
    choice = choose(peek_config(folder), Demand(str(folder), dtype="float32", prompt_tokens=16, new_tokens=16), 1)
    told = LLM(load_decoder(folder), tokenizer=Bytes(), device="cpu", num_kv_slots=64).describe()
    assert choice.weight_bytes == told["weight_bytes"] and choice.kv_bytes_per_token == told["kv_bytes_per_token"]
    eight_bits = replace(Demand(str(folder)), dtype="float32", kv_cache_dtype="fp8_e4m3")
    assert choose(peek_config(folder), eight_bits, 1).kv_bytes_per_token == choice.kv_bytes_per_token // 4


def test_more_ranks_than_kv_heads_have_heads_twice():
    demand = Demand("llama-3-70b", gpus=8)
    per_token = [choice.kv_bytes_per_token for choice in plan(demand).choices]
    assert per_token == [327_680, 163_840, 81_920, 40_960]
    config = replace(peek_config("llama-3-70b"), num_kv_heads=4)
    assert [choose(config, demand, size).kv_bytes_per_token for size in (4, 8)] == [40_960, 40_960]


@pytest.mark.parametrize(
    ("model", "expected"),
    [("llama-3-8b", {1: 0.84e6, 2: 1.8e6}), ("llama-3-70b", {1: 0, 2: 0.34e6, 4: 1.1e6, 8: 2.7e6})],
)
def test_pools_are_those_of_the_page_on_tensor_parallelism(model, expected):
    found = {choice.tensor_parallel_size: choice.kv_tokens for choice in plan(Demand(model, gpus=8)).choices}
    for size, tokens in expected.items():
        assert found[size] == pytest.approx(tokens, rel=0.04)


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(["tiny", "smollm2-135m", "llama-3.2-1b", "llama-3-8b"]),
    gpu=st.sampled_from(list(GPUS)),
    gpus=st.sampled_from(NUM_GPUS),
    prompt_tokens=st.integers(1, 20_000),
    branches=st.integers(1, 200),
    new_tokens=st.integers(1, 2000),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    utilization=st.floats(0.2, 1.0),
)
def test_every_plan_adds_up(model, gpu, gpus, prompt_tokens, branches, new_tokens, dtype, utilization):
    demand = Demand(model, gpus, gpu, prompt_tokens, branches, new_tokens, dtype, gpu_memory_utilization=utilization)
    found = plan(demand)
    fit = [choice for choice in found.choices if choice.refusal is None]
    for choice in found.choices:
        assert choice.tensor_parallel_size * choice.replicas == gpus
        if choice.weight_bytes and choice.kv_tokens:
            share = empty_share(peek_config(model), choice.tensor_parallel_size, getattr(torch, dtype))
            beside = choice.weight_bytes + step_bytes(share, getattr(torch, dtype), 1024) + RUNTIME_BYTES
            page = demand.page_size * choice.kv_bytes_per_token
            left = GPUS[gpu].memory * utilization - beside - choice.kv_tokens * choice.kv_bytes_per_token
            assert -1 < left < page + 1
    for choice in fit:
        assert choice.requests * demand.slots <= choice.kv_tokens and choice.requests * branches <= 1024
        assert choice.step_ms >= choice.floor_ms + choice.sums_ms > 0
        # A full pool decodes no slower than one request after the other on every replica.
        alone = choice.replicas * branches * new_tokens / choice.request_s
        assert choice.most_tokens_per_s >= 0.999 * alone
    assert (found.latency is None) == (found.throughput is None) == (not fit)
    if fit:
        assert found.latency.request_s == min(choice.request_s for choice in fit)
        assert found.throughput.most_tokens_per_s == max(choice.most_tokens_per_s for choice in fit)
    json.dumps(found.to_dict(), allow_nan=False)
    assert len(list(found.rows())) == len(found.choices)


def decode_runs():
    for run in ENGINE:
        kinds = ("samples", "few-shot", "sorting", "document", "keyword", "set")
        if run["model"] == "shape:llama-3-8b" and run.get("workload") in kinds:
            yield from ((run, result) for result in run["results"] if result["engine"] == "auto")


def test_floors_are_those_that_benchmarks_found():
    compared = 0
    for run, result in decode_runs():
        if run["workload"] == "samples" and result.get("floor_s"):
            demand = Demand("llama-3-8b", 1, "h200", run["prompt_tokens"], run["branches"], run["new_tokens"])
            [choice] = plan(demand).choices
            assert choice.floor_ms == pytest.approx(result["floor_s"] * 1e3 / result["steps"], rel=0.01)
            compared += 1
    assert compared >= 3


def test_constants_are_those_that_were_measured():
    of_floor = [result["of_floor"] for _, result in decode_runs()]
    assert len(of_floor) == 41 and pytest.approx(statistics.median(of_floor), abs=0.005) == OF_FLOOR
    rates = [run["rates"] for run in ENGINE if run.get("rates", {}).get("copy_gb_per_s")]
    h200 = GPUS["h200"]
    assert h200.measured.bandwidth == pytest.approx(rates[0]["copy_gb_per_s"] * 1e9, rel=0.005)
    assert h200.measured.matrix == pytest.approx(rates[0]["matrix_tflop_per_s"] * 1e12, rel=0.005)
    assert h200.measured.bandwidth / h200.bandwidth == pytest.approx(COPIED, abs=0.001)
    assert h200.measured.matrix / h200.half == pytest.approx(MULTIPLIED, abs=0.001)


def test_a_step_is_the_larger_of_bytes_and_products():
    demand = Demand("llama-3-8b", gpu="a100-80gb", prompt_tokens=16, branches=1, new_tokens=2, max_num_rows=4096)
    few, many = (choose(peek_config("llama-3-8b"), replace(demand, branches=n), 1).floor_ms for n in (1, 1000))
    weights = Weights.of(empty_share(peek_config("llama-3-8b"), 1, torch.bfloat16))
    rates, origin = GPUS["a100-80gb"].rates(torch.bfloat16)
    assert origin == "data sheet"
    assert few == pytest.approx(1e3 * weights.nbytes / rates.bandwidth, rel=0.001)
    flops = 1000 * (2 * (weights.body + weights.head) + 32 * 17 * weights.pair)
    assert many == pytest.approx(1e3 * flops / (0.9 * rates.matrix), rel=0.001)
    assert weights.floor(Step(rows=1, logit_rows=1), rates) * 1e3 == pytest.approx(few, rel=0.001)


def test_configurations_are_read_from_wherever_they_are(tmp_path):
    folder = save_model(tmp_path / "model")
    assert peek_config(folder) == peek_config(folder / "config.json") == load_config(folder)
    assert peek_config("shape:llama-3-8b") == peek_config("llama-3-8b") == read_config(SHAPES["llama-3-8b"])
    with pytest.raises(FileNotFoundError, match=r"no hub id \(owner/name\), and no shape \(tiny, smollm2-135m"):
        peek_config("nothing")


def test_windows_bound_what_is_read():
    config = peek_config("llama-3-8b")
    within = replace(config, layer_windows=(1024,) * config.num_layers)
    demand = Demand("llama-3-8b", prompt_tokens=16_000, branches=2, new_tokens=100)
    assert choose(within, demand, 1).floor_ms < choose(config, demand, 1).floor_ms
    assert choose(within, demand, 1).request_s < choose(config, demand, 1).request_s
    short = replace(demand, prompt_tokens=500)
    assert choose(within, short, 1) == choose(config, short, 1)


def test_the_verb_prints_a_plan(capsys, tmp_path):
    main(["env", "--plan", "llama-3-70b", "--gpus", "4"])
    out = capsys.readouterr().out
    assert "the weights do not fit" in out and "best throughput" in out and "best latency" in out
    assert "measured" in out and "data sheet" in out and "assumed" in out
    main(["env", "--plan", "smollm2-135m", "--gpus", "2", "--gpu", "rtx4090", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [choice["refusal"] is None for choice in told["choices"]] == [True, False]
    assert told["best_tensor_parallel_size"] == {"latency": 1, "throughput": 1}
    assert told["origins"]["rates"].startswith("0.89 TB/s, 121 TFLOP/s: data sheet, times what an H200 reaches")


def test_the_page_shows_the_plan_as_it_is():
    page = (RESULTS.parents[1] / "docs" / "scale.md").read_text("utf-8")
    assert "--plan llama-3-70b --gpus 8 --prompt-tokens 4000 --branches 50 --new-tokens 400" in page
    demand = Demand("llama-3-70b", gpus=8, prompt_tokens=4000, branches=50, new_tokens=400)
    for row in plan(demand).rows():
        cells = [_cell(value).replace(" x ", " × ") for value in row.values()]
        assert f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |") in page


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpus 2", "gpus: it is a part of a plan; give plan too"),
        ("--plan tiny --gpus 3", "gpus: 3 is not one of 1, 2, 4, 8"),
        ("--plan tiny --gpu h300", "gpu: 'h300' is not one of h200, h100, "),
        ("--plan tiny --dtype int4", "dtype: 'int4' is not one of float32, bfloat16, float16"),
        ("--plan tiny --kv-cache-dtype fp4", "kv_cache_dtype: 'fp4' is not one of auto, fp8_e4m3"),
        ("--plan tiny --branches 0", "branches must be an integer"),
        ("--plan tiny --branches 2000", "branches: 2000 are more than max_num_rows (1024)"),
        ("--plan tiny --prompt-tokens 200000", "new_tokens: paths of 200256 tokens are longer than the model's 131072"),
        ("--plan tiny --gpu-memory-utilization 0", "gpu_memory_utilization is 0"),
        ("--plan nothing", "no shape (tiny, "),
    ],
)
def test_mistakes_are_told_in_one_line(capsys, flags, message):
    with pytest.raises(SystemExit):
        main(["env", *flags.split()])
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err and printed.err.count("\n") == 1
