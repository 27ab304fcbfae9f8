"""Finding answers in texts and comparing them."""

import doctest

import pytest

import treewise.search.answers
from treewise.search.answers import EXTRACTORS, extract_answer, same_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 x 4 = 12 apples. He eats 2, so 12 - 2 = 10.", "10"),
        ("12-2=10", "10"),
        ("It sinks to -3.5 degrees", "-3.5"),
        ("That makes $1,234,567.50!", "1,234,567.50"),
        ("The answer is 7. I checked it 3 times.", "7"),
        ("The answer is: **Paris**.", "Paris"),
        ("The answer is: 9 + 3 = 12.", "12"),
        ("Final Answer: 3/4", "3/4"),
        ("60 * 3 = 180 miles in 3 hours.\n#### 180\nDone in 2 steps.", "180"),
        ("the answer is 5\nNo, the answer is 6", "6"),
        (r"Thus \boxed{\frac{1}{2}}. The answer is 3", r"\frac{1}{2}"),
        (r"An unclosed \boxed{4", "4"),
        ("The answer is", None),
        ("no idea", None),
        ("", None),
    ],
)
def test_answers_are_found(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("12", "12.0", True),
        ("1,200", "$1200", True),
        ("Paris.", " paris", True),
        ("100", "1e2", True),
        ("-3", "3", False),
        ("0.5", "1/2", False),
        ("nan", "NaN", True),
    ],
)
def test_equal_answers_are_equal(one, other, same):
    assert (same_answer(one) == same_answer(other)) is same


def test_other_extractors():
    text = "So 4.\nAnswer: 5 pears\n\n"
    assert {name: extract(text) for name, extract in EXTRACTORS.items()} == {
        "answer": "5",
        "boxed": None,
        "stated": "5",
        "number": "5",
        "line": "Answer: 5 pears",
    }


def test_examples():
    assert doctest.testmod(treewise.search.answers).failed == 0
