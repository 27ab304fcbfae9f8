"""The ranks of a model as threads of one process, over gloo as processes are; and folders of small random models."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch.distributed import HashStore

from treewise.models import CausalLM, read_config
from treewise.parallel import ParallelLM
from treewise.parallel.follower import follow, load_share
from treewise.parallel.group import Group
from treewise.parallel.ranks import Ranks

Result = TypeVar("Result")
CPU = torch.device("cpu")
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,  # no number of ranks divides it
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


def save_model(folder: Path, **changes: Any) -> Path:
    """Write a random model as Transformers does, and return its folder."""
    raw = {**SIZES, **changes}
    model = CausalLM(read_config(raw))
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, sources in model.checkpoint_tensors():
        for source, shape in sources.items():
            scale, mean = (0.25, 0.0) if len(shape) > 1 else (0.1, 0.0 if name.endswith("bias") else 1.0)
            tensor = torch.randn(shape, generator=generator) * scale + mean
            tensors[source if source == "lm_head.weight" else f"model.{source}"] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def on_ranks(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """Return what each of so many ranks makes of its group."""
    store = HashStore()
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(Group(store, rank, size, CPU, is_local=True)), range(size)))


@contextmanager
def shared_out(name: str | Path, size: int, dtype: str = "float32") -> Iterator[ParallelLM]:
    """Give the share of rank 0; the others follow it until the block ends."""
    store = HashStore()

    def other(rank: int) -> None:
        group = Group(store, rank, size, CPU, is_local=True)
        try:
            follow(load_share(str(name), dtype, CPU, group))
        except BaseException:  # rank 0 waits for this thread, and no connection breaks
            traceback.print_exc()
            os._exit(1)

    with ThreadPoolExecutor(size) as threads:
        others = [threads.submit(other, rank) for rank in range(1, size)]
        group = Group(store, 0, size, CPU, is_local=True)
        model = load_share(str(name), dtype, CPU, group)
        model.ranks = Ranks(group, None)
        try:
            yield model
        finally:
            model.ranks.close()
        for each in others:
            each.result(timeout=10)
