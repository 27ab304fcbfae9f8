"""One text, every policy, every way to ask: the rows that a report is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treewise.evaluate.cache import OfflineCache, read_together
from treewise.evaluate.measures import (
    kl_divergence,
    nll,
    output_errors,
    parts_right,
    retention,
    top1_agreement,
)
from treewise.evaluate.tasks import Encoded, EncodedQuestion
from treewise.models import CausalLM
from treewise.sparsity.policy import KVSparsity
from treewise.sparsity.scorers import KVzip, SnapKV

ORACLE = "oracle"
"""Keeps what the answer itself looks at: what a policy that sees the future would do."""

MODES = {
    "aware": "the question stands in the prompt that is compressed",
    "agnostic": "the question is asked after compression",
    "next": "a second question, after a cache that was compressed with the first in its prompt",
}
"""Ways to ask: what stands in the prompt when it is compressed."""


@dataclass(frozen=True)
class Contender:
    """A policy and its budget.

    Attributes
    ----------
    name : str
    budget : int, float or None
        See `KVSparsity.budget`; None for what keeps everything.
    """

    name: str
    budget: int | float | None = None

    def loses(self, tokens: int) -> bool:
        """Whether anything is given up of so many tokens."""
        return self.budget is not None and (
            self.budget < 1.0 if isinstance(self.budget, float) else self.budget < tokens
        )

    def policy(self, answer_tokens: int = 1) -> KVSparsity:
        """Return the policy of this name.

        That is a preset of `KVSparsity.named`, or a scorer and an allocator as in ``keydiff+ada``, or kvzip, or
        `ORACLE`. Behind colons there may be whole numbers for fields of the policy and of its scorer, as in
        ``snapkv:window=8:kernel_size=31``.

        Parameters
        ----------
        answer_tokens : int
            How many of the last queries the oracle looks at.

        Raises
        ------
        ValueError
            If there is no such policy or field, or a number is out of range.
        """
        name, *words = self.name.split(":")
        settings: dict[str, Any] = {} if self.budget is None else {"budget": self.budget}
        of_scorer: dict[str, int] = {}
        for word in words:
            field, _, value = word.partition("=")
            if not value.isdecimal():
                raise ValueError(f"policy: {word!r} is not of the form field=number")
            (settings if field in KVSparsity.__dataclass_fields__ else of_scorer)[field] = int(value)
        scorer, plus, allocator = name.partition("+")
        if name == ORACLE:
            policy = KVSparsity(SnapKV(answer_tokens, kernel_size=1), **settings)
        elif plus or name == "kvzip":
            policy = KVSparsity(scorer, allocator or "uniform", **settings)
        else:
            policy = KVSparsity.named(name, **settings)
        if not of_scorer:
            return policy
        own: Any = policy.scoring
        known = [field.name for field in fields(own)]
        if unknown := [field for field in of_scorer if field not in known]:
            names = ", ".join([*KVSparsity.__dataclass_fields__, *known])
            raise ValueError(f"policy: {unknown[0]!r} is not one of {names}")
        return replace(policy, scorer=replace(own, **of_scorer))


@dataclass(frozen=True)
class Row:
    """What one policy made of one question.

    Attributes
    ----------
    task, seed, mode
    policy, budget
        Of the `Contender`.
    held : float
        Bytes held of the prompt, over those of a dense cache.
    kl, top1 : float
        Means over the dense cache's own continuation, teacher-forced; see `treewise.evaluate.measures`.
    nll_increase, answer_nll : float
        Nats a token of the right answer: more than under the dense cache, and altogether.
    right, dense_right : tuple of bool
        For each part of the right answer, whether it was found.
    kept : list of list of float, or None
        For each layer and KV head the share of the needle that is held; None where there is no needle.
    errors : list of float
        See `output_errors`.
    """

    task: str
    seed: int
    mode: str
    policy: str
    budget: int | float | None
    held: float
    kl: float
    top1: float
    nll_increase: float
    answer_nll: float
    right: tuple[bool, ...]
    dense_right: tuple[bool, ...]
    kept: list[list[float]] | None
    errors: list[float]


class Way(NamedTuple):
    """One way to ask a question.

    Attributes
    ----------
    start : OfflineCache
        What is compressed.
    asked : OfflineCache
        `start`, or what goes on from it up to where the answer begins.
    question : EncodedQuestion
    continuation : list of int
        What the dense cache says.
    """

    start: OfflineCache
    asked: OfflineCache
    question: EncodedQuestion
    continuation: list[int]

    @property
    def lead(self) -> list[int]:
        """What is read between compression and the answer."""
        return self.asked.tokens[self.start.length :]


def ways_to_ask(model: CausalLM, encoded: Encoded, modes: Sequence[str], new_tokens: int) -> dict[str, Way]:
    """Read a text, and return those of the `MODES` in which it can be asked about."""
    first, *others = encoded.questions
    context = OfflineCache(model)
    context.read(encoded.context)
    prompt = context.copy()
    prompt.read(first.tokens)
    ways: dict[str, Way] = {}
    if "aware" in modes or "agnostic" in modes:
        # To a dense cache it makes no difference when the question was read.
        continuation = prompt.greedy(max(new_tokens, len(first.answer)))
        ways["aware"] = Way(prompt, prompt, first, continuation)
        ways["agnostic"] = Way(context, prompt, first, continuation)
    if "next" in modes and others:
        asked = prompt.copy()
        asked.read([*first.answer, *others[0].tokens])
        ways["next"] = Way(prompt, asked, others[0], asked.greedy(max(new_tokens, len(others[0].answer))))
    return {mode: way for mode, way in ways.items() if mode in modes}


def predict(
    caches: Sequence[OfflineCache], lead: Sequence[int], tokens: Sequence[int], others: Sequence[int] = ()
) -> tuple[list[OfflineCache], list[Tensor], list[Tensor]]:
    """Let copies of caches read a lead and some tokens behind it, and return them with what they expected.

    Returns
    -------
    caches : list of OfflineCache
        They have read all but the last of `tokens`.
    log_probs : list of Tensor [places, vocabulary], float32
        Of each of the tokens; without a lead not of the first, which was expected before.
    log_probs of others : list of Tensor
        The same of `others` instead of these tokens, which may be none.
    """
    model = caches[0].model
    copies = [cache.copy() for cache in caches]
    hidden = read_together(copies, [[*lead, *tokens[:-1]]] * len(copies))
    first = max(0, len(lead) - 1)

    def expected(rows: Tensor) -> Tensor:
        return model.logits(rows).float().log_softmax(-1)

    instead: list[Tensor] = []
    if others:
        behind = read_together([copy.without(len(tokens) - 1) for copy in copies], [others[:-1]] * len(copies))
        before = [rows[first : len(lead)] for rows in hidden]
        instead = [expected(torch.cat(both)) for both in zip(before, behind, strict=True)]
    return copies, [expected(rows[first:]) for rows in hidden], instead


def solved(model: CausalLM, encoded: Encoded) -> list[bool]:
    """Tell which parts of the answer to the first question the dense cache finds."""
    question = encoded.questions[0]
    context = OfflineCache(model)
    context.read(encoded.context)
    _, [expected], _ = predict([context], question.tokens, question.answer)
    return parts_right(expected, question.answer, question.parts)


def try_policies(
    model: CausalLM,
    encoded: Encoded,
    contenders: Sequence[Contender],
    modes: Sequence[str],
    *,
    new_tokens: int,
    repeat: Sequence[int],
    task: str = "",
    seed: int = 0,
) -> list[Row]:
    """Measure every policy on one text.

    Parameters
    ----------
    model : CausalLM
        On the CPU.
    encoded : Encoded
    contenders : sequence of Contender
    modes : sequence of str
        See `MODES`. One that needs a second question is left out where there is none.
    new_tokens : int
        Length of the dense cache's continuation, or the answer's if that is more.
    repeat : sequence of int
        Tokens that ask for the text to be repeated, for kvzip.
    task, seed
        Where the text came from; policies that draw do so from `seed`.
    """
    return [
        row
        for mode, way in ways_to_ask(model, encoded, modes, new_tokens).items()
        for row in _try_way(way, contenders, repeat, task=task, seed=seed, mode=mode)
    ]


def _try_way(way: Way, contenders: Sequence[Contender], repeat: Sequence[int], **labels: Any) -> list[Row]:
    start, continuation = way.start, way.continuation
    answer, parts = way.question.answer, way.question.parts

    @cache
    def answered() -> OfflineCache:
        end = way.asked.copy()
        end.read(answer[:-1])
        return end

    @cache
    def repeated() -> OfflineCache:
        again = start.copy()
        again.read(repeat)
        again = again.only([None] * len(again.held))  # which forgets what was asked so far
        again.read(start.tokens)
        return again

    choices = []
    for contender in contenders:
        policy = contender.policy(len(answer))
        judge = answered() if contender.name == ORACLE else start
        judge = repeated() if isinstance(policy.scoring, KVzip) else judge
        choices.append(judge.choose(policy, start.length, labels["seed"]))
    caches, places = [start], []
    for choice in choices:
        left = start.only(choice)
        if smaller := left.num_bytes() < start.num_bytes():
            caches.append(left)
        places.append(len(caches) - 1 if smaller else 0)  # what keeps everything is the dense cache
    alike = continuation[: len(answer)] == answer
    after, expected, found = predict(caches, way.lead, continuation, () if alike else answer)
    if alike:
        found = [log_probs[: len(log_probs) + len(answer) - len(continuation)] for log_probs in expected]
    costs = [float(nll(log_probs, answer[-len(log_probs) :]).mean()) for log_probs in found]
    right = [tuple(parts_right(_from_first(start, log_probs, answer), answer, parts)) for log_probs in found]
    errors = [output_errors(after[0], each).tolist() for each in caches]
    kv_heads = start.model.config.num_kv_heads
    return [
        Row(
            **labels,
            policy=contender.name,
            budget=contender.budget,
            held=caches[i].num_bytes() / start.num_bytes(),
            kl=float(kl_divergence(expected[0], expected[i]).mean()),
            top1=float(top1_agreement(expected[0], expected[i]).float().mean()),
            nll_increase=costs[i] - costs[0],
            answer_nll=costs[i],
            right=right[i],
            dense_right=right[0],
            kept=retention(choice, way.question.needles, kv_heads).tolist() if way.question.needles else None,
            errors=errors[i],
        )
        for contender, choice, i in zip(contenders, choices, places, strict=True)
    ]


def _from_first(start: OfflineCache, log_probs: Tensor, answer: Sequence[int]) -> Tensor:
    """Put in front what was expected before compression, where the answer begins right there."""
    if len(log_probs) == len(answer):
        return log_probs
    assert start.last is not None
    return torch.cat([start.model.logits(start.last[None]).float().log_softmax(-1), log_probs])
