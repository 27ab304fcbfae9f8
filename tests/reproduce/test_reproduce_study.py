"""Studies that end early: what was measured is kept, what failed is told, and the rest is measured the next time."""

import json

import pytest
import torch

from treewise.reproduce.report import Section
from treewise.reproduce.study import Measurement, Study, carry_out, check, read_records

CPU = torch.device("cpu")


def told(results):
    return [Section("Results", json.dumps(dict(results), sort_keys=True))]


def study(*measurements):
    return Study("some", "Some study", measurements, told)


def counted(calls, key, seconds=1.0, **settings):
    """A measurement that counts how often it is made."""

    def run():
        calls.append(key)
        return {"value": len(calls)}

    return Measurement(key, f"measure {key}", seconds, run, settings)


def failing(key, error):
    def run():
        raise error

    return Measurement(key, f"measure {key}", 1.0, run)


def test_a_study_that_was_ended_goes_on_where_it_was(tmp_path):
    calls = []
    first, second, last = (counted(calls, key) for key in "abc")
    broken = failing("b", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        carry_out(study(first, broken, last), tmp_path, CPU)
    assert calls == ["a"] and set(read_records(tmp_path)) == {"a"}
    page = (tmp_path / "report.md").read_text("utf-8")
    assert '"a": {"value": 1}' in page and "not measured: measure c" in page
    (tmp_path / "raw" / "b.json").write_text('{"key": "b", "resu', encoding="utf-8")  # as if the power had gone
    results = carry_out(study(first, second, last), tmp_path, CPU)
    assert calls == ["a", "b", "c"] and results == {key: {"value": n} for n, key in enumerate("abc", 1)}
    assert "not measured" not in (tmp_path / "report.md").read_text("utf-8")


def test_other_settings_are_measured_again(tmp_path):
    calls = []
    for settings in ({"steps": 1}, {"steps": 1}, {"steps": 2}):
        carry_out(study(counted(calls, "a:b", **settings)), tmp_path, CPU)
    assert calls == ["a:b", "a:b"]
    record = json.loads((tmp_path / "raw" / "a-b.json").read_text("utf-8"))
    assert record["settings"] == {"steps": 2} and record["machine"]["versions"]["torch"] and record["study"] == "some"


def test_lack_of_memory_is_a_result_and_other_failures_are_tried_again(tmp_path, capsys):
    lacking, broken = failing("big", torch.OutOfMemoryError("no room")), failing("odd", RuntimeError("odd"))
    calls = []
    results = carry_out(study(lacking, broken, counted(calls, "after")), tmp_path, CPU)
    assert results["big"]["out_of_memory"] is True and "RuntimeError: odd" in results["odd"]["error"]
    assert results["after"] == {"value": 1}
    with pytest.raises(SystemExit):
        check(results)
    check({"big": results["big"], "after": results["after"]})
    page = (tmp_path / "report.md").read_text("utf-8")
    assert "failed: measure big: out of memory" in page and "failed: measure odd: RuntimeError: odd" in page
    capsys.readouterr()
    again = carry_out(study(counted(calls, "big"), counted(calls, "odd"), counted(calls, "after")), tmp_path, CPU)
    assert "1 of 3 measurements to do" in capsys.readouterr().err
    assert calls == ["after", "odd"] and again["big"]["out_of_memory"] and again["odd"] == {"value": 2}


def test_nothing_is_begun_that_would_end_too_late(tmp_path, capsys):
    calls = []
    todo = study(counted(calls, "short"), counted(calls, "long", seconds=600.0), counted(calls, "also", seconds=2.0))
    carry_out(todo, tmp_path, CPU, minutes=1)
    assert calls == ["short", "also"]
    assert "about 10 min, at most 60 s" in capsys.readouterr().err
    assert "not measured: measure long" in (tmp_path / "report.md").read_text("utf-8")
    carry_out(todo, tmp_path, CPU, minutes=0)
    assert calls == ["short", "also"]


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no results"):
        read_records(tmp_path)
