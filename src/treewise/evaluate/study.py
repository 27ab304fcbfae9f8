"""A whole comparison of policies: which texts, which settings, and everything that was measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from treewise.config import check_integer
from treewise.evaluate.branches import DRAWN, REDUCED, Shared, share
from treewise.evaluate.cache import OfflineCache
from treewise.evaluate.summary import BASELINE, summarise, summarise_shared
from treewise.evaluate.tasks import SANITY, TASKS, make, needles
from treewise.evaluate.trial import MODES, ORACLE, Contender, Row, solved, try_policies
from treewise.llm import KV_CACHE_DTYPES
from treewise.models import CausalLM, Tokenizer
from treewise.sparsity.scorers.kvzip import REPEAT

SELECTION = 1_000_000
"""Seeds from here on choose the tasks that the model can solve; no result comes from them."""

SOLVED = 0.5
"""A task counts for recall if the dense cache finds at least this share of its answers' parts."""

ALWAYS = ("full", BASELINE, "streaming", ORACLE)
"""Policies that others are compared with."""


QUICK: dict[str, Any] = {
    "budgets": (96,),
    "tasks": ("passkey", "niah_multikey", "vt"),
    "tokens": 384,
    "seeds": 2,
    "selection_seeds": 2,
    "branches": 3,
}
"""Settings of a `Study` for a first look."""


def check_names(field: str, chosen: Sequence[str], known: Collection[str]) -> None:
    """Refuse names that are not known."""
    if unknown := [word for word in chosen if word not in known]:
        raise ValueError(f"{field}: {unknown[0]!r} is not one of {', '.join(known)}")


def countable(selection: Mapping[str, float]) -> set[str]:
    """Return the tasks that count for recall, from the share of their answers that the dense cache finds."""
    return {task for task, share in selection.items() if share >= SOLVED and task != SANITY}


