"""Fills a decoder with the tensors of a Transformers folder, memory-mapped, and checks every one of them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from treewise.config import ModelConfig
from treewise.models.decoder import CausalLM

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
        """Read one tensor, on the CPU and in the type it is stored in, checked against ``shape`` if that is given."""
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


def load_weights(config: ModelConfig, folder: Path, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Build the decoder of ``config`` and fill it from the safetensors files of ``folder``.

    Where nothing needs converting or stacking, parameters stay views of the memory-mapped file.

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
        model = CausalLM(config)
    used = set()
    for name, sources in list(model.checkpoint_tensors()):
        parts = []
        for source, shape in sources.items():
            full_name = source if source == HEAD else prefix + source
            used.add(full_name)
            parts.append(checkpoint.read(full_name, shape).to(device=device, dtype=dtype))
        module, _, kind = name.rpartition(".")
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        setattr(model.get_submodule(module), kind, nn.Parameter(weight, requires_grad=False))
    # Old checkpoints list the rotary frequencies, which follow from the configuration.
    layers = [
        name for name in checkpoint.names if name.startswith(f"{prefix}layers.") and not name.endswith("inv_freq")
    ]
    unused = sorted(set(layers) - used)
    if unused:
        raise ValueError(f"{folder}: {config.architecture} as config.json describes it has no {', '.join(unused[:5])}")
    return model.to(device).eval()


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
