"""How much attention each key gets: the second pass over keys, by the LSE of the first."""

from __future__ import annotations

import torch
from torch import Tensor

REDUCTIONS = ("mean", "max", "sum")


def column_sums(
    q: Tensor,
    lse: Tensor,
    k: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    reduce: str = "mean",
) -> Tensor:
    """Sum what each key got of the attention of some queries.

    Each query's attention is ``exp(q k scale - lse)`` where it sees the key: exact also where `k` are only some of the
    keys that the query saw, as `lse` is over all of them.

    Parameters
    ----------
    q : Tensor [queries, heads, head_dim]
        Rotated queries.
    lse : Tensor [queries, heads], float32
        Of each query over everything on its path.
    k : Tensor [tokens, kv_heads, head_dim]
        Rotated keys.
    q_positions, k_positions : Tensor [queries], [tokens], int64
        A query sees the keys up to its own position.
    scale, soft_cap
        As in `treewise.attention.run_plan`.
    reduce : {"mean", "max", "sum"}
        How the sums of the heads that share a KV head become one.

    Returns
    -------
    Tensor [kv_heads, tokens], float32

    Raises
    ------
    ValueError
        If `reduce` is none of these.
    """
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce is {reduce!r}; choose one of {', '.join(REDUCTIONS)}")
    num_kv_heads = k.shape[1]
    grouped = q.float().unflatten(1, (num_kv_heads, -1))  # [queries, kv_heads, group, head_dim]
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.float()).mul_(scale)
    if soft_cap is not None:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores -= lse.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0)[..., None]
    unseen = k_positions[None, :] > q_positions[:, None]
    sums = scores.exp_().masked_fill_(unseen, 0).sum(2)  # [kv_heads, group, tokens]
    match reduce:
        case "mean":
            return sums.mean(1)
        case "max":
            return sums.amax(1)
        case _:
            return sums.sum(1)
