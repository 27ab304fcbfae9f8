"""Tensors by name out of the files that drafters' weights are published in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


def read_tensors(folder: Path, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Read the first file of `names` that a folder has: safetensors, else what ``torch.save`` writes.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If it is damaged or holds something else.
    """
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is None:
        raise FileNotFoundError(f"speculate: {folder} has no {' or '.join(names)}")
    try:
        if path.suffix == ".safetensors":
            return cast(Mapping[str, Tensor], load_file(path))
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"speculate: {path} is truncated or no file of tensors: {error}") from None
    if not isinstance(loaded, Mapping) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise ValueError(f"speculate: {path} holds something else than tensors by name")
    return loaded


def check_vocabulary(tokens: Tensor, vocab_size: int, where: str) -> Tensor:
    """Return the tokens that a head chooses from, if the model has them.

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
