"""The one decoder: every architecture is this module with other data in its configuration."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treewise.config import ModelConfig
from treewise.layers import Attend, Attention, Embedding, GatedMLP, Linear, RMSNorm, Rotary


class DecoderLayer(nn.Module):
    """Attention and a gated MLP, each on a normalised residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()

        def norm(present: bool = True) -> nn.Module:
            return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset) if present else nn.Identity()

        self.attention_norm = norm()
        self.attention = Attention(config, layer)
        self.attention_output_norm = norm(config.sandwich_norms)
        self.mlp_norm = norm()
        self.mlp = GatedMLP(config)
        self.mlp_output_norm = norm(config.sandwich_norms)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Transform the residual stream ``x`` ``[rows, hidden]``."""
        x = x + self.attention_output_norm(self.attention(self.attention_norm(x), angles, attend))
        x = x + self.mlp_output_norm(self.mlp(self.mlp_norm(x)))
        return x


class CausalLM(nn.Module):
    """A decoder-only language model over flat rows: no batch dimension, no padding, no cache of its own.

    Parameters
    ----------
    config : ModelConfig
        Sizes, norms, biases, windows and rotary embeddings of the layers.

    Notes
    -----
    Weights are uninitialised until :func:`treewise.models.load_model` fills them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)
        if not config.tie_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
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

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, logit_rows: Tensor) -> Tensor:
        """Compute rows of any number of sequences.

        Parameters
        ----------
        tokens : Tensor
            ``[rows]`` int64 token ids.
        positions : Tensor
            ``[rows]`` int64 logical positions, for the rotary embedding.
        attend : Attend
            Called once a layer with the rows' queries, keys and values; which row sees what is its business.
        logit_rows : Tensor
            ``[m]`` int64 indices of the rows whose logits are wanted.

        Returns
        -------
        Tensor
            ``[m, vocab_size]`` float32 logits.
        """
        x = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            # NOTE: the factor is rounded to the model's type first, as Gemma was trained.
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype).item()
        angles = [rope(positions, x.dtype) for rope in self.ropes]
        for layer, rope in zip(self.layers, self.layer_ropes, strict=True):
            x = layer(x, angles[rope], attend)
        x = self.norm(x[logit_rows])
        head = self.embedding if self.config.tie_embeddings else self.head
        return F.linear(x, head.weight).float()

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
