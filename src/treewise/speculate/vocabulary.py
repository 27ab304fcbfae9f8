"""Networks that choose from some of the model's tokens only."""

from __future__ import annotations

import torch
from torch import Tensor

UNLIKELY = -1e4
"""Logit of tokens that a network cannot choose: far below all others, and yet above what a grammar refuses."""


def check_vocabulary(tokens: Tensor, vocab_size: int, where: str) -> Tensor:
    """Return the tokens that the columns of logits stand for, if the model has them.

    Raises
    ------
    ValueError
        If they are not a list of its tokens; the message begins with `where`.
    """
    if tokens.dtype != torch.int64 or tokens.dim() != 1 or not len(tokens):
        raise ValueError(f"{where} is not a list of tokens")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"{where} has tokens that the model has not")
    return tokens


def spread(logits: Tensor, tokens: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits ``[rows, vocab_size]`` of all tokens, given those of some, or of all in order (None)."""
    if tokens is None:
        return logits
    return logits.new_full((len(logits), vocab_size), UNLIKELY).index_copy_(1, tokens, logits)
