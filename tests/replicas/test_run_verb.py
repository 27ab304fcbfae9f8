"""`treewise run`: programs found in files, prompts read from files, lines of JSON written."""

from __future__ import annotations

import json
import sys
from io import StringIO

import pytest
from tiny import ChatBytes, tiny_llm, tiny_model

import treewise.llm
from treewise.cli import main
from treewise.cli.run import find_program, read_prompts

MODEL = tiny_model()
SOURCE = """
from helper_of_programs import PARAMS
from treewise import generate


async def program(root, n: int = 2, fails_on: str = ""):
    if fails_on and root.num_tokens == len(fails_on):
        raise RuntimeError("told to")
    return await generate(root.fork(n), PARAMS)


async def other(root):
    return root.num_tokens
"""
HELPER = """
from treewise import SamplingParams

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a program; the model is a tiny one."""
    (tmp_path / "my_program.py").write_text(SOURCE)
    (tmp_path / "helper_of_programs.py").write_text(HELPER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(treewise.llm, "LLM", lambda **_: tiny_llm(MODEL, ChatBytes()))
    return tmp_path


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main(["run", *arguments])
    printed = capsys.readouterr()
    assert exit.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_results_are_lines(folder, capsys):
    main(["run", "my_program.py", "one", "two and more", "--set", "n=3", "--seed", "5"])
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    assert [[len(branch["token_ids"]) for branch in line["value"]] for line in lines] == [[3] * 3] * 2
    assert lines[0]["usage"]["completion_tokens"] == 9 and "tree" not in lines[0]
    assert printed.err == "2 of 2 prompts have a result\n"
    main(["run", "my_program.py", "one", "two and more", "--set", "n=3", "--seed", "5", "--in-flight", "1", "--trees"])
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    texts = [[branch["text"] for branch in line["value"]] for line in lines]
    assert [[branch["text"] for branch in line["value"]] for line in again] == texts
    assert all(line["tree"]["format"] == "treewise.tree" for line in again)


def test_a_file_of_results_is_gone_on_from(folder, capsys):
    (folder / "prompts.txt").write_text("one\n\nthree\nseven\n")
    arguments = ["run", "my_program.py", "--prompts", "prompts.txt", "--output", "out.jsonl", "--set", "fails_on=three"]
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == "out.jsonl: 1 of 3 prompts have a result\n"
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text("utf-8").splitlines()]
    assert [line["index"] for line in lines if "error" in line] == [1, 2]  # both have five tokens
    before = (folder / "out.jsonl").read_bytes()
    with pytest.raises(SystemExit):
        main(arguments)
    assert (folder / "out.jsonl").read_bytes() == before
    capsys.readouterr()
    assert "of other work" in fails(capsys, *arguments[1:-1], "fails_on=four")


def test_trees_are_drawn(folder, capsys):
    main(["run", "my_program.py:other", "one", "--text"])
    assert capsys.readouterr().out.startswith("▸ one")


def test_prompts_are_read(folder, capsys, monkeypatch):
    lines = ['"text"', "[1, 2]", '{"prompt": "p"}', '{"messages": [{"role": "user", "content": "c"}], "more": 1}', ""]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    assert read_prompts(folder / "prompts.jsonl") == ["text", [1, 2], "p", [{"role": "user", "content": "c"}]]
    main(["run", "my_program.py:other", "--prompts", "prompts.jsonl"])
    values = [json.loads(line)["value"] for line in capsys.readouterr().out.splitlines()]
    assert values == [4, 2, 1, len("[user]c~[assistant]")]
    monkeypatch.setattr(sys, "stdin", StringIO("from outside"))
    main(["run", "my_program.py:other", "--chat"])
    assert json.loads(capsys.readouterr().out)["value"] == len("[user]from outside~[assistant]")
    (folder / "prompts.jsonl").write_text('"one"\n{"text": "two"}\n')
    assert "line 2 of prompts.jsonl is neither a text" in fails(capsys, "my_program.py", "--prompts", "prompts.jsonl")
    (folder / "prompts.jsonl").write_text("one\n")
    assert "line 1 of prompts.jsonl is no JSON" in fails(capsys, "my_program.py", "--prompts", "prompts.jsonl")
    assert "texts or a file of them, not both" in fails(capsys, "my_program.py", "a", "--prompts", "prompts.jsonl")


def test_ready_made_programs_run(folder, capsys):
    main(["run", "rollouts", "one", "--set", "widths=[2,2]", "--set", "at=[1]", "--set", "max_tokens=2"])
    [line] = capsys.readouterr().out.splitlines()
    assert [len(trajectory["logprobs"]) for trajectory in json.loads(line)["value"]] == [2] * 4
    assert "strategy rollouts has no such setting" in fails(capsys, "rollouts", "one", "--set", "width=2")


def test_the_program_of_a_file_is_found(folder):
    assert find_program("my_program.py", {})[0].__name__ == "program"
    assert find_program("my_program.py:other", {})[0].__name__ == "other"
    (folder / "single.py").write_text("from my_program import other\nasync def alone(root): pass\n")
    assert find_program("single.py", {})[0].__name__ == "alone"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_program"], "program: 'my_program' is neither a file, as program.py, nor one of best_of_n,"),
        (["none.py"], "program: there is no file none.py"),
        (["my_program.py:nobody"], "has no async function 'nobody'; it has program, other; give my_program.py:NAME"),
        (["helper_of_programs.py"], "has no async function 'program'; it has none"),
        (["my_program.py", "--set", "width=2"], "set: program(root, n: int = 2"),
        (["my_program.py", "--errors", "ignore"], "errors"),
        (["my_program.py", "--in-flight", "0"], "in_flight must be"),
    ],
)
def test_mistakes_are_told_in_one_line(folder, capsys, arguments, message):
    assert message in fails(capsys, *arguments, *([] if len(arguments) == 1 else ["prompt"]))
