"""Which keys and values each layer keeps: the settings of a policy, and what follows from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor

from treewise.config import ModelConfig, check_integer, check_number
from treewise.sparsity.allocators import ALLOCATORS, Allocator, FirstFull
from treewise.sparsity.evidence import Evidence, Scorer
from treewise.sparsity.presets import PRESETS
from treewise.sparsity.scorers import SCORERS
from treewise.sparsity.select import protect, top, top_of_each

TRIGGERS = ("prompt", "pressure")
ACTIONS = ("evict", "hide")


@dataclass(frozen=True)
class KVSparsity:
    """Which keys and values a layer keeps of a prompt, and of what is decoded behind it.

    Attributes
    ----------
    scorer : str or Scorer
        Says which tokens are worth keeping; by name one of `SCORERS`, which looks at as many of the last queries as the
        window has, where it looks at the last ones.
    allocator : str or Allocator
        Spreads the budget over layers, and perhaps over the heads of a layer; by name one of `ALLOCATORS`.
    budget : int or float
        Tokens a layer keeps in the mean, protected ones included; more than `window` and `sinks` together. A float in
        (0, 1] is a share of the tokens there are.
    window : int
        The last tokens, which always stay.
    sinks : int
        The first tokens, which always stay (Xiao et al., 2023, arXiv 2309.17453).
    first_full : int
        The first layers keep everything. `budget` is then that of each of the other layers.
    every : int or None
        Decoded tokens after which a branch is brought back to its budget; None: only the prompt is compressed.
    joint : bool
        Wait with the prompt until the branches that a program begins with have read what it gave them, and score by the
        last queries of all of them: several questions on one context.
    trigger : {"prompt", "pressure"}
        Begin when the prompt has been computed, or only where the pool is short, before anybody gives way. What is kept
        then depends on who else runs; `every` is how many tokens a path has to gain before it is thinned out again.
    action : {"evict", "hide"}
        Free the memory of what is not kept, or keep it and read it no more, to measure what freeing it is worth.

    Raises
    ------
    ValueError
        A value is out of range or of a wrong type, or a name is unknown; the message names the field and the choices.

    Notes
    -----
    Layers with a sliding window of their own keep what they see. They count in none of the numbers here.

    Examples
    --------
    >>> policy = KVSparsity.named("pyramidkv", budget=512)
    >>> policy.budgets(4000, num_layers=4)
    [964, 663, 361, 60]
    """

    scorer: str | Scorer = "snapkv"
    allocator: str | Allocator = "uniform"
    budget: int | float = 1024
    window: int = 32
    sinks: int = 4
    first_full: int = 0
    every: int | None = None
    joint: bool = False
    trigger: Literal["prompt", "pressure"] = "prompt"
    action: Literal["evict", "hide"] = "evict"

    def __post_init__(self) -> None:
        check_integer("window", self.window, 0)
        check_integer("sinks", self.sinks, 0)
        check_integer("first_full", self.first_full, 0)
        if self.every is not None:
            check_integer("every", self.every, 1, also=" or None")
        _check_choice("trigger", self.trigger, TRIGGERS)
        _check_choice("action", self.action, ACTIONS)
        if self.joint and self.trigger == "pressure":
            raise ValueError("joint: branches look at the prompt before it is thinned out; choose trigger 'prompt'")
        if isinstance(self.budget, float):
            check_number("budget", self.budget, 0, 1, open_low=True)
        else:
            also = f", more than window ({self.window}) and sinks ({self.sinks}) together, or a share as a float"
            check_integer("budget", self.budget, self.window + self.sinks + 1, also=also)
        if isinstance(self.scorer, str):
            _check_choice("scorer", self.scorer, SCORERS)
        elif type(self.scorer).__repr__ is object.__repr__:
            raise ValueError(f"scorer must say by its repr what it is, as a dataclass does, not {self.scorer!r}")
        if isinstance(self.allocator, str):
            _check_choice("allocator", self.allocator, ALLOCATORS)
        elif type(self.allocator).__repr__ is object.__repr__:
            raise ValueError(f"allocator must say by its repr what it is, as a dataclass does, not {self.allocator!r}")

    @classmethod
    def named(cls, name: str, **settings: Any) -> Self:
        """Return the policy of a name among `PRESETS`, with some settings changed.

        Raises
        ------
        ValueError
            If the name is unknown, or a setting is out of range.
        """
        _check_choice("policy", name, PRESETS)
        return cls(**{**PRESETS[name], **settings})

    @cached_property
    def scoring(self) -> Scorer:
        """The scorer itself."""
        return SCORERS[self.scorer](self.window) if isinstance(self.scorer, str) else self.scorer

    @cached_property
    def allocation(self) -> Allocator:
        """The allocator itself, behind the layers that keep everything."""
        allocator = ALLOCATORS[self.allocator]() if isinstance(self.allocator, str) else self.allocator
        return FirstFull(self.first_full, allocator) if self.first_full else allocator

    @property
    def per_head(self) -> bool:
        """Whether heads of a layer may keep different numbers of tokens: `keep_heads` rather than `keep`."""
        return self.allocation.per_head

    @property
    def num_queries(self) -> int | None:
        """How many of the last queries the scorer wants to see; 0 for none, None for all of the prompt."""
        return self.scoring.num_queries

    @property
    def second_pass(self) -> bool:
        """Whether the scorer looks at queries of a second pass over the prompt."""
        return getattr(self.scoring, "second_pass", False)

    @property
    def key(self) -> str:
        """All that changes what is kept, given the tokens: two policies with one key keep the same."""
        numbers = f"budget={self.budget!r} window={self.window} sinks={self.sinks} every={self.every}"
        numbers += (
            " joint" * self.joint + " pressure" * (self.trigger == "pressure") + " hide" * (self.action == "hide")
        )
        return f"{self.scoring!r} {self.allocation!r} {numbers}"

    def refusals(self, config: ModelConfig) -> list[str]:
        """Say why a model cannot have this policy; nothing if it can."""
        num_layers = sum(window is None for window in config.layer_windows)
        if self.joint and self.num_queries is None:
            return [f"joint: {self.scoring!r} looks at all queries, not at the last ones of each branch"]
        if not num_layers:
            return ["every layer of the model has a sliding window, so that there is nothing to evict"]
        tokens = self.least(config.max_positions) + 1
        scores = list(protect(torch.zeros((config.num_kv_heads, tokens)), self.window, self.sinks))
        try:
            for layer, budget in enumerate(self.budgets(tokens, num_layers)):
                self.allocation.heads(scores, budget, layer)
        except ValueError as error:
            return [str(error)]
        return []

    def least(self, tokens: int) -> int:
        """Return how many of `tokens` always stay."""
        return min(tokens, max(1, self.window + self.sinks))

    def budgets(self, tokens: int, num_layers: int) -> list[int]:
        """Return how many of `tokens` each layer keeps, none fewer than the window and the sinks.

        They sum to exactly ``num_layers`` times the budget (a share of the tokens is rounded to a whole number first),
        apart from the first layers that keep everything, and from a `Table`. A budget of at least `tokens` keeps all.

        Parameters
        ----------
        tokens : int
            By their positions: those that a layer has evicted before count.
        num_layers : int
            Layers without a sliding window of their own.
        """
        budget = round(self.budget * tokens) if isinstance(self.budget, float) else self.budget
        least = self.least(tokens)
        return self.allocation.layers(tokens, max(least, min(budget, tokens)), num_layers, least)

    def keep(self, evidence: Evidence, budget: int, *beside: Evidence) -> Tensor:
        """Return which tokens a layer keeps, the same number in each KV head.

        Parameters
        ----------
        evidence : Evidence
        budget : int
            Tokens a head keeps.
        *beside : Evidence
            Of the same tokens, with the queries of other branches: the scores add up.

        Returns
        -------
        Tensor [kv_heads, min(budget, tokens)], int64
            Ascending indices into the evidence's tokens: the first `sinks`, the last `window`, and those with the
            highest scores; of equal ones the lower position.

        Raises
        ------
        ValueError
            If the budget has no room for the tokens that always stay.
        """
        tokens, kv_heads, _ = evidence.keys.shape
        if budget >= tokens:
            return torch.arange(tokens, device=evidence.keys.device).expand(kv_heads, tokens)
        return top(self.scores(evidence, budget, *beside), budget)

    def keep_heads(self, evidence: Sequence[Evidence], budget: int, *beside: Sequence[Evidence]) -> list[Tensor]:
        """Return which tokens each KV head of a layer keeps, `budget` in the mean.

        What is kept and errors are those of `keep`; how many each head keeps is the allocator's choice.

        Parameters
        ----------
        evidence : sequence of Evidence
            One of all KV heads or, where these hold different numbers of tokens, one of each: scorers that compare
            heads cannot then. ``evidence.layer`` counts the layers without a sliding window of their own.
        budget : int
            Tokens a head keeps in the mean.
        *beside : sequence of Evidence
            As in `keep`.

        Returns
        -------
        list of Tensor [kept], int64
            One for each KV head, together ``kv_heads * budget`` indices, or all that there are.
        """
        tokens = [len(each.keys) for each in evidence for _ in range(each.keys.shape[1])]  # of each head
        if len(tokens) * budget >= sum(tokens):
            return [torch.arange(count, device=evidence[0].keys.device) for count in tokens]
        scores = [
            row for each in zip(evidence, *beside, strict=True) for row in self.scores(each[0], budget, *each[1:])
        ]
        return top_of_each(scores, self.allocation.heads(scores, budget, evidence[0].layer))

    def scores(self, evidence: Evidence, budget: int, *beside: Evidence) -> Tensor:
        """Return the scorer's scores [kv_heads, tokens], infinite for tokens that always stay; see `keep`."""
        least = self.least(len(evidence.keys))
        if budget < least:
            raise ValueError(f"budget must be at least the {least} tokens that always stay, not {budget}")
        scores = self.scoring.scores(evidence)
        for each in beside:
            scores = scores + self.scoring.scores(each)
        return protect(scores, self.window, self.sinks)


def _check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(sorted(choices))}")
