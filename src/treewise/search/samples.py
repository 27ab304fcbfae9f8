"""Programs that draw several answers and choose among them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from treewise.awaitables import decode, generate
from treewise.branch import Branch, keep, prune
from treewise.config import MAX_SEQUENCES, SamplingParams, check_integer, check_number
from treewise.grammar import Grammar
from treewise.search.answers import EXTRACTORS, Extractor, same_answer
from treewise.search.certainty import CertaintySample
from treewise.search.evaluators import Evaluator, Reward, elected, judged, likely, rewarded, whole

RANKINGS: dict[str, Evaluator] = {"mean_logprob": likely, "logprob": whole, "judge": judged, "vote": elected}
QUESTIONS = {
    "judge": "Is this answer correct? Answer Yes or No.",
    "vote": "Which of these answers is the best? Answer with its number.",
}


async def best_of_n(
    root: Branch,
    n: int = 8,
    by: str | Reward = "mean_logprob",
    question: str | None = None,
    temperature: float = 0.8,
    top_p: float = 0.95,
    max_tokens: int = 256,
    stop: Sequence[str] = (),
    grammar: Grammar | None = None,
) -> Branch:
    """Draw n answers and keep the best by log-probability, self-certainty, the model's own judgement or a reward.

    Parameters
    ----------
    root : Branch
    n : int
        Answers to draw.
    by : {"mean_logprob", "logprob", "self_certainty", "judge", "vote"} or callable
        What is best: the highest log-probability a token, or summed; the highest self-certainty, that is how far the
        model's distributions are from uniform, as a mean over the tokens (see `self_certainty`); what the model itself
        thinks of the answer when asked, by the probability of "Yes" against "No" (``"judge"``), or by how likely it
        picks the answer out of all (``"vote"``); or the reward that a function gives to the list of all texts. The
        function runs in a worker thread.
    question : str, optional
        What ``"judge"`` asks, to be answered by Yes or No, or ``"vote"``, by a number.
    temperature, top_p, max_tokens, stop, grammar
        As in `SamplingParams`.

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
        root, n, by, question, temperature=temperature, top_p=top_p, max_tokens=max_tokens, stop=stop, grammar=grammar
    )
    return keep(answers, values, 1)[0]


async def self_consistency(
    root: Branch,
    n: int = 8,
    extract: str | Extractor = "answer",
    by: str | Reward = "mean_logprob",
    borda: float = 0.0,
    question: str | None = None,
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
    by, question
        What the solutions are ranked by, as in `best_of_n`.
    borda : float
        The power of the votes, in [0, 50]. 0: every solution has one vote, and the majority wins. The higher, the
        nearer to `best_of_n`; 1 is the Borda count.
    temperature, top_p, max_tokens, stop, grammar
        As in `SamplingParams`.

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
        root, n, by, question, temperature=temperature, top_p=top_p, max_tokens=max_tokens, stop=stop, grammar=grammar
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
    total = sum(weights)
    for answer, agreeing in voters.items():
        for solution in agreeing:
            solution.score = votes[answer] / total
    # Answers stand in the order of their best solutions, and `max` takes the first of equals.
    winners = voters[max(votes, key=votes.__getitem__)] if votes else solutions[:1]
    kept = set(winners)
    prune(solution for solution in solutions if solution not in kept)
    return winners


async def _rated(
    root: Branch, n: int, by: str | Reward, question: str | None, **sampling: Any
) -> tuple[list[Branch], list[float]]:
    """Draw n answers as fields of `SamplingParams` say, and return what each is worth by `by`, see `best_of_n`."""
    check_integer("n", n, 1, MAX_SEQUENCES)
    if not callable(by) and by not in (*RANKINGS, "self_certainty"):
        raise ValueError(f"by: {by!r} is neither one of {', '.join(RANKINGS)}, self_certainty nor a function")
    if not isinstance(question, str | None):
        raise ValueError(f"question must be a text or None, not {question!r}")
    params = SamplingParams(**sampling)
    if by == "self_certainty":
        controller = CertaintySample(params)
        answers = await decode(root.fork(n), controller)
        return answers, [controller.mean(answer.path) for answer in answers]
    answers = await generate(root.fork(n), params)
    if callable(by):
        return answers, await rewarded("by", by, answers)
    return answers, await RANKINGS[by](root, answers, QUESTIONS.get(by, "") if question is None else question)
