"""The slot interface: what every pool promises to the KV manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treewise.tree import Node

Slots = NDArray[np.int32]

MOST_MOVED = 64
"""Tokens whose keys may be copied so that two nodes become one; a longer node stays apart, which wastes little."""


class OutOfSlots(Exception):
    """The pool has no room for the slots asked for; nothing was changed."""


@dataclass(frozen=True, eq=False)
class Copy:
    """Keys and values that must move before the next forward: slot ``source[i]`` to slot ``target[i]``."""

    source: Slots
    target: Slots


class SlotPool(Protocol):
    """Gives each node of the forest a slot a token; knows nothing of the tensors that lie behind the slots.

    Attributes
    ----------
    num_slots : int
        Slots of the key and value tensors, the scratch slots included.
    scratch_slot : int
        A slot that no token ever owns; rows whose keys need no place write there.
    page_size : int
        Tokens of a node whose slots follow each other without a gap are promised in runs of this many.
    num_moves : int
        How often tokens have changed their slots so far.
    """

    num_slots: int
    scratch_slot: int
    page_size: int
    num_moves: int

    @property
    def num_free(self) -> int:
        """Slots that nothing uses."""

    def num_held(self, nodes: Iterable[Node]) -> int:
        """Return how many slots lie on pages that `nodes` have tokens in."""

    def extend(self, node: Node, length: int) -> None:
        """See to it that the first `length` tokens of `node` have slots.

        Raises
        ------
        OutOfSlots
            If the pool cannot; nothing was changed then.
        """

    def append(self, nodes: Sequence[Node]) -> Slots:
        """Return the slot of the last token of each of `nodes`, int32 [nodes]; they may lack that one.

        Raises
        ------
        OutOfSlots
            If the pool cannot; some of the nodes may have got theirs, and keep them.
        """

    def slots(self, node: Node) -> Slots:
        """Return the slots of `node`'s tokens, as many as it was extended to; a view that the next change ends."""

    def split(self, upper: Node, lower: Node) -> None:
        """Follow `Forest.split`: the first ``len(upper.tokens)`` slots of `lower` pass to `upper`."""

    def join(self, upper: Node, lower: Node) -> bool:
        """Undo `split` before `Forest.join`: the slots of `upper` pass to `lower`, in front of its own.

        Returns
        -------
        bool
            False if that would move more than `MOST_MOVED` tokens or there is no room; nothing was changed then.
        """

    def shrink(self, node: Node, length: int) -> None:
        """Take back the slots behind the first `length` tokens of `node`, as far as nobody else uses them."""

    def lend(self, num_slots: int) -> Slots:
        """Return at least `num_slots` slots that no node owns, int32, the borrower's until `take_back`.

        Raises
        ------
        OutOfSlots
            If the pool cannot; nothing was changed then.
        """

    def take_back(self, slots: Slots) -> None:
        """Take back what one call of `lend` gave."""

    def origins(self, slots: Slots) -> Slots:
        """Return where the keys of `slots` lie until the next forward; -1 stays."""

    def move(self, origins: Slots, target: Slots) -> None:
        """Have keys moved before the next forward from their `origins`, whoever owns these by now."""

    def take_copies(self) -> list[Copy]:
        """Return the moves that became necessary since the last call, in order."""

    def check_integrity(self, nodes: Iterable[Node]) -> None:
        """Verify that the pool's records are what `nodes` own, no more and no less."""
