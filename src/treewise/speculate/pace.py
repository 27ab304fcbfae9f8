"""How many guesses pay: what they have brought against what steps have taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from treewise.graphs import padded
from treewise.speculate.trees import Floats

SAMPLES = 8
"""Last steps of a size whose fastest is what a step of that size takes: the others were held up by something."""
TRIALS = 3
"""Steps of a size before it is known what they take."""
SHORTEST_REST, LONGEST_REST = 4, 128
"""Steps without guesses before it is tried again."""
MEMORY = 0.9
"""Weight of what was known against what a step has shown."""


class Pace:
    """Measures what guesses bring and what they cost, and says how many a step should have.

    A guess is expected to be right as often as its drafter says, times how far the drafter's word has come true lately.
    A step of so many rows takes what the fastest of the last ones of about that size took; of sizes that are not known
    yet the best is thought, so that they are tried. The number of guesses is that which brings most tokens a second.
    Where that is none, the next steps do without, and more of them each time.

    Nothing of this changes what is decoded.

    Attributes
    ----------
    trust : float
        How far the drafter's probabilities have come true lately.

    Examples
    --------
    >>> pace = Pace()
    >>> for _ in range(TRIALS):
    ...     pace.stepped(1, 1.0), pace.stepped(4, 1.1), pace.stepped(8, 4.0)
    (None, None, None)
    (None, None, None)
    (None, None, None)
    >>> pace.choose(np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]), num_leaves=1, num_rows=1)
    3
    """

    def __init__(self) -> None:
        self.trust = 1.0
        self._seconds: dict[int, deque[float]] = {}
        self._drafting: deque[float] = deque(maxlen=SAMPLES)
        self._left = 0  # steps of rest
        self._rest = SHORTEST_REST
        self._probing = False

    @property
    def resting(self) -> bool:
        """Whether the next step is to do without guesses."""
        return self._left > 0

    def rest(self) -> None:
        """Do without guesses for a while, as they do not pay."""
        self._left = self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)
        self._probing = False

    def pass_by(self) -> None:
        """Note that a step did without guesses as it should; the one after the last of them tries again."""
        self._left -= 1
        self._probing = not self._left

    def choose(self, reach: Floats, num_leaves: int, num_rows: int) -> int:
        """Return how many of the guesses a step should have.

        Parameters
        ----------
        reach : float64 [guesses]
            How likely each is right by its drafter's word, in descending order.
        num_leaves : int
            Leaves that get a token anyhow.
        num_rows : int
            Rows of the step without guesses.
        """
        trust = max(self.trust, 1.0) if self._probing else self.trust
        tokens = num_leaves + trust * np.concatenate([[0.0], np.cumsum(reach)])
        sizes, which = np.unique([padded(num_rows + guesses) for guesses in range(len(reach) + 1)], return_inverse=True)
        seconds = np.array([self.seconds(size) for size in sizes.tolist()])[which]
        seconds[1:] += min(self._drafting, default=0.0)
        return int(np.argmax(tokens / seconds))

    def seconds(self, size: int) -> float:
        """Return what a step of so many rows, padded, may take at best as far as is known."""
        known = self._seconds
        if size in known and len(known[size]) >= TRIALS:
            return min(known[size])
        smaller = max((other for other in known if other < size), default=None)
        if smaller is not None:
            return min(known[smaller])
        larger = min((other for other in known if other > size), default=None)
        return 1.0 if larger is None else min(known[larger]) * size / larger

    def drafted(self, seconds: float) -> None:
        """Note how long it took to guess."""
        self._drafting.append(seconds)

    def stepped(self, num_rows: int, seconds: float) -> None:
        """Note how long a step of decoding took, guessing apart."""
        self._seconds.setdefault(padded(num_rows), deque(maxlen=SAMPLES)).append(seconds)

    def verified(self, reaches: Sequence[Floats], num_right: Sequence[int]) -> None:
        """Note how many guesses of each tree were right."""
        expected, came = sum(float(reach.sum()) for reach in reaches), sum(num_right)
        self.trust = MEMORY * self.trust + (1 - MEMORY) * came / expected
        if came:
            self._rest = SHORTEST_REST
        self._probing = False