@dataclass(frozen=True)
class Study:
    """What is compared, on what.

    Attributes
    ----------
    policies : tuple of str
        See `treewise.evaluate.trial.Contender`; `ALWAYS` are added.
    budgets : tuple of int or float
        See `KVSparsity.budget`.
    tasks, modes : tuple of str
        Among `TASKS` and `MODES`.
    tokens : int
        Length of the texts.
    seeds, selection_seeds : int
        Texts of each task that are measured, and that choose which tasks the model can solve.
    new_tokens : int
        Length of the dense cache's continuations.
    branches : int
        Branches that share a prompt; 0 for none.
    branch_policy : str
        What they keep of it. No question is shorter than the default's window.
    kv_cache_dtype : str
        What policies store keys and values as, among `treewise.llm.KV_CACHE_DTYPES`. The dense cache that they are
        compared with is not rounded, and counts as 16 bits.

    Raises
    ------
    ValueError
        A name is unknown or a number out of range.
    """

    policies: tuple[str, ...] = ("snapkv", "pyramidkv", "novita")
    budgets: tuple[int | float, ...] = (160, 320)
    tasks: tuple[str, ...] = tuple(TASKS)
    modes: tuple[str, ...] = tuple(MODES)
    tokens: int = 640
    seeds: int = 4
    selection_seeds: int = 2
    new_tokens: int = 16
    branches: int = 6
    branch_policy: str = "snapkv:window=8"
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        check_names("tasks", self.tasks, TASKS)
        check_names("modes", self.modes, MODES)
        check_names("kv_cache_dtype", [self.kv_cache_dtype], KV_CACHE_DTYPES)
        check_integer("tokens", self.tokens, 128)
        check_integer("seeds", self.seeds, 1)
        check_integer("selection_seeds", self.selection_seeds, 1)
        check_integer("new_tokens", self.new_tokens, 2)
        if self.branches:
            check_integer("branches", self.branches, 2, 8, also=" or 0")
        for contender in self.contenders:
            contender.policy()
        for budget in self.budgets:
            Contender(self.branch_policy, budget).policy()

    @property
    def contenders(self) -> list[Contender]:
        """Every policy with every budget."""
        names = dict.fromkeys([*ALWAYS, *self.policies])
        return [
            Contender(name, budget)
            for name in names
            for budget in ((None,) if name == "full" else dict.fromkeys(self.budgets))
        ]

    @property
    def trial_tokens(self) -> int:
        """About how many tokens it takes to measure a text, as far as time goes."""
        smaller = sum(contender.loses(self.tokens) for contender in self.contenders)
        return self.tokens + 2 * self.new_tokens * len(self.modes) * (1 + smaller)

    @property
    def shared_tokens(self) -> int:
        """The same for branches of a text."""
        return (DRAWN + self.new_tokens) * (self.branches + REDUCED * len(self.budgets))

    @property
    def total_tokens(self) -> int:
        """The same for everything."""
        texts = len(self.tasks) * (self.selection_seeds * self.tokens + self.seeds * self.trial_tokens)
        kinds = 2 if self.branches else 0
        return texts + self.seeds * kinds * self.shared_tokens

    def run(self, model: CausalLM, tokenizer: Tokenizer, done: Callable[[str, int], None]) -> dict[str, Any]:
        """Measure everything, and sum it up.

        `done` is called after each text, with what it was and how much of `total_tokens`.

        Raises
        ------
        ValueError
            If a text is longer than half of the model's context: kvzip reads it twice.
        """
        check_integer("tokens", self.tokens, 128, model.config.max_positions // 2)
        selection = {}
        for task in self.tasks:
            selection[task] = self.solved(model, tokenizer, task, done)
        rows: list[Row] = []
        for seed in range(self.seeds):
            for task in self.tasks:
                rows += self.try_text(model, tokenizer, task, seed)
                done(task, self.trial_tokens)
        solvable = countable(selection)
        return {
            "solved_on_selection_seeds": selection,
            "counted_for_recall": sorted(solvable),
            "results": summarise(rows, solvable),
            "branches": summarise_shared(list(self._shared(model, tokenizer, done))),
        }

    def solved(
        self, model: CausalLM, tokenizer: Tokenizer, task: str, done: Callable[[str, int], None] = lambda *_: None
    ) -> float:
        """Return which share of a task's parts the dense cache finds in the texts that choose; `done` as in `run`."""
        found: list[bool] = []
        for seed in range(SELECTION, SELECTION + self.selection_seeds):
            found += solved(model, make(TASKS[task], seed, self.tokens, tokenizer))
            done(f"{task}, dense", self.tokens)
        return mean(found)

    def try_text(self, model: CausalLM, tokenizer: Tokenizer, task: str, seed: int) -> list[Row]:
        """Measure every policy on one text of a task."""
        return try_policies(
            model,
            make(TASKS[task], seed, self.tokens, tokenizer),
            self.contenders,
            self.modes,
            new_tokens=self.new_tokens,
            repeat=tokenizer.encode(REPEAT, add_special_tokens=False),
            stored=KV_CACHE_DTYPES[self.kv_cache_dtype],
            task=task,
            seed=seed,
        )

    def _shared(self, model: CausalLM, tokenizer: Tokenizer, done: Callable[[str, int], None]) -> Iterator[Shared]:
        if not self.branches:
            return
        for seed in range(self.seeds):
            encoded = make(partial(needles, num_keys=self.branches), seed, self.tokens, tokenizer)
            prompt = OfflineCache(model)
            prompt.read(encoded.context)
            policies = [Contender(self.branch_policy, budget).policy() for budget in self.budgets]
            for kind, branches in (
                ("questions", [question.tokens for question in encoded.questions]),
                ("samples", self.branches),
            ):
                yield from share(prompt, branches, policies, new_tokens=self.new_tokens, kind=kind, seed=seed)
                done(f"branches, {kind}", self.shared_tokens)
