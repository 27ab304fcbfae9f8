"""What a layer would know of a prompt, with attention worked out in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treewise.config import RopeConfig
from treewise.sparsity import Evidence

Floats = NDArray[np.float64]


def rope_of(head_dim: int, scale: float = 1.0) -> RopeConfig:
    return RopeConfig(tuple(100.0 ** -(2 * i / head_dim) for i in range(head_dim // 2)), scale)


def rotated(x: Floats, positions: Floats, rope: RopeConfig) -> Floats:
    """Turn vectors [tokens, heads, head_dim] to their positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * np.array(rope.inverse_frequencies)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return rope.scale * np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def numbers(x: torch.Tensor) -> Floats:
    return x.double().numpy()


def attention(evidence: Evidence) -> tuple[Floats, Floats]:
    """Return the scores [heads, queries, tokens] of attention, -inf where hidden, and their softmax."""
    q, k = numbers(evidence.queries), numbers(evidence.keys)
    group = q.shape[1] // k.shape[1]
    scores = np.stack([q[:, head] @ k[:, head // group].T for head in range(q.shape[1])]) * evidence.scale
    if evidence.soft_cap is not None:
        scores = evidence.soft_cap * np.tanh(scores / evidence.soft_cap)
    hidden = evidence.positions.numpy()[None, :] > evidence.query_positions.numpy()[:, None]
    scores = np.where(hidden, -np.inf, scores)
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return scores, exponentials / exponentials.sum(-1, keepdims=True)


def make_evidence(
    tokens: int = 40,
    *,
    num_queries: int | None = None,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    rope_scale: float = 1.0,
    start: int = 0,
    behind: int = 0,
    seed: int = 0,
    **settings: Any,
) -> Evidence:
    """Return random keys and values at positions from `start`, and the last queries, `behind` tokens further on."""
    random = np.random.default_rng(seed)
    rope = rope_of(head_dim, rope_scale)
    positions = np.arange(start, start + tokens)
    num_queries = tokens if num_queries is None else min(tokens, num_queries)
    query_positions = positions[-num_queries:] + behind
    k = rotated(random.normal(size=(tokens, kv_heads, head_dim)), positions, rope)
    v = random.normal(size=(tokens, kv_heads, head_dim))
    q = rotated(2 * random.normal(size=(tokens, kv_heads * group, head_dim)), positions + behind, rope)[-num_queries:]
    evidence = Evidence(
        layer=1,
        num_layers=4,
        keys=torch.tensor(k).to(dtype),
        values=torch.tensor(v).to(dtype),
        positions=torch.tensor(positions),
        queries=torch.tensor(q).to(dtype),
        query_positions=torch.tensor(query_positions),
        lse=torch.zeros(()),
        scale=head_dim**-0.5,
        soft_cap=None,
        rope=rope,
        seed=5,
    )._replace(**settings)
    scores, _ = attention(evidence)
    top = scores.max(-1)
    lse = top + np.log(np.exp(scores - top[..., None]).sum(-1))
    return evidence._replace(lse=torch.tensor(lse.T, dtype=torch.float32))


def kept_only(evidence: Evidence, kept: list[int]) -> Evidence:
    """Return what is known once only some tokens are there: the LSE of the queries is still over all."""
    return evidence._replace(keys=evidence.keys[kept], values=evidence.values[kept], positions=evidence.positions[kept])
