"""Rank 0: a runner that tells the other ranks what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import finalize

import torch
from torch import Tensor

from treewise.batch import Batch
from treewise.graphs import Plans
from treewise.kv import KVManager
from treewise.models import CausalLM
from treewise.parallel.model import ParallelLM
from treewise.parallel.orders import Ask, Begin, Call, Forward, PlanTeller
from treewise.runner import Result, Runner, Step
from treewise.sparsity.observation import Seen
from treewise.thicket import Ints


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
        self._shows = False
        with self.ranks.together():
            self.ranks.tell(Begin(self.number, (attention, num_slots, page_size, kv_dtype, cuda_graphs)))
            self.weight_bytes = self.ranks.group.total(self.weight_bytes)
        finalize(self, self.ranks.drop, self.number)

    def kv_bytes(self, plans: Plans) -> int:
        """See `Runner.kv_bytes`."""
        return super().kv_bytes(plans) * self.num_ranks

    def forward(
        self,
        batch: Batch,
        plans: Plans,
        kv: KVManager,
        drawn: Tensor | None = None,
        see: Callable[[Tensor], None] | None = None,
        seen: Sequence[Seen] = (),
    ) -> Tensor:
        """See `Runner.forward`.

        Raises
        ------
        RankLost
            If another rank has ended; so does every later call.
        """
        self._shows = any(True for _ in batch.asked())  # in whose place `see` may put what was kept

        def show(hidden: Tensor) -> None:
            if see is not None:
                see(hidden)
            if self._shows:
                self.ranks.group.broadcast(hidden)

        with self.ranks.together():
            return super().forward(batch, plans, kv, drawn, show, seen)

    def take(self, step: Step, drawn: Tensor | None = None, seen: Sequence[Seen] = ()) -> Tensor:
        """See `Runner.take`."""
        news = self._plan_teller.tell(step.plans)
        num_drawn = None if drawn is None else len(drawn)
        # NOTE: what takes queries knows its rows on the device only, which the host waits for here.
        takers = [(self.ranks.number_of(each.observation), *_there(each.rows, each.places)) for each in seen]
        self.ranks.tell(Forward(self.number, step._replace(plans={}), news, num_drawn, takers, self._shows))
        if drawn is not None:
            drawn = self.ranks.group.broadcast(drawn.contiguous())
        return super().take(step, drawn, seen)

    def on_ranks(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """See `Runner.on_ranks`."""
        number = self.ranks.next_number()
        with self.ranks.together():
            self.ranks.tell(Call(self.number, function, arguments, number))
            result = function(self, *arguments)
        if isinstance(result, list):
            result = cast(Result, _List(result))
        if result is not None:
            self.ranks.keep(number, result)
        return result

    def check(self) -> None:
        """See `Runner.check`."""
        self.ranks.check()


class _List(list[Any]):
    """A list that can be referred to weakly."""


def _there(*tensors: Tensor) -> tuple[Ints, Ints]:
    rows, places = (tensor.cpu().numpy() for tensor in tensors)
    return rows, places


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
        subject.ranks.tell(Ask(number, function, arguments))
        return subject.ranks.group.least(function(subject, *arguments) or 0)
