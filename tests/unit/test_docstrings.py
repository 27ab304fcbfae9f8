"""The examples in docstrings run, with a tiny random model in the place of the built-in one."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ChatBytes, tiny_llm, tiny_model

import treewise.llm

SOURCE = Path(treewise.__file__).parent
SKIPPED = {
    "treewise.adapters.kvpress": "needs kvpress",
    "treewise.adapters.lm_eval": "fetches the questions of a task",
    "treewise.attention.buffers": "captures a CUDA graph",
    "treewise.models.load": "tells what is in the built-in model's file",
    "treewise.models.tokenizer": "likewise",
    "treewise.replicas.fleet": "needs a cluster of Ray",
    "treewise.rewards": "needs a reward model",
}
"""Modules with examples that are left out (``# doctest: +SKIP``), and why."""
LIBRARIES = {
    "treewise.adapters.kvpress": "kvpress",
    "treewise.adapters.lm_eval": "lm_eval",
    "treewise.adapters.reasoners": "reasoners",
    "treewise.adapters.treequest": "treequest",
    "treewise.hf": "transformers",
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


TEXTS = {name_of(path): path.read_text("utf-8") for path in sorted(SOURCE.rglob("*.py"))}


def transformers_model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=6, num_key_value_heads=2, eos_token_id=None, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def names(module: str) -> dict[str, Any]:
    """What the examples of a module take for granted."""
    if module == "treewise.hf":
        tokens = torch.arange(1, 33)[None]
        return {
            "model": transformers_model(),
            "inputs": {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)},
        }
    if module == "treewise.evaluate.cache":
        return {"model": tiny_model()}
    return {"llm": tiny_llm()} if module == "treewise.adapters.treequest" else {}


@pytest.mark.parametrize("module", [name for name, text in TEXTS.items() if ">>> " in text])
def test_examples_of_docstrings_run(module, monkeypatch):
    if module in LIBRARIES:
        pytest.importorskip(LIBRARIES[module])
    home = importlib.import_module(module)

    def tiny(*_: Any, **options: Any) -> treewise.llm.LLM:
        return tiny_llm(codec=ChatBytes(), **options)

    found = doctest.DocTestFinder().find(home, extraglobs=names(module) | {"LLM": tiny})
    assert any(test.examples for test in found)
    monkeypatch.setattr(treewise.llm, "LLM", tiny)
    runner = doctest.DocTestRunner(verbose=False)
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_examples_that_are_left_out_have_a_reason():
    assert {name for name, text in TEXTS.items() if "doctest: +SKIP" in text} == set(SKIPPED)
