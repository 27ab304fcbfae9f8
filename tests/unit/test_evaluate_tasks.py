"""Texts that are made up: what is asked is in them, once, where it is said to be."""

import re

import pytest
from tiny import Bytes

from treewise.evaluate.tasks import TASKS, make


def read(tokens):
    return Bytes().decode(tokens)


@pytest.mark.parametrize("name", TASKS)
def test_texts_have_the_length_that_was_asked_for_and_come_again(name):
    one = make(TASKS[name], 3, 700, Bytes())
    assert 600 <= len(one.context) <= 710
    assert make(TASKS[name], 3, 700, Bytes()) == one != make(TASKS[name], 4, 700, Bytes())
    for question in one.questions:
        assert len(question.answer) == len(question.parts) and question.parts == sorted(question.parts)


@pytest.mark.parametrize(("name", "count"), [("passkey", 1), ("niah_single", 1), ("niah_multikey", 4)])
def test_an_answer_stands_in_its_needle_and_nowhere_else(name, count):
    encoded = make(TASKS[name], 1, 900, Bytes())
    text = read(encoded.context)
    assert len(encoded.questions) == count
    for question in encoded.questions:
        needle = read(encoded.context[index] for index in question.needles)
        answer = read(question.answer).strip()
        assert needle in text and answer in needle and answer not in text.replace(needle, "")
        asked = re.findall(r"(pass key|for \w+) is$", read(question.tokens))
        assert asked and asked[0] in needle


def test_variables_lead_back_to_the_value():
    [question] = make(TASKS["vt"], 5, 600, Bytes()).questions
    encoded = make(TASKS["vt"], 5, 600, Bytes())
    needles = read(encoded.context[index] for index in question.needles)
    value = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", needles))
    names = read(question.answer).strip().split(" and VAR ")
    assert len(names) == 3 == len(set(question.parts))
    assert value[names[0]] == re.search(r"value (\d+)\?", read(question.tokens))[1]
    assert [value[name] for name in names[1:]] == names[:-1]


def test_the_most_frequent_words_are_the_answer():
    encoded = make(TASKS["fwe"], 2, 900, Bytes())
    words = read(encoded.context).partition("\n\n")[2].split()
    counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
    answer = re.findall(r"\w+", read(encoded.questions[0].answer))
    assert [word for _, word in counts[:3]] == answer and counts[0][0] > counts[1][0] > counts[2][0] > counts[3][0]
    assert not encoded.questions[0].needles
