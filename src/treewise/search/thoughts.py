"""Tree of Thoughts, breadth first and depth first."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from treewise.branch import Branch
from treewise.config import MAX_SEQUENCES, check_integer, check_number
from treewise.search.thinking import Thinker, ThoughtParams, ended, ranked, retain


async def tree_of_thoughts(
    root: Branch,
    depth: int = 3,
    width: int = 3,
    beam: int = 2,
    **thoughts: Any,
) -> Branch:
    """Think in steps: draw some next thoughts, rate them, keep the best few, and answer from the best chain.

    Yao et al., "Tree of Thoughts: Deliberate Problem Solving with Large Language Models", 2023, its breadth-first form.

    Parameters
    ----------
    root : Branch
    depth : int
        Rounds of thoughts.
    width : int
        Thoughts drawn from each chain a round.
    beam : int
        Chains kept a round.
    **thoughts
        Fields of `ThoughtParams`: `evaluate`, `judge`, `conclude`, `temperature`, `top_p`, `thought_tokens`,
        `answer_tokens`, `stop`, `thought_grammar`, `grammar`.

    Returns
    -------
    Branch
        The best chain with its answer. Branches' scores are the values they were rated with.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    """
    for name, value in (("depth", depth), ("width", width), ("beam", beam)):
        check_integer(name, value, 1, MAX_SEQUENCES)

    def to_best(drawn: Sequence[Branch]) -> list[int]:
        # A chain that has come to its end stays in the race as it is.
        best = set(ranked(drawn)[:beam])
        return [width if thought in best else 0 for thought in drawn]

    return await Thinker(root, ThoughtParams.of(thoughts)).rounds(depth, width, to_best)


async def depth_first_thoughts(
    root: Branch,
    depth: int = 3,
    width: int = 3,
    threshold: float = 0.5,
    budget: int = 32,
    solutions: int = 1,
    **thoughts: Any,
) -> Branch:
    """Think in steps, follow the best next thought first, and go back where nothing is worth following.

    Yao et al., "Tree of Thoughts: Deliberate Problem Solving with Large Language Models", 2023, its algorithm 2. A
    complete chain has `depth` thoughts or has come to its end. What is given up is pruned at once; one chain is spared,
    the best complete one, or before there is any the deepest one, of equals the one of the higher value.

    Parameters
    ----------
    root : Branch
    depth : int
        Thoughts of a complete chain.
    width : int
        Thoughts drawn where a chain goes on.
    threshold : float
        A thought whose value is not above this is given up; in the units of `evaluate`.
    budget : int
        The most thoughts drawn in all.
    solutions : int
        Complete chains after which the search stops, even if thoughts are left.
    **thoughts
        Fields of `ThoughtParams`; ``"vote"`` compares the next thoughts of one chain.

    Returns
    -------
    Branch
        The answer from the chain that was spared; from the prompt itself if every first thought was given up.
        Branches' scores are the values they were rated with.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    """
    for name, value in (("depth", depth), ("budget", budget), ("solutions", solutions)):
        check_integer(name, value, 1)
    check_integer("width", width, 1, MAX_SEQUENCES)
    check_number("threshold", threshold, -inf, inf)
    thinker = Thinker(root, ThoughtParams.of(thoughts))

    def complete(chain: Branch) -> bool:
        return ended(chain) or len(chain.path) == len(root.path) + depth

    def merit(chain: Branch) -> tuple[bool, int, float]:
        return complete(chain), 0 if complete(chain) else len(chain.path), chain.score or 0

    best, ahead = root, [root]
    while ahead and solutions > 0:
        chain = ahead.pop()
        if complete(chain):
            solutions -= 1
        elif budget > 0:
            drawn = await thinker.extend([chain], [min(width, budget)])
            budget -= len(drawn)
            values = await thinker.rate(drawn)
            hopeful = [thought for thought, value in zip(drawn, values, strict=True) if value > threshold]
            ahead += reversed(ranked(hopeful))
            retain(drawn, [chain, *hopeful])
        if merit(chain) > merit(best):
            best, chain = chain, best
        retain([chain], [best])
    retain(ahead, [best])
    return await thinker.conclude([best])
