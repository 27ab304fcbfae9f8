"""What the programs over thoughts share: drawing thoughts, rating chains of them, answering, and pruning the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from treewise.branch import Branch, generate
from treewise.config import SamplingParams, check_integer
from treewise.search.evaluators import EVALUATORS, evaluate_chains
from treewise.search.samples import Reward


class Thinker:
    """Draws thoughts below a branch, rates chains of them, and gets answers out of them.

    Parameters
    ----------
    root : Branch
        Where all chains begin.
    evaluate, judge, conclude, temperature, top_p, thought_tokens, answer_tokens, stop
        As in `tree_of_thoughts`.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    """

    def __init__(
        self,
        root: Branch,
        evaluate: str | Reward,
        judge: str,
        conclude: str,
        temperature: float,
        top_p: float,
        thought_tokens: int,
        answer_tokens: int,
        stop: str | Sequence[str],
    ) -> None:
        if not callable(evaluate) and evaluate not in EVALUATORS:
            raise ValueError(f"evaluate: {evaluate!r} is neither one of {', '.join(EVALUATORS)} nor a function")
        check_integer("thought_tokens", thought_tokens, 1)
        check_integer("answer_tokens", answer_tokens, 1)
        self.root = root
        self.evaluate = evaluate
        self.judge = judge
        self.conclusion = conclude
        self.thought = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=thought_tokens, stop=stop)
        self.answer = SamplingParams(temperature=0, max_tokens=answer_tokens)

    async def extend(self, chains: Sequence[Branch], widths: Sequence[int]) -> list[Branch]:
        """Draw the next thoughts of each chain, ``widths[i]`` of the i-th, all in one batch.

        A chain that has come to its end goes on as itself. A thought is drawn once more where only a line end came.
        """
        longer = [
            thought
            for chain, width in zip(chains, widths, strict=True)
            for thought in ([chain] if ended(chain) else chain.fork(width))
        ]
        drawn = [thought for thought in longer if not ended(thought)]
        await generate(drawn, self.thought)
        await generate([thought for thought in drawn if not thought.new.strip() and not ended(thought)], self.thought)
        return longer

    async def rate(self, chains: Sequence[Branch]) -> list[float]:
        """Return the values of chains; they become the branches' scores."""
        return await evaluate_chains(self.root, chains, self.evaluate, self.judge)

    async def conclude(self, chains: Sequence[Branch]) -> Branch:
        """Answer from each chain, and keep the best answer alone."""
        answers = [chain if ended(chain) else chain.fork()[0].append(self.conclusion) for chain in chains]
        await generate([answer for answer in answers if not ended(answer)], self.answer)
        await self.rate(answers)
        best = ranked(answers)[0]
        retain(answers, [best])
        return best


def ended(chain: Branch) -> bool:
    """Whether the model itself ended its text here."""
    return chain.finish_reason == "stop" and chain.stop_reason is None


def ranked(chains: Iterable[Branch]) -> list[Branch]:
    """Return rated chains by score, the best first; ties keep their order."""
    return sorted(chains, key=lambda chain: -(chain.score or 0))


def retain(chains: Iterable[Branch], kept: Collection[Branch]) -> None:
    """Prune the chains that are not kept, and the shorter ones that nothing goes on from any more."""
    for chain in chains:
        while chain.alive and chain.parent is not None and not chain.children and chain not in kept:
            chain.prune()
            chain = chain.parent
