"""Rates branches: by the model as a judge, by its vote, by its log-probabilities, or by a reward."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from math import exp, isfinite

from treewise.awaitables import call
from treewise.branch import Branch
from treewise.search.conversation import ask

Reward = Callable[[list[str]], Sequence[float]]
"""Rates texts, all in one call; higher is better."""

Evaluator = Callable[[Branch, Sequence[Branch], str], Awaitable[list[float]]]
"""Returns the values of branches below a root; what it asks the model, if anything, is given to it."""


async def judged(root: Branch, branches: Sequence[Branch], question: str) -> list[float]:
    """Return the probability that the model answers "Yes" rather than "No" to a question about each branch."""
    rated = await ask(branches, question, ("Yes", "No"))
    return [1 / (1 + exp(min(no - yes, 700))) for yes, no in rated]


async def elected(root: Branch, branches: Sequence[Branch], question: str) -> list[float]:
    """Return how likely the model names each branch when all are shown to it, numbered, under a question."""
    options = "\n".join(f"{number}. {branch.new.strip()}" for number, branch in enumerate(branches, 1))
    [ballot] = await ask([root], f"{question}\n{options}", [f"{number}." for number in range(1, len(branches) + 1)])
    return [exp(logprob) for logprob in ballot]


async def rewarded(name: str, reward: Reward, branches: Sequence[Branch]) -> list[float]:
    """Run a reward function, given as the parameter `name`, over the texts of `branches` in a worker thread.

    Raises
    ------
    ValueError
        If it does not give one finite number a text.
    """
    values = [float(value) for value in await call(reward, [branch.text for branch in branches])]
    if len(values) != len(branches):
        raise ValueError(f"{name}: the reward gave {len(values)} values for {len(branches)} texts")
    for branch, value in zip(branches, values, strict=True):
        if not isfinite(value):
            raise ValueError(f"{name}: the value of {branch.text!r} must be a finite number, not {value}")
    return values


def mean_logprob(branch: Branch, since: Branch) -> float:
    """Return the log-probability a token of what `branch` has beyond its ancestor `since`; 0 where that is nothing."""
    return (branch.logprob - since.logprob) / max(branch.num_tokens - since.num_tokens, 1)


async def likely(root: Branch, branches: Sequence[Branch], question: str) -> list[float]:
    """Return the log-probability a token of each branch; nothing is asked."""
    return [mean_logprob(branch, root) for branch in branches]


async def whole(root: Branch, branches: Sequence[Branch], question: str) -> list[float]:
    """Return the summed log-probability of each branch; nothing is asked."""
    return [branch.logprob for branch in branches]


EVALUATORS: dict[str, Evaluator] = {"judge": judged, "vote": elected, "logprob": likely}
"""How chains of thoughts are rated, by name."""

QUESTIONS = {
    "judge": "Is every step of this solution correct so far? Answer Yes or No.",
    "vote": "Which of these next steps is the best? Answer with its number.",
}
"""What evaluators ask about chains of thoughts, unless told otherwise."""
