"""Which keys of a path survive: what its layers choose by the last queries that looked at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from treewise.runner import Runner
from treewise.sparsity.evidence import Evidence
from treewise.sparsity.logits import log_sums
from treewise.sparsity.observation import Observation
from treewise.sparsity.policy import KVSparsity
from treewise.sparsity.select import top

TOGETHER = 1 << 16
"""Most tokens that are scored at once, those of each layer counted, unless a single layer has more."""

Places = Sequence[Sequence[Tensor]]
"""Of each layer the slots of its tokens, of all KV heads together or of each, see `Runner.places`."""
Chosen = Sequence[Sequence[Tensor] | None]
"""Of each layer which of its tokens stay, see `Runner.gather`."""


def choose(
    runner: Runner,
    policy: KVSparsity,
    observations: Sequence[Observation],
    end: int,
    budgets: Sequence[int],
    places: Places,
) -> Chosen:
    """Return which tokens each layer keeps of those up to position `end`.

    Layers that hold as many tokens and keep as many are scored together where the scorer allows it. In any case they
    are sorted together: a sort of many rows takes little longer than one of a few.

    Parameters
    ----------
    runner : Runner
    policy : KVSparsity
    observations : sequence of Observation
        The last queries of one branch, or of several.
    end : int
    budgets : sequence of int
        Tokens that each layer keeps, in the mean of its heads.
    places : Places
    """
    num_heads = runner.model.config.num_kv_heads
    chosen: list[Sequence[Tensor] | None] = [None] * len(places)
    scores: dict[tuple[int, int], dict[int, Tensor]] = {}  # by tokens and budget; by layer
    for layers in _together(policy, budgets, places, num_heads):
        first, budget = layers[0], budgets[layers[0]]
        held = [
            runner.read(torch.cat([places[layer][part] for layer in layers]), len(places[first]))
            for part in range(len(places[first]))
        ]
        # By observation, and by head where heads hold different tokens.
        evidence, *beside = [
            [_evidence(runner, observation, end, layers, head, both) for head, both in enumerate(held)]
            for observation in observations
        ]
        if policy.per_head:
            own = policy.keep_heads(evidence, budget, *beside)
            alike = len(held) == len(set(map(len, own))) == 1
            chosen[first] = [torch.stack(own)] if alike else [head[None] for head in own]
        else:
            rows = policy.scores(evidence[0], budget, *(other[0] for other in beside))
            scores.setdefault((rows.shape[1], budget), {}).update(zip(layers, rows.split(num_heads), strict=True))
    for (_, budget), alike_layers in scores.items():
        best = top(torch.cat(list(alike_layers.values())), budget).split(num_heads)
        for layer, which in zip(alike_layers, best, strict=True):
            chosen[layer] = [which]
    return chosen


def score_together(runner: Runner, policy: KVSparsity, observation: Observation, places: Tensor) -> Tensor:
    """Return the scores of a path's first tokens, added up over all layers and KV heads, float32 [tokens].

    Parameters
    ----------
    runner : Runner
    policy : KVSparsity
    observation : Observation
        Its last queries.
    places : Tensor [tokens], int64
        The slots of all its tokens, up to where the observation ends, in the first layer.
    """
    total = torch.zeros(len(places), device=places.device)
    for layer in range(runner.model.config.num_layers):
        both = runner.read(places + layer * runner.k.shape[1])
        evidence = _evidence(runner, observation, len(places), [layer], 0, both)
        total += policy.scoring.scores(evidence).sum(0)
    return total


def _together(policy: KVSparsity, budgets: Sequence[int], places: Places, num_heads: int) -> Iterator[list[int]]:
    """Yield the layers that lose tokens, those that are scored at once together."""
    alike: dict[tuple[int, int], list[int]] = {}
    for layer, (budget, parts) in enumerate(zip(budgets, places, strict=True)):
        tokens = len(parts[0])
        if num_heads * budget >= sum(map(len, parts)) * (num_heads // len(parts)):
            continue
        if policy.per_head or not getattr(policy.scoring, "by_head", False):
            yield [layer]
            continue
        layers = alike.setdefault((tokens, budget), [])
        layers.append(layer)
        if (len(layers) + 1) * tokens > TOGETHER:
            yield alike.pop((tokens, budget))
    yield from alike.values()


def _evidence(
    runner: Runner, observation: Observation, end: int, layers: Sequence[int], first_head: int, both: Tensor
) -> Evidence:
    """Return what layers know of their tokens up to position `end`, or some of the KV heads of a single one.

    Those of the first layer come first, or the heads from the first on. `both` has keys and values of one layer after
    the other [2, layers * tokens, kv_heads, head_dim].
    """
    config = runner.model.config
    keys, values = (own.unflatten(0, (len(layers), -1)).transpose(0, 1).flatten(1, 2) for own in both)
    num_tokens, num_heads = keys.shape[0], both.shape[2]
    group = config.num_heads // config.num_kv_heads
    heads = slice(first_head * group, (first_head + num_heads) * group)
    evidence = Evidence(
        layer=sum(window is None for window in config.layer_windows[: layers[0]]),
        num_layers=config.layer_windows.count(None),
        keys=keys,
        values=values,
        # NOTE: heads may hold different tokens of earlier stages, all of which lie before those of this one.
        positions=torch.arange(end - num_tokens, end, device=keys.device),
        queries=torch.stack([observation.queries[layer][:, heads] for layer in layers], dim=1).flatten(1, 2),
        query_positions=observation.positions,
        lse=torch.stack([observation.lse[layer][:, heads] for layer in layers], dim=1).flatten(1, 2),
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        rope=config.layer_ropes[layers[0]],
        first_head=first_head,
    )
    return evidence._replace(lse=log_sums(evidence)) if observation.lacks_lse else evidence
