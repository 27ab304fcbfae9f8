"""EAGLE heads: a decoder layer that guesses the model's states, in the published formats of EAGLE-1 and EAGLE-3."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from treewise.config import ModelConfig
from treewise.layers import Attend, Attention, Embedding, GatedMLP, Linear, RMSNorm, Rotary
from treewise.models import CausalLM, read_config
from treewise.models.decoder import PARTS
from treewise.models.tokenizer import read_json
from treewise.runner import Runner
from treewise.sampler import spread
from treewise.speculate.features import Features, InnerFeatures, SlotStates
from treewise.speculate.tensor_files import check_vocabulary, read_tensors

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files of heads, the first found counts."""
LAYERS = "eagle_aux_hidden_state_layer_ids"
"""Key of ``config.json``: the layers of the model that a head of EAGLE-3 reads."""
_EMBEDDING = "embed_tokens.weight"
_SOURCES = {**PARTS, "embedding_norm": ("input_layernorm",)}

Tensors = Mapping[str, Tensor]


class EagleHead(nn.Module, ABC):
    """A decoder layer over a token and a state of the token before, which guesses the state of the token.

    Parameters
    ----------
    config : ModelConfig
        Of one layer.
    embedding : Embedding

    Attributes
    ----------
    layout : str
        Name of its format.
    layer : str
        What the names of the layer's tensors begin with there.
    outside : tuple of str
        Its modules that are no part of the layer.
    unread : tuple of str
        Tensors that are no weights.
    """

    layout: ClassVar[str]
    layer: ClassVar[str]
    outside: ClassVar[tuple[str, ...]]
    unread: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ModelConfig, embedding: Embedding) -> None:
        super().__init__()
        self.config = config
        self.attention = Attention(config, 0)
        self.mlp_norm = _norm(config)
        self.mlp = GatedMLP(config)
        self.rope = Rotary(config.layer_ropes[0])
        self.embedding = embedding

    @abstractmethod
    def watch(self, engine: Runner) -> SlotStates:
        """Return the model's states, as the head takes them, of all tokens that an engine computes from now on."""

    @abstractmethod
    def join(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the attention takes, and the residual stream."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Return what follows from guessed states [rows, hidden]: logits of the model's tokens [rows, vocabulary]."""

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Guess the state of each row.

        Parameters
        ----------
        tokens : Tensor [rows], int64
        states : Tensor [rows, hidden]
            Of the token before each; or guesses of them.
        positions : Tensor [rows], int64
            Of the tokens before.
        attend : Attend

        Returns
        -------
        Tensor [rows, hidden]
        """
        x, residual = self.join(self.embedding(tokens), states)
        seen = self.attention(x, self.rope(positions, x.dtype), attend)
        normed, stream = self.mlp_norm.add(seen, residual)
        guessed: Tensor = self.mlp.down(self.mlp.gated(normed)) + stream
        return guessed


class Eagle1Head(EagleHead):
    """Guesses states as they are behind the model's last norm; it has no norm in front.

    Parameters
    ----------
    config, embedding
        See `EagleHead`.
    model : CausalLM
        Whose output head it shares.
    fc_bias : bool
        Whether the map that joins tokens and states has a bias.

    Notes
    -----
    Li et al., *EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty*, 2024.
    """

    layout = "EAGLE-1"
    layer = "layers.0."
    outside = ("fc", "embedding")

    def __init__(self, config: ModelConfig, embedding: Embedding, model: CausalLM, fc_bias: bool) -> None:
        super().__init__(config, embedding)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.output = model.logits

    def watch(self, engine: Runner) -> SlotStates:
        """See `EagleHead.watch`: the states behind the last norm."""
        return Features(engine)

    def join(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `EagleHead.join`."""
        x = self.fc(torch.cat([embedded, states], dim=-1))
        return x, x

    def logits(self, states: Tensor) -> Tensor:
        """See `EagleHead.logits`."""
        return self.output(states)


class Eagle3Head(EagleHead):
    """Reads what enters a low, a middle and a high layer of the model, and has an output head of its own.

    Parameters
    ----------
    config, embedding
        See `EagleHead`.
    model : CausalLM
    layers : sequence of int
        The layers of the model that it reads.
    tokens : Tensor [words], int64, or None
        The tokens that it chooses from; None: all in order.
    fc_bias : bool
        Whether the map that joins the states has a bias.

    Notes
    -----
    Li et al., *EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test*, 2025.
    """

    layout = "EAGLE-3"
    layer = "midlayer."
    outside = ("fc", "embedding", "norm", "head")
    unread = ("d2t", "t2d")

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        model: CausalLM,
        layers: Sequence[int],
        tokens: Tensor | None,
        fc_bias: bool,
    ) -> None:
        super().__init__(config, embedding)
        self.layers = layers
        self.tokens = tokens
        self.vocab_size = model.config.vocab_size
        size = config.hidden_size
        self.fc = Linear(len(layers) * model.config.hidden_size, size, bias=fc_bias)
        self.embedding_norm, self.hidden_norm, self.norm = _norm(config), _norm(config), _norm(config)
        self.attention.qkv = Linear(2 * size, self.attention.qkv.out_features, bias=config.qkv_bias)
        self.head = Linear(size, self.vocab_size if tokens is None else len(tokens), bias=False)

    def watch(self, engine: Runner) -> SlotStates:
        """See `EagleHead.watch`: what `fc` makes of the layers' states."""
        return InnerFeatures(engine, self.layers, self.config.hidden_size, self.fc)

    def join(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `EagleHead.join`."""
        return torch.cat([self.embedding_norm(embedded), self.hidden_norm(states)], dim=-1), states

    def logits(self, states: Tensor) -> Tensor:
        """See `EagleHead.logits`."""
        logits: Tensor = self.head(self.norm(states))
        return logits if self.tokens is None else spread(logits, self.tokens, self.vocab_size)


def load_eagle(folder: Path, model: CausalLM) -> EagleHead:
    """Read a head for a model from a folder in the published format of EAGLE-1 or EAGLE-3.

    It holds ``config.json``, that of a Llama-like model with one layer, and ``model.safetensors`` or
    ``pytorch_model.bin``. The names of the tensors tell which format it is.

    - EAGLE-1: ``fc.weight``, perhaps ``fc.bias``, ``layers.0.self_attn.*``, ``layers.0.mlp.*`` and
      ``layers.0.post_attention_layernorm.weight``.
    - EAGLE-3: ``fc.weight``, ``midlayer.self_attn.*``, ``midlayer.mlp.*``, ``midlayer.input_layernorm.weight``,
      ``midlayer.hidden_norm.weight``, ``midlayer.post_attention_layernorm.weight``, ``norm.weight`` and
      ``lm_head.weight``; and ``d2t`` where there is ``draft_vocab_size`` in the configuration: by how much the model's
      number of each token is larger than the head's.

    In both, ``embed_tokens.weight`` may be there; without it, the head shares the model's embedding. A head of EAGLE-3
    reads what enters layers 2, ``n // 2`` and ``n - 3`` of the model's ``n``, unless the configuration has
    ``eagle_aux_hidden_state_layer_ids``: the layers whose inputs it reads, or, within ``eagle_config``, whose outputs.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If a file is damaged, lacks something, or the head does not fit the model.
    """
    path = folder / "config.json"
    raw = read_json(path)
    if not raw:
        raise FileNotFoundError(f"speculate: {folder} has no config.json: it is not a folder of an EAGLE head")
    # Some call the architecture of heads LlamaForCausalLMEagle3 or Eagle3LlamaForCausalLM.
    names = [name.replace("Eagle3", "") for name in raw.get("architectures") or []]
    config = read_config({**raw, "architectures": names})
    if config.num_layers != 1 or config.sandwich_norms:
        raise ValueError(f"speculate: {path}: a head has one layer, with norms as in Llama")
    tensors = {name.removeprefix("model."): tensor for name, tensor in read_tensors(folder, WEIGHTS).items()}
    reads_layers = any(name.startswith(Eagle3Head.layer) for name in tensors)
    size = "target_hidden_size" if reads_layers and "target_hidden_size" in config.raw else "hidden_size"
    for key, wanted in ((size, model.config.hidden_size), ("vocab_size", model.config.vocab_size)):
        if (own := config.raw[key]) != wanted:
            raise ValueError(f"speculate: {path}: {key} is {own}, that of the model {wanted}")
    with torch.device("meta"):
        shared = _EMBEDDING not in tensors and config.hidden_size == model.config.hidden_size
        embedding = model.embedding if shared else Embedding(config.vocab_size, config.hidden_size)
        has_bias = "fc.bias" in tensors
        head: EagleHead
        if reads_layers:
            layers, tokens = _inner_layers(path, config.raw, model), _tokens(folder, config.raw, tensors, model)
            head = Eagle3Head(config, embedding, model, layers, tokens, has_bias)
        else:
            head = Eagle1Head(config, embedding, model, has_bias)
    _fill(head, folder, tensors, model)
    return head.eval()


def _norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)


def _inner_layers(path: Path, raw: Mapping[str, Any], model: CausalLM) -> list[int]:
    """Return the layers of the model that a head of EAGLE-3 reads the inputs of."""
    if raw.get("norm_before_residual"):
        raise ValueError(f"speculate: {path}: norm_before_residual is true, which is no head of EAGLE-3 as published")
    count = model.config.num_layers
    layers: list[int] = raw.get(LAYERS) or [2, count // 2, count - 3]
    if outputs := (raw.get("eagle_config") or {}).get(LAYERS):
        layers = [layer + 1 for layer in outputs]
    if wrong := [layer for layer in layers if not 0 <= layer < count]:
        raise ValueError(
            f"speculate: {path}: the head reads what enters layer {wrong[0]}, and the model has {count} layers"
        )
    return layers


def _tokens(folder: Path, raw: Mapping[str, Any], tensors: Tensors, model: CausalLM) -> Tensor | None:
    """Return the tokens that a head of EAGLE-3 chooses from; None where these are all in order."""
    words = model.config.vocab_size
    own = raw.get("draft_vocab_size") or words
    offsets = tensors.get("d2t")
    if offsets is None:
        if own != words:
            raise ValueError(f"speculate: {folder}: the tensor d2t is missing, as draft_vocab_size is {own}")
        return None
    if offsets.shape != (own,):
        raise ValueError(
            f"speculate: {folder}: the tensor d2t has shape {tuple(offsets.shape)}, config.json implies {(own,)}"
        )
    tokens = offsets + torch.arange(own, device=offsets.device)
    return check_vocabulary(tokens, words, f"speculate: {folder}: the tensor d2t").to(model.device)


def _fill(head: EagleHead, folder: Path, tensors: Tensors, model: CausalLM) -> None:
    """Give a head the weights that it does not share with the model."""
    used = set(head.unread)
    for name, parameter in list(head.named_parameters()):
        if not parameter.is_meta:
            continue
        module, _, kind = name.rpartition(".")
        prefix = "" if module in head.outside else head.layer
        sources = [f"{prefix}{source}.{kind}" for source in _SOURCES.get(module, (module,))]
        if missing := [source for source in sources if source not in tensors]:
            raise ValueError(f"speculate: {folder}: the tensor {missing[0]} is missing")
        weight = torch.cat([tensors[source] for source in sources])
        if weight.shape != parameter.shape:
            raise ValueError(
                f"speculate: {folder}: {' and '.join(sources)} have shape {tuple(weight.shape)}, "
                f"config.json implies {tuple(parameter.shape)}"
            )
        setattr(head.get_submodule(module), kind, nn.Parameter(weight.to(model.device, model.dtype), False))
        used.update(sources)
    unused = sorted(name for name in tensors if name not in used and not name.endswith("inv_freq"))
    if unused:
        raise ValueError(f"speculate: {folder}: a head of {head.layout} has no {', '.join(unused[:5])}")
    head.rope.to(model.device)
