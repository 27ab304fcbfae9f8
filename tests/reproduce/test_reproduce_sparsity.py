"""The account of KV sparsity, measured again with tiny models: requests, losses, layers, and what the report says."""

from dataclasses import asdict, replace

import pytest
import torch
from tiny import Bytes, tiny_llm, tiny_model

from treewise.bench.subject import Subject
from treewise.cli import main
from treewise.evaluate.study import Study as Comparison
from treewise.reproduce.again import STUDIES
from treewise.reproduce.report import Compared, Figure, Table
from treewise.reproduce.sparsity import maps, protocol, quality, serving, study, tasks
from treewise.reproduce.sparsity.quality import Quality, grid_policies
from treewise.reproduce.sparsity.serving import Cell, Service
from treewise.reproduce.study import carry_out, read_records
from treewise.sparsity.policy import KVSparsity

PUBLISHED = study.published()
SMALL = {
    "tokens": 200,
    "seeds": 2,
    "selection_seeds": 1,
    "new_tokens": 4,
    "branches": 0,
    "modes": ("aware", "agnostic"),
}


@pytest.fixture(scope="module")
def service():
    return Service.scaled(Subject("shape:tiny"), 96, levels=(8, 2), policies=("novita", "snapkv"), rounds=1)


@pytest.fixture(scope="module")
def served(service):
    loaded = tiny_model(windows=(None,) * 6), Bytes()
    return {each.key: each.run() for each in serving.measurements(service, loaded)}


@pytest.fixture
def small_model(monkeypatch):
    model = tiny_model(windows=(None,) * 16, max_positions=2048)
    monkeypatch.setattr(quality, "packed", lambda name: (model, Bytes()))
    monkeypatch.setattr(quality, "load_config", lambda name: model.config)
    return model


def tables(section):
    return {part.title: part for part in section.parts if isinstance(part, Table)}


# ------------------------------------------------------------------------------------------------- requests at a time


def test_requests_are_scaled_with_all_that_goes_with_them(service):
    assert (service.length, service.output_tokens, service.starved_tokens) == (108, 12, 744)
    whole, part = Service(Subject("shape:tiny")), replace(service, input_tokens=1000)
    assert whole.policy("dense") is None
    assert (whole.policy("novita").budget, whole.policy("novita").window, whole.policy("novita").every) == (
        512,
        32,
        256,
    )
    assert (part.policy("novita").budget, part.policy("novita").window, part.policy("novita").every) == (128, 8, 64)
    assert part.policy("snapkv").every is None and part.policy("novita").first_full == 3


def test_what_tells_most_is_measured_first_and_nothing_twice():
    cells = Service(Subject("shape:tiny")).cells(("vllm",))
    told = [(cell.pool, cell.level, cell.engine) for cell in cells]
    assert told[:4] == [(pool, 20, engine) for pool in ("starved", "ample") for engine in ("dense", "novita")]
    assert len(set(told)) == len(told)
    assert ("ample", 5, "dense") not in told  # the starved pool holds five requests
    assert all(engine == "vllm" for _, _, engine in told[-6:])
    assert all(Cell.of(cell.key) == cell for cell in cells) and Cell.of("policies-vt") is None


def test_requests_are_served_dense_and_sparse_in_both_pools(service, served):
    assert list(served) == [cell.key for cell in service.cells()]
    for key, facts in served.items():
        cell = Cell.of(key)
        assert facts["requests"] == cell.level and facts["tokens_per_s"] > 0 and facts["ttft_s"]["p50"] > 0
        assert facts["peak_slots"] <= facts["kv_tokens"]
        assert (facts["policy"] is None) == (cell.engine == "dense")
    assert served["serving-starved-08-snapkv"]["kv_ratio"] < served["serving-starved-08-dense"]["kv_ratio"]
    assert served["serving-ample-08-dense"]["kv_tokens"] > served["serving-starved-08-dense"]["kv_tokens"]


def test_ratios_to_dense_stand_beside_the_published_one(served):
    [section] = serving.sections(served, PUBLISHED)
    versus, everything = tables(section).values()
    compared = {tuple(row[:3]): row[3] for row in versus.rows}
    expected = served["serving-starved-08-novita"]["tokens_per_s"] / served["serving-starved-08-dense"]["tokens_per_s"]
    assert compared["starved", 8, "novita"] == Compared(expected, 1.58)
    assert compared["ample", 8, "novita"].published is None and ("starved", 8, "dense") not in compared
    assert compared["starved", 2, "novita"].published is None  # that pool holds both
    starved, ample = (served[f"serving-{pool}-08-dense"]["tokens_per_s"] for pool in ("starved", "ample"))
    curves = {
        (panel.title, panel.y): panel.curves
        for panel in serving.panels({Cell.of(key): facts for key, facts in served.items()}, ())
    }
    assert curves["starved pool", "output tokens a second"]["dense"][1][1] == starved
    assert curves["ample pool", "output tokens a second"]["dense"][0] == [2, 8]
    assert curves["ample pool", "output tokens a second"]["dense"][1][1] == ample
    assert len(everything.rows) == len(served) and "scaled down" in section.text
    assert not any(column.startswith("vLLM") for column in everything.columns)  # it was asked for whole requests


