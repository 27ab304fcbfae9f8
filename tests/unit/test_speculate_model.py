"""A smaller model as a drafter: its keys follow the engine's slots whatever happens to them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from guesses import guessing
from test_speculate_engine import GREEDY, MODEL, PROMPTS, same, wild
from tiny import dense_logits, idle, tiny_llm, tiny_model

from treewise import SamplingParams, Speculation, generate
from treewise.llm import LLM
from treewise.speculate import drafters, sprouts
from treewise.speculate.model import ModelDrafter
from treewise.speculate.sprouts import DEPTH
from treewise.speculate.trees import TokenTree


def noisy(scale: float, layers: int = 2) -> Any:
    """A model that is nearly the tiny one, with more layers or fewer perhaps."""
    other = tiny_model(windows=(None,) * layers)
    generator = torch.Generator().manual_seed(1)
    for parameter in other.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * parameter.std())
    return other


def assisted(smaller: Any, tree_size: int = 64, chunk: int | None = None, **options: Any) -> LLM:
    llm = guessing(MODEL, None, tree_size, **options)
    engine = llm.engine
    engine.speculator.drafter = ModelDrafter(smaller, engine.runner, chunk or engine.scheduler.max_num_rows)
    return llm


SAMPLED = [
    GREEDY,
    SamplingParams(n=3, max_tokens=30, temperature=0.6),
    SamplingParams(n=2, max_tokens=25, temperature=1.1, top_p=0.8, frequency_penalty=0.3, logprobs=2),
    SamplingParams(n=2, max_tokens=30, temperature=0.9, stop=["e", "<", "ab"], min_tokens=3, top_k=9),
]


OPTIONS = [{}, {"page_size": 1}, {"num_kv_slots": 240}, {"max_num_rows": 9}, {"chunk": 9}, {"looks_ahead": True}]


@pytest.mark.parametrize(
    ("options", "scale", "layers"),
    [*((options, 0.1, 2) for options in OPTIONS), ({}, 0.0, 2), ({}, 0.0, 1), ({"page_size": 1}, 3.0, 3)],
    ids=str,
)
def test_what_is_decoded_is_what_plain_decoding_gives(options, scale, layers):
    for params in SAMPLED:
        llm = assisted(noisy(scale, layers), **options)
        same(llm.generate(PROMPTS[1:6], params), tiny_llm(MODEL).generate(PROMPTS[1:6], params))
        idle(llm)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_model_itself_guesses_right_as_deep_as_it_goes_on(page_size, temperature, monkeypatch):
    monkeypatch.setattr(sprouts, "WORTH", 0.0)
    params = SamplingParams(temperature=temperature, max_tokens=46, ignore_eos=True)
    llm = assisted(noisy(0.0), page_size=page_size)
    [output] = llm.generate([PROMPTS[2]], params)
    usage = output.tree.usage
    # In a step one token and all guesses on one path; the last step has one token left.
    assert usage.accepted_length == DEPTH + 1 or usage.accepted_tokens == 40
    assert usage.steps == -(-46 // (DEPTH + 1))
    idle(llm)


def test_sampled_tokens_are_guessed_with_their_own_noise(monkeypatch):
    """With the noise that the tokens are drawn with, a model that is nearly the same is nearly always right."""
    monkeypatch.setattr(sprouts, "WORTH", 0.0)
    monkeypatch.setattr(sprouts, "WIDTH", 1)
    lengths = []
    for temperature in (0.0, 2.0):
        params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True)
        outputs = assisted(noisy(0.002)).generate(PROMPTS, params)
        lengths.append(sum(o.tree.usage.accepted_length for o in outputs) / len(outputs))
    assert min(lengths) > 5


def test_what_was_computed_is_not_computed_again():
    """Prompts once, whatever forks; then the pending token and at most one guess of the last level for each branch."""
    llm = assisted(noisy(0.05))
    rows: list[int] = []
    forward = llm.engine.speculator.drafter.runner.forward
    llm.engine.speculator.drafter.runner.forward = lambda batch, *rest: (
        rows.append(sum(span.end - span.start for span in batch.spans)),
        forward(batch, *rest),
    )[1]

    async def program(root):
        branches = await generate(root.fork(3), SamplingParams(max_tokens=8, temperature=0.9, ignore_eos=True))
        twins = [twin for branch in branches for twin in branch.fork(2)]
        await generate(twins, SamplingParams(max_tokens=8, temperature=0.9, ignore_eos=True))

    request = llm.engine.add(program, list(range(1, 60)))
    while llm.engine.requests:
        llm.engine.step()
    assert request.error is None
    assert rows[0] == 59 and all(count <= 2 * 6 for count in rows[1:])
    idle(llm)


def test_its_keys_are_right_after_forks_moves_and_preemption():
    """What the drafter thinks it knows of slots is so: its guesses are the likeliest by a dense forward."""
    smaller = noisy(0.3)
    llm = assisted(smaller, num_kv_slots=320)
    drafter, seen = llm.engine.speculator.drafter, []
    draft = drafter.draft

    def watched(stems, size, step):
        trees = draft(stems, size, step)
        for stem, tree in zip(stems, trees, strict=True):
            if len(tree) and stem.row.params.is_greedy:
                likely = dense_logits(smaller, stem.tokens)[-1].softmax(-1)
                first = tree.parents == -1
                assert likely[tree.tokens[first]].numpy() == pytest.approx(tree.probabilities[first], abs=1e-4)
                seen.append(len(tree))
                for node in tree.parents[tree.parents >= 0][-1:].tolist():
                    below = tree.parents == node
                    likely = dense_logits(smaller, [*stem.tokens, *tree.path(node)])[-1].softmax(-1)
                    assert likely[tree.tokens[below]].numpy() == pytest.approx(tree.probabilities[below], abs=1e-4)
        return trees

    drafter.draft = watched
    assert wild(llm) == wild(tiny_llm(MODEL))
    assert len(seen) > 30


def test_a_long_prompt_is_read_in_chunks():
    prompt = [random.Random(3).randrange(1, 100) for _ in range(200)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = tiny_llm(MODEL).generate([prompt], params)
    llm = assisted(noisy(0.0), max_num_rows=64, chunk=48)
    [output] = outputs = llm.generate([prompt], params)
    same(outputs, expected)
    assert output.tree.usage.accepted_tokens > 10
    idle(llm)


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize("drafter", ["ngram", "ngram:shared", "model"])
def test_two_hundred_prompts(drafter, page_size):
    draw = random.Random(page_size)
    prompts = [
        [draw.randrange(1, 100) for _ in range(draw.randrange(1, 12))] * draw.randrange(1, 4) for _ in range(200)
    ]
    params = SamplingParams(temperature=0, max_tokens=16)
    options: Any = {"num_kv_slots": 1 << 16, "max_num_rows": 8192, "page_size": page_size}
    expected = tiny_llm(MODEL, **options).generate(prompts, params)
    if drafter == "model":
        llm = assisted(noisy(0.05), tree_size=12, **options)
    else:
        llm = tiny_llm(MODEL, speculate=Speculation(drafter, 12, adaptive=False), **options)
    outputs = llm.generate(prompts, params)
    same(outputs, expected)
    assert sum(output.tree.usage.accepted_tokens for output in outputs) > 200
    idle(llm)


class Likely:
    """Guesses a text that the model may well draw."""

    wants_hidden = False

    def __init__(self, texts: dict[tuple[int, ...], float]) -> None:
        self.texts, self.draw = texts, random.Random(0)

    def draft(self, stems: Any, size: int, step: Any) -> list[TokenTree]:
        several = [self.draw.choices(list(self.texts), list(self.texts.values()), k=2) for _ in stems]
        return [TokenTree.of([*one[:2], *other[:2]], [-1, 0, -1, 2]) for one, other in several]


@pytest.mark.parametrize("drafter", ["likely", "model"])
def test_sampled_texts_have_the_distribution_of_the_model(drafter):
    """Chi-square of whole texts of three tokens, each the fourth-likeliest at most, that were drawn with guesses."""
    params = SamplingParams(temperature=1.5, top_k=4, max_tokens=3, ignore_eos=True)
    prompt, count = [5, 9, 5, 9, 5], 4000
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, odds in expected.items():
            best = dense_logits(MODEL, [*prompt, *text])[-1].topk(4)
            for token, share in zip(best.indices.tolist(), (best.values / 1.5).softmax(-1).tolist(), strict=True):
                longer[(*text, token)] = odds * share
        expected = longer
    options: Any = {"num_kv_slots": 1 << 17, "max_num_rows": 1 << 16, "page_size": 1}
    llm = assisted(noisy(0.2), 4, **options) if drafter == "model" else guessing(MODEL, Likely(expected), 4, **options)
    [output] = llm.generate([prompt], replace(params, n=count))
    seen = Counter(tuple(branch.token_ids) for branch in output.outputs)
    assert output.tree.usage.accepted_tokens > count / 20 and set(seen) <= set(expected)
    cells = [(seen[text], odds * count) for text, odds in expected.items() if odds * count >= 5]
    statistic = sum((number - mean) ** 2 / mean for number, mean in cells)
    assert statistic < len(cells) + 4 * (2 * len(cells)) ** 0.5
    idle(llm)


def test_drafters_by_name(monkeypatch):
    class Other(type(tiny_llm(MODEL).tokenizer)):
        def token_bytes(self, token):
            return super().token_bytes(token).upper()

    loads = {"same": (noisy(0.0, 1), tiny_llm(MODEL).tokenizer), "other": (noisy(0.0), Other())}
    monkeypatch.setattr(drafters, "load_model", lambda name, **options: loads[name])
    llm = tiny_llm(MODEL, speculate="draft:same")
    same(llm.generate(PROMPTS, GREEDY), tiny_llm(MODEL).generate(PROMPTS, GREEDY))
    with pytest.raises(ValueError, match="tokens of other are not those of the model: 97 is b'A', not b'a'"):
        tiny_llm(MODEL, speculate="draft:other")
    with pytest.raises(ValueError, match="'draft' needs a model behind it"):
        tiny_llm(MODEL, speculate="draft")
