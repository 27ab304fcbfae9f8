"""Files of real models, small random models, and a dense attention to run them with."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from treewise.attention import TreeSpec, plan_tree, run_plan
from treewise.config import ModelConfig
from treewise.models import CausalLM, read_config
from treewise.models.builtin import fetch_builtin
from treewise.models.cache import cache_folder, make_once
from treewise.ops import Heads, rotate, rotate_and_store

REAL_MODELS = ("smollm2", "qwen2", "gemma3")


def shared_folder() -> Path:
    """Where helpers lie that are not part of the repository."""
    return Path(os.environ.get("TREEWISE_SHARED") or Path(__file__).parents[2] / "shared")


def find_real_model(name: str) -> Path:
    """The GGUF file of a real model, fetched into the cache once; skips the test where it cannot be had."""
    if name == "smollm2":
        return fetch_builtin("smollm2-135m")
    folder = cache_folder() / "tests"
    present = list(folder.glob(f"{name}-*.gguf"))
    if present:
        return present[0]
    getter = shared_folder() / "models" / "get.py"
    if not getter.exists():
        pytest.skip(f"{name}: {getter} is not here (TREEWISE_SHARED names the folder)")
    folder.mkdir(parents=True, exist_ok=True)
    fetched = load_script(getter).get(name, folder)
    return make_once(folder / f"{name}-{fetched.name}", fetched.rename)


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class DenseAttention:
    """Plain attention over one sequence in the model's own type: causal, with the window of each layer.

    Rows may come in several calls; rows of calls before stay visible.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.past: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.positions = torch.empty(0, dtype=torch.int64)

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        config = self.config
        q, k, v = rotate(heads, config.num_kv_heads)
        positions = self.positions  # of the rows of this call, set by run_dense
        if layer in self.past:
            past_k, past_v, past_positions = self.past[layer]
            k, v = torch.cat([past_k, k]), torch.cat([past_v, v])
            key_positions = torch.cat([past_positions, positions])
        else:
            key_positions = positions
        self.past[layer] = k, v, key_positions
        distance = positions[:, None] - key_positions  # [rows, keys]
        visible = distance >= 0
        if (window := config.layer_windows[layer]) is not None:
            visible &= distance < window
        groups = config.num_heads // config.num_kv_heads
        k, v = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))  # [heads, keys, dim]
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * config.attention_scale
        if (cap := config.attention_soft_cap) is not None:
            scores = torch.tanh(scores / cap) * cap
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ v).transpose(0, 1)


SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}
SMALL_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **GEMMA, "attn_logit_softcapping": 5.0},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], **GEMMA},
}


def small_model(name: str) -> CausalLM:
    """A random model of an architecture, the same each time."""
    model = CausalLM(read_config({**SIZES, **SMALL_MODELS[name]}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(values + (0.5 if parameter.ndim == 1 else 0))
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def run_tree(
    model: CausalLM,
    tokens: Sequence[int] | Tensor,
    positions: Tensor | None = None,
    *,
    kv_dtype: torch.dtype | None = None,
    around: Callable[[Callable[[], Tensor]], Tensor] = lambda forward: forward(),
) -> Tensor:
    """Logits of all rows of one sequence, ``[rows, vocab]``, as a runner computes them: by a plan, through a pool.

    `around` gets the forward, after everything that it needs is on the device, to call or capture it.
    """
    config, device, rows = model.config, model.device, len(tokens)
    tokens = torch.as_tensor(tokens, device=device)
    everything = torch.arange(rows, device=device)
    positions = everything.clone() if positions is None else positions
    tree = TreeSpec([-1], [rows], [0] * rows, range(rows))
    shape = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    shape |= {"dtype": model.dtype, "kv_dtype": kv_dtype, "device": device, "slots": range(5, rows + 5)}
    plans = {window: plan_tree(tree, window=window, **shape) for window in set(config.layer_windows)}
    pools = torch.zeros(2, config.num_layers, rows + 8, config.num_kv_heads, config.head_dim, device=device)
    pools = pools.to(kv_dtype or model.dtype)
    slots = everything + 5
    scoring = {"scale": config.attention_scale, "soft_cap": config.attention_soft_cap}

    def attend(layer: int, heads: Heads) -> Tensor:
        k, v = pools[0, layer], pools[1, layer]
        return run_plan(plans[config.layer_windows[layer]], rotate_and_store(heads, k, v, slots), k, v, **scoring)

    return around(lambda: model.logits(model(tokens, positions, attend)))


def run_dense(
    model: CausalLM, tokens: list[int], positions: Tensor | None = None, attention: DenseAttention | None = None
) -> Tensor:
    """Logits of all rows of one sequence, ``[rows, vocab]``."""
    attention = attention or DenseAttention(model.config)
    attention.positions = torch.arange(len(tokens)) if positions is None else positions
    with torch.inference_mode():
        return model.logits(model(torch.tensor(tokens), attention.positions, attention))
