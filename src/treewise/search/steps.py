"""Step-wise beam search: a fixed number of thoughts a round, allotted to the chains by their rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, floor, inf
from typing import Any, NamedTuple

from treewise.branch import Branch
from treewise.config import MAX_SEQUENCES, check_integer, check_number
from treewise.search.thinking import Thinker, ThoughtParams, ended


class Candidate(NamedTuple):
    """A chain that asks for thoughts.

    Attributes
    ----------
    value : float
    subtree : int
        Which of the first thoughts' deals it descends from, counted from 0.
    ended : bool
        Whether it has come to its end: being kept takes one thought of the round's, and no more.
    """

    value: float
    subtree: int
    ended: bool


class Budget(NamedTuple):
    """What there is to allot: `width`, `beam` and `balance` of `step_beam_search`."""

    width: int
    beam: int
    balance: float


async def step_beam_search(
    root: Branch,
    depth: int = 3,
    width: int = 8,
    beam: int = 2,
    allot: str = "rebase",
    balance: float = 0.1,
    **thoughts: Any,
) -> Branch:
    """Think in steps with a process reward, a fixed number of thoughts a round, and answer from the best chain.

    Parameters
    ----------
    root : Branch
    depth : int
        Rounds of thoughts.
    width : int
        Thoughts drawn a round, over all chains.
    beam : int
        Chains that ``"top"`` keeps a round; subtrees of ``"dvts"``.
    allot : str
        A name from `ALLOTMENTS`, how a round's thoughts are allotted to the chains; a chain without any is pruned.
        ``"top"``: evenly to the best chains. ``"dvts"``: the first thoughts are dealt into subtrees that never compete,
        and the best chain of each goes on (Beeching, Tunstall and Rush, "Scaling test-time compute with open models",
        2024: diverse verifier tree search). ``"rebase"``: by the softmax of the values (Wu et al., "Inference Scaling
        Laws", 2024: reward balanced search).
    balance : float
        Temperature of that softmax; above 0. The lower, the more the best chains get.
    **thoughts
        Fields of `ThoughtParams`; `evaluate` is the process reward.

    Returns
    -------
    Branch
        The best chain with its answer. Branches' scores are the values they were rated with.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    """
    check_integer("depth", depth, 1)
    check_integer("width", width, 1, MAX_SEQUENCES)
    check_integer("beam", beam, 1, width)
    check_number("balance", balance, 0, inf, open_low=True)
    if allot not in ALLOTMENTS:
        raise ValueError(f"allot: {allot!r} is not one of {', '.join(ALLOTMENTS)}")
    budget = Budget(width, beam, balance)
    subtrees: dict[Branch | None, int] = {}

    def by_reward(drawn: Sequence[Branch]) -> list[int]:
        candidates = []
        for i, thought in enumerate(drawn):
            # The first drawn are dealt out; later ones belong where their chain does.
            subtree = subtrees.setdefault(thought, subtrees.get(thought.parent, i % beam))
            candidates.append(Candidate(thought.score or 0.0, subtree, ended(thought)))
        return ALLOTMENTS[allot](candidates, budget)

    return await Thinker(root, ThoughtParams.of(thoughts)).rounds(depth, width, by_reward)


def split(number: int, weights: Sequence[float]) -> list[int]:
    """Split a number in proportion to weights by largest remainder; the parts' sum is the number exactly.

    Of equal remainders the first come first. Nothing is given where all weights are 0.

    Examples
    --------
    >>> split(8, [0.5, 0.3, 0.2]), split(2, [1, 1, 1])
    ([4, 2, 2], [1, 1, 0])
    """
    total = sum(weights)
    if total == 0:
        return [0] * len(weights)
    exact = [number * weight / total for weight in weights]
    parts = [floor(share) for share in exact]
    largest = sorted(range(len(weights)), key=lambda i: parts[i] - exact[i])
    for i in largest[: number - sum(parts)]:
        parts[i] += 1
    return parts


def _deal(candidates: Sequence[Candidate], number: int, weights: Sequence[float]) -> list[int]:
    """Give one thought to each ended candidate of positive weight, and split the rest by the weights of the others."""
    given = [int(candidate.ended and weight > 0) for candidate, weight in zip(candidates, weights, strict=True)]
    asking = [0 if candidate.ended else weight for candidate, weight in zip(candidates, weights, strict=True)]
    return [sum(pair) for pair in zip(given, split(number - sum(given), asking), strict=True)]


def _evenly_to_best(candidates: Sequence[Candidate], number: int, beam: int) -> list[int]:
    order = sorted(range(len(candidates)), key=lambda i: -candidates[i].value)
    shares = _deal([candidates[i] for i in order], number, [int(rank < beam) for rank in range(len(order))])
    return [share for _, share in sorted(zip(order, shares, strict=True))]


def _top(candidates: Sequence[Candidate], budget: Budget) -> list[int]:
    return _evenly_to_best(candidates, budget.width, budget.beam)


def _by_subtree(candidates: Sequence[Candidate], budget: Budget) -> list[int]:
    shares = [0] * len(candidates)
    for subtree, number in enumerate(split(budget.width, [1] * budget.beam)):
        members = [i for i, candidate in enumerate(candidates) if candidate.subtree == subtree]
        for i, share in zip(members, _evenly_to_best([candidates[i] for i in members], number, 1), strict=True):
            shares[i] = share
    return shares


def _by_softmax(candidates: Sequence[Candidate], budget: Budget) -> list[int]:
    highest = max((candidate.value for candidate in candidates if not candidate.ended), default=0)
    # Every ended chain is kept, whatever its value.
    weights = [1 if one.ended else exp((one.value - highest) / budget.balance) for one in candidates]
    return _deal(candidates, budget.width, weights)


ALLOTMENTS: dict[str, Callable[[Sequence[Candidate], Budget], list[int]]] = {
    "rebase": _by_softmax,
    "dvts": _by_subtree,
    "top": _top,
}
"""How a round's thoughts are allotted to chains, by name.

Returned is one number a candidate, 0 for those to prune. They sum to the width, less what chains that have all ended
(``"dvts"``: all within a subtree) cannot use.
"""
