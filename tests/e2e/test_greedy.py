"""Real models, float32: token for token what Transformers decodes from the same weights, one prompt at a time."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from treewise import LLM, BeamSearchParams, SamplingParams
from treewise.attention import METHODS
from treewise.models import load_model

pytestmark = pytest.mark.slow

COUNT = 10
TEXT = (
    "The lighthouse keeper counted the ships each evening and wrote their names in a thick green book. On some days "
    "there were none, and then he wrote about the weather, the gulls, and the price of lamp oil in the town. "
)
PROMPTS = [
    "The capital of France is",
    "1, 2, 3, 4,",
    "def fibonacci(n):\n",
    "Once upon a time",
    "Q: What is 2 + 2?\nA:",
    "The",
    "Roses are red,\nviolets are blue,\n",
    "import numpy as np\n\n# Compute the mean of each row\n",
    "Water boils at",
    "Dear Sir or Madam,\n\n",
    "Translate to French: Good morning, my friend.\n",
    "The three primary colours are red,",
    "x = 5  y = 7\nx + y =",
    "SELECT name FROM users WHERE",
    "List of planets: Mercury, Venus,",
    "In 1969, humans first",
    TEXT,
    TEXT * 3 + "One night",
    TEXT * 7,
    TEXT * 14 + "The last entry in the book said",
    "你好，",
    "a  0\t\n  1",
]


@pytest.fixture(scope="module")
def loaded(model_path: Callable[[str], Path]) -> Callable[[str], Any]:
    """``loaded(name)`` is our model and its tokenizer, read once."""
    return cache(lambda name: load_model(model_path(name), dtype="float32"))


@pytest.fixture(scope="module")
def answers(oracle: Callable[[str], Any], loaded: Callable[[str], Any]) -> Callable[[str], list[list[int]]]:
    """``answers(name)`` is what Transformers decodes after each prompt."""

    @cache
    def decode(name: str) -> list[list[int]]:
        model, tokenizer = oracle(name), loaded(name)[1]
        decoded = []
        for prompt in PROMPTS:
            tokens = torch.tensor([tokenizer.encode(prompt)])
            with torch.inference_mode():
                output = model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=COUNT,
                    do_sample=False,
                    eos_token_id=sorted(tokenizer.eos_token_ids),
                    pad_token_id=0,
                )
            decoded.append(output[0, tokens.shape[1] :].tolist())
        return decoded

    return decode


def build(loaded: Callable[[str], Any], name: str, **options: Any) -> LLM:
    model, tokenizer = loaded(name)
    return LLM(model, tokenizer=tokenizer, device="cpu", num_kv_slots=16384, **options)


def check(llm: LLM, answers: list[list[int]], single: bool = False) -> None:
    params = SamplingParams(temperature=0, max_tokens=COUNT)
    batches = [[prompt] for prompt in PROMPTS] if single else [PROMPTS]
    outputs = [output for batch in batches for output in llm.generate(batch, params)]
    assert [output.outputs[0].token_ids for output in outputs] == answers
    llm.engine.check_integrity()


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method, loaded, answers):
    check(build(loaded, "smollm2", attention=method), answers("smollm2"))


@pytest.mark.parametrize(("pool", "page_size"), [("paged", 1), ("paged", 32), ("contiguous", 1)])
def test_every_pool(pool, page_size, loaded, answers):
    check(build(loaded, "smollm2", pool=pool, page_size=page_size), answers("smollm2"))


def test_one_prompt_at_a_time_with_small_chunks(loaded, answers):
    check(build(loaded, "smollm2", max_num_rows=100), answers("smollm2"), single=True)


@pytest.mark.parametrize("method", ["deft:flatten", "radix"])
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_other_architectures(name, method, loaded, answers):
    check(build(loaded, name, attention=method), answers(name))


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_log_probs(name, oracle, loaded):
    llm = build(loaded, name)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, n=3, logprobs=0, prompt_logprobs=0)
    [output] = llm.generate([TEXT], params)
    for completion in output.outputs:
        tokens = output.prompt_token_ids + completion.token_ids
        with torch.inference_mode():
            reference = oracle(name)(torch.tensor([tokens])).logits[0].log_softmax(-1)
        ours = [
            entry[tokens[i + 1]].logprob for i, entry in enumerate(output.prompt_logprobs[1:] + completion.logprobs)
        ]
        theirs = reference[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].tolist()
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(("length_penalty", "early_stopping"), [(1.0, False), (0.0, True), (2.0, "never")])
def test_beam_search(length_penalty, early_stopping, oracle, loaded):
    llm = build(loaded, "smollm2")
    tokenizer = llm.tokenizer
    width = 4
    for prompt in (
        tokenizer.apply_chat_template([{"role": "user", "content": "Name a colour."}]),
        tokenizer.encode("The dog"),
    ):
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            expected = oracle("smollm2").generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                num_beams=width,
                num_return_sequences=width,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=sorted(tokenizer.eos_token_ids),
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        [output] = llm.beam_search(
            [prompt],
            BeamSearchParams(
                beam_width=width, max_tokens=12, length_penalty=length_penalty, early_stopping=early_stopping
            ),
        )
        assert len(output.outputs) == width
        scores = [node.score for node in output.tree.nodes if node.score is not None and node.state != "pruned"]
        assert sorted(scores, reverse=True) == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        for ours, theirs in zip(output.outputs, expected.sequences[:, len(prompt) :].tolist(), strict=True):
            assert ours.token_ids == theirs[: len(ours.token_ids)]
            assert not any(theirs[len(ours.token_ids) :]), "Transformers pads with 0 behind the end"
    llm.engine.check_integrity()
