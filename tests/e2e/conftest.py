"""Real models and what Transformers makes of them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import find_real_model

from treewise.models.cache import cache_folder, make_once


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """``model_path("smollm2" | "qwen2" | "gemma3")`` is a GGUF file."""
    return cache(find_real_model)


@pytest.fixture(scope="session")
def oracle(model_path: Callable[[str], Path]) -> Callable[[str], Any]:
    """``oracle(name)`` is the Transformers model of the same weights, in float32, shared by the session.

    Transformers reads the GGUF file itself, which takes it half a minute or more, so what it read is kept in the cache.
    """
    transformers = pytest.importorskip("transformers")

    def read_gguf(path: Path, folder: Path) -> None:
        read = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        del read.config.quantization_config  # a model that remembers its file refuses to be saved
        plain = transformers.AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(folder)

    @cache
    def load(name: str) -> Any:
        path = model_path(name)
        version = transformers.__version__
        folder = make_once(
            cache_folder() / "tests" / f"{name}-transformers-{version}", lambda made: read_gguf(path, made)
        )
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    return load
