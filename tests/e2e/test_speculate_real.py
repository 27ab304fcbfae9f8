"""The real model with guesses: the tokens of plain decoding, in fewer steps where the answer stands in the prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_greedy import PROMPTS

from treewise import LLM, SamplingParams, Speculation
from treewise.bench.texts import PROMPTS as TEXTS
from treewise.models import load_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Any:
    return load_model(model_path("smollm2"), dtype="float32")


@pytest.fixture(scope="module")
def prompts(model: Any) -> list[list[int]]:
    chats = [text for kind in ("edit", "code") for text in TEXTS[kind]]
    written = [model[1].apply_chat_template([{"role": "user", "content": text}]) for text in chats]
    return [*map(model[1].encode, PROMPTS), *written]


@pytest.fixture(scope="module")
def plain(model: Any, prompts: list[list[int]]) -> Callable[[SamplingParams], list[Any]]:
    llm = LLM(model[0], tokenizer=model[1], device="cpu", num_kv_slots=16384)
    known: dict[str, list[Any]] = {}

    def answers(params: SamplingParams) -> list[Any]:
        if repr(params) not in known:
            known[repr(params)] = llm.generate(prompts, params)
        return known[repr(params)]

    return answers


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0, max_tokens=24), SamplingParams(temperature=0.6, top_p=0.9, max_tokens=16, seed=3)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize(("drafter", "page_size"), [("ngram", 1), ("ngram:shared", 16), ("draft:smollm2-135m", 16)])
def test_the_tokens_are_those_of_plain_decoding(drafter, params, page_size, model, prompts, plain):
    llm = LLM(
        model[0],
        tokenizer=model[1],
        device="cpu",
        num_kv_slots=16384,
        page_size=page_size,
        speculate=Speculation(drafter, 8, adaptive=False),
    )
    outputs = llm.generate(prompts, params)
    expected = plain(params)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in expected]
    copies = outputs[-4:]
    steps = sum(output.tree.usage.steps for output in copies)
    if drafter.startswith("draft") or params.is_greedy:
        assert steps < 0.8 * sum(output.tree.usage.steps for output in expected[-4:])
    llm.engine.check_integrity()
