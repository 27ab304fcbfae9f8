"""What rank 0 tells the others: orders, and of each step's plans what they have not heard yet."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from treewise.graphs import Kind, Plans
from treewise.plan import Plan
from treewise.runner import Step
from treewise.thicket import Ints

OWN = ("device", "unsent", "tensors", "prepared", "accepted_by")
"""Fields of a plan that each rank has for itself."""


class Growth(NamedTuple):
    """What became of a plan since the step before.

    Attributes
    ----------
    slots : list of int32 [queries]
        Of the tokens that branches have appended, see `Plan.grow`.
    filled : (int64 [places], int32 [places], int64 [places]) or None
        Places, slots and readers of open tokens, see `Plan.fill`.
    """

    slots: list[Ints]
    filled: tuple[Ints, Ints, Ints] | None


News = Mapping[Kind, Growth | Mapping[str, Any]]
"""Of each plan how it has grown, or all its fields that are not `OWN`."""


class PlanTeller:
    """Tells of the plans of one step after another: whole ones, and only growth while a step goes on with them."""

    def __init__(self) -> None:
        self._last: Plans | None = None
        self._grown: list[int] = []

    def tell(self, plans: Plans) -> News:
        """Return what has to be told of `plans`."""
        news: dict[Kind, Growth | Mapping[str, Any]] = {}
        if plans is self._last:
            for (kind, plan), grown in zip(plans.items(), self._grown, strict=True):
                slots = [plan.kv_slots[tokens] for tokens in plan.room[grown : plan.grown]]
                news[kind] = Growth(slots, _filled(plan))
        else:
            names = [field.name for field in fields(Plan) if field.name not in OWN]
            news = {kind: {name: getattr(plan, name) for name in names} for kind, plan in plans.items()}
        self._last, self._grown = plans, [plan.grown for plan in plans.values()]
        return news


def _filled(plan: Plan) -> tuple[Ints, Ints, Ints] | None:
    if not plan.unsent:
        return None
    places, _, readers = plan.unsent
    return places, plan.kv_slots[places], readers


class PlanHearer:
    """Has the plans that a `PlanTeller` tells of.

    Parameters
    ----------
    device : torch.device
        Where they are to be.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._plans: dict[Kind, Plan] = {}

    def hear(self, news: News) -> Plans:
        """Return the plans of the step: the same object as in the step before where they have only grown."""
        whole = {kind: told for kind, told in news.items() if isinstance(told, Mapping)}
        if whole:
            self._plans = {kind: Plan(**told, device=self.device).place() for kind, told in whole.items()}
        for kind, told in news.items():
            if isinstance(told, Growth):
                for slots in told.slots:
                    self._plans[kind].grow(slots)
                if told.filled is not None:
                    self._plans[kind].fill(*told.filled)
        return self._plans


@dataclass(frozen=True)
class Begin:
    """Make a runner, known by its number from now on; `arguments` are those of `Runner` behind the model."""

    number: int
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Ask:
    """Call a function with the model, or with the runner of this number, and say what number it returns."""

    number: int | None
    function: Callable[..., int | None]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """Call a function with a runner and with `arguments`, and keep what it returns, under the number `result`.

    What was kept may be among the arguments, and within lists of them: it travels as its number.
    """

    number: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    result: int


@dataclass(frozen=True)
class Forward:
    """Compute a step with a runner, up to the logits.

    Attributes
    ----------
    number : int
    step : Step
        Without plans.
    news : News
        Of its plans.
    num_drawn : int or None
        Tokens that were drawn, which rank 0 sends behind from device to device; None if there are none.
    seen : list of (int, int64 [rows], int64 [rows])
        Of each `Seen` the number of its observation, its rows and its places.
    shows : bool
        Whether rank 0 sends what comes before the output head, as it puts something there.
    """

    number: int
    step: Step
    news: News
    num_drawn: int | None
    seen: list[tuple[int, Ints, Ints]]
    shows: bool


Order = Begin | Ask | Call | Forward


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, numbers: Mapping[int, int]) -> None:
        super().__init__(file, protocol=5)
        self.numbers = numbers

    def persistent_id(self, each: Any) -> int | None:
        return self.numbers.get(id(each))


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: Mapping[int, Any]) -> None:
        super().__init__(file)
        self.kept = kept

    def persistent_load(self, number: Any) -> Any:
        return self.kept[number]


def write(order: Order, dropped: list[int], numbers: Mapping[int, int]) -> bytes:
    """Put an order in a message.

    Parameters
    ----------
    order : Order
    dropped : list of int
        Numbers of runners, and of what calls have returned, that nobody needs any more.
    numbers : mapping of int to int
        By the identity of what calls have returned, its number.
    """
    if not isinstance(order, Call):
        return pickle.dumps((order, dropped), protocol=5)
    file = io.BytesIO()
    _Writer(file, numbers).dump((order, dropped))
    return file.getvalue()


def read(message: bytes, kept: Mapping[int, Any]) -> tuple[Order, list[int]]:
    """Return the order in a message, and the numbers that are dropped; `kept` is what calls have returned here."""
    order, dropped = _Reader(io.BytesIO(message), kept).load()
    return order, dropped
