"""Branches of one prompt: how much of it they want alike, and what a later one makes of what the others have kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treewise.evaluate.cache import OfflineCache, read_together
from treewise.evaluate.measures import Chosen, jaccard, kl_divergence, top1_agreement, union
from treewise.evaluate.trial import predict
from treewise.sparsity.policy import KVSparsity
from treewise.sparsity.select import protect, top_of_each

DRAWN = 32
"""Tokens of a branch that is drawn."""
REDUCED = 7
"""Prompts over which the last branch goes on, the whole one included."""


@dataclass(frozen=True)
class Shared:
    """What the last of several branches made of the prompt as others left it.

    Attributes
    ----------
    kind : str
        How branches differ.
    seed, budget
    jaccard : float
        Of the branches' own sets, see `treewise.evaluate.measures.jaccard`.
    union_tokens : list of float
        Tokens that a KV head of a layer holds in the mean for the union of the first one, two, … branches' sets.
    prompt_tokens : int
    kl, top1 : dict of str to float
        On the dense continuation of the last branch, when it reads its own tokens and goes on over a prompt reduced to
        its own set (``own``, which it cannot know before it has read them), to that of one other branch (``sibling``),
        to the union of all others' (``union``), to as many random tokens as that (``random``), to what the policy keeps
        by the queries of all branches together (``joint``), and to what it keeps at the end of the prompt (``prompt``).
    """

    kind: str
    seed: int
    budget: int | float | None
    jaccard: float
    union_tokens: list[float]
    prompt_tokens: int
    kl: dict[str, float]
    top1: dict[str, float]


def sample(prompt: OfflineCache, num_branches: int, new_tokens: int, seed: int) -> list[list[int]]:
    """Draw continuations of a prompt at temperature 1, side by side."""
    generator = torch.Generator().manual_seed(seed)
    caches = [prompt.copy() for _ in range(num_branches)]
    branches: list[list[int]] = [[] for _ in caches]
    while len(branches[0]) < new_tokens:
        if branches[0]:
            read_together(caches, [branch[-1:] for branch in branches])
        last = torch.stack([cache.last for cache in caches if cache.last is not None])
        drawn = prompt.model.logits(last).float().softmax(-1).multinomial(1, generator=generator)
        for branch, token in zip(branches, drawn[:, 0].tolist(), strict=True):
            branch.append(token)
    return branches


def random_like(chosen: Chosen, policy: KVSparsity, tokens: int, seed: int) -> list[list[Tensor] | None]:
    """Return as many random tokens of so many as was chosen in each head, with those that always stay."""
    generator = torch.Generator().manual_seed(seed)
    return [
        None
        if kept is None
        else top_of_each(
            list(protect(torch.rand((len(kept), tokens), generator=generator), policy.window, policy.sinks)),
            [len(head) for head in kept],
        )
        for kept in chosen
    ]


def share(
    prompt: OfflineCache,
    branches: Sequence[Sequence[int]] | int,
    policies: Sequence[KVSparsity],
    *,
    new_tokens: int,
    kind: str = "",
    seed: int = 0,
) -> list[Shared]:
    """Let branches of one prompt choose what they keep of it, and let the last go on with what the others chose.

    Parameters
    ----------
    prompt : OfflineCache
        Which has read the prompt.
    branches : sequence of sequence of int, or int
        Tokens of each branch, two branches at least; or how many are to be drawn.
    policies : sequence of KVSparsity
        By each of which the branches choose.
    new_tokens : int
        Length of the dense continuation of the last branch.
    kind, seed
        For `Shared`; what is drawn is drawn from `seed`.

    Returns
    -------
    list of Shared
        One for each policy.
    """
    if isinstance(branches, int):
        branches = sample(prompt, branches, DRAWN, seed)
    paths = [prompt.copy() for _ in branches]
    read_together(paths, branches)
    continuation = paths[-1].greedy(new_tokens)
    return [_share(prompt, paths, continuation, policy, kind, seed) for policy in policies]


def _share(
    prompt: OfflineCache,
    paths: Sequence[OfflineCache],
    continuation: Sequence[int],
    policy: KVSparsity,
    kind: str,
    seed: int,
) -> Shared:
    """Return what comes of branches whose paths have been read, of which the last goes on."""
    sets = [path.choose(policy, prompt.length, seed) for path in paths]
    *others, own = sets
    together = union(others)
    reduced = {
        "own": own,
        "sibling": others[0],
        "union": together,
        "random": random_like(together, policy, prompt.length, seed),
        "joint": paths[0].choose(policy, prompt.length, seed, beside=paths[1:]),
        "prompt": prompt.choose(policy, seed=seed),
    }
    caches = [prompt, *(prompt.only(chosen) for chosen in reduced.values())]
    _, (dense, *sparse), _ = predict(caches, paths[-1].tokens[prompt.length :], continuation)
    results = dict(zip(reduced, sparse, strict=True))
    return Shared(
        kind=kind,
        seed=seed,
        budget=policy.budget,
        jaccard=jaccard(sets),
        union_tokens=[_tokens(union(sets[:count])) for count in range(1, len(sets) + 1)],
        prompt_tokens=prompt.length,
        kl={name: float(kl_divergence(dense, log_probs).mean()) for name, log_probs in results.items()},
        top1={name: float(top1_agreement(dense, log_probs).float().mean()) for name, log_probs in results.items()},
    )


def _tokens(chosen: Chosen) -> float:
    """Return how many tokens a head of a layer that keeps a part holds in the mean."""
    counts = [len(head) for kept in chosen if kept is not None for head in kept]
    return sum(counts) / len(counts)
