"""The last queries of a path, kept while it is computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Observation:
    """The queries at the last positions of a path in all layers, with the LSE of each.

    Parameters
    ----------
    num_layers, num_heads, head_dim : int
    first, end : int
        The positions are ``first`` to ``end - 1``.
    dtype : torch.dtype
        Of the queries.
    device : torch.device
    alone : bool
        Whether the keys that will be scored are all that the queries have seen, so that their LSE follows from these.

    Attributes
    ----------
    queries : Tensor [layers, positions, heads, head_dim]
        Rotated.
    lse : Tensor [layers, positions, heads], float32
        Over all that each query saw.
    missing : set of int
        Positions of which nothing is known yet.
    lacks_lse : bool
        Whether there are queries without an LSE.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        first: int,
        end: int,
        dtype: torch.dtype,
        device: torch.device,
        alone: bool = True,
    ) -> None:
        self.alone = alone
        self.lacks_lse = False
        self.first = first
        self.end = end
        self.missing = set(range(first, end))
        self.queries = torch.zeros(num_layers, end - first, num_heads, head_dim, dtype=dtype, device=device)
        self.lse = torch.zeros(num_layers, end - first, num_heads, dtype=torch.float32, device=device)

    @property
    def positions(self) -> Tensor:
        """Of the queries, int64."""
        return torch.arange(self.first, self.end, device=self.queries.device)


class Seen(NamedTuple):
    """Rows of a step whose queries an observation takes.

    Attributes
    ----------
    observation : Observation
    rows, places : Tensor [rows], int64
        The rows of the step, and where their queries go.
    """

    observation: Observation
    rows: Tensor
    places: Tensor

    def take(self, layer: int, q: Tensor, lse: Tensor) -> None:
        """Take them from those of all rows of `layer`: `q` [rows, heads, head_dim], `lse` [rows, heads]."""
        observation = self.observation
        observation.queries[layer].index_copy_(0, self.places, q.index_select(0, self.rows))
        observation.lse[layer].index_copy_(0, self.places, lse.index_select(0, self.rows))

    def take_behind(self, queries: Tensor) -> None:
        """Take them from `queries` [layers, rows, heads, head_dim] once the step has run, without their LSE."""
        self.observation.queries.index_copy_(1, self.places, queries.index_select(1, self.rows))
        self.observation.lacks_lse = True
