"""Tree of Thoughts, breadth first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from math import exp

from treewise.branch import Branch, generate, keep
from treewise.config import MAX_SEQUENCES, SamplingParams, check_integer
from treewise.search.conversation import ask
from treewise.search.samples import mean_logprob

JUDGE = "Is every step of this solution correct so far? Answer Yes or No."
BALLOT = "Which of these next steps is the best? Answer with its number."


async def tree_of_thoughts(
    root: Branch,
    depth: int = 3,
    width: int = 3,
    beam: int = 2,
    evaluate: str = "judge",
    judge: str = JUDGE,
    conclude: str = "\nSo the answer is",
    temperature: float = 0.8,
    top_p: float = 0.95,
    thought_tokens: int = 48,
    answer_tokens: int = 64,
    stop: str | Sequence[str] = "\n",
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
    evaluate : str
        A name from `EVALUATORS`: ``"judge"`` asks the model about each chain and takes the probability of "Yes"
        against "No"; ``"vote"`` shows it all new thoughts and takes how likely it picks each; ``"logprob"`` takes a
        chain's log-probability a token and asks nothing.
    judge : str
        The question of ``"judge"``, to be answered by Yes or No.
    conclude : str
        Put behind each chain, to get an answer out of it; "" lets it go on as it will.
    temperature, top_p
        Of thoughts, as in `SamplingParams`; answers are greedy.
    thought_tokens, answer_tokens : int
        The most tokens of a thought, and of the answer.
    stop : str or list of str
        What ends a thought. Answers end at the end of text.

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
    check_integer("thought_tokens", thought_tokens, 1)
    check_integer("answer_tokens", answer_tokens, 1)
    if evaluate not in EVALUATORS:
        raise ValueError(f"evaluate: {evaluate!r} is not one of {', '.join(EVALUATORS)}")
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=thought_tokens, stop=stop)
    rate = EVALUATORS[evaluate]

    chains = [root]
    for _ in range(depth):
        # A chain that has come to its end stays in the race as it is.
        thoughts = [thought for chain in chains for thought in ([chain] if _ended(chain) else chain.fork(width))]
        await _think([thought for thought in thoughts if not _ended(thought)], params)
        chains = _keep(chains, thoughts, await rate(root, thoughts, judge), beam)
        if all(map(_ended, chains)):
            break

    answers = [chain if _ended(chain) else chain.fork()[0].append(conclude) for chain in chains]
    last = SamplingParams(temperature=0, max_tokens=answer_tokens)
    await generate([answer for answer in answers if not _ended(answer)], last)
    return _keep(chains, answers, await rate(root, answers, judge), 1)[0]


def _keep(chains: Sequence[Branch], longer: Sequence[Branch], values: Sequence[float], k: int) -> list[Branch]:
    """Keep the best of the longer chains, and of all shorter ones those that they go on from."""
    best = keep(longer, values, k)
    for chain in chains:
        while chain.alive and chain.parent is not None and not chain.children and chain not in best:
            chain.prune()
            chain = chain.parent
    return best


async def _think(thoughts: Sequence[Branch], params: SamplingParams) -> None:
    """Draw a thought on each branch, once more where only a line end came."""
    await generate(thoughts, params)
    await generate([thought for thought in thoughts if not thought.new.strip() and not _ended(thought)], params)


def _ended(chain: Branch) -> bool:
    """Whether the model itself ended its text here."""
    return chain.finish_reason == "stop" and chain.stop_reason is None


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
