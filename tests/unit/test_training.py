"""Training of Medusa heads: what they learn from, that they learn, and the verb."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from guesses import guessing
from test_speculate_engine import MODEL, PROMPTS, same
from tiny import VOCABULARY, ChatBytes, dense_states, idle, tiny_llm

from treewise import SamplingParams, training
from treewise.cli import main
from treewise.speculate.medusa import MedusaDrafter, load_heads
from treewise.training import PIECE, TALK, lessons, opening, pieces, read, train

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that goes on by a second with each look at it."""
    ticks = count()
    monkeypatch.setattr(training, "perf_counter", lambda: float(next(ticks)))


@pytest.mark.parametrize("options", [{}, {"page_size": 1}, {"num_kv_slots": 320}], ids=str)
def test_lessons_hold_the_states_of_what_was_read_and_said(options):
    llm = tiny_llm(MODEL, **options)
    taught = list(read(llm, PROMPTS, GREEDY, seconds=10_000, abreast=4))
    assert sorted(lesson.tokens[:-60] for lesson in taught) == sorted(PROMPTS)
    for lesson in taught:
        torch.testing.assert_close(lesson.states, dense_states(MODEL, lesson.tokens)[:-1], atol=1e-3, rtol=1e-3)
    assert not llm.engine.runner.watchers and len(llm.engine.runner.followers) == 1
    idle(llm)


def test_when_time_is_over_lessons_end_and_nothing_is_left():
    llm = tiny_llm(MODEL, max_num_rows=16)
    taught = list(read(llm, PROMPTS, GREEDY, seconds=10))
    assert len(taught) == len(PROMPTS) and max(len(lesson.states) for lesson in taught) > 25
    for lesson in taught:
        expected = dense_states(MODEL, lesson.tokens)[: len(lesson.states)]
        torch.testing.assert_close(lesson.states, expected, atol=1e-3, rtol=1e-3)
    assert not llm.engine.runner.watchers
    idle(llm)


def test_texts_are_cut_in_pieces_and_the_rest_of_the_time_is_talk():
    llm = tiny_llm(MODEL, codec=ChatBytes())
    text = "".join(chr(33 + i % 90) for i in range(600))
    cut = pieces(llm.tokenizer, [text, "short"], seed=0)
    starts = range(0, len(text), PIECE)
    assert sorted(cut) == sorted(llm.tokenizer.encode(own) for own in ["short", *(text[i : i + PIECE] for i in starts)])
    start = opening(llm.tokenizer)
    assert llm.tokenizer.decode(start) == "[user]"
    taught = lessons(llm, [text, "short"], seconds=900)
    assert [lesson.tokens[:-1] in cut for lesson in taught[:4]] == [True] * 4
    assert any(len(lesson.tokens) == len(start) + TALK for lesson in taught[4:])
    for lesson in taught[4:]:
        assert lesson.tokens[: len(start)] == start and len(lesson.tokens) <= len(start) + TALK
    idle(llm)


def dense(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight


def test_heads_learn(tmp_path, monkeypatch):
    """Heads that have seen texts again and again guess them; a random model makes none that others are like."""
    monkeypatch.setattr(training, "RATE", 2e-2)
    monkeypatch.setattr(training, "SEGMENTS", 4)
    llm = tiny_llm(MODEL)
    before = [dense(parameter).clone() for parameter in MODEL.parameters()]
    taught = list(read(llm, PROMPTS[:3], GREEDY, seconds=10_000))
    seen: list[tuple[float, list[float]]] = []
    torch.manual_seed(0)
    heads = train(MODEL, taught, 3, 1, 300, lambda over, loss, right: seen.append((loss, list(right))))
    assert len(seen) == 299 and seen[-1][0] < 0.8 * seen[0][0]
    assert all(last > first + 0.2 for first, last in zip(seen[0][1], seen[-1][1], strict=True))
    assert all(torch.equal(one, dense(other)) for one, other in zip(before, MODEL.parameters(), strict=True))
    heads.save(tmp_path, "tiny")
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    assisted = guessing(MODEL, MedusaDrafter(load_heads(tmp_path, MODEL), VOCABULARY), tree_size=8)
    outputs = assisted.generate(PROMPTS[:3], params)
    same(outputs, tiny_llm(MODEL).generate(PROMPTS[:3], params))
    assert all(output.tree.usage.accepted_length > 2 for output in outputs)
    idle(assisted)


def test_heads_choose_from_the_most_frequent_tokens(monkeypatch):
    monkeypatch.setattr(training, "VOCABULARY", 5)
    taught = [training.Lesson([9, 9, 80, 80, 7], torch.zeros(4, 48)), training.Lesson([80], torch.zeros(0, 48))]
    assert training.frequent(taught, VOCABULARY).tolist() == [0, 1, 7, 9, 80]


def test_the_verb(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("treewise.cli.options.ModelOptions.load", lambda self: tiny_llm(MODEL, codec=ChatBytes()))
    text, out = tmp_path / "text", tmp_path / "heads"
    text.write_text("Once upon a time " * 40)
    main(["train-medusa", "--out", str(out), "--text", str(text), "--minutes", "20", "--heads", "2", "--layers", "2"])
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n" and "the heads guess" in captured.err
    heads = load_heads(out, MODEL)
    assert heads.num_heads == 2 and len(heads.weight) == 2
    assert heads.weight.abs().amax((2, 3)).min() > 0
    for arguments, message in [
        (["--minutes", "0"], "minutes: 0.0 is not above 0"),
        (["--minutes", "0.01"], "minutes: 0.01 are too few"),
        (["--heads", "0"], "heads must be an integer of at least 1"),
    ]:
        with pytest.raises(SystemExit):
            main(["train-medusa", "--out", str(out), *arguments])
        assert message in capsys.readouterr().err
