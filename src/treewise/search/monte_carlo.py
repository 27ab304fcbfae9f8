"""Monte Carlo tree search over thoughts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, log, sqrt
from typing import Any

from treewise.awaitables import gather
from treewise.branch import Branch
from treewise.config import MAX_SEQUENCES, check_integer, check_number
from treewise.search.thinking import Thinker, ThoughtParams, ended, retain


@dataclass
class Statistics:
    """What a search knows about a branch; its `note`.

    Attributes
    ----------
    visits : int
        How often a value was backed up through it: its own, and those of all branches below it.
    total : float
        The sum of these values.
    """

    visits: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float:
        """The mean of the values; 0 before there is any."""
        return self.total / max(self.visits, 1)


async def monte_carlo_tree_search(
    root: Branch,
    iterations: int = 16,
    parallel: int = 4,
    depth: int = 3,
    width: int = 3,
    c: float = 1.4,
    **thoughts: Any,
) -> Branch:
    """Think in steps where thoughts have proved good or were seldom tried, and answer from the most visited chain.

    Kocsis and Szepesvári, "Bandit based Monte-Carlo Planning", 2006 (UCT), with the values of thoughts in the place of
    playouts. An iteration goes down from the root to a leaf, always to the child with the highest upper bound; draws
    `width` next thoughts there; rates them; and backs each value up to the root. A leaf that has come to its end, or
    has `depth` thoughts, is not extended: its value is backed up once more.

    Several leaves are under way at a time, in one batch. What comes of them is backed up in the order of their choice,
    each time another leaf is chosen at once, and the tree hangs on nothing but the seed. A leaf under way is not chosen
    again, and counts as a visit with the lowest value that the search has seen (virtual loss: Chaslot et al., "Parallel
    Monte-Carlo Tree Search", 2008), so that the next choice tends elsewhere.

    Parameters
    ----------
    root : Branch
    iterations : int
        Leaves chosen in all.
    parallel : int
        The most leaves under way at a time; 1 is plain UCT. A function that rates is called for each of them.
    depth : int
        The most thoughts of a chain.
    width : int
        Thoughts drawn from each chosen leaf.
    c : float
        Weight of what was seldom tried, in the units of `evaluate`; about 1.4 where values lie in [0, 1].
    **thoughts
        Fields of `ThoughtParams`; `evaluate` cannot be ``"vote"``, whose values hold within one ballot only.

    Returns
    -------
    Branch
        The answer from the most visited chain, its score the answer's own value. The other branches are pruned; their
        scores are their mean values, and their notes, like the root's, are `Statistics`.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    """
    for name, value in (("parallel", parallel), ("depth", depth), ("width", width)):
        check_integer(name, value, 1, MAX_SEQUENCES)
    check_integer("iterations", iterations, 1)
    check_number("c", c, 0, 1e9)
    params = ThoughtParams.of(thoughts)
    if params.evaluate == "vote":
        raise ValueError("evaluate: 'vote' compares thoughts of one ballot only; ask for judge, logprob or a function")
    thinker = Thinker(root, params)

    tree = ConfidenceTree(root, c)
    outcomes: dict[Branch, Callable[[], None]] = {}  # back up what has come of leaves under way

    def choose() -> list[Branch]:
        """Back up what there is in its turn, choose other leaves, and return those that are to be extended."""
        nonlocal iterations
        chosen = []
        while True:
            # All that can be chosen is chosen before more is backed up: when values come, makes no difference.
            if iterations > 0 and len(tree.under_way) < parallel and (leaf := tree.choose()) is not None:
                iterations -= 1
                if ended(leaf) or len(leaf.path) == len(root.path) + depth:
                    outcomes[leaf] = partial(tree.back_up, leaf, leaf.note.mean)
                else:
                    chosen.append(leaf)
            elif tree.under_way and tree.under_way[0] in outcomes:
                outcomes.pop(tree.land())()
            else:
                return chosen

    async def extend(leaf: Branch) -> None:
        drawn = await thinker.extend([leaf], [width])
        outcomes[leaf] = partial(tree.add, drawn, await thinker.rate(drawn))
        for other in choose():
            extensions.add(extend(other))

    extensions = gather(*map(extend, choose()))
    await extensions
    best = tree.most_visited()
    retain(tree.leaves(), [best])
    return await thinker.conclude([best])


class ConfidenceTree:
    """The branches that a search knows, and which of them it tries next.

    Parameters
    ----------
    root : Branch
    c : float
        Weight of what was seldom tried.

    Attributes
    ----------
    below : dict of Branch to list of Branch
        The thoughts drawn from each.
    under_way : deque of Branch
        Leaves that are chosen and not backed up, in the order of their choice; each is a visit of the lowest value.
    """

    def __init__(self, root: Branch, c: float) -> None:
        root.note = Statistics()
        self.root = root
        self.c = c
        self.lowest = inf  # of all values
        self.below: dict[Branch, list[Branch]] = {}
        self.under_way: deque[Branch] = deque()
        self._above = len(root.lineage()) - 1  # branches above the root
        # Of each branch, with itself and all below it: leaves, and how many of them are under way.
        self._num_leaves = Counter([root])
        self._num_under_way: Counter[Branch] = Counter()

    def choose(self) -> Branch | None:
        """Choose a leaf by upper bounds, which is then under way; None where all are."""
        line = [self.root]
        if self._is_taken(self.root):
            return None
        while line[-1] in self.below:
            free = [child for child in self.below[line[-1]] if not self._is_taken(child)]
            bounds = self.upper_bounds(line[-1], free)
            line.append(free[bounds.index(max(bounds))])
        self._num_under_way.update(line)
        self.under_way.append(line[-1])
        return line[-1]

    def land(self) -> Branch:
        """Return the leaf that was chosen first of those under way; it is so no longer."""
        leaf = self.under_way.popleft()
        self._num_under_way.subtract(self._line(leaf))
        return leaf

    def _is_taken(self, branch: Branch) -> bool:
        """Whether all leaves of a branch are under way."""
        return self._num_under_way[branch] == self._num_leaves[branch]

    def _line(self, branch: Branch) -> list[Branch]:
        """Return the branches from the root down to one."""
        return branch.lineage()[self._above :]

    def upper_bounds(self, parent: Branch, children: Sequence[Branch]) -> list[float]:
        """Return UCB1 of children, with a visit more of the lowest value for each leaf under way."""
        tries, bounds = log(parent.note.visits + self._num_under_way[parent]), []
        for child in children:
            lost, known = self._num_under_way[child], child.note
            visits = known.visits + lost
            bounds.append((known.total + lost * self.lowest) / visits + self.c * sqrt(tries / visits))
        return bounds

    def add(self, thoughts: Sequence[Branch], values: Sequence[float]) -> None:
        """Take in new branches below known ones, and back up their values."""
        for thought, value in zip(thoughts, values, strict=True):
            assert thought.parent is not None, "a thought was forked off"
            siblings = self.below.setdefault(thought.parent, [])
            if siblings:  # the first one is a leaf in the place of its parent
                self._num_leaves.update(self._line(thought.parent))
            siblings.append(thought)
            self._num_leaves[thought] = 1
            thought.note = Statistics()
            self.back_up(thought, value)

    def back_up(self, branch: Branch, value: float) -> None:
        """Count a value at a branch and all above it up to the root."""
        self.lowest = min(self.lowest, value)
        for ancestor in self._line(branch):
            ancestor.note.visits += 1
            ancestor.note.total += value
            ancestor.score = ancestor.note.mean

    def most_visited(self) -> Branch:
        """Return the leaf that is reached by the most visited child each time, of equals the one of the higher mean."""
        branch = self.root
        while branch in self.below:
            branch = max(self.below[branch], key=lambda child: (child.note.visits, child.note.mean))
        return branch

    def leaves(self) -> list[Branch]:
        """Return the branches that nothing goes on from."""
        return [child for children in self.below.values() for child in children if child not in self.below]
