"""Plans of steps in which leaves have guesses behind them: one serves many steps, whatever shape the guesses have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from treewise.batch import ACCEPTED, Guesses
from treewise.graphs import Plans
from treewise.kv import KVManager, Slots
from treewise.plan import TreeSpec
from treewise.plan.layout import pack
from treewise.thicket import Ints
from treewise.tree import Node

ROOM = 64
"""Tokens by which a leaf may become longer before a new plan is made."""
MOST = 16
"""Plans that are kept, for so many numbers of guesses."""

Stems = Sequence[tuple[Node, Guesses | None]]


class _Planned(NamedTuple):
    """Plans, and what they were made for.

    Attributes
    ----------
    plans : Plans
    sizes : tuple of int
        Guesses behind each leaf.
    lengths : list of int
        Of the leaves' paths when the plans were made.
    paths : list of int32 arrays
        Slots of the paths in the last step.
    see : int64 [leaves]
        Which rows see what a leaf gains: its own, and those of its guesses, which follow.
    own : int64 [guesses]
        The row of each guess.
    places : list of (int64 [places], int64 [places])
        Where guesses stand in each plan, and which of them at each place, see `Plan.places`.
    told : list of (bytes, bytes)
        The slots of the guesses and who sees them, as the plans have been told last; empty before that.
    """

    plans: Plans
    sizes: tuple[int, ...]
    lengths: list[int]
    paths: list[Slots]
    see: Ints
    own: Ints
    places: list[tuple[Ints, Ints]]
    told: list[tuple[bytes, bytes]]

    def goes_on(self, paths: Sequence[Slots]) -> bool:
        """Whether there is room for what leaves have gained, and no key has moved."""
        return all(
            len(last) <= len(path) <= length + ROOM and path[: len(last)].tobytes() == last.tobytes()
            for length, last, path in zip(self.lengths, self.paths, paths, strict=True)
        )

    def again(self) -> _Planned:
        """Return it as it has to be after a step that had other plans, or that failed."""
        for plan in self.plans.values():
            plan.renew()
        return self._replace(plans={**self.plans})  # a graph loads it anew

    def has_room(self, paths: Sequence[Slots]) -> bool:
        """Whether there is room for as many tokens as a step may bring, behind these paths."""
        return all(len(path) + ACCEPTED <= length + ROOM for length, path in zip(self.lengths, paths, strict=True))

    def fill(self, stems: Stems, paths: list[Slots]) -> None:
        """Tell the plans of the tokens that leaves have gained since the last step, and of the guesses."""
        tokens: list[int] = []  # that leaves have gained, of those that are open
        leaves: list[int] = []  # that have gained them
        slots: list[Slots] = []
        for leaf, (length, last, path) in enumerate(zip(self.lengths, self.paths, paths, strict=True)):
            first = leaf * ROOM - length
            tokens += range(first + len(last), first + len(path))
            leaves += [leaf] * (len(path) - len(last))
            slots.append(path[len(last) :])
        self.paths[:] = paths
        guesses = [guesses for _, guesses in stems if guesses is not None]
        guessed = np.concatenate([each.slot for each in guesses])
        seen = pack(self.own, self.own + np.concatenate([each.below for each in guesses]))
        told = guessed.tobytes(), seen.tobytes()
        changed = self.told != [told]  # seldom, where guesses have one shape
        self.told[:] = [told]
        gained, slot, see = np.array(tokens, np.int64), np.concatenate(slots), self.see[leaves]
        for plan, (places, which) in zip(self.plans.values(), self.places, strict=True):
            own, of = plan.places(gained)
            if changed:
                own = np.concatenate((own, places))
                plan.fill(own, np.concatenate((slot[of], guessed[which])), np.concatenate((see[of], seen[which])))
            elif len(own):
                plan.fill(own, slot[of], see[of])


class StemPlanner:
    """Plans such steps; a plan serves those that have as many guesses behind the same leaves, which grow.

    A leaf has room for tokens to come, and one node has room for its guesses. What they see of each other is told in
    each step by who sees each token (`Plan.fill`), so that it is no part of the plan.

    Parameters
    ----------
    make : callable
        Plans a tree, given the slots of its tokens and how many are open, see `treewise.plan.plan_tree`.
    """

    def __init__(self, make: Callable[[TreeSpec, Slots, int], Plans]) -> None:
        self._make = make
        self._planned: dict[tuple[int, ...], _Planned] = {}  # by their guesses behind each leaf; used last, comes last
        self._last: _Planned | None = None  # of the last step

    def forget(self) -> None:
        """Note that a step has had other plans."""
        self._last = None

    def plan(self, stems: Stems, kv: KVManager) -> Plans:
        """Plan a step of these rows, see `Batch.stems`."""
        sizes, paths = _sizes(stems), [kv.path_slots(leaf) for leaf, _ in stems]
        planned = self._planned.pop(sizes, None)
        if planned is None or not planned.goes_on(paths):
            planned = self._plan_anew(stems, paths, kv)
        elif planned is not self._last or any(plan.unsent for plan in planned.plans.values()):
            planned = planned.again()
        self._last = self._planned[sizes] = planned
        if len(self._planned) > MOST:
            del self._planned[next(iter(self._planned))]
        planned.fill(stems, paths)
        return planned.plans

    def plan_ahead(self, stems: Stems, kv: KVManager) -> None:
        """Make a new plan behind a step of these rows, if one more may find no room in the last."""
        paths = [kv.path_slots(leaf) for leaf, _ in stems]
        if self._last is not None and not self._last.has_room(paths):
            self._last = self._planned[_sizes(stems)] = self._plan_anew(stems, paths, kv)

    def _plan_anew(self, stems: Stems, paths: list[Slots], kv: KVManager) -> _Planned:
        sizes = _sizes(stems)
        slots = {node: kv.slots(node)[: len(node.tokens)] for leaf, _ in stems for node in kv.forest.path(leaf)}
        open_slots = -1 - np.arange(len(stems) * ROOM + sum(sizes), dtype=np.int32)
        place = {node: number for number, node in enumerate(slots)}  # parents first
        parent = [-1 if node.parent is None else place[node.parent] for node in slots]
        tokens = list(slots.values())
        query_node = [place[leaf] for leaf, _ in stems]
        for number, node in enumerate(query_node):
            tokens[node] = np.concatenate([tokens[node], open_slots[number * ROOM :][:ROOM]])
        offset = [len(tokens[node]) - 1 for node in query_node]
        free = len(stems) * ROOM
        for leaf, size in zip(query_node[:], sizes, strict=True):
            if size:
                query_node += [len(tokens)] * size
                offset += [size - 1] * size
                parent.append(leaf)
                tokens.append(open_slots[free:][:size])
                free += size
        spec = TreeSpec(parent, [len(own) for own in tokens], query_node, offset)
        plans = self._make(spec, np.concatenate(tokens), len(open_slots))
        order = next(iter(plans.values())).row_order
        rows = np.empty_like(order)
        rows[order] = np.arange(len(order))
        leaves = rows[: len(stems)]
        guesses = len(stems) * ROOM + np.arange(sum(sizes))
        return _Planned(
            plans,
            sizes,
            [len(path) for path in paths],
            paths,
            pack(leaves, leaves + 1 + np.array(sizes)),
            np.concatenate([row + 1 + np.arange(size) for row, size in zip(leaves.tolist(), sizes, strict=True)]),
            [plan.places(guesses) for plan in plans.values()],
            [],
        )


def _sizes(stems: Stems) -> tuple[int, ...]:
    return tuple(0 if guesses is None else len(guesses.rows) for _, guesses in stems)
