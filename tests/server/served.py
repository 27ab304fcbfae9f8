"""A real server in a process of its own, with a model of a few thousand weights from files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from treewise.models.gguf_tokenizer import build_tokenizer
from treewise.models.tokenizer import BYTE_ALPHABET

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n{{ turn['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, max_positions: int = 2048) -> Path:
    """Write a random Llama of two layers, whose tokens are bytes, in Transformers' layout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = [*SPECIAL, *BYTE_ALPHABET]
    backend, settings, _ = build_tokenizer(
        {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * len(BYTE_ALPHABET),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": CHAT,
        }
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@contextmanager
def serving(model: str | Path, *flags: Any) -> Iterator[tuple[str, psutil.Process]]:
    """Serve a model at a free port; gives the URL and the process, which has to end well within a minute."""
    command = [sys.executable, "-m", "treewise", "serve", str(model), "--port", "0", *map(str, flags)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            found = re.search(r"https?://\S+", said)
            assert found, f"{said!r}: the server has not begun"
            yield found[0], psutil.Process(server.pid)
            assert server.poll() is None, "the server has ended by itself"
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()
