"""The DeFT paper's tables on a machine without a GPU: exact bytes, honest sums, a report with every part."""

import gzip
import json
import os
from pathlib import Path

import pytest
import torch

from treewise.bench.subject import Subject
from treewise.cli import main
from treewise.replay import Schedule, load_recordings
from treewise.reproduce.deft import attention, published, runs, workloads
from treewise.reproduce.deft.attention import Layer, apart, over_runs
from treewise.reproduce.deft.tables import against_flatten, disagreements, sign
from treewise.reproduce.deft.traffic import count
from treewise.reproduce.deft.utilisation import idle_shares
from treewise.reproduce.deft.workloads import QUICK, SIZES, TITLES, Setup, evenly, mean_steps, samples, with_prompt

SHARED = Path(os.environ.get("TREEWISE_SHARED", Path(__file__).parents[2].parent / "shared")) / "data"
needs_recordings = pytest.mark.skipif(
    not (SHARED / "deft_trees.json.gz").exists(), reason="the recorded trees are not beside the checkout"
)
TREE = [[-30, 0, [1, 2, 3]], [1, 4, []], [1, 7, [4, 5]], [1, 2, []], [8, 9, []], [8, 20, []]]
RECORDED = {
    "reasoning": {task: [TREE, TREE] for task in ("sorting", "document", "keyword", "set")},
    "speculative": {
        "topologies": {str(size): [[rank] for rank in range(size - 2)] + [[0, 0]] for size in SIZES},
        "accepted_lengths": [1, 2, 3, 1, 3],
        "prompt_tokens": 40,
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "deft_trees.json.gz").write_bytes(gzip.compress(json.dumps(RECORDED).encode()))
    return folder


@pytest.fixture(scope="module")
def setup(data):
    return Setup(Subject("shape:tiny"), QUICK, load_recordings(data / "deft_trees.json.gz"))


# ------------------------------------------------------------------------------------------------------------ bytes

SHOWN = {
    "few-shot-20": (1.68, 17.6),
    "few-shot-30": (2.10, 26.4),
    "few-shot-50": (2.94, 44.1),
    "sorting": (12.40, 59.94),
    "document": (10.57, 39.73),
    "keyword": (0.58, 4.68),
    "set": (1.04, 7.01),
    "star-32": (2.954, 93.735),
    "star-64": (2.979, 187.471),
    "star-128": (3.030, 374.942),
    "star-256": (3.131, 749.884),
}
"""Terabytes of keys and values that were published, to the digits given: each once, and by each query."""


@needs_recordings
@pytest.mark.parametrize(
    "workload",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("sorting", "document", "set"))) for name in SHOWN],
)
def test_bytes_of_whole_runs_are_the_published_ones_to_the_digit(workload):
    setup = Setup(Subject("shape:tiny"), QUICK, load_recordings(SHARED / "deft_trees.json.gz"))
    found = count(setup.works(workload), ("radix", "deft:flatten"))
    for method, shown in zip(("deft:flatten", "radix"), SHOWN[workload], strict=True):
        digits = len(str(shown).partition(".")[2])
        assert found[method]["once"] == pytest.approx(shown, abs=0.75 * 10**-digits)  # some are cut, not rounded


@needs_recordings
def test_what_the_paper_leaves_out_of_its_bytes_is_counted():
    setup = Setup(Subject("shape:tiny"), QUICK, load_recordings(SHARED / "deft_trees.json.gz"))
    found = count(setup.works("star-256"), ("deft:flatten",))
    flatten = found["deft:flatten"]
    assert flatten["read"] == pytest.approx(23.63, abs=0.005)  # what the repository's own counter says of node
    assert flatten["partials"] > 3 * flatten["once"] and flatten["scores"] == 0
    few = count(setup.works("few-shot-20"), ("medusa",))["medusa"]
    assert few["scores"] == pytest.approx(published.PARTIAL_TERABYTES["medusa"]["few-shot-20"], abs=0.005)


# --------------------------------------------------------------------------------------------------- sampled runs


def test_sampled_steps_stand_for_all_steps(setup):
    work = setup.works("few-shot-20")[0]
    exact = sum(work.at(step).num_tokens for step in range(1, work.num_steps + 1))
    chosen = samples([work], 4)
    assert sum(weight for _, weight in chosen) == work.num_steps
    assert sum(tree.num_tokens * weight for tree, weight in chosen) == pytest.approx(exact, rel=2e-3)
    trees = setup.works("sorting")
    assert sum(weight for _, weight in samples(trees, 6)) == pytest.approx(mean_steps(trees)) == 20
    assert evenly(3, 10) == [1, 2, 3]
    drafted = setup.works("star-32")[0]
    assert [tree.num_tokens for tree, _ in samples([drafted], drafted.num_steps)] == [
        tree.num_tokens for tree in drafted
    ]


def test_a_longer_prompt_leaves_the_rest_of_a_tree_as_it_was():
    tree = Schedule.from_json(TREE)
    longer = with_prompt(tree, 500)
    assert longer.prompt_tokens == 500 and longer.at(9).length.tolist()[1:] == tree.at(9).length.tolist()[1:]


