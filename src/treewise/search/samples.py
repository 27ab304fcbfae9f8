"""Programs that draw several answers and choose among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from treewise.awaitables import call, decode, generate
from treewise.branch import Branch, keep
from treewise.config import MAX_SEQUENCES, SamplingParams, check_integer
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
    temperature, top_p, max_tokens, stop
        As in `SamplingParams`.

    Returns
    -------
    Branch
        The best answer; its score is what it was chosen by. The others are pruned.

    Raises
    ------
    ValueError
        If a parameter is out of range, or the reward does not give one number a text.
    """
    if not callable(by) and by not in RANKINGS:
        raise ValueError(f"by: {by!r} is neither one of {', '.join(RANKINGS)} nor a function")
    params = _sampling(n, temperature, top_p, max_tokens, stop)
    if by == "self_certainty":
        controller = CertaintySample(params)
        answers = await decode(root.fork(n), controller)
        return keep(answers, [controller.mean(answer.path) for answer in answers], 1)[0]
    answers = await generate(root.fork(n), params)
    if callable(by):
        values = await rewards("by", by, answers)
    else:
        values = [mean_logprob(answer, root) if by == "mean_logprob" else answer.logprob for answer in answers]
    return keep(answers, values, 1)[0]


async def self_consistency(
    root: Branch,
    n: int = 8,
    extract: str | Extractor = "answer",
    temperature: float = 0.8,
    top_p: float = 0.95,
    max_tokens: int = 256,
    stop: Sequence[str] = (),
) -> list[Branch]:
    """Draw n solutions and keep those that come to the answer of the majority.

    Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models", 2022. Of two answers with
    equally many votes the one wins whose best solution has the higher log-probability a token.

    Parameters
    ----------
    root : Branch
    n : int
        Solutions to draw.
    extract : str or callable
        How to find a solution's answer: a name from `EXTRACTORS`, or a function that returns the answer in a text or
        None. A solution without an answer has no vote.
    temperature, top_p, max_tokens, stop
        As in `SamplingParams`.

    Returns
    -------
    list of Branch
        The solutions that agree with the majority, the likeliest a token first; if nothing has an answer, the
        likeliest one. A branch's score is the share of the votes that its answer has, its `note` the answer. The
        others are pruned.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    """
    if not callable(extract) and extract not in EXTRACTORS:
        raise ValueError(f"extract: {extract!r} is neither one of {', '.join(EXTRACTORS)} nor a function")
    extractor = extract if callable(extract) else EXTRACTORS[extract]
    params = _sampling(n, temperature, top_p, max_tokens, stop)
    solutions = await generate(root.fork(n), params)
    solutions.sort(key=lambda solution: -mean_logprob(solution, root))
    voters: dict[str, list[Branch]] = {}
    for solution in solutions:
        solution.note, solution.score = extractor(solution.text), 0.0
        if solution.note is not None:
            voters.setdefault(same_answer(solution.note), []).append(solution)
    for agreeing in voters.values():
        for solution in agreeing:
            solution.score = len(agreeing) / n
    # Answers stand in the order of their likeliest solutions, and `max` takes the first of equals.
    majority = max(voters.values(), key=len) if voters else solutions[:1]
    for solution in solutions:
        if solution not in majority:
            solution.prune()
    return majority


async def rewards(name: str, reward: Reward, branches: Sequence[Branch]) -> list[float]:
    """Run a reward function, given as the parameter `name`, over the texts of `branches` in a worker thread.

    Raises
    ------
    ValueError
        If it does not give one number a text.
    """
    values = [float(value) for value in await call(reward, [branch.text for branch in branches])]
    if len(values) != len(branches):
        raise ValueError(f"{name}: the reward gave {len(values)} values for {len(branches)} texts")
    return values


def mean_logprob(branch: Branch, since: Branch) -> float:
    """Return the log-probability a token of what `branch` has beyond its ancestor `since`; 0 where that is nothing."""
    return (branch.logprob - since.logprob) / max(branch.num_tokens - since.num_tokens, 1)


def _sampling(n: int, temperature: float, top_p: float, max_tokens: int, stop: Sequence[str]) -> SamplingParams:
    check_integer("n", n, 1, MAX_SEQUENCES)
    return SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, stop=stop)
