"""Medusa heads: each guesses a token some places ahead from the model's last hidden state alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from treewise.models import CausalLM
from treewise.models.tokenizer import read_json
from treewise.ops import linear, pack
from treewise.sampler import SamplingRow, leanings
from treewise.speculate.drafter import Stem, Step
from treewise.speculate.tensor_files import check_vocabulary, read_tensors
from treewise.speculate.trees import EMPTY, TokenTree, best_first

WIDTH = 10
"""Tokens that each head may put in a tree."""
WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Files of heads, the first found counts."""
VOCABULARY = "vocabulary"
"""Name of the tensor of the tokens that heads choose from, where these are not all."""


class MedusaHeads(nn.Module):
    """Heads that guess tokens ahead of the next one; the first guesses the token behind it.

    A head is some residual blocks, ``x + silu(linear(x))``, and an output matrix. Heads without a matrix of their own
    share the model's, or those of its rows that stand for the tokens in `vocabulary`.

    Parameters
    ----------
    weight : Tensor [layers, heads, hidden, hidden]
        Of the blocks, layer by layer.
    bias : Tensor [layers, heads, hidden]
    output : Tensor [heads, vocabulary, hidden] or callable
        A matrix each; or what they share, from rows ``[rows, hidden]`` to logits ``[rows, vocabulary]``.
    vocabulary : Tensor [vocabulary], int64, optional
        The tokens that heads choose from; all of them in order by default.

    Notes
    -----
    Cai et al., *Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads*, 2024.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        output: Tensor | Callable[[Tensor], Tensor],
        vocabulary: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)
        self.output = output
        self.vocabulary = vocabulary

    @classmethod
    def untrained(cls, model: CausalLM, num_heads: int, num_layers: int, vocabulary: Tensor | None) -> MedusaHeads:
        """Return heads whose blocks change nothing yet, in float32 to be trained, that share the model's output."""
        size, device = model.config.hidden_size, model.device
        weight = torch.zeros(num_layers, num_heads, size, size, device=device)
        bias = torch.zeros(num_layers, num_heads, size, device=device)
        return cls(weight, bias, shared_output(model, vocabulary), vocabulary)

    @property
    def num_heads(self) -> int:
        """How many tokens ahead are guessed."""
        return self.bias.shape[1]

    def blocks(self, hidden: Tensor) -> Tensor:
        """Return what the residual blocks of each head make of ``[rows, hidden]``: ``[heads, rows, hidden]``."""
        x = hidden.expand(self.num_heads, -1, -1)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            x = x + F.silu(torch.baddbmm(bias[:, None], x, weight.transpose(1, 2)))
        return x

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of each head, float32 ``[heads, rows, vocabulary]``, for ``[rows, hidden]``."""
        x = self.blocks(hidden)
        if isinstance(self.output, Tensor):
            return torch.bmm(x, self.output.transpose(1, 2)).float()
        logits: Tensor = self.output(x.flatten(0, 1)).float().unflatten(0, x.shape[:2])
        return logits

    def save(self, folder: Path, base_model: str) -> None:
        """Write the heads in the published format; a matrix that belongs to the model is left out."""
        folder.mkdir(parents=True, exist_ok=True)
        num_layers = len(self.weight)
        config = {
            "base_model_name_or_path": base_model,
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": num_layers,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        tensors = {} if self.vocabulary is None else {VOCABULARY: self.vocabulary}
        for head in range(self.num_heads):
            for layer in range(num_layers):
                tensors[f"{head}.{layer}.linear.weight"] = self.weight[layer, head].detach().contiguous()
                tensors[f"{head}.{layer}.linear.bias"] = self.bias[layer, head].detach().contiguous()
            if isinstance(self.output, Tensor):
                tensors[f"{head}.{num_layers}.weight"] = self.output[head].contiguous()
        save_file(tensors, folder / WEIGHTS[0])


def shared_output(model: CausalLM, vocabulary: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return what makes logits of rows by the model's own output matrix, or by its rows for some tokens."""
    if vocabulary is None:
        return model.logits
    return partial(linear, weight=pack(output_rows(model, vocabulary)))


def output_rows(model: CausalLM, vocabulary: Tensor) -> Tensor:
    """Return the rows of the model's output matrix for some tokens."""
    matrix = model.head_weight
    return (matrix.to_dense() if matrix.is_mkldnn else matrix).index_select(0, vocabulary)


