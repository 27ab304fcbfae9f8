"""Texts with something hidden in them, and questions about it: made up from a seed, no files."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from treewise.models.tokenizer import Tokenizer

PEOPLE = "baker sailor teacher farmer doctor painter gardener driver clerk miller judge tailor weaver singer"
DEEDS = "carried found sold painted repaired borrowed counted watched cleaned moved measured hid wrapped"
THINGS = "basket lamp wagon ladder window table bottle clock letter map rope kettle mirror drum bucket coat"
PLACES = (
    "near the river, behind the church, at the market, on the hill, by the old bridge, in the harbour, beside the mill"
    ", under the oak, in front of the school"
)
TIMES = (
    "In the morning, After the rain, On Monday, Late in the evening, During the winter, Before noon, In the spring, "
    "Once a week"
)
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True)
class Question:
    """What is asked about a text.

    Attributes
    ----------
    text : str
        Stands behind the text, and ends where the answer begins.
    answer : tuple of str
        Parts of the answer, each of which can be right or wrong by itself.
    needles : tuple of int
        The pieces of the text that the answer is in.
    """

    text: str
    answer: tuple[str, ...]
    needles: tuple[int, ...] = ()


@dataclass(frozen=True)
class Instance:
    """A text and questions about it.

    Attributes
    ----------
    pieces : tuple of str
        The text is all of these in a row.
    questions : tuple of Question
        At least one.
    """

    pieces: tuple[str, ...]
    questions: tuple[Question, ...]


class EncodedQuestion(NamedTuple):
    """A `Question` in tokens.

    Attributes
    ----------
    tokens : list of int
    answer : list of int
    parts : list of int
        Of each token of the answer, the part that it belongs to.
    needles : list of int
        Indices of the context's tokens that the answer is in.
    """

    tokens: list[int]
    answer: list[int]
    parts: list[int]
    needles: list[int]


class Encoded(NamedTuple):
    """An `Instance` in tokens."""

    context: list[int]
    questions: list[EncodedQuestion]


def encode(instance: Instance, tokenizer: Tokenizer) -> Encoded:
    """Turn an instance into tokens piece by piece, so that it is known which tokens are the needle's."""
    context: list[int] = []
    places: list[range] = []
    for index, piece in enumerate(instance.pieces):
        start = len(context)
        context += tokenizer.encode(piece, add_special_tokens=index == 0)
        places.append(range(start, len(context)))
    questions = []
    for question in instance.questions:
        parts = [tokenizer.encode(part, add_special_tokens=False) for part in question.answer]
        questions.append(
            EncodedQuestion(
                tokenizer.encode(question.text, add_special_tokens=False),
                [token for part in parts for token in part],
                [index for index, part in enumerate(parts) for _ in part],
                [token for needle in question.needles for token in places[needle]],
            )
        )
    return Encoded(context, questions)


def sentences(draw: random.Random) -> Iterator[str]:
    """Yield sentences about nothing in particular, a space before each, without end."""
    times, places = TIMES.split(", "), PLACES.split(", ")
    while True:
        who, deed, thing = (draw.choice(words.split()) for words in (PEOPLE, DEEDS, THINGS))
        yield f" {draw.choice(times)} the {who} {deed} the {thing} {draw.choice(places)}."


class Needle(NamedTuple):
    """A piece that is hidden; `group`, from 0 on, says whose question it answers."""

    text: str
    group: int = 0


