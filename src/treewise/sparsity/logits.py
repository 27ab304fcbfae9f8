"""The scores of attention themselves, for scorers that need more than their sums."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from treewise.sparsity.evidence import Evidence

LOGITS = 1 << 24
"""Most numbers made at once."""


def query_blocks(evidence: Evidence, num_queries: int | None) -> Iterator[slice]:
    """Cut the last `num_queries` queries, or all, into blocks whose logits are not too many at once."""
    tokens, total, heads = len(evidence.keys), *evidence.queries.shape[:2]
    size = max(1, LOGITS // max(1, heads * tokens))
    first = 0 if num_queries is None else max(0, total - num_queries)
    for start in range(first, total, size):
        yield slice(start, min(start + size, total))


def logits(evidence: Evidence, block: slice) -> Tensor:
    """Return the scores of a block of queries, -inf where a query does not see a key.

    Returns
    -------
    Tensor [kv_heads, group, queries, tokens], float32
    """
    keys = evidence.keys.float()
    grouped = evidence.queries[block].float().unflatten(1, (keys.shape[1], -1))  # [queries, kv_heads, group, head_dim]
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys).mul_(evidence.scale)
    if evidence.soft_cap is not None:
        scores = scores.div_(evidence.soft_cap).tanh_().mul_(evidence.soft_cap)
    unseen = evidence.positions[None, :] > evidence.query_positions[block, None]
    return scores.masked_fill_(unseen, -torch.inf)


def log_sums(evidence: Evidence) -> Tensor:
    """Return the LSE of all queries over the keys of the evidence, float32 [queries, heads]."""
    parts = [logits(evidence, block).logsumexp(-1) for block in query_blocks(evidence, None)]
    return torch.cat(parts, dim=2).permute(2, 0, 1).flatten(1)
