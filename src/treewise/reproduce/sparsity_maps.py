"""What a model's layers do with a text: which activations are massive, and which tokens attention is spent on."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewise.bench.runs import Facts
from treewise.charts import COLOURS
from treewise.evaluate.cache import Held, weigh
from treewise.evaluate.tasks import TASKS, make
from treewise.models import CausalLM, Tokenizer
from treewise.ops import Heads, rotate

MASSIVE = (100.0, 1000.0)
"""An activation is massive if it is larger than 100, and so many times the median of its layer (Sun et al., 2024, arXiv
2402.17762)."""

SIDE = 64
"""Most cells of a side of a map: what is larger is put together."""
NEAR = 32
"""Tokens before a query that count as near, itself included."""
SINKS = 4
"""First tokens that count as sinks."""
MASS = 0.9
"""Share of attention for which tokens are counted."""
SHOWN = 6
"""Layers whose attention is kept as a map."""
MOST = 3
"""Largest activations that are listed of each layer."""


@torch.inference_mode()
def look(model: CausalLM, tokenizer: Tokenizer, tokens: int) -> Facts:
    """Let a model read a text with a question behind it, and look at every layer.

    Parameters
    ----------
    model : CausalLM
        On the CPU.
    tokenizer : Tokenizer
    tokens : int
        Of the text, about.

    Returns
    -------
    dict
        ``tokens``, how many were read. ``layers``: of each layer, of the residual stream that enters it, ``largest``,
        magnitude, place, word and dimension of the `MOST` largest activations, ``median`` of all magnitudes and
        ``massive``, how many are; and of its attention, in the mean of heads and of the queries of the text's second
        half, ``sinks`` and ``near``, the shares that the first `SINKS` tokens and the last `NEAR` get, ``spread``, the
        tokens that get `MASS` of it over those that are seen, and ``effective``, the exponential of its entropy.
        ``magnitudes``, those of the layer ``peak``, which has the largest: a map of places and dimensions.
        ``attention``: maps of some layers by their numbers from 0 on, in the mean of heads.
    """
    encoded = make(TASKS["niah_multikey"], 0, tokens, tokenizer)
    text = [*encoded.context, *encoded.questions[0].tokens]
    config = model.config
    places = torch.arange(len(text))
    shown = np.unique(np.linspace(0, config.num_layers - 1, SHOWN).round().astype(int)).tolist()
    layers: list[Facts] = [{} for _ in range(config.num_layers)]
    streams: list[Tensor] = []
    attention: dict[str, list[list[float]]] = {}

    def attend(layer: int, heads: Heads) -> Tensor:
        q, k, v = rotate(heads, config.num_kv_heads)
        held = Held(k.transpose(0, 1), v.transpose(0, 1), places.expand(config.num_kv_heads, -1))
        weights, total, _ = weigh(
            q,
            places,
            held,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            window=config.layer_windows[layer],
        )
        shares = (weights / total).flatten(0, 1)  # [heads, queries, tokens]
        layers[layer] |= concentration(shares, config.layer_windows[layer])
        if layer in shown:
            attention[str(layer)] = shrink(shares.mean(0).numpy(), np.add.reduceat)
        outputs = torch.matmul(shares.unflatten(0, (config.num_kv_heads, -1)), held.values[:, None].float())
        return outputs.permute(2, 0, 1, 3).flatten(1, 2).to(v.dtype)

    see = {layer: streams.append for layer in range(config.num_layers)}
    model(torch.tensor(text), places, attend, see=see)
    for facts, stream in zip(layers, streams, strict=True):
        facts |= activations(stream, text, tokenizer)
    peak = max(range(config.num_layers), key=lambda layer: layers[layer]["largest"][0]["magnitude"])
    magnitudes = shrink(streams[peak].float().abs().numpy(), np.maximum.reduceat)
    return {
        "tokens": len(text),
        "hidden_size": config.hidden_size,
        "layers": layers,
        "peak": peak,
        "magnitudes": magnitudes,
        "attention": attention,
    }


def activations(stream: Tensor, text: Sequence[int], tokenizer: Tokenizer) -> Facts:
    """Return the largest activations of a residual stream [tokens, hidden] of a text, their median, and how many are massive."""
    size = stream.float().abs()
    median = float(size.median())
    values, indices = size.flatten().topk(MOST)
    largest = [
        {
            "magnitude": value,
            "token": index // size.shape[1],
            "word": tokenizer.decode([text[index // size.shape[1]]], skip_special_tokens=False),
            "dimension": index % size.shape[1],
        }
        for value, index in zip(values.tolist(), indices.tolist(), strict=True)
    ]
    floor, times = MASSIVE
    massive = int(((size > floor) & (size > times * median)).sum())
    return {"largest": largest, "median": median, "massive": massive}


def concentration(shares: Tensor, window: int | None) -> Facts:
    """Tell on how few tokens attention [heads, queries, tokens] is spent; see `look`."""
    num_queries = shares.shape[1]
    queries = torch.arange(num_queries // 2, num_queries)
    late = shares[:, queries]
    near = torch.arange(num_queries) > queries[:, None] - NEAR
    seen = queries + 1 if window is None else (queries + 1).clamp(max=window)
    ordered = late.sort(-1, descending=True).values.cumsum(-1)
    counts = (ordered < MASS).sum(-1) + 1
    entropy = -(late * late.clamp(min=1e-30).log()).sum(-1)
    return {
        "sinks": float(late[..., :SINKS].sum(-1).mean()),
        "near": float((late * near).sum(-1).mean()),
        "spread": float((counts / seen).mean()),
        "effective": float(entropy.exp().mean()),
    }


def shrink(values: NDArray[Any], together: Any) -> list[list[float]]:
    """Put cells of a map [rows, columns] together until it has at most `SIDE` of each.

    Parameters
    ----------
    values : array
    together : callable
        ``reduceat`` of what puts neighbours together: of sums, rows are averaged then.
    """
    for axis in (1, 0):
        step = -(-values.shape[axis] // SIDE)
        starts = np.arange(0, values.shape[axis], step)
        values = together(values, starts, axis=axis)
        if axis == 0 and together == np.add.reduceat:
            values = values / np.diff([*starts, starts[-1] + step])[:, None]
    return [[float(f"{value:.3g}") for value in row] for row in values]
