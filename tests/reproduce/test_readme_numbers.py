"""The README says what the kept reports say."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("readme_numbers", ROOT / "benchmarks" / "readme_numbers.py")
readme_numbers = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(readme_numbers)


def test_the_readme_is_what_the_script_writes():
    text = (ROOT / "README.md").read_text("utf-8")
    assert readme_numbers.fill(text) == text
    named = [block[2] for block in readme_numbers.BLOCK.finditer(text)]
    assert sorted(named) == sorted(readme_numbers.BLOCKS)


def test_a_block_is_drawn_from_its_report(tmp_path):
    raw = tmp_path / "deft_h200" / "raw"
    raw.mkdir(parents=True)
    seconds = {"radix": {"seconds": 3.0}, "deft:flatten": {"seconds": 2.0}}
    for workload, times in (("few-shot-20", 1.0), ("star-64", 4.0)):
        methods = seconds | {"radix": {"seconds": 2.0 * times}}
        record = {"study": "deft", "key": f"attention-{workload}", "title": workload, "machine": {"device": "A GPU"}}
        record |= {"result": {"steps": 10, "methods": methods}}
        (raw / f"attention-{workload}.json").write_text(json.dumps(record), encoding="utf-8")
    text = "before\n<!-- numbers: deft -->\nold\n<!-- /numbers -->\nafter\n"
    lines = readme_numbers.fill(text, tmp_path).splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    assert "treewise, A GPU" in lines[2]
    [row] = [line for line in lines if line.startswith("| attention")]
    assert row == "| attention, 2 workloads | 2.04 (1.73 to 2.41) | 2.00 (1.00 to 4.00) | 2 of 2 |"
    assert readme_numbers.fill(text, tmp_path / "nowhere") == text.replace("old\n", "")


def test_dense_and_sparse_requests_are_drawn_from_their_report(tmp_path):
    raw = tmp_path / "sparsity_h200" / "raw"
    raw.mkdir(parents=True)
    asked = {"input_tokens": 4000, "output_tokens": 500, "kv_tokens": 31_024}
    for key, speed, wait in (
        ("starved-05-dense", 800.0, 0.3),
        ("starved-05-novita", 800.0, 0.3),
        ("starved-20-dense", 1000.0, 6.5),
        ("starved-20-novita", 2000.0, 0.41),
        ("ample-20-dense", 1700.0, 0.4),
        ("starved-40-novita", 1900.0, 2.0),
    ):
        record = {"study": "sparsity", "key": f"serving-{key}", "title": key, "machine": {"device": "A GPU"}}
        record |= {"result": {"tokens_per_s": speed, "ttft_s": {"p50": wait}, **asked}}
        (raw / f"serving-{key}.json").write_text(json.dumps(record), encoding="utf-8")
    lines = readme_numbers.fill("<!-- numbers: sparsity -->\n<!-- /numbers -->\n", tmp_path).splitlines()
    assert lines[3:-1] == [
        "| 5, starved pool | 800 | 800 | 1.00 |  | 0.30 s | 0.30 s |",
        "| 20, starved pool | 1,000 | 2,000 | 2.00 | 1.58, RTX 4090 | 6.50 s | 0.41 s |",
    ]


@pytest.mark.parametrize("folder", sorted((ROOT / "docs" / "reports").glob("*/raw")), ids=lambda raw: raw.parent.name)
def test_kept_reports_have_their_pages_and_results(folder):
    page = (folder.parent / "report.html").read_text("utf-8")
    assert "<title>" in page and 'src="figures' not in page
    for file in folder.glob("*.json"):
        assert json.loads(file.read_text("utf-8"))["machine"]["device"] in page
