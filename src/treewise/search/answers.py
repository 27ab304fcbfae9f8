"""Takes the answer out of a text, and tells whether two answers are the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

Extractor = Callable[[str], str | None]
"""Returns the answer that a text gives, None where it gives none."""

NUMBER = re.compile(r"-?\d+(?:,\d{3})+(?:\.\d+)?|-?\d+(?:\.\d+)?(?:/\d+)?")
LONE_NUMBER = re.compile(rf"(?<![\d.])(?:{NUMBER.pattern})")  # a minus sign behind a digit subtracts
STATED = re.compile(r"(?:\banswer\s*(?:is|:|=)|####)\s*(.+)", re.IGNORECASE)


def last_number(text: str) -> str | None:
    r"""Return the last number of a text.

    Examples
    --------
    >>> last_number("3 boxes of 4 are 12 apples; 2 of them cost $1,250.50.")
    '1,250.50'
    """
    for word in reversed(text.split()):
        if numbers := LONE_NUMBER.findall(word):
            return str(numbers[-1])
    return None


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last ``\boxed{...}``, inner braces included.

    Examples
    --------
    >>> last_boxed(r"so \boxed{3}, or rather \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind(r"\boxed{")
    depth = 0
    for place in range(start + len(r"\boxed"), len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len(r"\boxed{") : place].strip()
    return None


def stated_answer(text: str) -> str | None:
    """Return what the last "answer is", "answer:" or "####" of a text announces.

    That is the first number of the sentence, behind an equals sign if there is one; its words where it has no number.

    Examples
    --------
    >>> stated_answer("The answer is 9 + 3 = 12 apples."), stated_answer("Answer: Paris. I am sure.")
    ('12', 'Paris')
    """
    stated = STATED.findall(text)
    if not stated:
        return None
    sentence = re.split(r"[.!?](?:\s|$)", stated[-1], maxsplit=1)[0].strip()
    number = NUMBER.search(sentence.rpartition("=")[2])
    return number[0] if number else sentence.strip(" *:$\"'") or None


def last_line(text: str) -> str | None:
    """Return the last line of a text that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def extract_answer(text: str) -> str | None:
    r"""Return the answer of a worked solution: what is boxed, else what is stated, else the last number.

    Examples
    --------
    >>> extract_answer(r"1 + 1 = \boxed{2}. That took 5 minutes."), extract_answer("3 + 4 makes 7 in all.")
    ('2', '7')
    """
    for extractor in (last_boxed, stated_answer, last_number):
        answer = extractor(text)
        if answer is not None:
            return answer
    return None


EXTRACTORS: dict[str, Extractor] = {
    "answer": extract_answer,
    "boxed": last_boxed,
    "stated": stated_answer,
    "number": last_number,
    "line": last_line,
}


def same_answer(answer: str) -> str:
    """Return a form in which equal answers are equal: numbers by value, text without case and outer punctuation.

    Examples
    --------
    >>> same_answer("1,200.0") == same_answer("$1200"), same_answer("Paris.")
    (True, 'paris')
    """
    text = re.sub(r"\s+", " ", answer).strip(" .,;:!?*$\"'").casefold()
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return text
    return f"{number.normalize():f}" if number.is_finite() else text
