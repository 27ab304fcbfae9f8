"""What a model's layers do with a text: which activations are massive, and which tokens attention is spent on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
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
from treewise.models import CausalLM, Tokenizer, load_model
from treewise.ops import Heads, rotate
from treewise.reproduce.figures import Panel, drawn, figure
from treewise.reproduce.report import Cell, Figure, Section, Table, slug
from treewise.reproduce.study import Measurement, Results

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
BROAD = 0.25
"""Share of tokens beyond which attention is broad."""
MAJORITY = 0.25
"""Share of attention on the first tokens beyond which they are sinks."""
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
    """Return what is large in a residual stream [tokens, hidden] of a text; see `look`."""
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


def measurements(models: Sequence[str], tokens: int) -> list[Measurement]:
    """Return what there is to measure: a look at each model."""

    def measure(name: str) -> Facts:
        return {"model": _short(name), **look(*load_model(name, dtype="float32", device="cpu"), tokens)}

    return [
        Measurement(
            f"maps-{slug(_short(name))}",
            f"activations and attention of {_short(name)}",
            0.02 * tokens,
            partial(measure, name),
            {"model": _short(name), "tokens": tokens},
        )
        for name in models
    ]


def sections(results: Results) -> list[Section]:
    """Report what the account's figures 1 and 2 are about."""
    found = {
        result["model"]: result for key, result in results.items() if key.startswith("maps-") and "layers" in result
    }
    heading = "Massive activations, and attention by layer"
    lead = (
        "What the account's figures 1 and 2 show of Llama 2 and 3: a few activations, of the first token and of "
        "delimiters, in a few dimensions, are thousands of times larger than the others; attention is broad in the "
        "lowest layers, local in the middle ones, and in the highest spent on a few tokens. That is its reason to "
        "treat layers differently. Here are the same of small real models, on a text with four hidden numbers and a "
        "question about one of them. An activation is massive if it is larger than "
        f"{MASSIVE[0]:.0f} and than {MASSIVE[1]:,.0f} medians of its layer."
    )
    if not found:
        return [Section(heading, lead + "\n\nNothing was measured.")]
    parts: list[Table | Figure] = []
    for name, facts in found.items():
        parts.append(_table(name, facts))
        parts += drawn(
            f"Activations by layer of {name}",
            partial(draw_activations, name, facts),
            "Magnitudes of the three largest activations and of the median by layer, and a surface of the magnitudes "
            "over tokens and dimensions in the layer with the largest.",
            "The account's figure 1. Layers are counted from 0; their activations are those of the residual stream "
            "that enters them.",
        )
        parts += drawn(
            f"Attention by layer of {name}",
            partial(draw_attention, name, facts),
            "Maps of six layers: what each query looks at, in the mean of heads.",
            "The account's figure 2.",
        )
    parts += figure(
        "Concentration of attention by depth",
        list(panels(found)),
        "By depth: the share of attention on the first tokens, on the last ones, and how many tokens get most.",
        "Depth: a layer's number over that of the last. Means of heads and of the queries of the text's second half.",
    )
    verdicts = [f"- {name}: {_verdict(facts)}" for name, facts in found.items()]
    return [Section(heading, lead + "\n\n" + "\n".join(verdicts), parts)]


def _verdict(facts: Facts) -> str:
    layers = facts["layers"]
    massive = [number for number, layer in enumerate(layers) if layer["massive"]]
    broad = [number for number, layer in enumerate(layers) if layer["spread"] > BROAD]
    sinks = [number for number, layer in enumerate(layers) if layer["sinks"] > MAJORITY]
    said = [
        f"massive activations enter {_span(massive)}",
        f"{MASS:.0%} of attention takes more than {BROAD:.0%} of the tokens in {_span(broad)}",
        f"the first {SINKS} tokens get more than {MAJORITY:.0%} of it in {_span(sinks)}",
    ]
    return "; ".join(said)


def _span(layers: Sequence[int]) -> str:
    """Write numbers of layers, neighbours as from-to.

    Examples
    --------
    >>> _span([1, 2, 3, 7]), _span([])
    ('layers 1–3, 7', 'no layer')
    """
    if not layers:
        return "no layer"
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return (
        "layer " * (len(layers) == 1)
        + "layers " * (len(layers) > 1)
        + ", ".join(str(start) if start == end else f"{start}–{end}" for start, end in zip(starts, ends, strict=True))
    )


