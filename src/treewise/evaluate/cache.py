"""Keys and values of one sequence, of which every layer and head may hold others: what policies are measured with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treewise.models import CausalLM
from treewise.ops import Heads, rotate
from treewise.sparsity.evidence import Evidence
from treewise.sparsity.policy import KVSparsity

NOWHERE = torch.iinfo(torch.int64).max
"""Position of what fills up a head that holds fewer tokens than others: no query sees it."""

ROWS = 256
"""Tokens of a prompt that are computed together."""

POSITION_BYTES = 4
"""What a cache has to know of each token that a head holds, besides keys and values: its position."""


class Held(NamedTuple):
    """What one layer holds.

    Attributes
    ----------
    keys, values : Tensor [kv_heads, tokens, head_dim]
        Keys are rotated to the positions of their tokens.
    positions : Tensor [kv_heads, tokens], int64
        `NOWHERE` for what is no token.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor

    def and_also(self, other: Held) -> Held:
        """Return this and what `other` holds."""
        return Held(*(torch.cat(both, dim=1) for both in zip(self, other, strict=True)))

    def only(self, kept: Sequence[Tensor]) -> Held:
        """Return the tokens of each KV head that have these indices, int64 [kept]."""
        counts = torch.tensor([len(indices) for indices in kept])
        chosen = pad_sequence(list(kept), batch_first=True)  # [kv_heads, most kept]
        filling = torch.arange(chosen.shape[1]) >= counts[:, None]
        wide = chosen[..., None].expand(-1, -1, self.keys.shape[2])
        positions = self.positions.gather(1, chosen).masked_fill(filling, NOWHERE)
        return Held(self.keys.gather(1, wide), self.values.gather(1, wide), positions)

    def rounded(self, dtype: torch.dtype | None) -> Held:
        """Return the keys and values that are left if they are stored as `dtype`; None: as they are."""
        if dtype is None:
            return self
        keys, values = (part.to(dtype).to(part.dtype) for part in (self.keys, self.values))
        return Held(keys, values, self.positions)

    @property
    def num_tokens(self) -> int:
        """Tokens that all heads hold together."""
        return int((self.positions != NOWHERE).sum())


class Asked(NamedTuple):
    """The queries of some rows in one layer, and what attention made of them.

    Attributes
    ----------
    queries, outputs : Tensor [rows, heads, head_dim]
    lse : Tensor [rows, heads], float32
    """

    queries: Tensor
    outputs: Tensor
    lse: Tensor


class Weights(NamedTuple):
    """How much of attention each token gets.

    Attributes
    ----------
    parts : Tensor [kv_heads, group, rows, tokens], float32
        Of each query, what each token gets; not divided by `total`.
    total : Tensor [kv_heads, group, rows, 1], float32
    lse : Tensor [kv_heads, group, rows], float32
        Of the scores.
    """

    parts: Tensor
    total: Tensor
    lse: Tensor


def weigh(
    queries: Tensor,
    query_positions: Tensor,
    held: Held,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
) -> Weights:
    """Tell how much of attention of queries [rows, heads, head_dim] each held token gets; see `attend`."""
    kv_heads = len(held.keys)
    grouped = queries.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, rows, head_dim]
    scores = torch.matmul(grouped * scale, held.keys[:, None].mT).float()  # [kv_heads, group, rows, tokens]
    if soft_cap is not None:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    distance = query_positions[:, None] - held.positions[:, None]  # [kv_heads, rows, tokens]
    unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores.masked_fill_(unseen[:, None], -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    return Weights(weights, total, (highest + total.log())[..., 0])


def attend(
    queries: Tensor,
    query_positions: Tensor,
    held: Held,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
) -> Asked:
    """Let queries [rows, heads, head_dim] see all that a layer holds up to their own positions [rows]."""
    weights, total, lse = weigh(queries, query_positions, held, scale=scale, soft_cap=soft_cap, window=window)
    outputs = torch.matmul(weights.to(held.values.dtype), held.values[:, None]) / total.to(held.values.dtype)
    return Asked(queries, outputs.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1))


