"""The benchmark of guesses: every class and drafter has a row, answers must not differ, errors help."""

import json

import pytest

from treewise.bench import speculate as module
from treewise.bench.speculate import PLAIN
from treewise.bench.texts import PROMPTS
from treewise.cli import main


@pytest.fixture
def run(capsys):
    def bench(*arguments):
        words = ["--output-tokens", "12", *map(str, arguments)]
        main(["bench", "speculate", "--model", "shape:tiny", *words])
        captured = capsys.readouterr()
        return json.loads(captured.out.splitlines()[-1]), captured.err

    return bench


def test_every_class_and_drafter_has_a_row(run, tmp_path):
    file = tmp_path / "result.json"
    result, said = run("--prompts", "code,chat", "--drafters", "ngram,ngram:shared", "--json", file, "--tree-size", 8)
    assert json.loads(file.read_text()) == result
    names = [PLAIN, "ngram", "ngram:shared"]
    cases = [f"{kind} {number}" for kind in ("code", "chat") for number in (1, 2)]
    assert [(row["case"], row["engine"]) for row in result["results"]] == [(c, n) for c in cases for n in names]
    for row in result["results"]:
        assert row["note"] is None and row["tokens_per_s"] > 0
        assert row["engine"] != PLAIN or (row["tokens_per_step"] == 1.0 and not row["drafts"])
        assert row["accepted_tokens"] <= row["drafted_tokens"] <= 8 * row["drafts"]
    lines = [(row["prompts"], row["guesses"]) for row in result["classes"]]
    assert lines == [(kind, name) for kind in ("code", "chat", "all") for name in names]
    assert all(row["times plain"] == 1.0 for row in result["classes"] if row["guesses"] == PLAIN)
    assert "times plain" in said


def test_other_tokens_are_noticed(run, monkeypatch):
    answer, calls = module.answer, []

    def forgetful(llm, params, answers, question, seed):
        calls.append(question)
        answers.pop((question.name, seed), None)
        if llm.engine.speculator is not None:
            answers[question.name, seed] = [1, 2, 3]
        return answer(llm, params, answers, question, seed)

    monkeypatch.setattr(module, "answer", forgetful)
    with pytest.raises(RuntimeError, match="other tokens than without guesses"):
        run("--prompts", "chat")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "chat,poems"], "prompts: 'poems' is not one of summarise, edit, code, chat"),
        (["--drafters", "oracle"], "speculate: 'oracle' is not one of ngram, draft:MODEL"),
        (["--tree-size", "0"], "tree_size must be an integer in [1, 256]"),
        (["--output-tokens", "1"], "output_tokens must be an integer of at least 2"),
        (["--repeats", "0"], "repeats must be an integer of at least 1"),
    ],
)
def test_mistakes_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["bench", "speculate", "--model", "shape:tiny", *arguments])
    assert message in capsys.readouterr().err


def test_there_are_prompts_of_each_class():
    assert all(len(set(texts)) >= 2 for texts in PROMPTS.values())
