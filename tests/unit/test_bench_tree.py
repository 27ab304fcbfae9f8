"""The benchmark of whole requests: exact bytes, the steps that were recorded, a last line of JSON, errors that help."""

import gzip
import json
import os
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny import tiny_llm, tiny_model
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from treewise import LLM, SamplingParams
from treewise.bench import compare
from treewise.bench.case import Case
from treewise.bench.meter import Meter, Step, distinct_tokens
from treewise.bench.runs import Watched, random_prompt
from treewise.bench.shares import timed_parts
from treewise.bench.steps import Weights, percentiles, summarise
from treewise.bench.subject import Subject
from treewise.bench.trees import visible_slots
from treewise.bench.workloads import DEFAULTS, clip, find_cases, published_tb
from treewise.cli import main
from treewise.models import CausalLM, read_config
from treewise.models.shapes import SHAPES, NumberTokenizer, find_shape, random_model
from treewise.plan import TreeSpec
from treewise.replay import Schedule

SHARED = Path(os.environ.get("TREEWISE_SHARED", Path(__file__).parents[2].parent / "shared")) / "data"
needs_recordings = pytest.mark.skipif(
    not (SHARED / "deft_trees.json.gz").exists(), reason="the recorded trees are not beside the checkout"
)
TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of a token's keys and values in the tiny shape: two layers, two heads of 16, float32."""
RECORDED = {
    "reasoning": {
        task: [
            [[-6, 0, [1, 2, 3]], [1, 4, []], [1, 7, [4, 5]], [1, 2, []], [8, 9, []], [8, 7, []]],
            [[-3, 0, [1, 2]], [1, 5, []], [1, 3, []]],
        ]
        for task in ("sorting", "document", "keyword", "set")
    },
    "speculative": {
        "topologies": {"5": [[0], [1], [0, 0], [0, 0, 0]]},
        "accepted_lengths": [1, 2, 4, 1, 3],
        "prompt_tokens": 12,
    },
}


@pytest.fixture
def data(tmp_path):
    (tmp_path / "deft_trees.json.gz").write_bytes(gzip.compress(json.dumps(RECORDED).encode()))
    return tmp_path


