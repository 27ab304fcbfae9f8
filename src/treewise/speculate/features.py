"""The model's last hidden states, kept under the slots of the tokens that they are of."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from treewise.kv import Copy, Slots
from treewise.plan.data import upload
from treewise.runner import Runner
from treewise.speculate.trees import Ints


class Features:
    """Hidden states behind the last norm, one under each slot whose key the model has computed.

    Whatever moves keys moves them too, so forks, preempted branches and cached prefixes need no care: where a key is
    right, so is the state.

    Parameters
    ----------
    engine : Runner
        Whose forwards are watched from now on.

    Attributes
    ----------
    states : Tensor [slots, hidden size]
    """

    def __init__(self, engine: Runner) -> None:
        self.device = engine.device
        shape = (engine.k.shape[1], engine.model.config.hidden_size)
        self.states = torch.zeros(shape, dtype=engine.dtype, device=self.device)
        self.engine = engine
        engine.watchers.append(self.see)
        engine.followers.append(self.copy)

    def end(self) -> None:
        """Watch no more."""
        self.engine.watchers.remove(self.see)
        self.engine.followers.remove(self.copy)

    def see(self, slots: Slots, hidden: Tensor) -> None:
        """Keep the states of a forward's rows [rows, hidden size]."""
        self.states.index_copy_(0, self.place(slots), hidden)

    def copy(self, copy: Copy) -> None:
        """Move states."""
        self.states[self.place(copy.target)] = self.states[self.place(copy.source)]

    def place(self, slots: Slots | Ints) -> Tensor:
        """Return slots as an index on the device."""
        return upload({"slots": np.ascontiguousarray(slots, np.int64)}, self.device)["slots"]
