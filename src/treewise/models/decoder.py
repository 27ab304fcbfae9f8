"""The one decoder: every architecture is this module with other data in its configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from treewise.config import ModelConfig
from treewise.layers import Attend, Attention, Embedding, GatedMLP, Linear, RMSNorm, Rotary
from treewise.ops import linear, pack


class DecoderLayer(nn.Module):
    """Attention and a gated MLP, each on a normalised residual stream.

    The output of an MLP is added to the stream by the norm that comes next, which is the next layer's.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)

        self.attention_norm = norm()
        self.attention = Attention(config, layer)
        self.attention_output_norm = norm() if config.sandwich_norms else nn.Identity()
        self.mlp_norm = norm()
        self.mlp = GatedMLP(config)
        self.mlp_output_norm = norm() if config.sandwich_norms else nn.Identity()

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        see: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add ``x`` ``[rows, hidden]`` to the residual stream; gives the output, not yet added, and the stream."""
        x, residual = self.attention_norm.add(x, residual)
        if see is not None:
            see(residual)
        x = self.attention_output_norm(self.attention(x, angles, attend))
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp_output_norm(self.mlp(x)), residual


class CausalLM(nn.Module):
    """A decoder-only language model over flat rows: no batch dimension, no padding, no cache of its own.

    Parameters
    ----------
    config : ModelConfig
        Sizes, norms, biases, windows and rotary embeddings of the layers.

    Notes
    -----
    Weights are uninitialised until :func:`treewise.models.load_model` fills them.

    Attributes
    ----------
    num_ranks : int
        Devices that share the model out; here all of it is on one.
    """

    num_ranks = 1

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)
        if not config.tie_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.packed_table: Tensor | None = None  # of tied embeddings, as the head
        ropes = list(dict.fromkeys(config.layer_ropes))
        self.ropes = nn.ModuleList(Rotary(rope) for rope in ropes)
        self.layer_ropes = [ropes.index(rope) for rope in config.layer_ropes]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, and of the queries, keys and values handed to ``attend``."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.weight.device

    @property
    def head_weight(self) -> Tensor:
        """The matrix of the output head ``[vocab_size, hidden]``, packed or not."""
        if not self.config.tie_embeddings:
            return self.head.weight
        return self.embedding.weight if self.packed_table is None else self.packed_table

    def pack(self) -> None:
        """Lay the matrices out for fast products where that helps, see `treewise.ops.pack`; weights change no more."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        if self.config.tie_embeddings:
            self.packed_table = pack(self.embedding.weight.detach())

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        see: Mapping[int, Callable[[Tensor], None]] | None = None,
    ) -> Tensor:
        """Compute rows of any number of sequences, up to what the output head takes; see `logits`.

        Parameters
        ----------
        tokens : Tensor
            ``[rows]`` int64 token ids.
        positions : Tensor
            ``[rows]`` int64 logical positions, for the rotary embedding.
        attend : Attend
            Called once a layer with the rows' queries, keys and values; which row sees what is its business.
            Nothing here waits for the device or makes tensors on the host: where `attend` does not either, a
            forward can be captured in a CUDA graph once one like it has run.
        wanted : Tensor, optional
            ``[m]`` int64 indices of the rows that are wanted; default all of them.
        see : mapping of int to callable, optional
            For some layers, what is called with the residual stream of all rows ``[rows, hidden]`` that enters them.

        Returns
        -------
        Tensor
            ``[m, hidden]``: the last layer's output, normalised.
        """
        x = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            x = x * _rounded(self.config.embedding_scale, x.dtype)
        angles = [rope(positions, x.dtype) for rope in self.ropes]
        residual: Tensor | None = None
        for number, (layer, rope) in enumerate(zip(self.layers, self.layer_ropes, strict=True)):
            x, residual = layer(x, residual, angles[rope], attend, see.get(number) if see else None)
        if wanted is not None:
            x = x.index_select(-2, wanted)
            residual = None if residual is None else residual.index_select(0, wanted)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return what the output head makes of rows ``[m, hidden]`` of `forward`: ``[m, vocab_size]``.

        In the type of the weights, or in float32 where a soft cap is put on them.
        """
        logits = self.project(hidden)
        if (cap := self.config.logit_soft_cap) is not None:
            logits = logits.float().div_(cap).tanh_().mul_(cap)
        return logits

    def project(self, hidden: Tensor) -> Tensor:
        """Multiply rows ``[m, hidden]`` with the matrix of the output head: ``[m, vocab_size]``."""
        return linear(hidden, self.head_weight)

    def share(self, source: str, tensor: Tensor) -> Tensor:
        """Return what this model takes of a checkpoint tensor, one of `checkpoint_tensors`: all of it."""
        return tensor

    def checkpoint_tensors(self) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
        """Yield each parameter's name with the checkpoint tensors stacked in it, by name, and their shapes.

        Checkpoint names are those of Transformers without the prefix of the decoder (usually ``model.``); the output
        head, which lives outside of the decoder, is ``lm_head.weight``.
        """
        config = self.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        stacked_rows = {
            "attention.qkv": [count * config.head_dim for count in heads],
            "mlp.gate_up": [config.intermediate_size] * 2,
        }
        parts = SANDWICH_PARTS if config.sandwich_norms else PARTS
        for name, parameter in self.named_parameters():
            module, _, kind = name.rpartition(".")
            prefix, part = "", module
            if module.startswith("layers."):
                _, number, part = module.split(".", 2)
                prefix = f"layers.{number}."
            rows = stacked_rows.get(part, [len(parameter)])
            yield (
                name,
                {
                    f"{prefix}{source}.{kind}": (count, *parameter.shape[1:])
                    for source, count in zip(parts[part], rows, strict=True)
                },
            )


@functools.cache
def _rounded(factor: float, dtype: torch.dtype) -> float:
    """Round to a type: Gemma's factor of the embeddings was rounded to the model's type when it was trained."""
    return torch.tensor(factor, dtype=dtype, device="cpu").item()


# Names of our modules and of the Transformers modules whose weights they take.
PARTS = {
    "embedding": ("embed_tokens",),
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.output": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "norm": ("norm",),
    "head": ("lm_head",),
}
# With norms on the outputs too, "post attention" means what it says, and the MLP's norms have names of their own.
SANDWICH_PARTS = {
    **PARTS,
    "attention_output_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_output_norm": ("post_feedforward_layernorm",),
}
