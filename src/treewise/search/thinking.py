"""What the programs over thoughts share: drawing thoughts, rating chains of them, answering, and pruning the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from treewise.awaitables import generate
from treewise.branch import Branch, prune
from treewise.config import SamplingParams, check_integer
from treewise.grammar import Grammar
from treewise.search.evaluators import EVALUATORS, QUESTIONS, Reward, rewarded


@dataclass(frozen=True)
class ThoughtParams:
    """How thoughts are drawn, rated and answered from; the keywords that all programs over thoughts take.

    Attributes
    ----------
    evaluate : str or callable
        A name from `EVALUATORS`: ``"judge"`` asks the model about each chain and takes the probability of "Yes"
        against "No"; ``"vote"`` shows it all new thoughts and takes how likely it picks each; ``"logprob"`` takes a
        chain's log-probability a token and asks nothing. Or a reward that a function gives to the list of all chains'
        texts. The function runs in a worker thread.
    question : str, optional
        What ``"judge"`` asks, to be answered by Yes or No, or ``"vote"``, by a number.
    conclude : str
        Put behind each chain, to get an answer out of it; "" lets it go on as it will.
    temperature, top_p : float
        Of thoughts, as in `SamplingParams`; answers are greedy.
    thought_tokens, answer_tokens : int
        The most tokens of a thought, and of the answer.
    stop : str or sequence of str
        What ends a thought. Answers end at the end of text.
    thought_grammar, grammar : Grammar, optional
        What each thought, and what the answer must be; the answer's text is what stands behind `conclude`. A thought
        ends when nothing may follow in its grammar; one that `thought_tokens` cuts off is ended by the next. With
        `grammar` a chain that has come to its end is asked for an answer as well, in the place of its end token.

    Raises
    ------
    ValueError
        A value is out of range or of a wrong type; the message names the field and what it accepts.
    """

    evaluate: str | Reward = "judge"
    question: str | None = None
    conclude: str = "\nSo the answer is"
    temperature: float = 0.8
    top_p: float = 0.95
    thought_tokens: int = 48
    answer_tokens: int = 64
    stop: str | Sequence[str] = "\n"
    thought_grammar: Grammar | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not callable(self.evaluate) and self.evaluate not in EVALUATORS:
            raise ValueError(f"evaluate: {self.evaluate!r} is neither one of {', '.join(EVALUATORS)} nor a function")
        for name, kind, accepted in (
            ("question", str | None, "a text or None"),
            ("conclude", str, "a text"),
            ("thought_grammar", Grammar | None, "a Grammar or None"),
            ("grammar", Grammar | None, "a Grammar or None"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ValueError(f"{name} must be {accepted}, not {value!r} of type {type(value).__name__}")
        for name in ("thought_tokens", "answer_tokens"):
            check_integer(name, getattr(self, name), 1)
        _ = self.thought, self.answer  # check the rest

    @cached_property
    def thought(self) -> SamplingParams:
        """How a thought is drawn."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.thought_tokens,
            stop=self.stop,
            grammar=self.thought_grammar,
        )

    @cached_property
    def answer(self) -> SamplingParams:
        """How an answer is decoded."""
        return SamplingParams(temperature=0, max_tokens=self.answer_tokens, grammar=self.grammar)

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> ThoughtParams:
        """Return the parameters that a program's further keywords give.

        Raises
        ------
        ValueError
            If one is no field.
        """
        names = [item.name for item in fields(cls)]
        for name in keywords:
            if name not in names:
                raise ValueError(f"{name}: programs over thoughts have no such keyword; they share {', '.join(names)}")
        return cls(**keywords)


class Thinker:
    """Draws thoughts below a branch, rates chains of them, and gets answers out of them.

    Parameters
    ----------
    root : Branch
        Where all chains begin.
    params : ThoughtParams
    """

    def __init__(self, root: Branch, params: ThoughtParams) -> None:
        self.root = root
        self.params = params

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
        await generate(drawn, self.params.thought)
        if blank := [thought for thought in drawn if not thought.new.strip() and not ended(thought)]:
            await generate(blank, self.params.thought)
        return longer

    async def rate(self, chains: Sequence[Branch]) -> list[float]:
        """Return the values of chains; they become the branches' scores.

        Raises
        ------
        ValueError
            If a reward function does not give one finite number a text.
        """
        evaluate, question = self.params.evaluate, self.params.question
        if callable(evaluate):
            values = await rewarded("evaluate", evaluate, chains)
        else:
            asked = QUESTIONS.get(evaluate, "") if question is None else question
            values = await EVALUATORS[evaluate](self.root, chains, asked)
        for chain, value in zip(chains, values, strict=True):
            chain.score = value
        return values

    async def rounds(self, depth: int, width: int, allot: Callable[[Sequence[Branch]], Sequence[int]]) -> Branch:
        """Draw and rate thoughts round by round, and answer from the chains that are left.

        Parameters
        ----------
        depth : int
            The most rounds; fewer where all chains have come to their ends.
        width : int
            Thoughts of the first round.
        allot : callable
            Takes a round's chains, which are rated, and says how many thoughts each gets next; those without any are
            pruned.
        """
        chains, widths = [self.root], [width]
        for _ in range(depth):
            drawn = await self.extend(chains, widths)
            await self.rate(drawn)
            shares = {chain: share for chain, share in zip(drawn, allot(drawn), strict=True) if share > 0}
            retain(drawn, shares)
            chains, widths = list(shares), list(shares.values())
            if all(map(ended, chains)):
                break
        return await self.conclude(chains)

    async def conclude(self, chains: Sequence[Branch]) -> Branch:
        """Answer from each chain, and keep the best answer alone."""
        answers = [self._begin_answer(chain) for chain in chains]
        await generate([answer for answer in answers if not ended(answer)], self.params.answer)
        await self.rate(answers)
        best = ranked(answers)[0]
        retain([*chains, *answers], [best])
        return best

    def _begin_answer(self, chain: Branch) -> Branch:
        """Return a fork of `chain` that asks for an answer, or `chain` itself where its end will do for one."""
        if ended(chain) and self.params.grammar is None:
            return chain
        [answer] = chain.fork(at=chain.num_tokens - ended(chain))
        return answer.append(self.params.conclude)


def ended(chain: Branch) -> bool:
    """Whether the model itself ended its text here, by an end token."""
    stopped = chain.finish_reason == "stop" and chain.stop_reason is None
    return stopped and not chain.tree.codec.token_bytes(chain.tokens[-1])  # at the end of a grammar there need be none


def ranked(chains: Iterable[Branch]) -> list[Branch]:
    """Return rated chains by score, the best first; ties keep their order."""
    return sorted(chains, key=lambda chain: -(chain.score or 0))


def retain(chains: Iterable[Branch], kept: Collection[Branch]) -> None:
    """Prune the chains that are not kept, and the shorter ones that nothing goes on from any more."""
    doomed: dict[Branch, None] = {}
    lost: Counter[Branch] = Counter()  # children of each branch that are doomed
    for chain in chains:
        while (
            chain.parent is not None
            and chain.alive
            and chain not in kept
            and chain not in doomed
            and lost[chain] == chain.num_children
        ):
            doomed[chain] = None
            chain = chain.parent
            lost[chain] += 1
    prune(chain for chain in doomed if chain.parent not in doomed)  # what is below them goes with them
