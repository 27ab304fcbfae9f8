"""Requests that share beginnings in different ways, for simulations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from treewise.config import check_integer
from treewise.replicas.simulation import Session, Turn

APART = 1 << 20
"""Token ids of one text and of the next are so far apart."""
OWN = 1 << 20
"""Texts from this one on are of sessions, and of nobody else."""


@dataclass(frozen=True)
class Trace:
    """A kind of load.

    Attributes
    ----------
    name, description : str
    make : callable
        Yields sessions without an end, from the numbers of the texts that they share, and a source of random numbers.
    texts : int
        Texts that sessions begin with.
    exponent : float
        The k-th of them is asked for in proportion to ``k ** -exponent`` (Zipf's law).
    clients : int
        Sessions under way at a time, for each replica.
    turns : int
        Of a session.
    """

    name: str
    description: str
    make: Callable[[Iterator[int], np.random.Generator], Iterator[Session]]
    texts: int
    exponent: float = 0.8
    clients: int = 32
    turns: int = 1

    def sessions(self, count: int, seed: int) -> list[Session]:
        """Make so many sessions, the same for the same seed."""
        random = np.random.default_rng(seed)
        weights = np.arange(1, self.texts + 1) ** -self.exponent
        texts = random.choice(self.texts, count, p=weights / weights.sum()).tolist()
        return list(self.make(iter(texts), random))


def _text(number: int, length: int) -> range:
    return range(number * APART, number * APART + length)


def _own(number: int, length: int) -> range:
    return _text(OWN + number, length)


def _about(length: int, random: np.random.Generator) -> int:
    """Draw a length from half to one and a half times of one."""
    return int(random.integers(length // 2, length + length // 2 + 1))


def _documents(texts: Iterator[int], random: np.random.Generator) -> Iterator[Session]:
    for number, text in enumerate(texts):
        yield [Turn((_text(text, 8000), _own(number, _about(100, random))), new_tokens=_about(200, random))]


def _system_prompts(texts: Iterator[int], random: np.random.Generator) -> Iterator[Session]:
    for number, text in enumerate(texts):
        yield [Turn((_text(text, 2000), _own(number, _about(200, random))), new_tokens=_about(200, random))]


def _tree_programs(texts: Iterator[int], random: np.random.Generator) -> Iterator[Session]:
    for number, text in enumerate(texts):
        asked = (_text(text, 4000), _own(number, _about(150, random)))
        yield [Turn(asked, branches=16, new_tokens=_about(128, random))]


def _chats(texts: Iterator[int], random: np.random.Generator) -> Iterator[Session]:
    for number, text in enumerate(texts):
        session = []
        for turn in range(CHAT_TURNS):
            said = _own(number * CHAT_TURNS + turn, _about(800, random))
            pause = float(random.exponential(2.0)) if turn else 0.0
            asked = (said,) if turn else (_text(text, 1000), said)
            session.append(Turn(asked, new_tokens=_about(300, random), pause=pause))
        yield session


def _distinct(texts: Iterator[int], random: np.random.Generator) -> Iterator[Session]:
    for number, _ in enumerate(texts):
        yield [Turn((_own(number, _about(2000, random)),), new_tokens=_about(200, random))]


CHAT_TURNS = 6

TRACES = {
    trace.name: trace
    for trace in (
        Trace("documents", "questions about documents of 8,000 tokens", _documents, 250),
        Trace("chats", "talks of 6 turns, with seconds between them", _chats, 10, 1.0, turns=CHAT_TURNS),
        Trace("tree-programs", "16 branches behind few-shot prompts of 4,000 tokens", _tree_programs, 100),
        Trace("system-prompts", "applications, each with a system prompt of 2,000 tokens", _system_prompts, 40, 1.0),
        Trace("distinct", "prompts of 2,000 tokens that share nothing", _distinct, 1),
    )
}
"""Kinds of load by name."""


def find_trace(name: str) -> Trace:
    """Return a kind of load; ``name:number`` has another number of texts.

    Raises
    ------
    ValueError
        If there is none of that name, or the number is none.
    """
    kind, colon, number = name.partition(":")
    if kind not in TRACES:
        raise ValueError(f"trace: {kind!r} is not one of {', '.join(TRACES)}")
    if not colon:
        return TRACES[kind]
    if not number.isdecimal():
        raise ValueError(f"trace: {name!r} is not of the form {kind}:NUMBER, the number of texts that are shared")
    check_integer("trace: the number of texts", int(number), 1)
    return replace(TRACES[kind], name=name, texts=int(number))