def test_an_engine_without_room_has_a_row(served):
    short = {**served, "serving-starved-08-novita": {"error": "no room", "out_of_memory": True}}
    [section] = serving.sections(short, PUBLISHED)
    rows = tables(section)["Every engine"].rows
    assert ["starved", 8, "novita", "out of memory"] in [row[:4] for row in rows]


def test_nothing_measured_is_said():
    for section in study.report({}):
        assert "Nothing was measured" in section.text or "not measured" in section.text or section.parts


# ------------------------------------------------------------------------------------------------------------- losses


def test_losses_are_summed_up_from_what_was_kept(small_model, tmp_path):
    compared = Quality("policies", "tiny", Comparison(("novita:window=8",), (0.25, 0.5), ("passkey", "vt"), **SMALL))
    grid = Quality("grid", "tiny", Comparison(grid_policies(16), (0.5, 0.25), ("vt",), **SMALL))
    measurements = [*compared.measurements(), *grid.measurements()]
    made = study.Study("sparsity", study.TITLE, measurements, study.report)
    carry_out(made, tmp_path, torch.device("cpu"))
    results = {key: record["result"] for key, record in read_records(tmp_path).items()}
    assert set(results) == {"policies-passkey", "policies-vt", "grid-vt"}
    _, cells = quality.summary(results, "policies")
    whole = compared.study.run(small_model, Bytes(), lambda *_: None)["results"]
    for cell, other in zip(cells, whole, strict=True):
        assert cell["policy"] == other["policy"] and cell["task"] == other["task"]
        assert cell["kl"] == pytest.approx(other["kl"], rel=1e-3)
        assert cell.get("kept") == pytest.approx(other.get("kept"), rel=1e-3)
    section = quality.policies_section(results, PUBLISHED)
    found = tables(section)
    assert {row[1] for row in found["Policies, aware"].rows} == {"novita:window=8", "random", "streaming", "oracle"}
    assert found.keys() == {"Policies, aware", "Policies, agnostic"}
    assert "above random" in section.text and len([part for part in section.parts if isinstance(part, Figure)]) == 1
    text = (tmp_path / "report.md").read_text()
    assert "Ours, aware: top-1 agreement" in text and (tmp_path / "report.html").exists()
    assert "novita:window=8 has a top-1 agreement, in the window and not" in text


def test_the_grid_has_a_row_for_each_number_of_sparse_layers(small_model):
    assert [quality.full_layers(policy) for policy in grid_policies(30)] == [9, 6, 1]
    grid = Quality("grid", "tiny", Comparison(grid_policies(16), (0.5, 0.25), ("vt",), **SMALL))
    results = {"grid-vt": grid.measure("vt")}
    assert "with 0 and with 5 full layers of 16" in protocol.section(results, PUBLISHED).text
    section = quality.grid_section(results, PUBLISHED)
    published, *ours = tables(section).values()
    assert published.rows[2] == [31, *(score / 0.4517 for score in (0.4476, 0.4403, 0.4310))]
    assert [row[1] for row in ours[0].rows] == [22, 26, 31] and len(ours) == 6
    assert all(row[2] > row[3] for table in ours if "bytes" in table.title for row in table.rows[2:])


# ------------------------------------------------------------------------------------------------------------- layers