def _table(name: str, facts: Facts) -> Table:
    rows: list[list[Cell]] = []
    for number, layer in enumerate(facts["layers"]):
        first = layer["largest"][0]
        rows.append(
            [
                number,
                first["magnitude"],
                layer["median"],
                first["magnitude"] / layer["median"],
                f"{first['token']}: {first['word']!r}",
                first["dimension"],
                layer["massive"],
                *(layer[measure] for measure in ("sinks", "near", "spread")),
            ]
        )
    columns = ["layer", "largest", "median", "times", "its token", "its dimension", "massive"]
    columns += [f"attention on the first {SINKS}", f"on the last {NEAR}", f"share of tokens with {MASS:.0%}"]
    return Table(f"Layers of {name}", columns, rows, "Activations have no unit.")


def _short(name: str) -> str:
    """Return a model's name without folders and the ending of a file."""
    return name.rpartition("/")[2].removesuffix(".gguf")


def draw_activations(name: str, facts: Facts) -> bytes:
    """Draw the largest activations by layer, and those of the layer that has the largest of all; a PNG."""
    from matplotlib.figure import Figure as Picture

    figure = Picture(figsize=(12, 4.6), layout="constrained")
    lines = figure.add_subplot(1, 2, 1)
    layers = range(len(facts["layers"]))
    for rank in range(MOST):
        sizes = [layer["largest"][rank]["magnitude"] for layer in facts["layers"]]
        lines.plot(layers, sizes, marker="o", markersize=3, color=COLOURS[rank], label=("largest", "2nd", "3rd")[rank])
    medians = [layer["median"] for layer in facts["layers"]]
    lines.plot(layers, medians, linestyle="--", color="#777777", label="median")
    lines.set_yscale("log")
    lines.set_xlabel("layer that it enters")
    lines.set_ylabel("magnitude of an activation of the residual stream (no unit)")
    lines.grid(color="#eeeeee")
    lines.legend(frameon=False, fontsize=8)
    surface = np.array(facts["magnitudes"])
    tokens, dimensions = (np.linspace(0, whole, count, endpoint=False) for whole, count in _sides(facts, surface))
    space: Any = figure.add_subplot(1, 2, 2, projection="3d")
    across, along = np.meshgrid(dimensions, tokens)
    space.plot_surface(along, across, surface, cmap="viridis", linewidth=0, rstride=1, cstride=1)
    space.set_xlabel("token")
    space.set_ylabel("dimension")
    space.set_zlabel("magnitude (no unit)", labelpad=12)
    space.view_init(elev=24, azim=-30)
    space.set_title(f"what enters layer {facts['peak']}, largest of neighbours", fontsize=9)
    figure.suptitle(f"{name}, {facts['tokens']} tokens", fontsize=10)
    return _png(figure)


def draw_attention(name: str, facts: Facts) -> bytes:
    """Draw the maps of attention of some layers; a PNG."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure as Picture

    maps = facts["attention"]
    columns = (len(maps) + 1) // 2
    figure = Picture(figsize=(4 * columns, 7.6), layout="constrained")
    grid = figure.subplots(2, columns, sharex=True, sharey=True, squeeze=False)
    whole = facts["tokens"]
    for axes, (layer, shares) in zip(grid.flat, maps.items(), strict=False):
        shown = np.maximum(np.array(shares), 1e-4)
        image = axes.imshow(shown, norm=LogNorm(1e-4, 1), cmap="magma", extent=(0, whole, whole, 0), aspect="equal")
        axes.set_title(f"layer {layer}", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("token that is looked at")
    for axes in grid[:, 0]:
        axes.set_ylabel("query")
    for axes in list(grid.flat)[len(maps) :]:
        axes.set_axis_off()
    together = -(-whole // len(np.array(next(iter(maps.values())))))
    label = f"share of a query's attention on {together} tokens, mean of heads"
    figure.colorbar(image, ax=list(grid.flat), shrink=0.6, label=label)
    figure.suptitle(f"{name}, {whole} tokens", fontsize=10)
    return _png(figure)


def panels(facts: Mapping[str, Facts]) -> Iterator[Panel]:
    """Yield charts of how few tokens attention is spent on in each layer, a line a model."""
    measures = {
        "sinks": f"share of attention on the first {SINKS} tokens",
        "near": f"share of attention on the last {NEAR} tokens",
        "spread": f"share of tokens that get {MASS:.0%} of attention",
        "effective": "tokens, by the entropy of attention",
    }
    for measure, label in measures.items():
        lines = {}
        for name, own in facts.items():
            values = [layer[measure] for layer in own["layers"]]
            lines[name] = (np.linspace(0, 1, len(values)).tolist(), values)
        yield Panel(label, "depth", label, lines, log_y=measure == "effective")


def _sides(facts: Facts, values: NDArray[Any]) -> list[tuple[int, int]]:
    """Return how long each side of a map of magnitudes is, and of how many cells."""
    return list(zip((facts["tokens"], facts["hidden_size"]), values.shape, strict=True))


def _png(figure: Any) -> bytes:
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()
