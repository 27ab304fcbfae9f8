"""Expected attention: what queries that are still to come will look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treewise.config import check_integer
from treewise.sparsity.evidence import Evidence


@dataclass(frozen=True)
class ExpectedAttention:
    """What a key gets of the attention of normally distributed queries at the next positions, times its value's norm.

    Expected Attention (Devoto et al., 2025, arXiv 2510.00636). With mean ``mu`` and covariance ``Sigma`` of a head's
    queries before their rotation, and the rotation ``R`` in the mean of the next positions::

        z_i = scale k_i R mu + scale^2 / 2 k_i R Sigma R^T k_i
        S_i = mean over the heads that share the KV head of softmax(z)_i, times |v_i|

    A soft cap of the scores is left out of account.

    Attributes
    ----------
    num_queries : int or None
        The last queries, which mean and covariance are taken of; None for all.
    horizon : int
        How many next positions.
    """

    num_queries: int | None = None
    horizon: int = 512

    def __post_init__(self) -> None:
        if self.num_queries is not None:
            check_integer("num_queries", self.num_queries, 1, also=" or None")
        check_integer("horizon", self.horizon, 1)

    def scores(self, evidence: Evidence) -> Tensor:
        """See `Scorer.scores`."""
        keys = evidence.keys.float()
        queries = self._turned(evidence).unflatten(1, (keys.shape[1], -1))  # [queries, kv_heads, group, head_dim]
        mean = queries.mean(0)
        centred = queries - mean
        covariance = torch.einsum("qhgi,qhgj->hgij", centred, centred) / len(queries)
        spread = torch.einsum("hgij,khj->hgki", covariance, keys).mul_(keys.transpose(0, 1)[:, None]).sum(-1)
        expected = torch.einsum("hgd,khd->hgk", mean, keys) * evidence.scale + spread * (evidence.scale**2 / 2)
        norms: Tensor = torch.linalg.vector_norm(evidence.values.float(), dim=-1)
        return expected.softmax(-1).mean(1) * norms.T

    def _turned(self, evidence: Evidence) -> Tensor:
        """Return the queries [queries, heads, head_dim], their rotations undone, in the mean of the next rotations."""
        first = 0 if self.num_queries is None else max(0, len(evidence.queries) - self.num_queries)
        frequencies = torch.tensor(evidence.rope.inverse_frequencies, device=evidence.keys.device)

        def rotations(positions: Tensor) -> Tensor:
            angles = positions[:, None].float() * frequencies
            return torch.polar(torch.ones_like(angles), angles)  # [positions, head_dim / 2]

        positions = evidence.query_positions[first:]
        coming = positions.max() + torch.arange(1, self.horizon + 1, device=positions.device)
        turns = rotations(positions).conj() * rotations(coming).mean(0)
        # The rotation's own scale is in the queries already, and would come back with the next rotation.
        pairs = torch.complex(*evidence.queries[first:].float().chunk(2, dim=-1)) * turns[:, None]
        return torch.cat([pairs.real, pairs.imag], dim=-1)