def test_a_planted_activation_is_found_and_uniform_attention_is_broad():
    model = tiny_model(max_positions=2048)
    word = Bytes().encode("~")[0]
    with torch.no_grad():
        model.embedding.weight[word, 5] = 5000.0
        model.layers[0].attention.qkv.weight.zero_()  # every score is 0
    facts = maps.look(model, Bytes(), 300)
    count = facts["tokens"]
    text = Bytes().decode([word])
    assert text not in "".join(layer["largest"][0]["word"] for layer in facts["layers"])  # it is not in the text
    first, second = facts["layers"]
    late = range(count // 2, count)
    assert first["sinks"] == pytest.approx(sum(4 / (row + 1) for row in late) / len(late), rel=1e-4)
    assert first["near"] == pytest.approx(sum(32 / (row + 1) for row in late) / len(late), rel=1e-4)
    assert first["spread"] == pytest.approx(0.9, abs=0.02)
    assert first["effective"] == pytest.approx(sum(row + 1 for row in late) / len(late), rel=1e-3)
    assert second["spread"] < first["spread"]
    rows = facts["attention"]["0"]
    assert len(rows) <= maps.SIDE and all(sum(row) == pytest.approx(1, abs=0.02) for row in rows)


def test_the_largest_activations_have_a_place_and_a_word():
    stream = torch.ones((4, 8))
    stream[2, 3], stream[0, 1] = -5000.0, 300.0
    found = maps.activations(stream, [65, 66, 67, 68], Bytes())
    assert [(each["magnitude"], each["token"], each["word"], each["dimension"]) for each in found["largest"][:2]] == [
        (5000.0, 2, "C", 3),
        (300.0, 0, "A", 1),
    ]
    assert found["median"] == 1 and found["massive"] == 1  # 300 is not a thousand medians


def test_layers_with_a_window_of_their_own_are_looked_at():
    facts = maps.look(tiny_model(windows=(16, None), max_positions=2048), Bytes(), 200)
    windowed, whole = facts["layers"]
    assert windowed["near"] == pytest.approx(1, abs=1e-5) and windowed["sinks"] == 0
    assert whole["sinks"] > 0
    [section] = maps.sections({"maps-tiny": {"model": "tiny", **facts}})
    assert [part.title for part in section.parts] == [
        "Layers of tiny",
        "Activations by layer of tiny",
        "Attention by layer of tiny",
        "Concentration of attention by depth",
    ]
    assert all(part.picture for part in section.parts[1:])


# ----------------------------------------------------------------------------------------------------- tasks, protocol


def choices(**config):
    """A task of lm-eval without a download: three questions of three answers."""
    datasets = pytest.importorskip("datasets")
    from lm_eval.api.task import ConfigurableTask

    rows = {
        "question": ["1 + 1 =", "1 + 2 =", "Hello"] * 2,
        "choices": [[" 2", " 3", " four"]] * 6,
        "answer": [0, 1, 2] * 2,
    }

    def load(**_):
        return {"test": datasets.Dataset.from_dict(rows)}

    return ConfigurableTask(
        config={
            "task": "tiny_choices",
            "custom_dataset": load,
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "A long context, of which much can go. " * 3 + "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
            **config,
        }
    )


def test_tasks_of_lm_eval_are_asked_dense_and_sparse():
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'treewise[eval]'")
    sparse = KVSparsity.named("novita", budget=0.25, window=8, first_full=1)
    llms = {"dense": tiny_llm(), "novita, 25% of the prompt": tiny_llm(kv_sparsity=sparse)}
    engines = {name: (lambda llm=llm: llm) for name, llm in llms.items()}
    found = tasks.evaluate(engines, [choices()], limit=5)
    assert found["questions"] == {"tiny_choices": 5}
    assert all(
        list(own) == ["tiny_choices"] and list(own["tiny_choices"]) == ["acc"] for own in found["results"].values()
    )
    assert all(0 <= own["tiny_choices"]["acc"] <= 1 for own in found["results"].values())
    asked = replace(tasks.QUICK_BENCHMARKS[0], tasks=("tiny_choices",))
    section = tasks.section({"tasks-mmlu": {"model": "tiny", **asdict(asked), **found}}, PUBLISHED["account"])
    [table] = section.parts
    assert [row[:3] for row in table.rows] == [[name, "tiny_choices", "acc"] for name in llms]
    assert "LongBench** (the account's table 3" in section.text and "not measured" in section.text


def test_data_that_is_not_there_is_said(monkeypatch):
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'treewise[eval]'")
    monkeypatch.setattr(tasks, "reachable", lambda: False)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = {"task": "no_such_data", "dataset_path": "nobody/has-this", "output_type": "multiple_choice"}
    found = tasks.evaluate({"dense": tiny_llm}, [missing])
    assert "the data is not here, and there is no network" in found["absent"]
    section = tasks.section({"tasks-mmlu": found}, PUBLISHED["account"])
    assert found["absent"] in section.text and not section.parts


def test_compression_is_counted_over_all_layers():
    section = protocol.section({}, PUBLISHED)
    counted, needed = tables(section).values()
    for tokens, window, sparse, held, times in counted.rows:
        assert sparse == tokens / window and held == pytest.approx((3 * tokens + 29 * window) / (32 * tokens))
        assert times == pytest.approx(1 / held)
    assert [row[0::3] for row in needed.rows] == [[7000, 48], [18_000, 124], [30_000, 207]]
    assert "48 tokens of 7,000 and 207 of 30,000" in section.text


def test_a_quick_plan_takes_less_than_five_minutes():
    plan, losses = study.make_plan(("smollm2-135m",), "cpu", quick=True), 0.0
    measurements = serving.measurements(plan.service)
    for compared in (plan.policies, plan.grid):
        texts = compared.selection_seeds * compared.tokens + compared.seeds * compared.trial_tokens
        losses += len(compared.tasks) * texts / quality.RATE
    assert sum(each.seconds for each in measurements) + losses < 240


def test_the_verb_refuses_parts_that_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "sparsity", "--only", "speed"])
    assert "only: 'speed' is not one of serving, policies, grid, maps, tasks" in capsys.readouterr().err
    assert STUDIES["sparsity"] == (study.TITLE, study.report)