class OfflineCache:
    """What a model has read of one sequence.

    Nothing is changed in place, so that copies share what they have in common. Built for measuring: it computes in
    plain torch, keeps every query that it has seen, and takes no thought for memory.

    Parameters
    ----------
    model : CausalLM

    Attributes
    ----------
    tokens : list of int
        All that was read, whatever is held of it.
    held : list of Held
        Of each layer.
    asked : list of list of Asked
        Of each layer, the rows that were read.
    last : Tensor [hidden] or None
        What the model made of the last token, for `CausalLM.logits`.
    stored : torch.dtype or None
        What keys and values are rounded to; None: they are as the model made them, and count as 16 bits.

    Examples
    --------
    >>> cache = OfflineCache(model)
    >>> states = cache.read(list(range(1, 101)))  # [tokens, hidden]
    >>> small = cache.compress(KVSparsity.named("snapkv", budget=48))
    >>> small.length, small.held[0].keys.shape[1]
    (100, 48)
    >>> states = small.read([7, 8])
    """

    def __init__(self, model: CausalLM) -> None:
        config = model.config
        empty = torch.empty((config.num_kv_heads, 0, config.head_dim), dtype=model.dtype)
        nothing = Held(empty, empty, torch.empty((config.num_kv_heads, 0), dtype=torch.int64))
        self.model = model
        self.tokens: list[int] = []
        self.held = [nothing] * config.num_layers
        self.asked: list[list[Asked]] = [[] for _ in range(config.num_layers)]
        self.last: Tensor | None = None
        self.stored: torch.dtype | None = None

    @property
    def length(self) -> int:
        """How many tokens were read, which is the position of the next one."""
        return len(self.tokens)

    def copy(self) -> Self:
        """Return a cache that can go on by itself."""
        other = type(self)(self.model)
        other.tokens, other.held = list(self.tokens), list(self.held)
        other.last, other.stored = self.last, self.stored
        other.asked = [list(rows) for rows in self.asked]
        return other

    def without(self, count: int) -> Self:
        """Return a copy that has not read the last `count` tokens, all of which are held, nor knows what follows."""
        other = self.copy()
        if count:
            other.tokens = self.tokens[:-count]
            other.held = [Held(*(part[:, :-count] for part in held)) for held in self.held]
            other.asked, other.last = [[] for _ in self.asked], None
        return other

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Go on with some tokens; returns the last layer's output behind each of them [tokens, hidden]."""
        parts = [tokens[start : start + ROWS] for start in range(0, len(tokens), ROWS)]
        return torch.cat([read_together([self], [part])[0] for part in parts])

    def greedy(self, count: int) -> list[int]:
        """Return the most likely continuation of so many tokens, which a copy reads."""
        cache, tokens = self.copy(), list[int]()
        while len(tokens) < count:
            if tokens:
                cache.read(tokens[-1:])
            assert cache.last is not None
            tokens.append(int(self.model.logits(cache.last[None]).argmax()))
        return tokens

    def evidence(self, layer: int, num_queries: int | None, tokens: int | None = None, seed: int = 0) -> Evidence:
        """Return what a layer that still holds everything knows of its first tokens.

        Parameters
        ----------
        layer : int
            Of the model; `Evidence.layer` counts those without a window of their own.
        num_queries : int or None
            How many of the last queries are in it; None for all.
        tokens : int, optional
            How many of the first tokens it is about; default all. Queries that come later have seen more.
        seed : int
            For what a scorer draws.
        """
        config = self.model.config
        keys, values, positions = (part[:, :tokens] for part in self.held[layer])
        queries, lse = (torch.cat([getattr(rows, name) for rows in self.asked[layer]]) for name in ("queries", "lse"))
        first = 0 if num_queries is None else max(0, len(queries) - num_queries)
        return Evidence(
            layer=config.layer_windows[:layer].count(None),
            num_layers=config.layer_windows.count(None),
            keys=keys.transpose(0, 1),
            values=values.transpose(0, 1),
            positions=positions[0],
            queries=queries[first:],
            query_positions=torch.arange(self.length - len(queries) + first, self.length),
            lse=lse[first:],
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            rope=config.layer_ropes[layer],
            seed=seed,
        )

    def choose(
        self, policy: KVSparsity, tokens: int | None = None, seed: int = 0, beside: Sequence[OfflineCache] = ()
    ) -> list[list[Tensor] | None]:
        """Return what a policy would keep of the first tokens, judging by the last queries that were read.

        Where the queries come from later tokens than those in question, the policy judges by what a continuation has
        looked at: a branch, a second reading of the text, the answer itself. It judges by the last queries of all
        caches together that are `beside` this one and begin with the same tokens.

        Returns
        -------
        list of (list of Tensor [kept], int64) or None
            For each layer the indices that each KV head keeps, None for a layer with a window of its own.

        Raises
        ------
        ValueError
            If the model cannot have this policy.
        """
        if reasons := policy.refusals(self.model.config):
            raise ValueError(f"policy: {'; '.join(reasons)}")
        total = self.length if tokens is None else tokens
        windows = self.model.config.layer_windows
        budgets = iter(policy.budgets(total, windows.count(None)))
        chosen: list[list[Tensor] | None] = []
        for layer, window in enumerate(windows):
            if window is not None:
                chosen.append(None)
                continue
            evidence = self.evidence(layer, policy.num_queries, total, seed)
            others = [cache.evidence(layer, policy.num_queries, total, seed) for cache in beside]
            budget = next(budgets)
            if policy.per_head:
                chosen.append(policy.keep_heads([evidence], budget, *([other] for other in others)))
            else:
                chosen.append([*policy.keep(evidence, budget, *others)])
        return chosen

    def only(self, chosen: Sequence[Sequence[Tensor] | None]) -> Self:
        """Return a copy that holds only what was chosen, and remembers no queries; see `choose`."""
        other = self.copy()
        other.asked = [[] for _ in other.asked]
        for layer, kept in enumerate(chosen):
            if kept is not None:
                other.held[layer] = self.held[layer].only(kept)
        return other

    def store(self, dtype: torch.dtype | None) -> Self:
        """Return a copy whose keys and values are rounded to a type, and those to come as well."""
        other = self.copy()
        other.stored, other.held = dtype, [held.rounded(dtype) for held in self.held]
        return other

    def compress(self, policy: KVSparsity, seed: int = 0) -> Self:
        """Return a copy that holds only what a policy keeps of what was read."""
        return self.only(self.choose(policy, seed=seed))

    def num_bytes(self) -> int:
        """Return the bytes of keys and values, and of the positions of those in layers that have lost some."""
        total, element_size = 0, 2 if self.stored is None else self.stored.itemsize
        for held in self.held:
            kv_heads, _, head_dim = held.keys.shape
            token = 2 * head_dim * element_size + POSITION_BYTES * (held.num_tokens < kv_heads * self.length)
            total += token * held.num_tokens
        return total