def test_flash_decoding_holds_copies_and_may_lack_the_memory_for_them(setup, monkeypatch):
    layer = Layer(4, 2, 16, 2, torch.float32, torch.device("cpu"))
    works = [Schedule.few_shot(40, 3, 8)]
    assert apart(works[0].at(8)).num_tokens == 3 * 48

    def full(self, tokens):
        raise torch.OutOfMemoryError(f"{tokens} tokens")

    monkeypatch.setattr(Layer, "make_room", full)
    found = over_runs(layer, works, ("flash_decoding", "radix"), 2, 1)
    assert found["methods"]["flash_decoding"]["out_of_memory"] is True
    assert found["methods"]["radix"]["seconds"] > 0 and found["steps"] == 8
    shown = attention.latency_sections({"attention-few-shot-20": found})
    cells = [row[2].ours for table in shown[0].parts for row in table.rows]
    assert cells[0] == "OOM" and isinstance(cells[1], float)


# -------------------------------------------------------------------------------------------------------- ratios


def test_signs_are_compared_row_by_row():
    assert [sign(*pair) for pair in ((2.0, 1.1), (2.0, 0.9), (1.02, 0.5), (None, 2.0))] == ["✓", "✗", "≈", ""]
    seconds = {"star-32": {"radix": 1.0, "deft:flatten": 2.0, "medusa": 4.0}}
    [(workload, method, ours, said)] = disagreements(seconds, published.ATTENTION_SECONDS)
    assert (workload, method, ours) == ("star-32", "radix", 0.5) and said == pytest.approx(25.73 / 13.15)
    [table] = against_flatten("T", seconds, published.ATTENTION_SECONDS)
    assert [row[-1] for row in table.rows] == ["✓", "✗", ""]  # Medusa, Radix, flatten itself
    assert all(method in runs.texts.REASONS for method in published.ATTENTION_SECONDS if method != "deft:flatten")


def test_what_was_not_run_to_its_end_is_reckoned():
    run = {"complete": False, "forward_ms": {"p50": 5.0}, "step_ms": {"p50": 7.0}, "attention_ms": 2.0}
    results = {
        "run-few-shot-radix": {"few-shot-20": [run]},
        "attention-few-shot-20": {"steps": 400, "methods": {"radix": {"seconds": 0.9}}},
    }
    whole = runs.Totals(results).whole("few-shot-20", "radix")
    assert not whole.measured and whole.forward == pytest.approx(400 * 3e-3 + 0.9)
    assert whole.loop == pytest.approx(400 * 5e-3 + 0.9)
    done = run | {"complete": True, "forward_s": 2.0, "decode_s": 3.0}
    assert runs.Totals({"run-few-shot-radix": {"few-shot-20": [done]}}).whole("few-shot-20", "radix").loop == 3.0
    assert runs.Totals({}).whole("few-shot-20", "radix") is None


def test_idle_processors_are_those_that_wait_for_a_long_item():
    idle, low = idle_shares([10.0] + [1.0] * 90, 100)
    assert idle == pytest.approx(1 - 100 / 1000) and low == pytest.approx(0.9)
    assert idle_shares([1.0] * 300, 100) == (0.0, 0.0)


# ---------------------------------------------------------------------------------------------------- the command


def test_the_command_fills_tables_and_figures_and_goes_on_where_it_was(data, tmp_path, capsys):
    asked = ["reproduce", "deft", "--quick", "--model", "shape:tiny", "--no-text", "--data", str(data)]
    asked += ["--out", str(tmp_path), "--only", "table14,table17,figure13"]
    main(asked)
    said = capsys.readouterr()
    assert said.out.strip() == str(tmp_path / "report.html") and "measurements to do" in said.err
    page = (tmp_path / "report.md").read_text("utf-8")
    for heading in ("Table 12", "Table 14", "Table 17", "Figure 13", "Figure 15"):
        assert f"### {heading}" in page
    assert "Table 5" not in page and "What is missing" not in page
    assert set(TITLES.values()) <= {line.split(" | ")[0].removeprefix("| ") for line in page.splitlines()}
    main(asked)
    assert "0 of " in capsys.readouterr().err
    before = page
    main(["reproduce", "report", str(tmp_path)])
    assert (tmp_path / "report.md").read_text("utf-8").split("\n## ")[1:] == before.split("\n## ")[1:]


def test_whole_requests_of_a_tiny_model(data, tmp_path, monkeypatch):
    monkeypatch.setattr(workloads, "PROMPT", 200)
    monkeypatch.setattr(runs, "ORDER", ("deft:flatten", "radix", "medusa"))
    for module in (workloads, runs):
        monkeypatch.setattr(module, "TOTAL", 300)
    asked = ["reproduce", "deft", "--quick", "--model", "shape:tiny", "--no-text", "--data", str(data)]
    main([*asked, "--out", str(tmp_path), "--only", "table5,table16,protocol"])
    page = (tmp_path / "report.md").read_text("utf-8")
    for heading in ("Table 5: decode latency", "The whole loop", "Radix over flatten, by what is counted"):
        assert f"### {heading}" in page
    records = {path.stem: json.loads(path.read_text("utf-8")) for path in (tmp_path / "raw").glob("run-*.json")}
    assert len(records) == 12 and all("error" not in record["result"] for record in records.values())
    for record in records.values():
        for facts in (run for found in record["result"].values() for run in found):
            assert facts["as_recorded"] is True and facts["steps"] == 4 and facts["attention_ms"] > 0


def test_what_there_is_not_is_refused_by_name(data, tmp_path, capsys):
    for folder, flags, message in (
        (data, ["--only", "table99"], "table99"),
        (tmp_path, [], "deft_trees.json.gz"),
        (data, ["--trees", "0"], "trees"),
    ):
        with pytest.raises(SystemExit):
            main(["reproduce", "deft", "--data", str(folder), "--out", str(tmp_path / "out"), *flags])
        assert message in capsys.readouterr().err
