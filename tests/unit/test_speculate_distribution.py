"""A hundred thousand texts drawn with guesses have the distribution of the model: chi-square of whole texts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_sampler import assert_follows

from treewise import SamplingParams
from treewise.sampler import SamplingRow, row_key, sample
from treewise.speculate.draft import Draft
from treewise.speculate.drafter import Stem
from treewise.speculate.trees import EMPTY, TokenTree

VOCABULARY, BEGIN, LENGTH, DRAWS = 5, 7, 3, 100_000
Text = tuple[int, ...]


class Chain:
    """A model whose logits depend on the last two tokens."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCABULARY + 1, VOCABULARY + 1, VOCABULARY, generator=generator)

    def logits(self, text: Text) -> torch.Tensor:
        before, last = (VOCABULARY, VOCABULARY, *text)[-2:]
        return self.table[before, last]


MODEL, OTHER = Chain(0), Chain(1)


def probabilities(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """What a token is drawn with, by the definitions of min-p, then top-k, then top-p."""
    odds = (logits.double() / params.temperature).softmax(-1).numpy()
    odds = np.where(odds >= params.min_p * odds.max(), odds, 0)
    if params.top_k:
        odds = np.where(odds >= np.sort(odds)[-params.top_k], odds, 0)
    odds /= odds.sum()
    order = np.argsort(-odds)
    enough = int((odds[order].cumsum() < params.top_p).sum()) + 1
    odds[order[enough:]] = 0
    return odds / odds.sum()


def expected(params: SamplingParams) -> dict[Text, float]:
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        texts = {
            (*text, token): odds * share
            for text, odds in texts.items()
            for token, share in enumerate(probabilities(MODEL.logits(text), params))
        }
    return texts


def blind(rows: list[SamplingRow]) -> np.ndarray:
    """Guess two tokens of each text at random."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (len(rows), 2))


def knowing(rows: list[SamplingRow]) -> np.ndarray:
    """Guess two tokens as another model draws them with the very noise."""
    first = sample(OTHER.logits(()).expand(len(rows), -1), rows)
    behind = torch.stack([OTHER.logits((token,)) for token in range(VOCABULARY)])
    second = sample(behind[first], [row._replace(position=row.position + 1) for row in rows])
    return torch.stack([first, second], 1).numpy()


def drawn(params: SamplingParams, drafter: Any) -> tuple[Counter[Text], int]:
    """Draw texts, a step with guesses first; gives how often each came, and the right guesses."""
    keys = [row_key(seed, ()) for seed in range(DRAWS)]
    guesses = drafter([SamplingRow(params, key, BEGIN) for key in keys])
    texts, num_right = defaultdict[Text, list[np.ndarray]](list), 0
    for (first, second), seeds in groups(guesses):
        tree = TokenTree.of([first, second, (first + 1) % VOCABULARY], [-1, 0, -1])
        for text, own in step((), params, keys, seeds, tree):
            num_right += (len(text) - 1) * len(own)
            texts[text].append(own)
    for length in range(1, LENGTH):
        for text in [text for text in texts if len(text) == length]:
            for longer, own in step(text, params, keys, np.concatenate(texts.pop(text)), EMPTY):
                texts[longer].append(own)
    return Counter({text: sum(map(len, own)) for text, own in texts.items()}), num_right


def step(text: Text, params: SamplingParams, keys: list[int], seeds: np.ndarray, tree: TokenTree) -> Iterator[Any]:
    """Let a step go on with texts that are alike, and have the same guesses; yields longer ones with their seeds."""
    branch, node = SimpleNamespace(tree=None), SimpleNamespace(end=BEGIN + len(text))
    row = SamplingRow(params, 0, BEGIN + len(text))
    draft = Draft(Stem(branch, node, place=0, room=LENGTH, row=row), tree)  # type: ignore[arg-type]
    positions = [each.position for each in (row, *draft.sampling_rows(range(len(tree))))]
    rows = [SamplingRow(params, keys[seed], position) for seed in seeds.tolist() for position in positions]
    logits = torch.stack([MODEL.logits(text), *(MODEL.logits((*text, *tree.path(n))) for n in range(len(tree)))])
    choices = sample(logits.repeat(len(seeds), 1), rows).view(len(seeds), -1).numpy()
    for tokens, mine in groups(choices):
        right = draft.right(np.array(tokens))
        yield (*text, tokens[0], *(tokens[1 + node] for node in right)), seeds[mine]


def groups(rows: np.ndarray) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield each row that there is, and where."""
    unique, which = np.unique(rows, axis=0, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    places = np.split(order, np.cumsum(np.bincount(which.ravel()))[:-1])
    yield from zip(unique.tolist(), places, strict=True)


def compare(counts: Counter[Text], odds: dict[Text, float]) -> None:
    """Texts that are expected less than five times count as one."""
    seen, shares = np.array([counts[text] for text in odds]), np.array([*odds.values()])
    assert not seen[shares == 0].any()
    rare = shares * DRAWS < 5
    together = [np.append(each[~rare], each[rare].sum()) for each in (seen, shares)]
    assert_follows(*map(torch.from_numpy, together))


@pytest.mark.parametrize(
    ("cuts", "drafter"),
    [
        ({"temperature": 1.3}, blind),
        ({"top_k": 3}, knowing),
        ({"top_p": 0.8}, knowing),
        ({"min_p": 0.25, "top_p": 0.95}, blind),
    ],
    ids=["temperature", "top-k", "top-p", "min-p"],
)
def test_texts_follow_the_model_whatever_is_guessed(cuts, drafter):
    params = SamplingParams(**{"temperature": 0.8} | cuts)
    counts, num_right = drawn(params, drafter)
    assert counts.total() == DRAWS and num_right > DRAWS / 5
    compare(counts, expected(params))
    with pytest.raises(AssertionError):  # so small a difference is seen
        compare(counts, expected(replace(params, temperature=1.06 * params.temperature)))


@pytest.mark.parametrize(
    ("cuts", "kept"),
    [
        ({}, 5),
        ({"top_k": 2}, 2),
        ({"top_p": 0.69}, 2),
        ({"top_p": 0.71}, 3),
        ({"min_p": 0.19}, 4),
        ({"top_k": 2, "top_p": 0.71}, 1),
        ({"min_p": 0.19, "top_p": 0.89}, 3),
    ],
)
def test_the_plain_formulas_keep_what_they_say(cuts, kept):
    odds = probabilities(torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log(), SamplingParams(**cuts))
    assert (odds > 0).sum() == kept and odds.sum() == pytest.approx(1)
