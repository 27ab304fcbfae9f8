"""The benchmark of many requests: what is counted, what waits, what is shared, errors that help."""

import json

import pytest

from treewise.bench.loads import Load, run_load
from treewise.bench.subject import Subject
from treewise.cli import main


@pytest.fixture
def run(capsys):
    def bench(*arguments):
        small = {"--input-tokens": 40, "--output-tokens": 6, "--concurrency": "2"}
        flags = small | dict(zip(arguments[::2], arguments[1::2], strict=True))
        words = [str(word) for flag in flags.items() for word in flag]
        main(["bench", "throughput", "--model", "shape:tiny", *words])
        captured = capsys.readouterr()
        return json.loads(captured.out.splitlines()[-1]), captured.err

    return bench


def test_every_level_and_method_has_a_row(run, tmp_path):
    file = tmp_path / "result.json"
    result, said = run("--concurrency", "1,3", "--attention", "auto,radix", "--json", file)
    assert json.loads(file.read_text()) == result
    rows = result["results"]
    assert [(row["case"], row["engine"]) for row in rows] == [
        (case, method) for case in ("1 at once", "3 at once") for method in ("auto", "radix")
    ]
    for row, requests in zip(rows, (1, 1, 3, 3), strict=True):
        assert row["requests"] == requests and row["preemptions"] == 0 and row["prefix_hits"] < 0.1
        assert row["tokens_per_s"] == pytest.approx(6 * requests / row["whole_s"])
        assert row["requests_per_s"] == pytest.approx(requests / row["whole_s"])
        assert 0 < row["ttft_s"]["p50"] <= row["ttft_s"]["p99"] < row["whole_s"]
        assert 0 < row["tpot_ms"]["p50"] <= row["tpot_ms"]["max"] < row["whole_s"] * 1e3
    assert rows[1]["times_first"] == pytest.approx(rows[1]["whole_s"] / rows[0]["whole_s"])
    assert "TTFT p50 s" in said and result["dtype"] == "float32"


def test_a_shared_prefix_is_computed_once(run):
    result, _ = run("--shared-prefix-tokens", 32, "--num-prompts", 8, "--concurrency", "1")
    [row] = result["results"]
    assert row["requests"] == 8 and row["prefix_hits"] >= 7 * 32 / (8 * 40)


def test_a_small_pool_makes_trees_give_way(run):
    scarce, _ = run("--concurrency", "4", "--output-tokens", 60, "--kv-tokens", 160, "--num-prompts", 6)
    assert scarce["results"][0]["preemptions"] > 0 and scarce["kv_tokens"] == 160


def test_as_many_run_at_a_time_as_were_asked_for(monkeypatch):
    subject = Subject(model="shape:tiny")
    llm = subject.engine(subject.load(), "auto", 3, num_kv_slots=4096)
    running = []
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (step(), running.append(len(llm.engine.runs)))[0])
    run_load(llm, Load("3 at once", 3, [[i + 1] * 9 for i in range(7)], 5), 0)
    assert max(running) == 3 and not llm.engine.requests
    llm.engine.check_integrity()


def test_transformers_beside_ours(run):
    result, _ = run("--against", "transformers", "--num-prompts", 3)
    theirs = result["results"][1]
    assert theirs["engine"] == "transformers" and theirs["note"] is None
    assert theirs["tokens_per_s"] == pytest.approx(18 / theirs["whole_s"]) and "ttft_s" not in theirs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,0"], "concurrency: '0' is not a number of requests"),
        (["--concurrency", "many"], "concurrency: 'many' is not a number of requests"),
        (["--input-tokens", "0"], "input_tokens must be an integer of at least 1"),
        (["--output-tokens", "1"], "output_tokens must be an integer of at least 2"),
        (["--output-tokens", "200000"], "output_tokens: paths of 200040 tokens are longer"),
        (["--shared-prefix-tokens", "40"], "shared_prefix_tokens must be an integer in [0, 39]"),
        (["--kv-tokens", "45"], "kv_tokens must be an integer of at least 46"),
        (["--num-prompts", "0"], "num_prompts must be an integer of at least 1"),
        (["--repeats", "0"], "repeats must be an integer of at least 1"),
        (["--against", "vllm"], "against: vllm is not installed; pip install vllm"),
        (["--attention", "best"], "attention: 'best' is not one of auto"),
    ],
)
def test_mistakes_name_the_field(capsys, run, arguments, message):
    with pytest.raises(SystemExit):
        run(*arguments)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
