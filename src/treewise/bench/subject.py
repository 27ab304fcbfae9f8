"""The model and the engine that a benchmark of whole requests runs, and how to make them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from treewise.attention import METHODS
from treewise.bench.measure import check_device
from treewise.config import ModelConfig
from treewise.llm import KV_CACHE_DTYPES, LLM
from treewise.models import CausalLM, Tokenizer, load_tokenizer, locate
from treewise.models.load import DTYPES, load_config, shape_of
from treewise.models.shapes import NumberTokenizer, find_shape
from treewise.parallel import everywhere, load
from treewise.sizing import default_slots

Loaded = tuple[CausalLM, Tokenizer]


@dataclass(frozen=True)
class Subject:
    """What is measured, a flag each.

    Parameters
    ----------
    model : str
        As in `treewise generate`; or shape:NAME, a model of a known shape with random weights, made on the device:
        tiny, smollm2-135m, qwen3-0.6b, llama-3.2-1b, qwen3-4b, qwen3-8b, llama-3-8b, llama-3-70b, codellama-7b,
        codellama-34b.
    dtype : str
        Type of the weights: float32, bfloat16 or float16; auto is float32 on a CPU, else of 16 bits.
    kv_cache_dtype : str
        Type of keys and values: auto, that of the weights, or fp8_e4m3.
    device : str
        cpu or cuda.
    page_size : int
        Tokens a page of keys and values.
    max_num_rows : int
        The most rows of a step; 1024, or what all leaves together need, if left out.
    cuda_graphs : bool
        Replay captured decode steps; what a GPU does if left out.
    capture_rows : int
        Common decode steps of up to so many rows are captured before the first request.
    tensor_parallel_size : int
        Devices that share the model out, a process each.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "cpu"
    page_size: int = 16
    max_num_rows: int | None = None
    cuda_graphs: bool | None = None
    capture_rows: int = 256
    tensor_parallel_size: int = 1

    @property
    def place(self) -> torch.device:
        """The device.

        Raises
        ------
        ValueError
            If this machine has no such device.
        """
        return check_device(self.device)

    @property
    def shape(self) -> str | None:
        """Name of the shape, None for a model that has weights of its own."""
        return shape_of(self.model)

    @property
    def element(self) -> torch.dtype:
        """Type of the weights; of a model that has its own, what auto most likely is.

        Raises
        ------
        ValueError
            If there is no such type.
        """
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype: {self.dtype!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES.get(self.dtype, torch.float32 if self.place.type == "cpu" else torch.bfloat16)

    def config(self) -> ModelConfig:
        """Read the model's configuration alone."""
        return load_config(self.model)

    def load(self) -> Loaded:
        """Load the model, or make it, with its tokenizer."""
        dtype = self.dtype if self.shape is None else self.element
        model = load(self.model, self.tensor_parallel_size, dtype=dtype, device=self.place)
        if self.shape is None:
            return model, load_tokenizer(self.model)
        return model, cast(Tokenizer, NumberTokenizer(model.config.vocab_size))

    def engine(self, loaded: Loaded, attention: str, widest: int = 1, **options: Any) -> LLM:
        """Put an engine around a loaded model, with rows for `widest` leaves a step.

        `options` are those of `LLM` that are no fields of this.
        """
        model, tokenizer = loaded
        return LLM(
            model,
            tokenizer=tokenizer,
            attention=attention,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device,
            page_size=self.page_size,
            max_num_rows=self._num_rows(widest),
            cuda_graphs=self.cuda_graphs,
            capture_rows=self.capture_rows,
            **options,
        )

    def default_slots(self, loaded: Loaded, widest: int) -> int:
        """Return how many tokens an engine with rows for `widest` leaves a step keeps if it is not told."""
        model, _ = loaded
        kv_dtype = KV_CACHE_DTYPES[self.kv_cache_dtype] or model.dtype
        return everywhere(model, default_slots, kv_dtype, self.page_size, self._num_rows(widest), 0.9)

    def _num_rows(self, widest: int) -> int:
        return self.max_num_rows or max(1024, widest)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Give other engines a folder with the model, or with the configuration of the shape and no weights."""
        if self.shape is None:
            yield locate(self.model)
            return
        with TemporaryDirectory() as folder:
            raw = find_shape(self.shape)
            (Path(folder) / "config.json").write_text(json.dumps(raw), encoding="utf-8")
            yield Path(folder)


def read_methods(attention: str) -> list[str]:
    """Read names of attention methods with commas between.

    Raises
    ------
    ValueError
        If there is no such method.
    """
    names = attention.split(",")
    known = ("auto", *METHODS, "reference")
    for name in names:
        if name not in known:
            raise ValueError(f"attention: {name!r} is not one of {', '.join(known)}")
    return list(dict.fromkeys(names))
