"""Drafters for tests, right, wrong and senseless ones, and engines that they guess for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tiny import VOCABULARY, tiny_llm

from treewise.llm import LLM
from treewise.speculate.drafter import Stem, Step
from treewise.speculate.speculator import Speculator
from treewise.speculate.trees import EMPTY, TokenTree


class Told:
    """Knows what comes, and says so in trees of all shapes: the right path goes through any child, decoys beside it.

    Parameters
    ----------
    answers : sequence of lists of int
        Whole paths.
    depth : int
        Right guesses on a path.
    decoys : int
        Wrong guesses beside each right one; each has wrong ones below it too.
    """

    wants_hidden = False

    def __init__(self, answers: Sequence[Sequence[int]], depth: int = 5, decoys: int = 2) -> None:
        self.answers = [list(answer) for answer in answers]
        self.depth, self.decoys = depth, decoys
        self.draw = random.Random(1)

    def draft(self, stems: Sequence[Stem], size: int, step: Step) -> list[TokenTree]:
        return [self.tree(stem.tokens) for stem in stems]

    def tree(self, path: list[int]) -> TokenTree:
        answers = [answer for answer in self.answers if answer[: len(path)] == path and len(answer) > len(path)]
        rest = answers[0][len(path) :][: self.depth] if answers else []
        tokens: list[int] = []
        parents: list[int] = []
        above = -1
        for token in rest:
            own = [token, *(self.draw.choice([t for t in range(VOCABULARY) if t != token]) for _ in range(self.decoys))]
            self.draw.shuffle(own)
            places = list(range(len(tokens), len(tokens) + len(own)))
            tokens += own
            parents += [above] * len(own)
            for place in places:
                if tokens[place] != token and self.draw.random() < 0.5:
                    tokens.append(token)
                    parents.append(place)
            above = places[own.index(token)]
        return TokenTree.of(tokens, parents)


class Wrong:
    """Is never right."""

    wants_hidden = False

    def __init__(self, told: Told) -> None:
        self.told = told

    def draft(self, stems: Sequence[Stem], size: int, step: Step) -> list[TokenTree]:
        trees = self.told.draft(stems, size, step)
        return [TokenTree.of((tree.tokens + 1) % VOCABULARY, tree.parents) for tree in trees]


class Noise:
    """Guesses anything, now and then nothing."""

    wants_hidden = False

    def __init__(self, seed: int = 0) -> None:
        self.draw = random.Random(seed)

    def draft(self, stems: Sequence[Stem], size: int, step: Step) -> list[TokenTree]:
        trees = []
        for _ in stems:
            nodes = self.draw.choice([0, 1, 5, 300])
            parents = [self.draw.randrange(-1, node) for node in range(nodes)]
            tokens = [self.draw.randrange(VOCABULARY) for _ in parents]
            trees.append(TokenTree.of(tokens, parents, [self.draw.random() for _ in parents]) if nodes else EMPTY)
        return trees


class Rivals:
    """Lets one of several drafters guess for all leaves of a step."""

    wants_hidden = False

    def __init__(self, drafters: Sequence[Any], seed: int = 0) -> None:
        self.drafters = drafters
        self.draw = random.Random(seed)

    def draft(self, stems: Sequence[Stem], size: int, step: Step) -> list[TokenTree]:
        return self.draw.choice(self.drafters).draft(stems, size, step)


def guessing(model: Any, drafter: Any, tree_size: int = 64, adaptive: bool = False, **options: Any) -> LLM:
    """Return an engine of `model` that `drafter` guesses for."""
    llm = tiny_llm(model, **options)
    llm.engine.speculator = Speculator(drafter, llm.engine.kv, tree_size, adaptive)
    return llm
