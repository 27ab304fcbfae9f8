"""Norm, RoPE, gated MLP, and the attention layer that calls the backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treewise.config import ModelConfig, RopeConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class Attend(Protocol):
    """What a model asks of the engine: store a layer's new keys and values, and attend with its queries."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with the rows of one layer.

        Parameters
        ----------
        layer : int
            Which layer of the model asks; decides the window and the pool.
        q : Tensor
            ``[rows, heads, head_dim]``, rotary embedding applied.
        k, v : Tensor
            ``[rows, kv_heads, head_dim]``, rotary embedding applied to ``k``.

        Returns
        -------
        Tensor
            ``[rows, heads, head_dim]``.
        """
        ...


class Linear(nn.Linear):
    """A linear map whose weights come from a checkpoint, so that time is not spent on random ones."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class Embedding(nn.Embedding):
    """Rows of a table by token id, which come from a checkpoint."""

    def reset_parameters(self) -> None:
        """Leave the table as it is."""


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 in the order of operations of Transformers.

    Parameters
    ----------
    size : int
        Length of the last dimension, which is the one normalised.
    eps : float
        Added to the mean square.
    offset : bool
        Gemma's form: multiply by ``1 + weight``, and round to the input's type only after that.
    """

    def __init__(self, size: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x``."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """Rotary position embedding: turns the pairs ``(i, i + head_dim / 2)`` of a head as far as the position says."""

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        frequencies = torch.tensor(config.inverse_frequencies, dtype=torch.float32, device="cpu")
        self.inverse_frequencies = nn.Buffer(frequencies, persistent=False)
        self.scale = config.scale

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Give the cosines and sines at ``positions`` ``[rows]``, each ``[rows, 1, head_dim / 2]``."""
        angles = positions[:, None].float() * self.inverse_frequencies
        return (
            (angles.cos() * self.scale).to(dtype)[:, None],
            (angles.sin() * self.scale).to(dtype)[:, None],
        )


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Apply a rotary embedding's ``angles`` to ``x`` ``[rows, heads, head_dim]``."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Projections, optional query and key norms and rotary embedding around the engine's ``attend``."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.head_counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q_size = config.num_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, sum(self.head_counts) * config.head_dim, bias=config.qkv_bias)
        self.output = Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.query_key_norm = config.query_key_norm
        if config.query_key_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Attend with rows ``x`` ``[rows, hidden]``; gives ``[rows, hidden]``."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [rows, heads + 2 * kv_heads, head_dim]
        q, k, v = heads.split(self.head_counts, dim=1)
        if self.query_key_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attend(self.layer, rotate(q, angles), rotate(k, angles), v)
        projected: Tensor = self.output(mixed.flatten(1))
        return projected


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``, gate and up in one product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows ``x`` ``[rows, hidden]``; gives ``[rows, hidden]``."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        projected: Tensor = self.down(self.activation(gate) * up)
        return projected
