"""Tree of Thoughts, breadth first and depth first."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from treewise.branch import Branch
from treewise.config import MAX_SEQUENCES, check_integer, check_number
from treewise.search.evaluators import JUDGE
from treewise.search.samples import Reward
from treewise.search.thinking import Thinker, ended, ranked, retain


async def tree_of_thoughts(
    root: Branch,
    depth: int = 3,
    width: int = 3,
    beam: int = 2,
    evaluate: str | Reward = "judge",
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
    evaluate : str or callable
        A name from `EVALUATORS`: ``"judge"`` asks the model about each chain and takes the probability of "Yes"
        against "No"; ``"vote"`` shows it all new thoughts and takes how likely it picks each; ``"logprob"`` takes a
        chain's log-probability a token and asks nothing. Or a reward that a function gives to the list of all chains'
        texts. The function runs in a worker thread.
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
    thinker = Thinker(root, evaluate, judge, conclude, temperature, top_p, thought_tokens, answer_tokens, stop)
    chains = [root]
    for _ in range(depth):
        # A chain that has come to its end stays in the race as it is.
        thoughts = await thinker.extend(chains, [width] * len(chains))
        await thinker.rate(thoughts)
        chains = ranked(thoughts)[:beam]
        retain(thoughts, chains)
        if all(map(ended, chains)):
            break
    return await thinker.conclude(chains)


async def depth_first_thoughts(
    root: Branch,
    depth: int = 3,
    width: int = 3,
    threshold: float = 0.5,
    budget: int = 32,
    solutions: int = 1,
    evaluate: str | Reward = "judge",
    judge: str = JUDGE,
    conclude: str = "\nSo the answer is",
    temperature: float = 0.8,
    top_p: float = 0.95,
    thought_tokens: int = 48,
    answer_tokens: int = 64,
    stop: str | Sequence[str] = "\n",
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
    evaluate, judge, conclude, temperature, top_p, thought_tokens, answer_tokens, stop
        As in `tree_of_thoughts`; ``"vote"`` compares the next thoughts of one chain.

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
    thinker = Thinker(root, evaluate, judge, conclude, temperature, top_p, thought_tokens, answer_tokens, stop)

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
            thoughts = await thinker.extend([chain], [min(width, budget)])
            budget -= len(thoughts)
            values = await thinker.rate(thoughts)
            hopeful = [thought for thought, value in zip(thoughts, values, strict=True) if value > threshold]
            ahead += reversed(ranked(hopeful))
            retain(thoughts, [chain, *hopeful])
        if merit(chain) > merit(best):
            best, chain = chain, best
        retain([chain], [best])
    retain(ahead, [best])
    return await thinker.conclude([best])
