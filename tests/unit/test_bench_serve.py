"""The benchmark of KV sparsity: dense beside policies, what memory they take, requests that come by chance."""

import json

import numpy as np
import pytest

import treewise.bench.loads as loads
from treewise.bench.loads import Demand, Load, run_load
from treewise.bench.subject import Subject
from treewise.cli import main
from treewise.sparsity.policy import KVSparsity

POLICY = KVSparsity.named("snapkv", budget=16, window=8)


@pytest.fixture
def run(capsys):
    def bench(*arguments):
        small = {
            "--input-tokens": 64,
            "--output-tokens": 16,
            "--concurrency": "2",
            "--kv-sparsity": "snapkv",
            "--kv-budget": 16,
            "--kv-window": 8,
        }
        flags = small | dict(zip(arguments[::2], arguments[1::2], strict=True))
        words = [str(word) for flag in flags.items() if flag[1] is not None for word in flag]
        main(["bench", "serve", "--model", "shape:tiny", *words])
        captured = capsys.readouterr()
        return json.loads(captured.out.splitlines()[-1]), captured.err

    return bench


def test_dense_stands_beside_every_policy(run, tmp_path):
    file, picture = tmp_path / "result.json", tmp_path / "result.png"
    policies = "novita,dense,snapkv"
    result, said = run(
        *("--concurrency", "1,3", "--kv-sparsity", policies, "--kv-first-full", 1, "--json", file, "--png", picture)
    )
    assert json.loads(file.read_text()) == result and picture.read_bytes().startswith(b"\x89PNG")
    rows = result["results"]
    assert [(row["case"], row["engine"]) for row in rows] == [
        (case, name) for case in ("1 at once", "3 at once") for name in ("dense", "novita", "snapkv")
    ]
    novita = KVSparsity.named("novita", budget=16, window=8, first_full=1)
    assert result["policies"]["novita"] == novita.key and result["bench"] == "serve"
    for row, requests in zip(rows, (1, 1, 1, 3, 3, 3), strict=True):
        assert row["requests"] == requests and row["preemptions"] == 0 and row["prefix_hits"] is None
        assert row["tokens_per_s"] == pytest.approx(16 * requests / row["whole_s"])
        assert 0 < row["ttft_s"]["p50"] <= row["ttft_s"]["p99"] < row["whole_s"]
        assert 0 < row["tpot_ms"]["p50"] <= row["tpot_ms"]["p99"] < row["whole_s"] * 1e3
        # Pages of 16 tokens: 64 of the prompt, and 15 that are decoded have keys.
        assert row["peak_slots"] <= requests * 80
        assert (1 if row["engine"] == "dense" else 0.2) <= row["kv_ratio"] < (1.3 if row["engine"] == "dense" else 1)
    # All of the prompt is there before some of it is given up.
    assert rows[0]["peak_slots"] == 80 and rows[2]["peak_slots"] == 64
    assert "of dense KV" in said and "TTFT p50 s" in said and "hits" not in said


def test_a_cpu_is_asked_for_less_if_nothing_is_said():
    assert [level for _, level, _ in Demand().levels(Subject())] == [1, 2]
    assert [len(load.prompts) for load in Demand(input_tokens=3).loads(Subject(), 100)] == [1, 2]


def test_a_small_pool_holds_more_thinned_requests(run):
    result, _ = run("--concurrency", 6, "--kv-tokens", 240, "--output-tokens", 40, "--num-prompts", 8)
    dense, sparse = result["results"]
    assert dense["preemptions"] > sparse["preemptions"] and result["kv_tokens"] == 240
    assert max(dense["peak_slots"], sparse["peak_slots"]) <= 240
    assert sparse["kv_ratio"] < 0.8 < 1 <= dense["kv_ratio"]
    again, _ = run("--pool-tokens", 240, "--num-prompts", 2)
    assert again["kv_tokens"] == 240, "a pool has two names"


def test_what_is_said_of_memory_is_what_the_pool_counts(monkeypatch):
    monkeypatch.setattr(loads, "LOOK", 1)
    subject = Subject(model="shape:tiny")
    options = {"num_kv_slots": 4096, "kv_sparsity": POLICY, "enable_prefix_caching": False}
    llm = subject.engine(subject.load(), "auto", 3, **options)
    engine, told, step = llm.engine, [], llm.engine.step

    def stepping():
        gains = step()
        told.append((engine.kv.num_slots - engine.kv.pool.num_free, llm.kv_usage))
        return gains

    monkeypatch.setattr(engine, "step", stepping)
    facts = run_load(llm, Load("3 at once", 3, Demand(input_tokens=50).prompts(5, 100, 0, 0), 6), 0)
    told.pop()  # the last step is behind the end
    assert max(slots for slots, _ in told) <= facts["peak_slots"] == engine.kv.peak_slots <= 3 * 64
    live, dense = sum(usage.live_bytes for _, usage in told), sum(usage.dense_bytes for _, usage in told)
    assert facts["kv_ratio"] == live / dense
    assert all(usage.live_slots == slots for slots, usage in told), "nothing is cached"
    assert engine.kv.pool.num_free == engine.kv.num_slots


def test_a_load_that_fails_leaves_nothing_behind(monkeypatch):
    subject = Subject(model="shape:tiny")
    llm = subject.engine(subject.load(), "auto", 2, num_kv_slots=128, enable_prefix_caching=False)
    with pytest.raises(Exception, match="num_kv_slots: the KV pool is too small"):
        run_load(llm, Load("2 at once", 2, [[1] * 60, [2] * 60], 80), 0)
    assert not llm.engine.requests and llm.engine.kv.pool.num_free == llm.engine.kv.num_slots


def test_requests_come_by_chance_at_a_rate(run):
    times = np.diff(Load("", 1, [[1]] * 4000, 2, rate=5.0).arrivals(0))
    assert times.mean() == pytest.approx(0.2, rel=0.1) and times.std() == pytest.approx(0.2, rel=0.1)
    result, _ = run("--rate", "40,1e6", "--num-prompts", 5)
    rows = result["results"]
    assert [row["case"] for row in rows[::2]] == ["40 a second", "1e6 a second"]
    for row in rows:
        last = Load("", 5, [[1]] * 5, 2, rate=float(row["case"].split()[0])).arrivals(0)[-1]
        assert row["requests"] == 5 and row["whole_s"] > last and row["ttft_s"]["p50"] > 0


def test_transformers_beside_ours(run):
    result, _ = run("--against", "transformers", "--num-prompts", 2)
    assert [row["engine"] for row in result["results"]] == ["dense", "snapkv", "transformers"]
    assert all(row["note"] is None for row in result["results"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-sparsity", "snapkv,snapcv"], "policy is 'snapcv'; choose one of"),
        (["--kv-sparsity", "novita"], "kv_sparsity: novita: first_full must be less than the 2 layers there are"),
        (["--kv-sparsity", None], "kv_budget: it is a setting of KV sparsity"),
        (["--kv-budget", "8"], "budget must be an integer of at least 13"),
        (["--rate", "0"], "rate: '0' is not a number of requests a second"),
        (["--rate", "often"], "rate: 'often' is not"),
        (["--rate", "2", "--against", "transformers"], "rate: transformers gets one batch after the other"),
        (["--attention", "radix,auto"], "attention: 'radix,auto' is several methods"),
        (["--pool-tokens", "79"], "kv_tokens must be an integer of at least 80"),
    ],
)
def test_mistakes_name_the_field(capsys, run, arguments, message):
    with pytest.raises(SystemExit):
        run(*arguments)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
