"""Which keys of a path survive: what its layers choose by the last queries that looked at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from treewise.kv import Count
from treewise.runner import Runner
from treewise.sparsity.evidence import Evidence
from treewise.sparsity.logits import log_sums
from treewise.sparsity.observation import Observation
from treewise.sparsity.policy import KVSparsity
from treewise.sparsity.select import ranked, top, top_of_each

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
    losing = losers(budgets, places, num_heads)
    rows = score(runner, policy, observations, end, budgets, losing, places)
    chosen: list[Sequence[Tensor] | None] = [None] * len(places)
    alike: dict[tuple[int, int], list[int]] = {}
    for layer in losing:
        if policy.per_head:
            heads = [row for part in rows[layer] for row in part]
            own = top_of_each(heads, policy.allocation.heads(heads, budgets[layer], scored_layer(runner, layer)))
            # Heads that by chance keep as many are by themselves too: a captured step serves whatever they keep.
            chosen[layer] = [head[None] for head in own]
        else:
            alike.setdefault((rows[layer][0].shape[1], budgets[layer]), []).append(layer)
    for (_, budget), layers in alike.items():
        best = top(torch.cat([rows[layer][0] for layer in layers]), budget).split(num_heads)
        for layer, which in zip(layers, best, strict=True):
            chosen[layer] = [which]
    return chosen


def losers(budgets: Sequence[int], places: Places, num_heads: int) -> list[int]:
    """Return the layers that have more tokens than they keep."""
    return [
        layer
        for layer, (budget, parts) in enumerate(zip(budgets, places, strict=True))
        if num_heads * budget < sum(map(len, parts)) * (num_heads // len(parts))
    ]


def scored_layer(runner: Runner, layer: int) -> int:
    """Return which layer it is of those without a sliding window of their own."""
    return sum(window is None for window in runner.model.config.layer_windows[:layer])


def score(
    runner: Runner,
    policy: KVSparsity,
    observations: Sequence[Observation],
    end: int,
    budgets: Sequence[int],
    layers: Sequence[int],
    places: Places,
) -> list[list[Tensor]]:
    """Return the scores of a path's tokens, float32 [kv_heads, tokens] of each of `layers`, see `KVSparsity.scores`.

    They are those of each head, [1, tokens], where heads hold different tokens, and none of other layers.
    """
    num_heads = runner.model.config.num_kv_heads
    scores: list[list[Tensor]] = [[] for _ in places]
    for alike in _together(policy, layers, places):
        first = alike[0]
        for part in range(len(places[first])):
            held = runner.read(torch.cat([places[layer][part] for layer in alike]), len(places[first]))
            # By observation, all of which see the same tokens.
            evidence, *beside = [_evidence(runner, each, end, alike, part, held) for each in observations]
            rows = policy.scores(evidence, budgets[first], *beside)
            for layer, own in zip(alike, rows.split(num_heads // len(places[first])), strict=True):
                scores[layer].append(own)
    return scores


def score_path(
    runner: Runner,
    policy: KVSparsity,
    observation: Observation,
    end: int,
    budgets: Sequence[int],
    layers: Sequence[int],
    pieces: Sequence[Places],
) -> list[list[Tensor]]:
    """Return the `score` of a path whose tokens come in several pieces."""
    places = [[torch.cat(parts) for parts in zip(*own, strict=True)] for own in zip(*pieces, strict=True)]
    return score(runner, policy, [observation], end, budgets, layers, places)


def share_out(
    runner: Runner,
    policy: KVSparsity,
    scores: Sequence[Sequence[Sequence[Tensor]]],
    budgets: Sequence[Sequence[int]],
    layers: Sequence[int],
    lines: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[Sequence[int]]],
) -> list[list[Count]]:
    """Return how many tokens each piece of a tree keeps where several paths are thinned out together, by layer.

    A token's score is the mean over the paths that lead through it. Each path would keep the best of all its tokens, as
    many as its budget; of a piece that several share the most is kept that any would keep, so that this is their
    union. What a path has for itself gets what is left of its budget, and what is protected at least.

    Layers that hold as many tokens keep equal numbers of them, in the mean as many as each would, so that they have one
    plan of attention; with budgets by head each head goes by itself.

    Parameters
    ----------
    runner : Runner
    policy : KVSparsity
    scores : sequence of sequences of sequences of Tensor
        Of each path what `score_path` says.
    budgets : sequence of sequences of int
        Of each path what each layer keeps of it.
    layers : sequence of int
        Those that lose tokens.
    lines : sequence of sequences of int
        The pieces that each path consists of. Pieces are numbered, those above others first.
    lengths : sequence of sequences of sequences of int
        Of each piece and layer how many tokens all its heads hold together, or each of them.
    """
    heads, num_layers = runner.model.config.num_kv_heads, len(lengths[0])
    counts: list[list[Count]] = [[own[layer][0] for layer in range(num_layers)] for own in lengths]
    alike: dict[object, list[int]] = {}
    for layer in range(num_layers):
        held = [own[layer] for own in lengths]
        if policy.per_head:
            parts = [[row for part in own[layer] for row in part] for own in scores] if layer in layers else []
            if not parts:
                for piece, own in enumerate(held):
                    counts[piece][layer] = tuple(own) if len(own) > 1 else own[0]
                continue
            wanted = [
                policy.allocation.heads(rows, own[layer], scored_layer(runner, layer))
                for rows, own in zip(parts, budgets, strict=True)
            ]
            by_head = [
                _share(
                    policy,
                    [rows[head][None] for rows in parts],
                    [own[head] for own in wanted],
                    lines,
                    [own[head % len(own)] for own in held],
                )
                for head in range(heads)
            ]
            for piece, own in enumerate(zip(*by_head, strict=True)):
                counts[piece][layer] = tuple(own)
        elif layer in layers:
            key = tuple(map(tuple, held)), tuple(own[layer] for own in budgets)
            alike.setdefault(key, []).append(layer)
    for same in alike.values():
        rows = [torch.cat([own[layer][0] for layer in same]) for own in scores]
        shared = _share(policy, rows, [own[same[0]] for own in budgets], lines, [own[same[0]][0] for own in lengths])
        for piece, count in enumerate(shared):
            for layer in same:
                counts[piece][layer] = count
    return counts


def _share(
    policy: KVSparsity,
    scores: Sequence[Tensor],
    budgets: Sequence[int],
    lines: Sequence[Sequence[int]],
    lengths: Sequence[int],
) -> list[int]:
    """Return how many tokens each piece keeps; `scores` are those of each path [rows, tokens], see `share_out`."""
    cut = [
        dict(zip(line, rows.split([lengths[piece] for piece in line], dim=1), strict=True))
        for line, rows in zip(lines, scores, strict=True)
    ]
    joint = [torch.stack([own[piece] for own in cut if piece in own]).mean(0) for piece in range(len(lengths))]
    left, counts = list(budgets), []
    for piece, length in enumerate(lengths):
        wanted: list[Tensor] = []
        through = [number for number, line in enumerate(lines) if piece in line]
        for number in through:
            below = lines[number][lines[number].index(piece) :]
            best = ranked(torch.cat([joint[each] for each in below], dim=1))[:, : left[number]]
            wanted.append((best < length).sum(1).double().mean())
        counts.append(int(torch.stack(wanted).max().item() + 0.5))
        for number in through:
            line = lines[number]
            place = line.index(piece) + 1
            above, below_it = (sum(lengths[each] for each in part) for part in (line[:place], line[place:]))
            protected = min(below_it, policy.window + max(0, policy.sinks - above))
            left[number] = max(left[number] - counts[-1], protected)
    return counts


def pick(
    runner: Runner,
    scores: Sequence[Sequence[Sequence[Tensor]]],
    begins: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[Sequence[int]],
    counts: Sequence[Count],
) -> Chosen:
    """Return which tokens of a piece stay, as many in each layer as `counts` say.

    Parameters
    ----------
    runner : Runner
    scores : sequence of sequences of sequences of Tensor
        Of the paths that lead through the piece, see `score_path`.
    begins : sequence of sequences of sequences of int
        Of each path, layer and head at which of its tokens the piece begins.
    lengths : sequence of sequences of int
        Of each layer how many tokens of the piece all its heads hold together, or each of them.
    counts : sequence of Count
        See `share_out`.
    """
    chosen: list[Sequence[Tensor] | None] = []
    for layer, (held, count) in enumerate(zip(lengths, counts, strict=True)):
        if not scores[0][layer]:
            chosen.append(None)
            continue
        parts = []
        for part, length in enumerate(held):
            first = [begin[layer][part] for begin in begins]
            own = [rows[layer][part][:, start : start + length] for rows, start in zip(scores, first, strict=True)]
            parts.append(torch.stack(own).mean(0))
        if not isinstance(count, tuple):
            chosen.append([top(parts[0], count)])
            continue
        rows = [row for part in parts for row in part]
        chosen.append([head[None] for head in top_of_each(rows, count)])
    return chosen


class Few(NamedTuple):
    """Which tokens of a layer's heads stay, in few bytes: those that do, or the others, whichever are fewer.

    Attributes
    ----------
    stay : bool
    which : Tensor [heads, tokens], int32
    """

    stay: bool
    which: Tensor


Remembered = Sequence[Sequence[Few] | None]
"""What has been chosen, in few bytes."""


def remember(runner: Runner, chosen: Chosen, places: Places) -> Remembered:
    """Return what has been chosen of the tokens at these places, to be recalled."""
    return [
        None if own is None else [_fewer(which, len(parts[place % len(parts)])) for place, which in enumerate(own)]
        for own, parts in zip(chosen, places, strict=True)
    ]


def recall(runner: Runner, remembered: Remembered, places: Places) -> Chosen:
    """Return what had been chosen of the tokens at these places."""
    return [
        None if own is None else [_all(few, len(parts[place % len(parts)])) for place, few in enumerate(own)]
        for own, parts in zip(remembered, places, strict=True)
    ]


def _fewer(which: Tensor, tokens: int) -> Few:
    stay = 2 * which.shape[1] <= tokens
    return Few(stay, (which if stay else _others(which, tokens)).int())


def _all(few: Few, tokens: int) -> Tensor:
    which = few.which.long()
    return which if few.stay else _others(which, tokens)


def _others(which: Tensor, tokens: int) -> Tensor:
    """Return the tokens that are not in each row of indices [rows, tokens], ascending."""
    left = torch.ones((len(which), tokens), dtype=torch.uint8, device=which.device).scatter_(1, which, 0)
    return top(left, tokens - which.shape[1])


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


def _together(policy: KVSparsity, layers: Sequence[int], places: Places) -> Iterator[list[int]]:
    """Yield those of `layers` that are scored at once together."""
    alike: dict[int, list[int]] = {}
    for layer in layers:
        tokens = len(places[layer][0])
        if policy.per_head or not getattr(policy.scoring, "by_head", False):
            yield [layer]
            continue
        same = alike.setdefault(tokens, [])
        same.append(layer)
        if (len(same) + 1) * tokens > TOGETHER:
            yield alike.pop(tokens)
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
        layer=scored_layer(runner, layers[0]),
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
