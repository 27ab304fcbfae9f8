"""Programs that draw several answers and choose among them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from treewise.awaitables import call, decode, generate
from treewise.branch import Branch, keep
from treewise.config import MAX_SEQUENCES, SamplingParams, check_integer, check_number
from treewise.grammar import Grammar
from treewise.search.answers import EXTRACTORS, Extractor, same_answer
from treewise.search.certainty import CertaintySample

Reward = Callable[[list[str]], Sequence[float]]
"""Rates texts, all in one call; higher is better."""

RANKINGS = ("mean_logprob", "logprob", "self_certainty")


async def best_of_n(
    root: Branch,
    n: int = 8,
    by: str | Reward = "mean_logprob",
    temperature: float = 0.8,
    top_p: float = 0.95,
    max_tokens: int = 256,
    stop: Sequence[str] = (),
    grammar: Grammar | None = None,
) -> Branch:
    """Draw n answers and keep the best by log-probability, self-certainty or a reward.

    Parameters
    ----------
    root : Branch
    n : int
        Answers to draw.
    by : {"mean_logprob", "logprob", "self_certainty"} or callable
        What is best: the highest log-probability a token, or summed; the highest self-certainty, that is how far the
        model's distributions are from uniform, as a mean over the tokens (see `self_certainty`); or the reward that a
        function gives to the list of all texts. The function runs in a worker thread.
    temperature, top_p, max_tokens, stop, grammar
        As in `SamplingParams`; ``"self_certainty"`` cannot be had with a grammar, which cuts the distributions.

    Returns
    -------
    Branch
        The best answer; its score is what it was chosen by. The others are pruned.

    Raises
    ------
    ValueError
        If a parameter is out of range, or the reward does not give one finite number a text.
    """
    answers, values = await _rated(
        root, n, by, temperature=temperature, top_p=top_p, max_tokens=max_tokens, stop=stop, grammar=grammar
    )
    return keep(answers, values, 1)[0]


async def self_consistency(
    root: Branch,
    n: int = 8,
    extract: str | Extractor = "answer",
    by: str | Reward = "mean_logprob",
    borda: float = 0.0,
    temperature: float = 0.8,
    top_p: float = 0.95,
    max_tokens: int = 256,
    stop: Sequence[str] = (),
    grammar: Grammar | None = None,
) -> list[Branch]:
    """Draw n solutions and keep those that come to the answer with the most votes.

    Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models", 2022. With `borda` the votes
    have weights: the solution of rank r by `by`, the best being the first, has ``(n - r + 1) ** borda`` (Kang, Zhao and
    Song, "Scalable Best-of-N Selection for Large Language Models via Self-Certainty", 2025). Of two answers with
    equally many votes the one wins that has the best solution.

    Parameters
    ----------
    root : Branch
    n : int
        Solutions to draw.
    extract : str or callable
        How to find a solution's answer: a name from `EXTRACTORS`, or a function that returns the answer in a text or
        None. A solution without an answer has no vote.
    by : {"mean_logprob", "logprob", "self_certainty"} or callable
        What the solutions are ranked by, as in `best_of_n`.
    borda : float
        The power of the votes, in [0, 50]. 0: every solution has one vote, and the majority wins. The higher, the
        nearer to `best_of_n`; 1 is the Borda count.
    temperature, top_p, max_tokens, stop, grammar
        As in `SamplingParams`; ``"self_certainty"`` cannot be had with a grammar, which cuts the distributions.

    Returns
    -------
    list of Branch
        The solutions that agree with the winner, the best first; if nothing has an answer, the best one. A branch's
        score is the share of the votes that its answer has, its `note` the answer. The others are pruned.

    Raises
    ------
    ValueError
        If a parameter is out of range, or the reward does not give one finite number a text.
    """
    if not callable(extract) and extract not in EXTRACTORS:
        raise ValueError(f"extract: {extract!r} is neither one of {', '.join(EXTRACTORS)} nor a function")
    check_number("borda", borda, 0, 50)
    extractor = extract if callable(extract) else EXTRACTORS[extract]
    drawn, values = await _rated(
        root, n, by, temperature=temperature, top_p=top_p, max_tokens=max_tokens, stop=stop, grammar=grammar
    )
    solutions = [drawn[i] for i in sorted(range(n), key=lambda i: -values[i])]
    weights = [float(n - rank) ** borda for rank in range(n)]
    voters: dict[str, list[Branch]] = {}
    votes: dict[str, float] = defaultdict(float)
    for solution, weight in zip(solutions, weights, strict=True):
        solution.note, solution.score = extractor(solution.text), 0.0
        if solution.note is not None:
            answer = same_answer(solution.note)
            voters.setdefault(answer, []).append(solution)
            votes[answer] += weight
    for answer, agreeing in voters.items():
        for solution in agreeing:
            solution.score = votes[answer] / sum(weights)
    # Answers stand in the order of their best solutions, and `max` takes the first of equals.
    winners = voters[max(votes, key=votes.__getitem__)] if votes else solutions[:1]
    for solution in solutions:
        if solution not in winners:
            solution.prune()
    return winners


async def rewards(name: str, reward: Reward, branches: Sequence[Branch]) -> list[float]:
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


async def _rated(root: Branch, n: int, by: str | Reward, **sampling: Any) -> tuple[list[Branch], list[float]]:
    """Draw n answers as fields of `SamplingParams` say, and return what each is worth by `by`, see `best_of_n`."""
    check_integer("n", n, 1, MAX_SEQUENCES)
    if not callable(by) and by not in RANKINGS:
        raise ValueError(f"by: {by!r} is neither one of {', '.join(RANKINGS)} nor a function")
    params = SamplingParams(**sampling)
    if by == "self_certainty" and params.grammar is not None:
        raise ValueError("by: 'self_certainty' needs whole distributions, of which a grammar leaves a part")
    if by == "self_certainty":
        controller = CertaintySample(params)
        answers = await decode(root.fork(n), controller)
        return answers, [controller.mean(answer.path) for answer in answers]
    answers = await generate(root.fork(n), params)
    if callable(by):
        return answers, await rewards("by", by, answers)
    return answers, [mean_logprob(answer, root) if by == "mean_logprob" else answer.logprob for answer in answers]
