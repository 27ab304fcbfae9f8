"""Reads GGUF files: metadata, and tensors dequantised on demand; every length is checked against the file's."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
# Value types of the format, by their number, as little-endian formats of the struct module.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Types that are kept as they are, since nothing is gained by widening them.
PLAIN = {GGMLQuantizationType.F32: "F32", GGMLQuantizationType.F16: "F16", GGMLQuantizationType.BF16: "BF16"}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a file.

    Attributes
    ----------
    shape : tuple of int
        Outermost dimension first, as in torch.
    stored : numpy array
        The quantised bytes, one row of ``shape[-1]`` elements after the other; a view of the memory-mapped file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    stored: NDArray[np.uint8]

    @property
    def dtype(self) -> str:
        """Type that :meth:`read` gives, by the name that safetensors uses."""
        return PLAIN.get(self.kind, "F32")

    def read(self) -> NDArray[Any]:
        """Dequantise to float32; 16-bit types stay as they are, bfloat16 as its bits (uint16)."""
        if self.kind in PLAIN:
            width = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[self.dtype]
            return self.stored.view(width).reshape(self.shape)
        try:
            values: NDArray[np.float32] = dequantize(self.stored.reshape(*self.shape[:-1], -1), self.kind)
        except NotImplementedError:
            raise ValueError(f"the tensor {self.name} has type {self.kind.name}, which cannot be dequantised") from None
        return values.reshape(self.shape)


class GGUFFile:
    """A GGUF file, memory-mapped.

    Parameters
    ----------
    path : Path
        Version 2 or 3, little-endian.

    Attributes
    ----------
    metadata : dict
        Numbers, strings and lists of them by key.
    tensors : dict of str to GGUFTensor
        By name.

    Raises
    ------
    ValueError
        Not a GGUF file, another version, truncated, or part of a split model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            magic = file.read(4)
            if magic != MAGIC:
                raise ValueError(f"{path} is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._place = len(MAGIC)
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{path} is GGUF version {version} (or big-endian); versions 2 and 3 can be read")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(f"{path} is one of {self.metadata['split.count']} parts; merge them into one file first")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._place // alignment) * alignment
        self.tensors = {tensor.name: tensor for tensor in self._map_tensors(infos, start)}

    def _take(self, size: int) -> bytes:
        if size > len(self._bytes) - self._place:
            raise ValueError(f"{self.path} is truncated: its header goes on after the file's {len(self._bytes)} bytes")
        self._place += size
        return self._bytes[self._place - size : self._place]

    def _scalar(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            kind, length = self._scalar("I"), self._scalar("Q")
            if kind in SCALARS:
                item = struct.calcsize(f"<{SCALARS[kind]}")
                return list(struct.unpack(f"<{length}{SCALARS[kind]}", self._take(item * length)))
            return [self._value(kind) for _ in range(length)]
        if kind not in SCALARS:
            raise ValueError(f"{self.path} is damaged: there is no value type {kind}")
        return self._scalar(SCALARS[kind])

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._scalar("I")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _map_tensors(self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int) -> Iterator[GGUFTensor]:
        for name, shape, kind_number, offset in infos:
            try:
                kind = GGMLQuantizationType(kind_number)
            except ValueError:
                raise ValueError(f"{self.path}: the tensor {name} has the unknown type {kind_number}") from None
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block_elements:
                raise ValueError(
                    f"{self.path} is damaged: rows of the tensor {name} have {shape[-1]} elements, "
                    f"which is no multiple of the {block_elements} of a {kind.name} block"
                )
            begin = start + offset
            size = prod(shape) // block_elements * block_bytes
            end = begin + size
            if end > len(self._bytes):
                raise ValueError(
                    f"{self.path} is truncated: the tensor {name} ends at byte {end}, the file at {len(self._bytes)}"
                )
            yield GGUFTensor(name, shape, kind, np.frombuffer(self._bytes, np.uint8, size, begin))
