"""Keyformer: what all queries might have looked at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treewise.config import check_integer, check_number
from treewise.sparsity.evidence import Evidence
from treewise.sparsity.logits import logits, query_blocks
from treewise.sparsity.noise import uniform


@dataclass(frozen=True)
class Keyformer:
    """What each token got of the attention of all queries, with Gumbel noise on the scores.

    Keyformer (Adnan et al., 2024, arXiv 2403.09054)::

        S_i = sum over queries j of softmax_i((q_j k_i scale + noise_ji) / temperature)

    and the mean of the heads that share a KV head. The noise depends on the evidence's seed, the layer, the head and
    both positions, as the evidence has them. The denominator is over the keys of the evidence: keys that are there no
    more cannot be known to it.

    Attributes
    ----------
    num_queries : int or None
        The last queries; None for all.
    temperature : float
        1 for a prompt, as in the paper, where it goes up to 2 in decoding.
    """

    num_queries: int | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.num_queries is not None:
            check_integer("num_queries", self.num_queries, 1, also=" or None")
        check_number("temperature", self.temperature, 0, 100, open_low=True)

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        tokens, kv_heads, _ = evidence.keys.shape
        group = evidence.queries.shape[1] // kv_heads
        heads = torch.arange(kv_heads * group, device=evidence.keys.device).view(kv_heads, group, 1, 1)
        heads += evidence.first_head * group
        sums = torch.zeros((kv_heads, tokens), device=evidence.keys.device)
        for block in query_blocks(evidence, self.num_queries):
            rows = evidence.query_positions[block, None]
            noise = uniform(evidence.seed, evidence.layer, heads, rows, evidence.positions).log_().neg_().log_()
            noisy = logits(evidence, block).sub_(noise).div_(self.temperature)
            # A query that sees none of the keys has no distribution over them.
            sums += noisy.softmax(-1).nan_to_num_(0.0).sum(2).mean(1)
        return sums
