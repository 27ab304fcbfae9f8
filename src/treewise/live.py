"""A view of trees in the terminal while they grow."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Self

from treewise.branch import BranchTree
from treewise.outputs import draw
from treewise.results import Tree

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

SHARE = 10
"""Drawing takes at most one part in so many of the time."""


class LiveTree:
    """Draws trees while they are decoded, in the form of `Tree.print`: ``llm.run(..., live=LiveTree())``.

    What does not fit the terminal is left out; the leaf that decodes last in the drawing is always in it. Where the
    console is no terminal nothing is drawn. The drawing is gone when the context ends.

    Parameters
    ----------
    console : rich.console.Console, optional
        Where to draw; standard error by default.
    per_second : float
        The most drawings a second, made between steps. Large trees are drawn less often.

    Raises
    ------
    ValueError
        If `per_second` is not positive.
    """

    def __init__(self, console: Console | None = None, per_second: float = 4.0) -> None:
        from rich.console import Console

        if not per_second > 0:
            raise ValueError(f"per_second must be positive, not {per_second!r}")
        self.console = console or Console(stderr=True)
        self.per_second = per_second
        self._live: Live | None = None
        self._due = 0.0

    def __enter__(self) -> Self:
        """Begin to draw, if there is a terminal."""
        from rich.live import Live

        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Take the drawing away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, trees: Sequence[BranchTree]) -> None:
        """Draw the trees as they are now, unless they were drawn a moment ago."""
        began = perf_counter()
        if self._live is None or began < self._due:
            return
        self._live.update(self.picture(trees), refresh=True)
        now = perf_counter()
        self._due = now + max(1 / self.per_second, SHARE * (now - began))

    def picture(self, trees: Sequence[BranchTree]) -> Group:
        """Return a line for each node, as many as the console has room for, and how many more there are."""
        from rich.console import Group
        from rich.text import Text

        lines = [
            (node.state == "live", line)
            for tree in trees
            for node, line in Tree(draw(tree)[0]).lines(self.console.width)
        ]
        room = max(1, self.console.height - 1)
        if len(lines) <= room:
            return Group(*(line for _, line in lines))
        last = max((place for place, (growing, _) in enumerate(lines) if growing), default=len(lines) - 1)
        above = max(0, last + 1 - room)
        below = len(lines) - above - room
        caption = Text(f"… {above} nodes above, {below} below", style="dim")
        return Group(*(line for _, line in lines[above : above + room]), caption)
