"""Tests that need a device this machine lacks, or minutes that nobody asked for, are skipped, and say so."""

import json
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and devices < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), this machine has {devices}"))
        if item.get_closest_marker("stress") and "stress" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="takes minutes: pytest -m stress"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A random Llama of a few thousand weights in Transformers' layout, with bytes for tokens and a chat template."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from treewise.models.tokenizer import BYTE_ALPHABET

    folder = tmp_path_factory.mktemp("tiny-llama")
    vocabulary = {character: number for number, character in enumerate(BYTE_ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}[assistant]"
    settings = {"eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=256,
    )
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