@torch.inference_mode()
def read_together(caches: Sequence[OfflineCache], texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Let caches of one model go on, each with tokens of its own, in one forward.

    Returns
    -------
    list of Tensor [tokens, hidden]
        The last layer's output behind each token.
    """
    model = caches[0].model
    config = model.config
    counts = [len(text) for text in texts]
    rows = [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
    places = [torch.arange(cache.length, cache.length + count) for cache, count in zip(caches, counts, strict=True)]

    def attend_all(layer: int, heads: Heads) -> Tensor:
        q, k, v = rotate(heads, config.num_kv_heads)
        outputs = []
        for cache, own, positions in zip(caches, rows, places, strict=True):
            new = Held(k[own].transpose(0, 1), v[own].transpose(0, 1), positions.expand(config.num_kv_heads, -1))
            cache.held[layer] = cache.held[layer].and_also(new.rounded(cache.stored))
            asked = attend(
                q[own],
                positions,
                cache.held[layer],
                scale=config.attention_scale,
                soft_cap=config.attention_soft_cap,
                window=config.layer_windows[layer],
            )
            cache.asked[layer].append(asked)
            outputs.append(asked.outputs)
        return torch.cat(outputs)

    hidden = model(torch.tensor([token for text in texts for token in text]), torch.cat(places), attend_all)
    parts = list(hidden.split(counts))
    for cache, text, part in zip(caches, texts, parts, strict=True):
        cache.tokens += text
        cache.last = part[-1]
    return parts