def load_heads(folder: Path, model: CausalLM) -> MedusaHeads:
    """Read heads for a model from a folder in the published format.

    It holds ``config.json`` with ``medusa_num_heads`` and ``medusa_num_layers``, and ``medusa_lm_head.safetensors`` or
    ``medusa_lm_head.pt`` with the tensors ``0.0.linear.weight``, ``0.0.linear.bias``, ``0.1.weight`` and so on: head,
    place in the head. Where no head has an output matrix, all share the model's; a tensor ``vocabulary`` says for which
    tokens.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If a file is damaged, lacks something, or the heads do not fit the model.
    """
    config = read_json(folder / "config.json")
    if not config:
        raise FileNotFoundError(f"speculate: {folder} has no config.json: it is not a folder of Medusa heads")
    numbers = []
    for name in ("medusa_num_heads", "medusa_num_layers"):
        if not isinstance(number := config.get(name), int) or number < 1:
            raise ValueError(f"speculate: {folder / 'config.json'}: {name} is {number!r}, not a number of at least 1")
        numbers.append(number)
    num_heads, num_layers = numbers
    tensors = read_tensors(folder, WEIGHTS)
    size, words = model.config.hidden_size, model.config.vocab_size

    def read(name: str, *shape: int) -> Tensor:
        if name not in tensors:
            raise ValueError(f"speculate: {folder}: the tensor {name} is missing")
        if tensors[name].shape != shape:
            raise ValueError(
                f"speculate: {folder}: the tensor {name} has shape {tuple(tensors[name].shape)}, "
                f"heads of this model have {shape}"
            )
        return tensors[name].to(model.device, model.dtype)

    def of_heads(name: str, *shape: int) -> Tensor:
        return torch.stack([read(f"{head}.{name}", *shape) for head in range(num_heads)])

    weight = torch.stack([of_heads(f"{layer}.linear.weight", size, size) for layer in range(num_layers)])
    bias = torch.stack([of_heads(f"{layer}.linear.bias", size) for layer in range(num_layers)])
    if any(f"{head}.{num_layers}.weight" in tensors for head in range(num_heads)):
        return MedusaHeads(weight, bias, of_heads(f"{num_layers}.weight", words, size)).requires_grad_(False)
    vocabulary = tensors.get(VOCABULARY)
    if vocabulary is not None:
        where = f"speculate: {folder}: the tensor {VOCABULARY}"
        vocabulary = check_vocabulary(vocabulary, words, where).to(model.device)
    return MedusaHeads(weight, bias, shared_output(model, vocabulary), vocabulary).requires_grad_(False)


class MedusaDrafter:
    """Makes trees of the likeliest tokens of each head, as far as their product is likely.

    The heads read the state behind the last verified token. That state has already chosen the pending token, so the
    first head guesses what follows the pending one.

    A token that is drawn at random is guessed by the noise that it will be drawn with, which depends on its position,
    not on the tokens before it; so all guesses at one depth share it. Penalties are those of the text so far.

    Parameters
    ----------
    heads : MedusaHeads
    vocab_size : int
        Of the model.
    """

    wants_hidden = True

    def __init__(self, heads: MedusaHeads, vocab_size: int) -> None:
        self.heads = heads
        self.vocab_size = vocab_size

    @torch.inference_mode()
    def draft(self, stems: Sequence[Stem], size: int, step: Step) -> list[TokenTree]:
        """See `Drafter.draft`."""
        states = {stem: stem.hidden[-1] for stem in stems if stem.hidden is not None}
        if not states:
            return [EMPTY] * len(stems)
        logits = self.heads(torch.stack([*states.values()])).transpose(0, 1)  # [stems, heads, vocabulary]
        rows = [_ahead(stem.row, places) for stem in states for places in range(self.heads.num_heads)]
        lean = leanings(logits.flatten(0, 1), rows, tokens=self.heads.vocabulary, vocab_size=self.vocab_size)
        odds, tokens = lean.softmax(dim=-1).topk(min(WIDTH, lean.shape[-1]), dim=-1)
        if self.heads.vocabulary is not None:
            tokens = self.heads.vocabulary[tokens]
        both = torch.stack([odds, tokens.float()], dim=1)  # whole numbers below 2^24 stay what they are
        own = both.unflatten(0, logits.shape[:2]).transpose(1, 2).cpu().numpy()  # [stems, 2, heads, width]
        trees = {stem: best_first(tokens, odds, size) for stem, (odds, tokens) in zip(states, own, strict=True)}
        return [trees.get(stem, EMPTY) for stem in stems]


def _ahead(row: SamplingRow, places: int) -> SamplingRow:
    """Return how a token some places further on is chosen, as far as that is known."""
    constraint = None if places else row.constraint
    return row._replace(position=row.position + places, num_tokens=row.num_tokens + places, constraint=constraint)
