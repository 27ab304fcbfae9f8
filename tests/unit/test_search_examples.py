"""The examples that people copy: files in examples/, and the code in README.md and docs/."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from tiny import tiny_llm, tiny_model

import treewise.llm

ROOT = Path(__file__).parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = load("every_third_step")


@pytest.mark.parametrize("form", ["controller", "program"])
def test_every_third_step_each_leaf_branches_in_two(form):
    stored = []

    async def program(root):
        leaves = await (EXAMPLE.controlled if form == "controller" else EXAMPLE.every_third_step)(root)
        stored.append(sum(len(node.tokens) for node in root.tree.kv.forest))
        return leaves

    llm = tiny_llm(tiny_model(), enable_prefix_caching=False)
    free = llm.engine.kv.pool.num_free
    [result] = llm.run(program, ["Once upon a time"], seed=1)
    assert [len(leaf.token_ids) for leaf in result.value] == [12] * 2**3
    assert [leaf.path for leaf in result.value] == [(0, i, j, k) for i in (0, 1) for j in (0, 1) for k in (0, 1)]
    nodes = result.tree.nodes
    assert [len(node.token_ids) for node in nodes] == [16] + [3] * (1 + 2 + 4 + 8)
    children = [sum(child.parent == node.id for child in nodes) for node in nodes]
    assert sorted(children) == [0] * 8 + [1] + [2] * 7
    # Each common beginning is stored and computed once.
    assert stored == [16 + 3 * 15]
    assert result.tree.usage.completion_tokens == 3 * 15
    llm.engine.check_integrity()
    assert llm.engine.kv.pool.num_free == free


def test_the_demo_draws_a_page_for_each_strategy(monkeypatch, tmp_path, capsys):
    demo = load("demo")
    model = tiny_model()
    monkeypatch.setattr(demo, "LLM", lambda *_, **__: tiny_llm(model))
    monkeypatch.setattr(demo, "FOLDER", tmp_path / "demo")
    assert len(demo.RUNS) >= 3
    short = {"best_of_n": {"n": 2, "max_tokens": 3}, "tot": {"depth": 1, "thought_tokens": 3, "answer_tokens": 3}}
    monkeypatch.setattr(demo, "RUNS", short)
    demo.main()
    out = capsys.readouterr().out
    for name in short:
        assert (tmp_path / "demo" / f"{name}.html").read_text("utf-8").startswith("<!doctype html>")
    assert out.count("tokens/s") == out.count("Answer:") == 2
    assert f"of 2 strategies found {demo.ANSWER}" in out


def blocks(path):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / path).read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", ["README.md", "docs/programs.md"])
def test_the_code_in_the_documents_runs(path, monkeypatch, tmp_path, capsys):
    model = tiny_model()
    monkeypatch.setattr(treewise.llm, "LLM", lambda *_, **options: tiny_llm(model, **options))
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    assert blocks(path)
    for number, block in enumerate(blocks(path), 1):
        exec(compile(block, f"{path}, block {number}", "exec"), namespace)


def test_the_document_shows_the_example_as_it_is():
    text = (ROOT / "docs/programs.md").read_text("utf-8")
    _, controller, program, *_ = (ROOT / "examples/every_third_step.py").read_text("utf-8").split("\n\n\n")
    for shown in (controller, program):
        assert shown in text
        assert len(shown.splitlines()) <= 10
