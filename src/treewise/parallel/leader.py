"""Rank 0: a runner that tells the other ranks what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from treewise.graphs import Plans
from treewise.models import CausalLM
from treewise.parallel.model import ParallelLM
from treewise.parallel.orders import Begin, Call, Forward, PlanTeller
from treewise.runner import Runner, Step
from treewise.sparsity.observation import Seen


class LeadingRunner(Runner):
    """The runner of rank 0: what it computes, the others compute with it, each with its share of the model.

    Only it plans, and only it has logits. Bytes that it tells of are those of all ranks.

    Parameters
    ----------
    model : ParallelLM
    attention, num_slots, page_size, kv_dtype, cuda_graphs
        See `Runner`.
    """

    def __init__(
        self,
        model: ParallelLM,
        attention: str,
        num_slots: int,
        page_size: int,
        kv_dtype: torch.dtype,
        cuda_graphs: bool | None = None,
    ) -> None:
        super().__init__(model, attention, num_slots, page_size, kv_dtype, cuda_graphs)
        self.ranks = model.ranks
        self.number = self.ranks.next_number()
        self.kv_bytes_per_token *= self.num_ranks
        self._plan_teller = PlanTeller()
        with self.ranks.together():
            self.ranks.tell(Begin(self.number, (attention, num_slots, page_size, kv_dtype, cuda_graphs)))
            self.weight_bytes = self.ranks.group.total(self.weight_bytes)
        finalize(self, self.ranks.drop, self.number)

    def kv_bytes(self, plans: Plans) -> int:
        """See `Runner.kv_bytes`."""
        return super().kv_bytes(plans) * self.num_ranks

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        """See `Runner.forward`.

        Raises
        ------
        RankLost
            If another rank has ended; so does every later call.
        """
        with self.ranks.together():
            return super().forward(*arguments, **options)

    def take(self, step: Step, drawn: Tensor | None = None, seen: Sequence[Seen] = ()) -> Tensor:
        """See `Runner.take`."""
        news = self._plan_teller.tell(step.plans)
        num_drawn = None if drawn is None else len(drawn)
        self.ranks.tell(Forward(self.number, step._replace(plans={}), news, num_drawn))
        if drawn is not None:
            drawn = self.ranks.group.broadcast(drawn.contiguous())
        return super().take(step, drawn, seen)

    def check(self) -> None:
        """See `Runner.check`."""
        self.ranks.check()


def make_runner(model: CausalLM, *arguments: Any) -> Runner:
    """Return the runner of a model, with `arguments` of `Runner`; of one that ranks share out, one that leads them."""
    return LeadingRunner(model, *arguments) if isinstance(model, ParallelLM) else Runner(model, *arguments)


def everywhere(subject: CausalLM | Runner, function: Callable[..., int | None], *arguments: Any) -> int:
    """Call a function of a model or of a runner; where ranks share it out, on all of them, each with its own.

    Parameters
    ----------
    subject : CausalLM or Runner
        What `function` is called with first.
    function : callable
        Of a module, so that other processes find it by its name. It does the same on each rank.

    Returns
    -------
    int
        The least of the numbers that it returns, 0 if it returns none.
    """
    if not isinstance(subject, ParallelLM | LeadingRunner):
        return function(subject, *arguments) or 0
    number = subject.number if isinstance(subject, LeadingRunner) else None
    with subject.ranks.together():
        subject.ranks.tell(Call(number, function, arguments))
        return subject.ranks.group.least(function(subject, *arguments) or 0)
