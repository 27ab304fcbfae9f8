"""What is measured: a sparse cache's predictions, what it holds and what attention makes of it, against a dense one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewise.evaluate.cache import OfflineCache, attend

Chosen = Sequence[Sequence[Tensor] | None]
"""For each layer the indices that each KV head keeps, None where everything stays; see `OfflineCache.choose`."""

CONFIDENCE = 0.95
RESAMPLES = 1000


def kl_divergence(dense: Tensor, sparse: Tensor) -> Tensor:
    """Return the nats that a sparse cache loses at each place, float32 [places].

    Parameters
    ----------
    dense, sparse : Tensor [places, vocabulary], float32
        Log-probs. The divergence is KL(dense || sparse).
    """
    return (dense.exp() * (dense - sparse)).sum(-1)


def top1_agreement(dense: Tensor, sparse: Tensor) -> Tensor:
    """Tell where two caches find the same token the most likely, bool [places]; see `kl_divergence`."""
    return dense.argmax(-1) == sparse.argmax(-1)


def nll(log_probs: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the nats that each token costs [places] under log-probs [places, vocabulary]."""
    return -log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def parts_right(log_probs: Tensor, tokens: Sequence[int], parts: Sequence[int]) -> list[bool]:
    """Tell for each part of an answer whether all of its tokens are the most likely ones, given those before.

    Parameters
    ----------
    log_probs : Tensor [places, vocabulary]
    tokens : sequence of int
        The answer.
    parts : sequence of int
        The part that each token belongs to, from 0 on.
    """
    same = (log_probs.argmax(-1) == torch.tensor(tokens)).tolist()
    return [all(right for right, own in zip(same, parts, strict=True) if own == part) for part in sorted(set(parts))]


def retention(chosen: Chosen, tokens: Sequence[int], kv_heads: int) -> Tensor:
    """Return which share of some tokens is kept, float32 [layers, kv_heads]."""
    wanted = torch.tensor(tokens)
    shares = [
        [1.0] * kv_heads if kept is None else [float(torch.isin(wanted, head).float().mean()) for head in kept]
        for kept in chosen
    ]
    return torch.tensor(shares)


def output_errors(dense: OfflineCache, sparse: OfflineCache) -> Tensor:
    """Return how far attention's outputs are off in each layer, relative L2, float32 [layers].

    The queries, and the keys and values of their own tokens, are those of the dense cache, so that each layer's error
    is its own and not what earlier layers have passed on.

    Parameters
    ----------
    dense : OfflineCache
        The rows that it has read together last are those that ask.
    sparse : OfflineCache
        What was held before.
    """
    config = dense.model.config
    errors = []
    for layer, window in enumerate(config.layer_windows):
        wanted = dense.asked[layer][-1]
        count = len(wanted.queries)
        new = type(dense.held[layer])(*(part[:, -count:] for part in dense.held[layer]))
        got = attend(
            wanted.queries,
            torch.arange(dense.length - count, dense.length),
            sparse.held[layer].and_also(new),
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            window=window,
        )
        errors.append(torch.linalg.vector_norm(got.outputs - wanted.outputs) / torch.linalg.vector_norm(wanted.outputs))
    return torch.stack(errors)


def union(choices: Sequence[Chosen]) -> list[list[Tensor] | None]:
    """Return what at least one of several choices keeps."""
    together: list[list[Tensor] | None] = []
    for layer in zip(*choices, strict=True):
        parts = [kept for kept in layer if kept is not None]
        together.append([torch.cat(heads).unique() for heads in zip(*parts, strict=True)] if parts else None)
    return together


def jaccard(choices: Sequence[Chosen]) -> float:
    """Return how much choices overlap: intersection over union, the mean of all pairs, layers and KV heads."""
    shares = []
    for one, other in combinations(choices, 2):
        for ours, theirs in zip(one, other, strict=True):
            if ours is not None and theirs is not None:
                for a, b in zip(ours, theirs, strict=True):
                    both = int(torch.isin(a, b).sum())
                    shares.append(both / (len(a) + len(b) - both))
    return float(np.mean(shares))


def bootstrap(
    values: Sequence[NDArray[np.float64]], statistic: Callable[..., NDArray[np.float64]], seed: int = 0
) -> tuple[float, float]:
    """Return a bootstrap interval of 95 % (percentiles; Efron, 1979) over seeds.

    Parameters
    ----------
    values : sequence of array [..., seeds]
        What belongs to one seed stays together, in all arrays, and the same seeds are drawn whatever the values: an
        interval of a difference between two policies is one of pairs.
    statistic : callable
        From arrays [..., resamples, seeds], one for each of `values`, to [resamples].
    seed : int
        Of the resampling.
    """
    count = values[0].shape[-1]
    drawn = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    results = statistic(*(value[..., drawn] for value in values))
    low, high = np.nanquantile(results, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
