"""The examples that people copy: files in examples/, and the code in README.md and docs/."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from tiny import ChatBytes, tiny_llm, tiny_model

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


@pytest.fixture
def tiny(monkeypatch):
    """Load an example whose model is a tiny one."""
    model = tiny_model()

    def loaded(name):
        example = load(name)
        monkeypatch.setattr(example, "LLM", lambda *_, **__: tiny_llm(model))
        return example

    return loaded


def test_word_problems_count_votes(tiny, monkeypatch, capsys):
    example = tiny("word_problems")
    monkeypatch.setattr(example, "SETTINGS", example.SETTINGS | {"n": 3, "max_tokens": 4})
    example.main()
    out = capsys.readouterr().out
    assert out.count("of the votes") == out.count("tokens/s") == len(example.PROBLEMS)
    assert out.rstrip().endswith(f"of {len(example.PROBLEMS)} are right")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (" 8 * 3 ", [4, 5, 24]),
        ("8 / 4 ", [3, 5, 2]),
        ("3 - 8 ", None),  # below 0
        ("8 / 3 ", None),  # not whole
        ("8 * 8 ", None),  # only one 8 is there
        ("8 x 3 ", None),
    ],
)
def test_the_game_of_24_checks_steps(text, left):
    assert load("game_of_24").step_of([3, 4, 5, 8], text) == left


@pytest.mark.parametrize(
    ("numbers", "worth"), [([24], 1), ([23], 0.1), ([3, 8], 1), ([3, 9], 0.1), ([5, 3, 8, 8], 1), ([1] * 4, 0.1)]
)
def test_the_game_of_24_knows_what_can_be_reached(numbers, worth):
    game = load("game_of_24")
    assert game.worth(numbers) == worth and game.worth(None) == 0


def test_the_game_of_24_plays_what_the_checker_likes(tiny, capsys):
    game = tiny("game_of_24")
    game.main()
    assert f"search: 0 of {len(game.GAMES)} games won" in capsys.readouterr().out

    async def program(root):
        # Steps that a model could have named, in its place.
        words = iter(["8 * 3 ", "5 - 2 ", "9 * 9 ", "3 * 8 "])
        original = game.generate

        async def named(steps, params):
            for step in steps:
                step.append(next(words))

        game.generate = named
        try:
            return await game.play(root, [2, 5, 8], width=2, beam=1)
        finally:
            game.generate = original

    [result] = tiny_llm().run(program, ["x"])
    assert result.value.note == [24]
    assert result.best.text == "5 - 2  3 (left: 3 8)\n3 * 8  24 (left: 24)\n"


def test_the_road_map_knows_its_ways(tiny, monkeypatch, capsys):
    example = tiny("road_map")
    assert [example.way_of(text) for text in (" B > E > F >", " C > F > K > M > A", " D > B", " B > A", "")] == [
        "ABEF",
        "ACFKM",
        "",
        "",
        "A",
    ]
    assert example.reward([" C > F > K > M", " B > E", " B > M", ""]) == pytest.approx([1, 0.4, 0, 0])
    monkeypatch.setattr(example, "SETTINGS", example.SETTINGS | {"iterations": 3, "width": 2})
    example.main()
    assert capsys.readouterr().out.rstrip().endswith("(not found)")


def test_rollouts_are_collected_as_lines(tiny, monkeypatch, tmp_path, capsys):
    example = tiny("collect_rollouts")
    monkeypatch.setattr(example, "SETTINGS", example.SETTINGS | {"widths": (2, 2), "at": (2,), "max_tokens": 4})
    path = tmp_path / "rollouts.jsonl"
    example.main(str(path))
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert 2 * len(example.SUMS) <= len(lines) <= 4 * len(example.SUMS)
    assert {line["reward"] for line in lines} <= {0.0, 1.0}
    assert all(len(line["logprobs"]) == len(line["token_ids"]) for line in lines)
    assert f"{len(lines)} trajectories" in capsys.readouterr().out


def test_many_rollouts_go_on_where_they_were_left(tiny, monkeypatch, tmp_path, capsys):
    example = tiny("many_rollouts")
    monkeypatch.setattr(example, "SETTINGS", example.SETTINGS | {"widths": (2, 2), "at": (2,), "max_tokens": 4})
    monkeypatch.setattr(example, "NUMBERS", (2, 3))
    path = tmp_path / "rollouts.jsonl"
    example.main(str(path))
    lines = path.read_bytes().splitlines(keepends=True)
    said = capsys.readouterr().out
    count = sum(len(json.loads(line)["value"]) for line in lines)
    assert f"{count} trajectories of 4 prompts" in said and 8 <= count <= 16
    path.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    example.main(str(path))
    assert capsys.readouterr().out == said and path.read_bytes().splitlines(keepends=True)[:2] == lines[:2]


PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


LIBRARIES = {"docs/libraries.md": ("treequest", "reasoners")}


def blocks(path):
    """Python code of a page; a comment right before it says why a block is not run."""
    block = r"(<!-- not run: .+? -->\n)?^```python\n(.*?)^```"
    found = re.findall(block, (ROOT / path).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [code for reason, code in found if not reason]


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path)])
def test_the_code_in_the_documents_runs(path, monkeypatch, tmp_path, capsys):
    for library in LIBRARIES.get(path, ()):
        pytest.importorskip(library)
    model = tiny_model(windows=(None,) * 4, max_positions=4096)
    monkeypatch.setattr(treewise.llm, "LLM", lambda *_, **options: tiny_llm(model, ChatBytes(), **options))
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    for number, block in enumerate(blocks(path), 1):
        exec(compile(block, f"{path}, block {number}", "exec"), namespace)


def test_the_document_shows_the_example_as_it_is():
    text = (ROOT / "docs/programs.md").read_text("utf-8")
    _, controller, program, *_ = (ROOT / "examples/every_third_step.py").read_text("utf-8").split("\n\n\n")
    for shown in (controller, program):
        assert shown in text
        assert len(shown.splitlines()) <= 10
