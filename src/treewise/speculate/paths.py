"""What is made of paths, token after token, once for what branches share."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from treewise.branch import Branch


class PathStates:
    """Folds paths, whose branches only grow, by a function of a state and a token.

    Parameters
    ----------
    step : callable
        From the state behind a path, and one more token, to the state behind that; states are whole numbers.
    start : int
        The state of the empty path.
    """

    def __init__(self, step: Callable[[int, int], int], start: int = 0) -> None:
        self.step = step
        self.start = start
        self._states: WeakKeyDictionary[Branch, list[int]] = WeakKeyDictionary()  # behind each token of its own

    def last(self, branch: Branch) -> int:
        """Return the state behind the path of `branch`."""
        own = self._states.setdefault(branch, [])
        if not own and branch.parent is not None:
            state = self.along(branch.parent)[branch.start - 1]
        else:
            state = own[-1] if own else self.start
        return self._read(branch, own, state)

    def along(self, branch: Branch) -> list[int]:
        """Return the state behind each token of the path of `branch`."""
        states: list[int] = []
        for each in branch.lineage():
            del states[each.start :]
            own = self._states.setdefault(each, [])
            self._read(each, own, own[-1] if own else states[-1] if states else self.start)
            states += own
        return states

    def _read(self, branch: Branch, own: list[int], state: int) -> int:
        """Read the tokens that `branch` has gained, the states behind which are not among its `own`."""
        for token in branch.tokens[len(own) :]:
            state = self.step(state, token)
            own.append(state)
        return state
