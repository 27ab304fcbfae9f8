"""The model's hidden states, kept under the slots of the tokens that they are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from treewise.kv import Slots
from treewise.plan.data import upload
from treewise.runner import Move, Runner, Tap
from treewise.speculate.trees import Ints


class SlotStates:
    """A row of numbers under each slot.

    Whatever moves keys moves them too, so forks, preempted branches and cached prefixes need no care: where a key is
    right, so is the state.

    Parameters
    ----------
    engine : Runner
        Whose slots they are.
    size : int
        Numbers of a row.

    Attributes
    ----------
    states : Tensor [slots, size]
    """

    def __init__(self, engine: Runner, size: int) -> None:
        self.device = engine.device
        self.states = torch.zeros((engine.k.shape[1], size), dtype=engine.dtype, device=self.device)
        self.engine = engine
        engine.followers.append(self.copy)

    def end(self) -> None:
        """Follow no more."""
        self.engine.followers.remove(self.copy)

    def put(self, slots: Tensor, states: Tensor) -> None:
        """Keep states [rows, size] under slots [rows] int64; nothing waits for the device."""
        self.states.index_copy_(0, slots, states)

    def copy(self, move: Move) -> None:
        """Move states."""
        self.put(move.target_there, self.states.index_select(0, move.source_there))

    def place(self, slots: Slots | Ints) -> Tensor:
        """Return slots as an index on the device."""
        return upload({"slots": np.ascontiguousarray(slots, np.int64)}, self.device)["slots"]


class Features(SlotStates):
    """The states behind the last norm of all tokens whose keys the model computes from now on."""

    def __init__(self, engine: Runner) -> None:
        super().__init__(engine, engine.model.config.hidden_size)
        engine.watchers.append(self.see)

    def end(self) -> None:
        """Watch no more."""
        super().end()
        self.engine.watchers.remove(self.see)

    def see(self, slots: Slots, hidden: Tensor) -> None:
        """Keep the states of a forward's rows [rows, hidden size]."""
        self.put(self.place(slots), hidden)


class InnerFeatures(SlotStates):
    """What is made of the states that enter some of the model's layers, likewise.

    Parameters
    ----------
    engine : Runner
        That has not captured any step yet.
    layers : sequence of int
    size : int
        Numbers of what is made of them.
    fuse : callable
        Makes it, of the layers' states side by side [rows, layers * hidden size]: it is part of the forward.
    """

    def __init__(self, engine: Runner, layers: Sequence[int], size: int, fuse: Callable[[Tensor], Tensor]) -> None:
        super().__init__(engine, size)
        engine.taps.append(Tap(tuple(layers), lambda slots, states: self.put(slots, fuse(states))))
