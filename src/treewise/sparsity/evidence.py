"""What a layer knows of its tokens when some of them have to go."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from treewise.attention.scores import column_sums
from treewise.config import RopeConfig


class Evidence(NamedTuple):
    """Keys and values of one layer, and the last queries that looked at them.

    Attributes
    ----------
    layer, num_layers : int
        Which of the model's layers this is, from 0.
    keys, values : Tensor [tokens, kv_heads, head_dim]
        As they are stored: keys are rotated to their positions.
    positions : Tensor [tokens], int64
        Logical positions of the tokens, ascending; not all positions need be there. Where heads hold different tokens,
        those that were chosen before have stand-ins: lower positions than any query's, in the right order.
    queries : Tensor [queries, heads, head_dim]
        Rotated queries: the last that a `Scorer` asked for, of one branch or of several.
    query_positions : Tensor [queries], int64
    lse : Tensor [queries, heads], float32
        The LSE of each query over everything on its path, which may be more than `keys`.
    scale : float
        Factor of the scores of attention.
    soft_cap : float or None
        See `treewise.attention.run_plan`.
    rope : RopeConfig
        How keys and queries of this layer were rotated.
    first_head : int
        Which of the layer's KV heads is the first of `keys`: heads that hold different numbers of tokens come one by
        one.
    seed : int
        Where a scorer draws, it draws from this.
    """

    layer: int
    num_layers: int
    keys: Tensor
    values: Tensor
    positions: Tensor
    queries: Tensor
    query_positions: Tensor
    lse: Tensor
    scale: float
    soft_cap: float | None
    rope: RopeConfig
    first_head: int = 0
    seed: int = 0

    def attention(self, num_queries: int | None = None, reduce: str = "mean") -> Tensor:
        """Return what each key got of the last `num_queries` queries' attention, float32 [kv_heads, tokens].

        See `treewise.attention.scores.column_sums`.
        """
        first = 0 if num_queries is None else max(0, len(self.queries) - num_queries)
        return column_sums(
            self.queries[None, first:],
            self.lse[None, first:],
            self.keys[None],
            self.query_positions[first:],
            self.positions,
            scale=self.scale,
            soft_cap=self.soft_cap,
            reduce=reduce,
        )[0]


class Scorer(Protocol):
    """Says which tokens of a layer are worth keeping.

    Attributes
    ----------
    num_queries : int or None
        How many of the last queries it wants to see; 0 for none, None for all of the prompt.

    Notes
    -----
    One that looks at queries of a second pass over the prompt, as `KVzip` does, has a true `second_pass` as well. One
    whose scores of a KV head follow from the keys, values and queries of this head alone, whatever the layer, has a
    true `by_head`: the heads of several layers may come to it as those of one, which takes less time.
    """

    @property
    def num_queries(self) -> int | None: ...  # noqa: D102

    def scores(self, evidence: Evidence) -> Tensor:
        """Return a score of each token, float32 [kv_heads, tokens]; the higher, the longer it stays."""
