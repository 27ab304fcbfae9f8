"""What every drafter is: something that guesses how leaves go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from treewise.batch import Batch
from treewise.branch import Branch
from treewise.kv import KVManager, Slots
from treewise.sampler import SamplingRow
from treewise.speculate.trees import Ints, TokenTree
from treewise.tree import Node


@dataclass(eq=False)
class Stem:
    """A leaf that goes on by itself, as its drafter sees it.

    The last token of its path is *pending*: it was chosen, the model has not read it, and the step under way will. The
    guesses are of what follows it.

    Attributes
    ----------
    branch : Branch
        To know the leaf again in the next step, and its ancestors: a fork has its parent's path.
    node : Node
        In which the path ends. All tokens of the path have slots, the pending one too.
    place : int
        Where the logits of its row will stand in the runner's answer.
    room : int
        How deep guesses are of use.
    row : SamplingRow
        How the token behind the pending one will be chosen; guesses that its grammar refuses are left out.
    hidden : Tensor [verified, hidden size] or None
        On the device: the model's last hidden states, behind the last norm, of the rows that have chosen the leaf's
        newest tokens, in order: as many as the last step has verified, so that the last of them is of the token before
        the pending one. None where the last step did not compute them, as for a fork, and for drafters that do not want
        them.
    """

    branch: Branch
    node: Node
    place: int
    room: int
    row: SamplingRow
    hidden: Tensor | None = None

    @property
    def tokens(self) -> list[int]:
        """All tokens of the path, prompt included."""
        return self.branch.path_tokens


@dataclass(eq=False)
class Step:
    """The step under way, for drafters that keep keys of their own under the engine's slots.

    Attributes
    ----------
    batch : Batch
        The rows that the model computes in this step anyhow, the pending tokens among them.
    kv : KVManager
    lent : list of int32 arrays
        Slots that guesses have in this step.
    """

    batch: Batch
    kv: KVManager
    lent: list[Slots] = field(default_factory=list)

    def lend(self, num_slots: int) -> Slots:
        """Return slots for guesses, which are given back when the step is over; keys of right guesses are moved first.

        Raises
        ------
        OutOfSlots
        """
        slots = self.kv.lend(num_slots)
        self.lent.append(slots)
        return slots[:num_slots]

    def path_slots(self, stem: Stem) -> Ints:
        """Return the slot of each token of a path, int64 [tokens]."""
        return self.kv.path_slots(stem.node).astype(np.int64)


class Drafter(Protocol):
    """Guesses how leaves go on.

    What it guesses never changes what is decoded, only how many steps that takes. A drafter belongs to one engine, and
    is called once a step for all leaves that are to have guesses, after the step's rows have got their slots and before
    its forward.

    Attributes
    ----------
    wants_hidden : bool
        Whether `Stem.hidden` is to be filled in.

    Notes
    -----
    One that looks at the slots of whole paths has a true `wants_path` as well: it is not asked about paths of which
    some keys have been given up.
    """

    wants_hidden: bool

    def draft(self, stems: Sequence[Stem], size: int, step: Step) -> list[TokenTree]:
        """Return a tree for each of `stems`, an empty one where there is nothing to guess.

        Parameters
        ----------
        stems : sequence of Stem
        size : int
            The most nodes of a tree; more are cut off. Of trees with probabilities the engine takes the part that pays.
        step : Step

        Raises
        ------
        OutOfSlots
            If there is no room for its keys; the step has no guesses then.
        """
