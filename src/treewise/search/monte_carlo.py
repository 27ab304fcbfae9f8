"""Monte Carlo tree search over thoughts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Any

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

    Leaves that are chosen in one round decode as one batch. A leaf is chosen once a round, and each choice counts until
    the round's end as a visit with the lowest value that the search has seen (virtual loss: Chaslot et al., "Parallel
    Monte-Carlo Tree Search", 2008), so that the next choice of the round tends elsewhere.

    Parameters
    ----------
    root : Branch
    iterations : int
        Leaves chosen in all.
    parallel : int
        The most leaves chosen a round; 1 is plain UCT.
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
    while iterations > 0:
        leaves = tree.choose(min(parallel, iterations))
        iterations -= len(leaves)
        over = [leaf for leaf in leaves if ended(leaf) or len(leaf.path) == len(root.path) + depth]
        for leaf in over:
            tree.back_up(leaf, leaf.note.mean)
        growing = [leaf for leaf in leaves if leaf not in over]
        if growing:
            drawn = await thinker.extend(growing, [width] * len(growing))
            tree.add(drawn, await thinker.rate(drawn))
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
    """

    def __init__(self, root: Branch, c: float) -> None:
        root.note = Statistics()
        self.root = root
        self.c = c
        self.lowest = inf  # of all values
        self.below: dict[Branch, list[Branch]] = {}

    def choose(self, count: int) -> list[Branch]:
        """Choose up to `count` different leaves by upper bounds, each under the virtual losses of those before it."""
        chosen: list[Branch] = []
        losses: Counter[Branch] = Counter()
        taken: set[Branch] = set()  # branches below which every leaf is chosen
        while len(chosen) < count and self.root not in taken:
            line = [self.root]
            while line[-1] in self.below:
                parent = line[-1]
                free = [child for child in self.below[parent] if child not in taken]
                bounds = self.upper_bounds(parent, free, losses)
                line.append(free[bounds.index(max(bounds))])
            losses.update(line)
            for branch in reversed(line):
                if taken.issuperset(self.below.get(branch, [])):
                    taken.add(branch)
            chosen.append(line[-1])
        return chosen

    def upper_bounds(self, parent: Branch, children: Sequence[Branch], losses: Mapping[Branch, int]) -> list[float]:
        """Return UCB1 of children, with ``losses[branch]`` more visits of the lowest value at each branch."""
        tries, bounds = log(parent.note.visits + losses.get(parent, 0)), []
        for child in children:
            lost, known = losses.get(child, 0), child.note
            visits = known.visits + lost
            bounds.append((known.total + lost * self.lowest) / visits + self.c * sqrt(tries / visits))
        return bounds

    def add(self, thoughts: Sequence[Branch], values: Sequence[float]) -> None:
        """Take in new branches below known ones, and back up their values."""
        for thought, value in zip(thoughts, values, strict=True):
            assert thought.parent is not None, "a thought was forked off"
            self.below.setdefault(thought.parent, []).append(thought)
            thought.note = Statistics()
            self.back_up(thought, value)

    def back_up(self, branch: Branch, value: float) -> None:
        """Count a value at a branch and all above it up to the root."""
        self.lowest = min(self.lowest, value)
        for ancestor in branch.lineage()[len(self.root.path) :]:
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