def hide(
    draw: random.Random, lead: str, needles: Sequence[Needle], length: Callable[[str], int], tokens: int
) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Spread needles, in their order, over a text of about so many tokens.

    Returns
    -------
    pieces : tuple of str
    places : list of tuple of int
        For each group, in which pieces its needles are.
    """
    room = tokens - length(lead) - sum(length(needle.text) for needle in needles)
    filler: list[str] = []
    for sentence in sentences(draw):
        room -= length(sentence)
        if room < 0:
            break
        filler.append(sentence)
    cuts = sorted(draw.randint(0, len(filler)) for _ in needles)
    pieces = [lead]
    places: list[list[int]] = [[] for _ in {needle.group for needle in needles}]
    for needle, start, end in zip(needles, [0, *cuts], cuts, strict=False):
        pieces += filler[start:end]
        places[needle.group].append(len(pieces))
        pieces.append(needle.text)
    pieces += filler[cuts[-1] if cuts else 0 :]
    return tuple(pieces), [tuple(place) for place in places]


Length = Callable[[str], int]
"""Counts the tokens of a text."""


def passkey(draw: random.Random, tokens: int, length: Length) -> Instance:
    """Hide a number that is announced as what to remember (Mohtashami and Jaggi, 2023, arXiv 2305.16300)."""
    key = str(draw.randrange(10_000, 100_000))
    needle = f" The pass key is {key}. Remember it. {key} is the pass key."
    lead = "There is important information hidden in the text below. Find it and remember it.\n\n"
    pieces, [places] = hide(draw, lead, [Needle(needle)], length, tokens)
    return Instance(pieces, (Question("\n\nWhat is the pass key? The pass key is", (f" {key}",), places),))


def needles(draw: random.Random, tokens: int, length: Length, *, num_keys: int) -> Instance:
    """Hide numbers of 32 hexadecimal digits under words (RULER's ``niah``, Hsieh et al., 2024, arXiv 2404.06654)."""
    keys = draw.sample(THINGS.split(), num_keys)
    values = [str(uuid.UUID(int=draw.getrandbits(128))) for _ in keys]
    hidden = [
        Needle(f" The special magic number for {key} is {value}.", group)
        for group, (key, value) in enumerate(zip(keys, values, strict=True))
    ]
    lead = "Some special magic numbers are hidden in the text below. Remember them.\n\n"
    pieces, places = hide(draw, lead, hidden, length, tokens)
    questions = [
        Question(
            f"\n\nWhat is the special magic number for {key}? The special magic number for {key} is",
            (f" {value}",),
            place,
        )
        for key, value, place in zip(keys, values, places, strict=True)
    ]
    draw.shuffle(questions)  # or the first question would always be about what comes first
    return Instance(pieces, tuple(questions))


def variable_tracking(draw: random.Random, tokens: int, length: Length, *, hops: int = 2) -> Instance:
    """Hide assignments of variables to each other, of which one has a value (RULER's ``vt``)."""
    names = ["".join(draw.choices(string.ascii_uppercase, k=3)) for _ in range(hops + 1)]
    value = str(draw.randrange(10_000, 100_000))
    sources = [value, *(f"VAR {name}" for name in names)]
    hidden = [Needle(f" VAR {name} = {source}.") for name, source in zip(names, sources, strict=False)]
    lead = "Variable assignments are hidden in the text below. Remember them.\n\n"
    pieces, [places] = hide(draw, lead, hidden, length, tokens)
    question = f"\n\nWhich variables have the value {value}? The variables with the value {value} are VAR"
    answer = (f" {names[0]}", *(f" and VAR {name}" for name in names[1:]))
    return Instance(pieces, (Question(question, answer, places),))


def frequent_words(draw: random.Random, tokens: int, length: Length, *, exponent: float = 2.0) -> Instance:
    """Ask for the words that come most often in a list of made-up ones (RULER's ``fwe``), by frequency.

    The word of rank ``r`` comes in proportion to ``r ** -exponent``.
    """
    words: list[str] = []
    while len(words) < 100:
        word = "".join(draw.choice(CONSONANTS) + draw.choice(VOWELS) for _ in range(3))
        if word not in words:
            words.append(word)
    lead = "Read the coded text below and count its words.\n\n"
    weights = [(rank + 1) ** -exponent for rank in range(len(words))]
    room = tokens - length(lead)
    unit = room / sum(weight * length(f" {word}") for weight, word in zip(weights, words, strict=True))
    listed = [word for weight, word in zip(weights, words, strict=True) for _ in range(round(unit * weight))]
    draw.shuffle(listed)
    first, second, third = words[:3]
    question = '\n\nWhich three words come most often in the coded text above? They are "'
    return Instance(
        (lead, "".join(f" {word}" for word in listed)),
        (Question(question, (first, f'", "{second}', f'", "{third}')),),
    )


def text(draw: random.Random, tokens: int, length: Length) -> Instance:
    """Let a text go on that hides nothing; a check of sanity only."""
    pieces, _ = hide(draw, "", [], length, tokens)
    more = sentences(draw)
    return Instance(pieces, (Question(next(more), (next(more) + next(more),)),))


Task = Callable[[random.Random, int, Length], Instance]

TASKS: dict[str, Task] = {
    "passkey": passkey,
    "niah_single": partial(needles, num_keys=1),
    "niah_multikey": partial(needles, num_keys=4),
    "vt": variable_tracking,
    "fwe": frequent_words,
    "text": text,
}
"""By name: what makes an instance of about so many tokens from a random generator."""

SANITY = "text"
"""The task that counts for no result over all tasks."""


def make(task: Task, seed: int, tokens: int, tokenizer: Tokenizer) -> Encoded:
    """Make an instance of a task in a model's tokens; the same for the same task, seed and length."""

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return encode(task(random.Random(seed), tokens, length), tokenizer)
