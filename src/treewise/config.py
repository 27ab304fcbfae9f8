"""Frozen dataclasses with docs; resolved once, never mutated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """What a decoder-only model of the Llama family looks like, whatever file it came from.

    Attributes
    ----------
    architecture : str
        Transformers' class name, e.g. ``"LlamaForCausalLM"``.
    layer_windows : tuple of (int or None)
        Sliding window of each layer in tokens; ``None`` where a layer sees everything.
        A query at position ``p`` sees keys at positions ``> p - window``.
    attention_scale : float
        Factor of the attention scores (``head_dim ** -0.5`` unless the model says otherwise).
    max_positions : int
        The longest context in tokens that the model was made for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    layer_windows: tuple[int | None, ...]
    attention_scale: float
    norm_eps: float
    tie_embeddings: bool
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens of a branch are chosen and when it ends; names and meanings follow vLLM."""

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
