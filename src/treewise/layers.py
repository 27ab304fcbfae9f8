"""Norm, RoPE, gated MLP, and the attention layer that calls the backend."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from treewise.config import ModelConfig, RopeConfig
from treewise.ops import Heads, gated_linear, linear, linear_parts, pack, rms_norm


class Attend(Protocol):
    """What a model asks of the engine: store a layer's new keys and values, and attend with its queries."""

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """Attend with the rows of one layer.

        Parameters
        ----------
        layer : int
            Which layer of the model asks; decides the window and the pool.
        heads : Heads
            Its queries, keys and values, and how `treewise.ops.rotate_and_store` is to make them ready.

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

    def pack(self) -> None:
        """Let the weights be what `treewise.ops.pack` makes of them."""
        self.weight = nn.Parameter(pack(self.weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows ``x`` ``[rows, inputs]``."""
        return linear(x, self.weight, self.bias)

    def parts(self, x: Tensor) -> Tensor:
        """Transform rows for a norm, which can take them in parts, see `treewise.ops.linear_parts`."""
        return linear_parts(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """Rows of a table by token id, which come from a checkpoint."""

    def reset_parameters(self) -> None:
        """Leave the table as it is."""


class RMSNorm(nn.Module):
    """Root-mean-square norm, see `treewise.ops.rms_norm`.

    Parameters
    ----------
    size : int
        Length of the last dimension, which is the one normalised.
    eps, offset
        As in `treewise.ops.rms_norm`.
    """

    def __init__(self, size: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows ``x`` ``[rows, size]``, or what they are the sum of ``[parts, rows, size]``."""
        return self.add(x, None)[0]

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream, which begins with it where there is none; give the norm and the sum."""
        return rms_norm(x, self.weight, self.eps, self.offset, residual)


class Rotary(nn.Module):
    """Rotary position embedding: turns the pairs ``(i, i + head_dim / 2)`` of a head as far as the position says."""

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        frequencies = torch.tensor(config.inverse_frequencies, dtype=torch.float32, device="cpu")
        self.inverse_frequencies = nn.Buffer(frequencies, persistent=False)
        self.scale = config.scale

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Give the cosines and sines at ``positions`` ``[rows]``, each ``[rows, head_dim / 2]``."""
        angles = positions[:, None].float() * self.inverse_frequencies
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


class Attention(nn.Module):
    """Projections around the engine's ``attend``, which normalises and rotates queries and keys by the way."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_stacked = config.num_heads + 2 * config.num_kv_heads
        self.qkv = Linear(config.hidden_size, self.num_stacked * config.head_dim, bias=config.qkv_bias)
        self.output = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        self.query_key_norm = config.query_key_norm
        if config.query_key_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Attend with rows ``x`` ``[rows, hidden]``; gives ``[rows, hidden]``, or parts of it for a norm."""
        heads = Heads(self.qkv(x).view(-1, self.num_stacked, self.head_dim), *angles)
        if self.query_key_norm:
            q_norm, k_norm = self.q_norm, self.k_norm
            heads = heads._replace(q_norm=q_norm.weight, k_norm=k_norm.weight, eps=q_norm.eps, offset=q_norm.offset)
        return self.output.parts(attend(self.layer, heads).flatten(1))


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``, gate and up in one product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows ``x`` ``[rows, hidden]``; gives ``[rows, hidden]``, or parts of it for a norm."""
        return self.down.parts(self.gated(x))

    def gated(self, x: Tensor) -> Tensor:
        """Return what `down` takes of rows ``x`` ``[rows, hidden]``."""
        return gated_linear(x, self.gate_up.weight, self.gate_up.bias, self.activation)
