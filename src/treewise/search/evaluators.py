"""Rates chains of thoughts: by the model as a judge, by its vote, by its log-probabilities, or by a reward."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from math import exp

from treewise.branch import Branch
from treewise.search.conversation import ask
from treewise.search.samples import Reward, mean_logprob, rewards

JUDGE = "Is every step of this solution correct so far? Answer Yes or No."
BALLOT = "Which of these next steps is the best? Answer with its number."


async def evaluate_chains(root: Branch, chains: Sequence[Branch], evaluate: str | Reward, judge: str) -> list[float]:
    """Return the values of `chains` by an evaluator or a reward function; they become the branches' scores.

    Parameters
    ----------
    root : Branch
        Where the chains begin.
    chains : sequence of Branch
        At least one.
    evaluate : str or callable
        A name from `EVALUATORS`, or a function from the list of all texts to as many numbers, for a worker thread.
    judge : str
        The question of ``"judge"``.

    Raises
    ------
    ValueError
        If a reward function does not give one finite number a text.
    """
    if callable(evaluate):
        values = await rewards("evaluate", evaluate, chains)
    else:
        values = await EVALUATORS[evaluate](root, chains, judge)
    for chain, value in zip(chains, values, strict=True):
        chain.score = value
    return values


async def _judge(root: Branch, chains: Sequence[Branch], judge: str) -> list[float]:
    rated = await ask(chains, judge, ("Yes", "No"))
    return [1 / (1 + exp(min(no - yes, 700))) for yes, no in rated]


async def _vote(root: Branch, chains: Sequence[Branch], judge: str) -> list[float]:
    options = "\n".join(f"{number}. {chain.new.strip()}" for number, chain in enumerate(chains, 1))
    [ballot] = await ask([root], f"{BALLOT}\n{options}", [f"{number}." for number in range(1, len(chains) + 1)])
    return [exp(logprob) for logprob in ballot]


async def _likelihood(root: Branch, chains: Sequence[Branch], judge: str) -> list[float]:
    return [mean_logprob(chain, root) for chain in chains]


EVALUATORS: dict[str, Callable[[Branch, Sequence[Branch], str], Awaitable[list[float]]]] = {
    "judge": _judge,
    "vote": _vote,
    "logprob": _likelihood,
}
"""How chains of thoughts are rated, by name."""
