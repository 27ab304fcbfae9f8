"""Shapes of well-known models, and models of any shape with random weights: timings need no checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from treewise.config import ModelConfig
from treewise.models.decoder import CausalLM

POSITIONS = 131_072
"""Of every shape: a timing should not end at the context that a model was trained for."""


def _llama(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, kv_heads: int, vocab_size: int, **others: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": POSITIONS,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        **others,
    }


def _qwen3(*sizes: int, **others: Any) -> dict[str, Any]:
    named = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "rope_theta": 1e6}
    return _llama(*sizes, **{**named, "rms_norm_eps": 1e-6, **others})


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _llama(64, 128, 2, 4, 2, 256),
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49_152, rope_theta=100_000.0, tie_word_embeddings=True),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, 151_936, tie_word_embeddings=True),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128_256, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, 151_936, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, 8, 151_936),
    "llama-3-8b": _llama(4096, 14_336, 32, 32, 8, 128_256),
    "llama-3-70b": _llama(8192, 28_672, 80, 64, 8, 128_256),
    "codellama-7b": _llama(4096, 11_008, 32, 32, 32, 32_016, rope_theta=1e6),
    "codellama-34b": _llama(8192, 22_016, 48, 64, 8, 32_000, rope_theta=1e6),
}
"""Transformers configurations by name, to be read by `treewise.models.read_config`; ``tiny`` is of no model."""


def find_shape(name: str) -> dict[str, Any]:
    """Return the Transformers configuration of a shape.

    Raises
    ------
    ValueError
        If there is no shape of that name.
    """
    if name not in SHAPES:
        raise ValueError(f"model: shape {name!r} is not one of {', '.join(SHAPES)}")
    return dict(SHAPES[name])


def random_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    build: Callable[[ModelConfig], CausalLM] = CausalLM,
) -> CausalLM:
    """Make a model with small random weights straight on its device; the same each time on a device of one kind.

    Norms multiply by one and biases are zero, so that logits are numbers at any depth. `build` makes the model, by
    default the whole one; each that takes a share of the weights takes it of the same.
    """
    with torch.device("meta"):
        model = build(config)
    generator = torch.Generator(device).manual_seed(0)
    for name, sources in list(model.checkpoint_tensors()):
        module, _, kind = name.rpartition(".")
        rows = [shape[0] for shape in sources.values()]
        _, *columns = next(iter(sources.values()))
        weight = torch.empty((sum(rows), *columns), dtype=dtype, device=device)
        if weight.ndim > 1:
            weight.normal_(0, 0.02, generator=generator)
        else:
            weight.fill_(1.0 if kind == "weight" and not config.norm_offset else 0.0)
        parts = zip(sources, weight.split(rows), strict=True)
        weight = torch.cat([model.share(source, part) for source, part in parts])
        setattr(model.get_submodule(module), kind, nn.Parameter(weight, requires_grad=False))
    return model.to(device).eval()


class NumberTokenizer:
    """Stands in for the tokenizer of a model without text: a token is written as its number.

    Parameters
    ----------
    vocab_size : int
        How many tokens there are; none of them ends a text.

    Examples
    --------
    >>> NumberTokenizer(100).decode([7, 42])
    ' 7 42'
    >>> NumberTokenizer(100).encode(" 7 42")
    [7, 42]
    """

    eos_token_ids: frozenset[int] = frozenset()
    has_chat_template = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._texts = [b" %d" % token for token in range(vocab_size)]

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Read the numbers in `text`."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Write the numbers of tokens."""
        return b"".join(map(self.token_bytes, ids)).decode()

    @property
    def token_bytes(self) -> Callable[[int], bytes]:
        """Writes the number of a token."""
        return self._texts.__getitem__
