"""Fills a decoder with the tensors of a Transformers folder, memory-mapped, and checks every one of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from treewise.config import ModelConfig
from treewise.models.decoder import CausalLM

PIECE = 1 << 25
"""Bytes that are copied at a time, of which each thread keeps a few in page-locked memory."""
THREADS = min(8, os.cpu_count() or 1)

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


class Checkpoint:
    """The tensors of a folder by name, read from its memory-mapped safetensors files when asked for.

    Parameters
    ----------
    folder : Path
        Holds ``model.safetensors``, or ``model.safetensors.index.json`` and the shards it lists.

    Raises
    ------
    FileNotFoundError
        There are no safetensors files, or a shard of the index is missing.
    ValueError
        A file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}
        for path in _safetensors_files(folder):
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from None
            self.files.update(dict.fromkeys(file.keys(), file))  # type: ignore[no-untyped-call]

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self.files.keys()

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Map one tensor, on the CPU and in the type it is stored in, checked against ``shape`` if that is given.

        Its bytes are read when they are used.
        """
        if name not in self.files:
            raise ValueError(f"{self.folder}: the tensor {name} is missing")
        tensor: Tensor = self.files[name].get_tensor(name)
        if shape not in (None, tuple(tensor.shape)):
            raise ValueError(
                f"{self.folder}: the tensor {name} has shape {tuple(tensor.shape)}, config.json implies {shape}"
            )
        return tensor


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    else:
        files = [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}; weights are read from safetensors files")
    return files


def load_weights(
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    build: Callable[[ModelConfig], CausalLM] = CausalLM,
) -> CausalLM:
    """Build the decoder of ``config`` and fill it from the safetensors files of ``folder``.

    Where nothing needs converting, stacking or moving, parameters stay views of the memory-mapped file. Otherwise each
    part is copied once, to its place in the parameter; several threads do so, because waiting for the disk, copying
    into page-locked memory and moving it on to a GPU can go on at the same time.

    Parameters
    ----------
    config : ModelConfig
    folder : Path
    dtype : torch.dtype or None
        Of the parameters; ``None``: float32 on a CPU, else the type of 16 bits that the embedding is stored in, else
        bfloat16.
    device : torch.device
    build : callable
        Makes the decoder; by default the whole one.

    Raises
    ------
    FileNotFoundError
        There are no safetensors files.
    ValueError
        A tensor is missing, has another shape than the configuration implies, or is there without a place in the
        decoder (which would mean that the model is not what its configuration says).
    """
    checkpoint = Checkpoint(folder)
    prefix = _decoder_prefix(checkpoint)
    if config.tie_embeddings and _has_another_head(checkpoint, prefix):
        config = replace(config, tie_embeddings=False)
    with torch.device("meta"):
        model = build(config)
    dtype = dtype or _default_dtype(checkpoint.read(prefix + EMBEDDING).dtype, device)
    used = set()
    parts: dict[str, list[Tensor]] = {}
    for name, sources in list(model.checkpoint_tensors()):
        full_names = [source if source == HEAD else prefix + source for source in sources]
        whole = [checkpoint.read(*wanted) for wanted in zip(full_names, sources.values(), strict=True)]
        parts[name] = [model.share(source, tensor) for source, tensor in zip(sources, whole, strict=True)]
        used.update(full_names)
    with ThreadPoolExecutor(THREADS) as threads:
        weights = threads.map(partial(_stack, dtype=dtype, device=device), parts.values())
        for name, weight in zip(parts, weights, strict=True):
            module, _, kind = name.rpartition(".")
            setattr(model.get_submodule(module), kind, nn.Parameter(weight, requires_grad=False))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # nobody else waits for these copies
    # Old checkpoints list the rotary frequencies, which follow from the configuration.
    layers = [
        name for name in checkpoint.names if name.startswith(f"{prefix}layers.") and not name.endswith("inv_freq")
    ]
    unused = sorted(set(layers) - used)
    if unused:
        raise ValueError(f"{folder}: {config.architecture} as config.json describes it has no {', '.join(unused[:5])}")
    return model.to(device).eval()


def _default_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    return stored if stored in (torch.float16, torch.bfloat16) else torch.bfloat16


def _stack(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Join mapped tensors by their rows, in another type or place."""
    first, *others = parts
    if not others and first.dtype == dtype and first.device == device and first.is_contiguous():
        return first
    stacked = torch.empty((sum(map(len, parts)), *first.shape[1:]), dtype=dtype, device=device)
    for part, place in zip(parts, stacked.split([len(part) for part in parts]), strict=True):
        rows = max(1, PIECE * len(part) // part.nbytes)
        for piece, target in zip(part.split(rows), place.split(rows), strict=True):
            target.copy_(piece.contiguous().pin_memory() if device.type == "cuda" else piece, non_blocking=True)
    return stacked


def _decoder_prefix(checkpoint: Checkpoint) -> str:
    """Find what comes before the decoder's names: ``model.``, or more in models with a vision part."""
    for name in checkpoint.names:
        if name == EMBEDDING or name.endswith(f".{EMBEDDING}"):
            return name.removesuffix(EMBEDDING)
    raise ValueError(f"{checkpoint.folder}: the tensor model.{EMBEDDING} is missing")


def _has_another_head(checkpoint: Checkpoint, prefix: str) -> bool:
    """Tell whether the file of a tied model ships a head that differs, which then counts (as in Transformers)."""
    if HEAD not in checkpoint.names:
        return False
    return not torch.equal(checkpoint.read(HEAD), checkpoint.read(prefix + EMBEDDING))
