"""A model of a few thousand weights and a tokenizer of bytes: whole engines that run in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from treewise.config import ModelConfig, RopeConfig
from treewise.llm import LLM
from treewise.models import CausalLM, Tokenizer
from treewise.ops import Heads, rotate

EOS = 0
VOCABULARY = 128


class Bytes:
    """Token ``i`` is the byte ``i``; token 0 ends the text."""

    eos_token_ids = frozenset({EOS})
    bos_token_id = None
    vocab_size = VOCABULARY
    has_chat_template = False
    chat_template = None
    special_tokens = {"eos_token": "~"}  # noqa: RUF012

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        return [min(byte, VOCABULARY - 1) for byte in text.encode()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(token) for token in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == EOS else bytes([token])

    def apply_chat_template(self, messages: Sequence[Any], add_generation_prompt: bool = True) -> list[int]:
        return self.encode("".join(f"{turn['role']}: {turn['content']}\n" for turn in messages))


class ChatBytes(Bytes):
    """A tokenizer with a chat template: ``[role]text`` a turn, each ended by token 0, written ``~``."""

    has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        tokens = super().encode(text)
        return [EOS if parse_special and token == ord("~") else token for token in tokens]

    def render_chat(self, messages: Sequence[Any], add_generation_prompt: bool = True) -> str:
        turns = "".join(f"[{turn['role']}]{turn['content']}~" for turn in messages)
        return turns + "[assistant]" * add_generation_prompt

    def apply_chat_template(self, messages: Sequence[Any], add_generation_prompt: bool = True) -> list[int]:
        return self.encode(self.render_chat(messages, add_generation_prompt), parse_special=True)


def tiny_model(seed: int = 0, windows: tuple[int | None, ...] = (None, None), max_positions: int = 512) -> CausalLM:
    """Return a random model with 6/2 heads of 8."""
    rope = RopeConfig(tuple(10000.0 ** -(i / 4) for i in range(4)))
    model = CausalLM(
        ModelConfig(
            architecture="TinyForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=48,
            intermediate_size=64,
            num_layers=len(windows),
            num_heads=6,
            num_kv_heads=2,
            head_dim=8,
            max_positions=max_positions,
            layer_windows=windows,
            layer_ropes=(rope,) * len(windows),
            attention_scale=8**-0.5,
            norm_eps=1e-5,
            tie_embeddings=True,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
            else:
                parameter.fill_(1.0)
        model.embedding.weight.mul_(4)
    return model.eval().requires_grad_(False)


def tiny_llm(
    model: CausalLM | None = None, codec: Bytes | None = None, looks_ahead: bool | None = None, **options: Any
) -> LLM:
    """Return an engine around `model`, or around ``tiny_model()``."""
    options = {"num_kv_slots": 4096, "device": "cpu", "capture_rows": 0} | options
    llm = LLM(tiny_model() if model is None else model, tokenizer=cast(Tokenizer, codec or Bytes()), **options)
    if looks_ahead is not None:
        llm.engine.looks_ahead = looks_ahead
    return llm


def idle(llm: LLM) -> None:
    """Check that nothing is held and that every slot comes back."""
    llm.engine.check_integrity()
    assert not llm.engine.requests and not llm.engine.runs
    llm.engine.kv.clear_cache()
    llm.engine.check_integrity()
    assert llm.engine.kv.pool.num_free == llm.engine.kv.num_slots


@torch.inference_mode()
def dense_states(model: CausalLM, tokens: Sequence[int], kv_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the last hidden state at every position [tokens, hidden size]: one sequence alone, no cache, no plan."""
    n = len(tokens)
    config = model.config

    def attend(layer: int, heads: Heads) -> torch.Tensor:
        q, *pools = rotate(heads, config.num_kv_heads)
        k, v = (pool.to(kv_dtype).to(q.dtype) for pool in pools)
        group = config.num_heads // config.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * config.attention_scale
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        window = config.layer_windows[layer]
        hidden = (distance < 0) | (distance >= (n if window is None else window))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))

    states: torch.Tensor = model(torch.tensor(tokens), torch.arange(n), attend)
    return states


def dense_logits(model: CausalLM, tokens: Sequence[int], kv_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the logits at every position [tokens, vocabulary], likewise."""
    with torch.inference_mode():
        return model.logits(dense_states(model, tokens, kv_dtype))


def greedy(model: CausalLM, prompt: Sequence[int], count: int, kv_dtype: torch.dtype = torch.float32) -> list[int]:
    """Return `count` greedy tokens after `prompt`, computed from scratch each time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(model, tokens, kv_dtype)[-1].argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]
