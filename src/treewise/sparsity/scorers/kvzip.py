"""KVzip: what it takes to say the context again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from treewise.sparsity.evidence import Evidence
from treewise.sparsity.logits import logits, query_blocks

REPEAT = "\n\nRepeat the text above word for word:\n\n"
"""What stands between the context and its repetition."""


@dataclass(frozen=True)
class KVzip:
    """The most attention that a token gets while the model repeats the context.

    KVzip (Kim et al., 2025, arXiv 2505.23416): ``S_i = max over the queries j of a second pass, and over the heads that
    share a KV head, of softmax_i(q_j k_i scale)``. That pass reads the context once more, behind it and behind words
    such as "Repeat the previous context:", in pieces of some 2,000 tokens. The evidence has the context's keys, and the
    queries of that pass, with their positions behind the context and their LSE over all that they saw. The pass costs
    more than the prompt itself, so that this is an upper bound for methods that do not know what will be asked.
    """

    num_queries: ClassVar[int | None] = None
    second_pass: ClassVar[bool] = True

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`.

        Raises
        ------
        ValueError
            If there are queries that are not behind the context.
        """
        if (evidence.query_positions <= evidence.positions[-1]).any():
            raise ValueError("queries: kvzip needs those of a second pass that repeats the context behind it")
        tokens, kv_heads, _ = evidence.keys.shape
        most = torch.zeros((kv_heads, tokens), device=evidence.keys.device)
        for block in query_blocks(evidence, None):
            lse = evidence.lse[block].unflatten(1, (kv_heads, -1)).permute(1, 2, 0)[..., None]
            most = most.maximum(logits(evidence, block).sub_(lse).exp_().amax((1, 2)))
        return most
