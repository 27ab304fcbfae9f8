"""How much attention each key gets: the second pass over keys, by the LSE of the first."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from treewise.attention.backend import Scoring, read

REDUCTIONS = ("mean", "max", "sum")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernel runs on a CPU too."""

QUERIES, TOKENS = 64, 1024
"""Most queries and key tokens of a block on a CPU."""
SCORES = 1 << 20
"""Most scores of a block, in all heads, unless these are very many."""


def column_sums(
    q: Tensor,
    lse: Tensor,
    k: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    *,
    scale: float,
    slots: Tensor | None = None,
    soft_cap: float | None = None,
    k_scale: Tensor | None = None,
    reduce: str = "mean",
) -> Tensor:
    """Sum what each key got of the attention of some queries, in several layers at once.

    Each query's attention is ``exp(q k scale - lse)`` where it sees the key: exact also where the keys are only some of
    those that the query saw, as `lse` is over all of them. Queries of several branches are just more queries.

    With the last queries of a prompt these sums are what SnapKV (arXiv 2404.14469) pools, with all of its queries what
    H2O (arXiv 2306.14048) adds up. The second pass, which takes the LSE from the first and costs no more than its own
    queries, follows Novita AI's account of sparsity by layers.

    Runs as one Triton kernel on a GPU, where it waits for nothing and the same input gives the same bits, and on a CPU
    under ``TRITON_INTERPRET=1``; else in blocks of torch, in float32.

    Parameters
    ----------
    q : Tensor [layers, queries, heads, head_dim]
        Rotated queries.
    lse : Tensor [layers, queries, heads], float32
        Natural-log sum of exponentials of each query over everything on its path; a query that saw nothing, -inf, gives
        nothing.
    k : Tensor [layers, slots, kv_heads, head_dim]
        The pool of rotated keys, read in place; of q's dtype, or 8-bit floating-point numbers.
    q_positions, k_positions : Tensor [queries], [tokens], int
        A query sees the keys up to its own position. Work that no query needs is skipped where positions ascend.
    scale, soft_cap
        As in `treewise.attention.run_plan`.
    slots : Tensor [tokens], int, optional
        Where in `k` the key tokens lie; by default they are all that `k` has, in order.
    k_scale : Tensor [layers, kv_heads], float32, optional
        Factors of the stored keys.
    reduce : {"mean", "max", "sum"}
        How the sums of the heads that share a KV head become one.

    Returns
    -------
    Tensor [layers, kv_heads, tokens], float32

    Raises
    ------
    ValueError
        If `reduce` is none of these, or shapes or dtypes do not fit.
    """
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce is {reduce!r}; choose one of {', '.join(REDUCTIONS)}")
    _check(q, lse, k, q_positions, k_positions, slots, k_scale)
    if k.is_cuda or INTERPRETED:
        # Imported here because Triton is not there on every machine, and reads TRITON_INTERPRET when imported.
        from treewise.attention.score_kernels import sum_columns

        return sum_columns(q, lse, k, q_positions, k_positions, slots, scale, soft_cap, k_scale, reduce)
    out = torch.empty((len(q), k.shape[2], len(k_positions)), dtype=torch.float32)
    order = q_positions.argsort(stable=True)
    for layer in range(len(q)):
        scoring = Scoring(scale, soft_cap, None if k_scale is None else k_scale[layer])
        sums = _sum_by_head(q[layer], lse[layer], k[layer], order, q_positions, k_positions, slots, scoring)
        match reduce:
            case "mean":
                torch.mean(sums, 1, out=out[layer])
            case "max":
                torch.amax(sums, 1, out=out[layer])
            case _:
                torch.sum(sums, 1, out=out[layer])
    return out


def _sum_by_head(
    q: Tensor,
    lse: Tensor,
    k: Tensor,
    order: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    slots: Tensor | None,
    scoring: Scoring,
) -> Tensor:
    """Return the sums of one layer for every head, [kv_heads, group, tokens]."""
    num_kv_heads, group, num_tokens = k.shape[1], q.shape[1] // k.shape[1], len(k_positions)
    sums = torch.zeros((num_kv_heads, group, num_tokens), dtype=torch.float32)
    size = max(16, min(TOKENS, SCORES // max(1, min(QUERIES, len(q)) * q.shape[1])))
    blocks = [slice(first, first + size) for first in range(0, num_tokens, size)]
    ranges = [torch.aminmax(k_positions[block]) for block in blocks]
    for start in range(0, len(order), QUERIES):
        chosen = order[start : start + QUERIES]
        position = q_positions[chosen]
        earliest, latest = position[0], position[-1]
        rows = q[chosen].float().unflatten(1, (num_kv_heads, group)).transpose(0, 1).flatten(1, 2) * scoring.scale
        if scoring.k_scale is not None:
            rows *= scoring.k_scale[:, None, None]
        logs = lse[chosen].unflatten(1, (num_kv_heads, group)).transpose(0, 1)[..., None]
        logs = logs.masked_fill(logs == -torch.inf, torch.inf)  # who sees nothing gives nothing
        for block, (first, last) in zip(blocks, ranges, strict=True):
            if first > latest:
                continue
            keys = read(k, block if slots is None else slots[block], None, torch.float32)
            scores = scoring.cap(rows @ keys.permute(1, 2, 0))
            weights = scores.unflatten(1, (-1, group)).sub_(logs).exp_()  # [kv_heads, queries, group, tokens]
            if last > earliest:
                weights.masked_fill_((k_positions[block] > position[:, None])[:, None], 0)
            sums[:, :, block] += weights.sum(1)
    return sums


def _check(
    q: Tensor,
    lse: Tensor,
    k: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    slots: Tensor | None,
    k_scale: Tensor | None,
) -> None:
    """Refuse what does not fit."""
    if q.dim() != 4 or k.dim() != 4 or (len(q), q.shape[3]) != (len(k), k.shape[3]) or q.shape[2] % k.shape[2]:
        raise ValueError(
            "q must be [layers, queries, heads, head_dim] and k [layers, slots, kv_heads, head_dim], heads a multiple "
            f"of kv_heads; they are {list(q.shape)} and {list(k.shape)}"
        )
    tokens = k.shape[1] if slots is None else len(slots)
    for name, tensor, shape in (
        ("lse", lse, q.shape[:3]),
        ("q_positions", q_positions, q.shape[1:2]),
        ("k_positions", k_positions, (tokens,)),
        ("k_scale", k_scale, (len(k), k.shape[2])),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}; it is {list(tensor.shape)}")
