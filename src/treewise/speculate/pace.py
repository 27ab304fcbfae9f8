"""How many guesses pay: what they have brought against what steps have taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from treewise.graphs import padded
from treewise.speculate.trees import Floats

SAMPLES = 8
"""Last steps of a size whose fastest is what a step of that size takes: the others were held up by something."""
TRIALS = 3
"""Steps of a size before it is known what they take."""
FORGOTTEN = 512
"""Steps after which nothing is known of a size any more that none of them had."""
SHORTEST_REST, LONGEST_REST = 4, 128
"""Steps without guesses before it is tried again."""
MEMORY = 0.9
"""Weight of what was known against what a step has shown."""
WORTH = 1.01
"""How many times the tokens a second of rest guessing has to bring lately."""


class Pace:
    """Measures what guesses bring and what they cost, and says how many a step should have.

    A guess is expected to be right as often as its drafter says, times how far the drafter's word has come true lately.
    A step of so many rows takes what the fastest of the last ones of about that size took; what is between two sizes
    that are known, or not far above them, lies on a line. The number of guesses is that which brings most tokens a
    second, none perhaps. Where guessing as such has not paid lately, the next steps rest, and more of them each time.

    Nothing of this changes what is decoded.

    Attributes
    ----------
    trust : float
        How far the drafter's probabilities have come true lately.

    Examples
    --------
    >>> pace = Pace()
    >>> for rows, seconds in ((1, 1.0), (4, 1.1), (8, 4.0)) * TRIALS:
    ...     pace.stepped(rows, seconds)
    >>> pace.choose(np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]), num_leaves=1, num_rows=1)
    3
    """

    def __init__(self) -> None:
        self.trust = 1.0
        self._taken: dict[int, deque[float]] = {}  # seconds of the last steps of each size
        self._bare: dict[int, deque[float]] = {}  # likewise, of steps without guesses that were no rest
        self._newest: dict[int, int] = {}  # when the last of them was
        self._num_steps = 0
        self._drafting: deque[float] = deque(maxlen=SAMPLES)
        self._gain = 1.5  # tokens a second over those of rest, lately
        self._left = 0  # steps of rest
        self._rest = SHORTEST_REST
        self._probing = False

    @property
    def resting(self) -> bool:
        """Whether the next step is to do without guesses."""
        return self._left > 0

    def pass_by(self) -> None:
        """Note that a step did without guesses as it should; the one after the last of them tries again."""
        self._left -= 1
        self._probing = not self._left

    def choose(self, reach: Floats, num_leaves: int, num_rows: int) -> int:
        """Return how many of the guesses a step should have; no more than make it twice as large as any that is known.

        Where guessing has not paid lately, the time that it takes included, the next steps are to rest.

        Parameters
        ----------
        reach : float64 [guesses]
            How likely each is right by its drafter's word, in descending order.
        num_leaves : int
            Leaves that get a token anyhow.
        num_rows : int
            Rows of the step without guesses.
        """
        known = self._known()
        most = 2 * max([padded(num_rows), *known])
        reach = reach[: max(0, most - num_rows)]
        trust = max(self.trust, 1.0) if self._probing else self.trust
        tokens = num_leaves + trust * np.concatenate([[0.0], np.cumsum(reach)])
        seconds = _seconds(known, num_rows, len(tokens))
        best = int(np.argmax(tokens / seconds))
        bare = self._bare.get(padded(num_rows), ())
        spent = (seconds[best] if best or len(bare) < TRIALS else min(bare)) + min(self._drafting, default=0.0)
        gain = tokens[best] / spent / (tokens[0] / seconds[0])
        self._gain = MEMORY * self._gain + (1 - MEMORY) * float(gain)
        if self._gain < WORTH:
            self._left = self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
        self._probing = False
        return best

    def drafted(self, seconds: float) -> None:
        """Note how long it took to guess."""
        self._drafting.append(seconds)

    def stepped(self, num_rows: int, seconds: float, bare: bool = False) -> None:
        """Note how long a step of decoding took, guessing apart.

        One that is `bare` had no guesses and was no rest. On a GPU it takes longer than one of rest, before whose end
        the next can begin.
        """
        size = padded(num_rows)
        self._num_steps += 1
        self._newest[size] = self._num_steps
        (self._bare if bare else self._taken).setdefault(size, deque(maxlen=SAMPLES)).append(seconds)
        for other in [other for other, newest in self._newest.items() if newest + FORGOTTEN < self._num_steps]:
            for known in (self._newest, self._taken, self._bare):
                known.pop(other, None)

    def verified(self, reaches: Sequence[Floats], num_right: Sequence[int]) -> None:
        """Note how many guesses of each tree were right."""
        expected, came = sum(float(reach.sum()) for reach in reaches), sum(num_right)
        if expected:
            self.trust = MEMORY * self.trust + (1 - MEMORY) * came / expected
        if came:
            self._rest = SHORTEST_REST

    def _known(self) -> dict[int, float]:
        """Return the seconds of the sizes that are known, in ascending order."""
        every = {size: [*self._taken.get(size, ()), *self._bare.get(size, ())] for size in sorted(self._newest)}
        return {size: min(taken) for size, taken in every.items() if len(taken) >= TRIALS}


def _seconds(known: Mapping[int, float], first: int, count: int) -> Floats:
    """Return what steps of ``first``, ``first + 1``, ... rows take, given those of sizes in ascending order."""
    if not known:
        return np.ones(count)
    sizes, at, taken = _sizes(first, count), np.array(list(known), np.float64), np.array(list(known.values()))
    slope = max(0.0, (taken[-1] - taken[-2]) / (at[-1] - at[-2])) if len(known) > 1 else 0.0
    beyond = slope * np.maximum(sizes - at[-1], 0)
    seconds: Floats = np.interp(sizes, at, taken) * np.minimum(sizes / at[0], 1) + beyond
    return seconds


@lru_cache(maxsize=256)
def _sizes(first: int, count: int) -> Floats:
    sizes = np.array([padded(rows) for rows in range(first, first + count)], np.float64)
    sizes.flags.writeable = False  # many steps have it
    return sizes