@pytest.fixture
def run(capsys, data):
    """Run the benchmark on the tiny shape; its last line, read, and what it said on standard error."""

    def bench(*arguments):
        defaults = {"--model": "shape:tiny", "--repeats": 1, "--data": data}
        added = [word for flag, value in defaults.items() if flag not in arguments for word in (flag, value)]
        main(["bench", "tree", *map(str, [*added, *arguments])])
        captured = capsys.readouterr()
        return json.loads(captured.out.splitlines()[-1]), captured.err

    return bench


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """A folder with a random model of two layers and a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    bytes_as_characters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: token for token, character in enumerate(bytes_as_characters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    shape = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=256, eos_token_id=0, bos_token_id=None, **shape, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def kv(row):
    return [round(row[f"{kind}_kv_gb"] * 1e9 / TOKEN) for kind in ("unique", "query")]


def test_shapes_are_those_of_the_models():
    sizes = {"llama-3-8b": 8.03e9, "codellama-7b": 6.74e9, "codellama-34b": 33.7e9, "qwen3-0.6b": 0.596e9}
    for name, number in (sizes | {"smollm2-135m": 0.1345e9, "qwen3-4b": 4.02e9, "llama-3.2-1b": 1.236e9}).items():
        config = read_config(find_shape(name))
        with torch.device("meta"):
            model = CausalLM(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(number, rel=0.005)
    assert all(name in Subject.__doc__ for name in SHAPES)
    with pytest.raises(ValueError, match="shape 'llama' is not one of tiny, smollm2-135m"):
        find_shape("llama")


def test_a_random_model_is_the_same_each_time():
    config = read_config(find_shape("tiny"))
    one, two = (random_model(config, torch.bfloat16, torch.device("cpu")) for _ in range(2))
    for first, second in zip(one.parameters(), two.parameters(), strict=True):
        assert first.dtype == torch.bfloat16 and torch.equal(first, second)
    assert one.norm.weight.eq(1).all() and 0.015 < one.head.weight.float().std() < 0.025
    assert NumberTokenizer(9).encode(NumberTokenizer(9).decode([1, 8])) == [1, 8]


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_distinct_tokens_are_what_some_query_sees(window):
    tree = TreeSpec([-1, 0, 0, 1, -1, 4], [7, 2, 4, 2, 2, 1], [3, 2, 5, 1], [1, 3, 0, 1])
    seen = visible_slots(tree)
    expected = {int(slot) for slots in seen for slot in (slots if window is None else slots[-window:])}
    assert distinct_tokens(tree, window) == len(expected)


def test_samples_count_every_byte(run):
    result, said = run("--prompt-tokens", 40, "--branches", 3, "--new-tokens", 5, "--attention", "radix,deft:node")
    assert [row["engine"] for row in result["results"]] == ["radix", "deft:node"]
    for row in result["results"]:
        assert kv(row) == [sum(40 + 3 * step for step in range(1, 5)), sum(3 * (40 + step) for step in range(1, 5))]
        assert row["as_recorded"] is True and row["steps"] == 4 and row["note"] is None
        assert row["whole_s"] == pytest.approx(row["prefill_s"] + row["decode_s"])
        assert 0 < row["schedule_s"] + row["plan_s"] + row["forward_s"] < row["decode_s"]
        assert row["step_ms"]["p50"] <= row["step_ms"]["p90"] <= row["step_ms"]["p99"] <= row["step_ms"]["max"]
        assert row["tokens_per_s"] == pytest.approx(15 / row["whole_s"])
        assert row["graph_captures"] == row["graph_replays"] == 0
        assert row["floor_s"] is None and row["peak_slots"] == 48 + 3 * 16
    radix, node = result["results"]
    assert radix["read_kv_gb"] == radix["query_kv_gb"] and node["read_kv_gb"] == node["unique_kv_gb"]
    assert radix["times_first"] == 1 and node["times_first"] == pytest.approx(node["whole_s"] / radix["whole_s"])
    assert result["dtype"] == "float32" and result["branches"] == 3 and result["published_kv_tb"] is None
    assert "times first" in said and "of floor" not in said


def test_windows_bound_what_is_counted():
    llm = tiny_llm(tiny_model(windows=(None, 4)), enable_prefix_caching=False)
    [case], _ = find_cases("samples", Path(), prompt_tokens=10, branches=2, new_tokens=4)
    steps = [step for step in Meter(llm).run(case.program, range(1, 11)) if step.rows and not step.prompt]
    token = 2 * 2 * 8 * 4  # of one layer
    for number, step in enumerate(steps, 1):
        assert step.unique_kv == token * ((10 + 2 * number) + (2 * number + 4 - number))
        assert step.query_kv == token * step.pairs == token * (2 * (10 + number) + 2 * 4)
    assert [step.rows for step in steps] == [step.logit_rows for step in steps] == [2, 2, 2]


def test_few_shot_replays_its_schedule(run):
    result, _ = run("--workload", "few-shot", "--prompt-tokens", 20, "--branches", 4, "--new-tokens", 6)
    [row] = result["results"]
    assert row["steps"] == 6 and kv(row) == [sum(20 + 4 * step for step in range(1, 7)), 4 * (6 * 20 + 21)]
    shorter, _ = run(
        "--workload", "few-shot", "--prompt-tokens", 20, "--branches", 4, "--new-tokens", 6, "--max-steps", 2
    )
    assert shorter["results"][0]["steps"] == 2 and shorter["results"][0]["as_recorded"] is True


def test_recorded_trees_branch_and_prune_as_they_were(run, tmp_path):
    file = tmp_path / "result.json"
    result, said = run("--workload", "set", "--json", file, "--attention", "auto")
    assert json.loads(file.read_text()) == result
    assert [row["case"] for row in result["results"]] == ["set 0", "set 1"]
    assert [row["steps"] for row in result["results"]] == [9, 5]
    for row, task in zip(result["results"], RECORDED["reasoning"]["set"], strict=True):
        trees = [Schedule.from_json(task).at(step) for step in range(1, row["steps"] + 1)]
        seen = sum(len(slots) for tree in trees for slots in visible_slots(tree))
        assert kv(row) == [sum(tree.num_tokens for tree in trees), seen] and row["as_recorded"] is True
    [mean] = result["means"]
    assert mean["requests"] == 2 and "mean of 2" in said
    assert mean["whole_s"] == pytest.approx(sum(row["whole_s"] for row in result["results"]) / 2)
    alone, _ = run("--workload", "set", "--trees", 1)
    assert len(alone["results"]) == 1


@pytest.mark.parametrize(("topology", "rows"), [("star", 5), ("real", 5)])
def test_speculation_accepts_as_recorded(run, topology, rows):
    small = ("--prompt-tokens", 12, "--new-tokens", 11, "--tree-size", 5)
    result, _ = run("--workload", "speculation", "--topology", topology, *small)
    [row] = result["results"]
    accepted = [2, 4, 1, 3]  # the first length belongs to the step that made the tree
    prompts = [12 + sum(accepted[:step]) for step in range(5)]
    depths = [1] * 5 if topology == "star" else [1, 2, 2, 3, 4]
    expected = [sum(prompt + rows for prompt in prompts), sum(prompt + depth for prompt in prompts for depth in depths)]
    assert row["steps"] == 5 and kv(row) == expected and row["as_recorded"] is True
    assert row["tokens_per_s"] == pytest.approx(10 / row["whole_s"])


def test_beams_are_as_many_as_were_asked_for(run):
    result, _ = run("--workload", "beam", "--beam-width", 40, "--prompt-tokens", 9, "--new-tokens", 3)
    [row] = result["results"]
    assert row["steps"] == 2 and row["as_recorded"] is None
    assert kv(row)[1] == 40 * (10 + 11) and row["case"] == "beam of 40"


def test_attention_alone(run):
    result, said = run("--against", "radix", "--prompt-tokens", 30, "--branches", 3, "--new-tokens", 4)
    assert [row["engine"] for row in result["results"]] == ["auto", "radix"]
    assert all(row["whole_s"] > 0 for row in result["results"]) and "attention alone" in said
    result, _ = run("--against", "radix", "--workload", "speculation", "--tree-size", 5, "--max-steps", 3)
    assert result["results"][1]["times_first"] > 0


@pytest.mark.parametrize("model", ["shape:tiny", "folder"])
def test_transformers_beside_ours(capsys, tiny_folder, model):
    size = ["--prompt-tokens", "40", "--branches", "3", "--new-tokens", "4", "--repeats", "3"]
    model = tiny_folder if model == "folder" else model
    main(["bench", "tree", "--model", model, "--against", "transformers", *size])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["engine"] for row in result["results"]] == ["auto", "transformers"]
    for row in result["results"]:
        assert row["whole_s"] == sorted(row["whole_s_all"])[1] and len(row["whole_s_all"]) == 3
    assert result["means"][1]["times_first"] > 0 and result["peak_memory_gb"] > 0


def test_vllm_is_asked_for_the_same(run, monkeypatch):
    calls = []

    class FakeLLM:
        def __init__(self, **options):
            config = json.loads((Path(options["model"]) / "config.json").read_text())
            assert config["hidden_size"] == 64 and options["load_format"] == "dummy" and options["max_num_seqs"] == 3
            assert options["max_model_len"] == 34

        def reset_prefix_cache(self):
            calls.append("reset")

        def generate(self, prompts, params, use_tqdm):
            calls.append((len(prompts[0]["prompt_token_ids"]), params.n, params.max_tokens, params.ignore_eos))
            outputs = [SimpleNamespace(token_ids=[0] * params.max_tokens)] * params.n
            return [SimpleNamespace(outputs=outputs) for _ in prompts]

    fake = ModuleType("vllm")
    fake.LLM, fake.SamplingParams, fake.__spec__ = FakeLLM, SimpleNamespace, SimpleNamespace(name="vllm")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    result, _ = run("--against", "vllm", "--prompt-tokens", 30, "--branches", 3, "--new-tokens", 4)
    assert result["results"][1]["engine"] == "vllm" and result["results"][1]["note"] is None
    assert calls == ["reset", (30, 3, 4, True), "reset", (30, 3, 4, True)]


def test_what_fails_is_said_and_the_others_count(monkeypatch):
    def works(case, seed):
        return {"whole_s": 2.0 + seed}

    def fails(case, seed):
        raise MemoryError("too small")

    cases = [SimpleNamespace(name="one"), SimpleNamespace(name="two")]
    rows = compare.measure(cases, {"bad": fails, "good": works}, 3)
    assert [row["note"] for row in rows] == ["MemoryError: too small", None] * 2
    assert rows[1]["whole_s"] == 3 and rows[1]["whole_s_all"] == [2, 3, 4] and rows[1]["times_first"] == 1
    assert compare.notes(rows)[0] == "bad did not run one: MemoryError: too small"
    assert [mean["whole_s"] for mean in compare.means(rows)] == [None, 3]
    assert [line["request"] for line in compare.table(rows, compare.means(rows))][-1] == "mean of 2"
    assert "did not read" in compare.notes([{**rows[1], "as_recorded": False}])[0]
    with pytest.raises(MemoryError):
        compare.measure(cases, {"bad": fails}, 1)


def test_an_engine_that_failed_runs_on(monkeypatch):
    subject = Subject(model="shape:tiny")
    cases, _ = find_cases("samples", Path(), prompt_tokens=20, branches=2, new_tokens=3)
    watched = Watched("auto", subject, subject.load(), cases, None)
    with monkeypatch.context() as patch:
        patch.setattr(watched.meter.llm.engine.runner.model, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            watched.run(cases[0], 0)
    assert watched.run(cases[0], 0)["as_recorded"] is True
    assert not watched.meter.llm.engine.requests


def test_floors_and_shares():
    model = random_model(read_config(find_shape("tiny")), torch.float32, torch.device("cpu"))
    weights = Weights.of(model)
    layers = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128)
    assert weights == Weights(4 * (layers + 256 * 64 + 5 * 64), layers, 256 * 64, 4 * 4 * 16)
    tied = replace(model.config, tie_embeddings=True)
    assert Weights.of(random_model(tied, torch.float32, torch.device("cpu"))) == weights
    prompt = Step(seconds=1.0, rows=9, prompt=True, slots=16)
    decoding = [
        Step(seconds=0.1 * i, plan=0.01, forward=0.05, rows=2, logit_rows=2, unique_kv=10**6) for i in (1, 2, 3)
    ]
    slow = SimpleNamespace(bandwidth=1e9, matrix=1e15)
    floor = (weights.nbytes + 10**6) / 1e9
    assert weights.floor(decoding[0], slow) == pytest.approx(floor)
    busy = SimpleNamespace(bandwidth=1e18, matrix=1e9)
    pairs = replace(decoding[0], pairs=100)
    assert weights.floor(pairs, busy) == pytest.approx((4 * (layers + 256 * 64) + 100 * 256) / 0.9e9)
    facts = summarise([prompt, *decoding, Step(seconds=0.4)], weights, slow)
    assert facts["whole_s"] == pytest.approx(2.0) and facts["prefill_s"] == 1 and facts["decode_s"] == pytest.approx(1)
    assert facts["steps"] == 3 and facts["plan_share"] == pytest.approx(0.03) and facts["peak_slots"] == 16
    assert facts["step_ms"]["p50"] == pytest.approx(200) and facts["unique_kv_gb"] == pytest.approx(3e-3)
    assert facts["of_floor"] == pytest.approx(0.6 / (3 * floor))
    assert facts["forward_of_floor"] == pytest.approx(0.15 / (3 * floor))
    assert percentiles([]) is None


def test_all_products_and_attention_are_timed():
    model = random_model(read_config(find_shape("tiny")), torch.float32, torch.device("cpu"))
    llm = LLM(model, tokenizer=NumberTokenizer(model.config.vocab_size))
    reads = count()
    with timed_parts(lambda: next(reads)) as spent:  # each call takes one tick
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert spent == {"products": 2 * (4 * model.config.num_layers + 1), "attention": 2 * model.config.num_layers}


def test_published_bytes_belong_to_whole_runs():
    settings = DEFAULTS["few-shot"]
    assert published_tb("few-shot", {**settings, "branches": 20}) == (1.68, 17.6)
    assert published_tb("few-shot", {**settings, "branches": 21}) is None
    assert published_tb("few-shot", {**settings, "max_steps": 9}) is None
    assert published_tb("sorting", DEFAULTS["sorting"]) == (12.40, 59.94)
    assert published_tb("sorting", {"trees": 2, "max_steps": None}) is None
    assert published_tb("speculation", {**DEFAULTS["speculation"], "topology": "real"}) is None


def test_a_clipped_schedule_ends_where_it_should():
    schedule = Schedule.from_json(RECORDED["reasoning"]["set"][0])
    for steps in range(1, schedule.num_steps + 1):
        shorter = clip(schedule, steps)
        assert shorter.num_steps == steps
        for step in range(1, steps + 1):
            assert shorter.at(step).length.tolist() == schedule.at(step).length.tolist()


def test_prompts_are_drawn_from_the_vocabulary():
    assert random_prompt(50, 7, 1) == random_prompt(50, 7, 1) != random_prompt(50, 7, 2)
    assert set(random_prompt(500, 7, 0)) == set(range(7))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--branches", "0"], "branches must be an integer of at least 1"),
        (["--new-tokens", "1"], "new_tokens must be an integer of at least 2"),
        (["--repeats", "0"], "repeats must be an integer of at least 1"),
        (["--workload", "sums"], "workload: 'sums' is not one of samples, few-shot, sorting"),
        (
            ["--workload", "set", "--branches", "3"],
            "branches: workload set has no such setting; it has trees, max_steps",
        ),
        (["--workload", "set", "--trees", "3"], "trees must be an integer in [1, 2]"),
        (["--workload", "set", "--data", "nowhere"], "data: nowhere does not hold the recorded trees"),
        (["--workload", "speculation", "--topology", "bush"], "topology: 'bush' is not one of star, real"),
        (["--workload", "speculation", "--topology", "real", "--tree-size", "6"], "tree_size: no real topology has 6"),
        (["--workload", "few-shot", "--against", "transformers"], "against: transformers runs the workload samples"),
        (["--workload", "beam", "--against", "radix"], "workload: the trees of beam of 5000 depend on the model"),
        (["--against", "vllm"], "against: vllm is not installed"),
        (["--attention", "auto,best"], "attention: 'best' is not one of auto, flash_decoding"),
        (["--dtype", "int8"], "dtype: 'int8' is not one of auto, float32"),
        (["--model", "shape:huge"], "model: shape 'huge' is not one of tiny"),
        (["--prompt-tokens", "200000"], "workload: paths of 200032 tokens are longer than the model's context, 131072"),
    ],
)
def test_mistakes_name_the_field_and_the_choices(capsys, run, arguments, message):
    with pytest.raises(SystemExit):
        run(*arguments)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_steps_are_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "steps.png"
    run("--prompt-tokens", 20, "--branches", 3, "--new-tokens", 4, "--attention", "auto,radix", "--png", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_steps_on_a_gpu_have_floors(run):
    size = ("--prompt-tokens", 200, "--branches", 8, "--new-tokens", 12)
    result, said = run("--model", "shape:smollm2-135m", "--device", "cuda", "--attention", "auto,radix", *size)
    assert result["copy_gb_per_s"] > 100 and result["matrix_tflop_per_s"] > 1 and "of floor" in said
    for row in result["results"]:
        assert row["note"] is None and row["as_recorded"] is True
        assert (
            0 < row["floor_s"] < row["forward_s"] <= row["decode_s"] and 1 < row["forward_of_floor"] <= row["of_floor"]
        )


@needs_recordings
@pytest.mark.parametrize("task", ["sorting", "document", "keyword", "set"])
def test_a_real_recording_starts_as_it_was(run, task):
    result, _ = run("--workload", task, "--trees", 1, "--max-steps", 3, "--data", SHARED)
    assert result["results"][0]["as_recorded"] is True


@needs_recordings
@pytest.mark.parametrize("topology", ["star", "real"])
def test_a_real_topology_is_verified(run, topology):
    small = ("--prompt-tokens", 40, "--max-steps", 3, "--tree-size", 32)
    result, _ = run("--workload", "speculation", "--topology", topology, *small, "--data", SHARED)
    assert result["results"][0]["as_recorded"] is True


@needs_recordings
def test_what_the_engine_would_read_is_what_was_published():
    cases, settings = find_cases("speculation", SHARED, tree_size=32)
    assert [case.work.num_steps for case in cases] == [1507]
    once, each = cases[0].kv_tokens()
    paper = 2 * 2 * 32 * 128 * 32 / 1e12
    assert published_tb("speculation", settings) == (round(once * paper, 3), round(each * paper, 3))
    assert isinstance(cases[0], Case) and cases[0].decoded == 6000 - 1016 - 1
