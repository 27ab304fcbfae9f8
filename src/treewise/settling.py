"""Branches out of a thicket: those that live at once, those that were pruned when somebody asks for them."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from treewise.branch import Branch
from treewise.branch.handle import PRUNED
from treewise.kv import OutOfSlots
from treewise.thicket import Lines, Thicket

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

MOST_ADOPTED = 4096
"""Tokens whose keys are moved to where nodes keep theirs; others are computed again, should anybody go on from them."""
NODE = 16
"""As many tokens as these count for each node, which takes longer than its tokens."""


def uncollected(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let the garbage collector wait while `function` makes thousands of objects, all of which stay.

    It would look at all that there is again and again, and find nothing.
    """

    @wraps(function)
    def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*arguments, **named)
        finally:
            if enabled:
                gc.enable()

    return run


class Settled(NamedTuple):
    """What became of a thicket.

    Attributes
    ----------
    rows, ended : list of Branch
        The branches of its rows, and of its ended entries.
    fallen : dict of Branch to int
        The leaves below which nothing is left, and the step since which that is so.
    """

    rows: list[Branch]
    ended: list[Branch]
    fallen: dict[Branch, int]


class _Chain(NamedTuple):
    """A line and its tokens."""

    start: int  # the entry that it begins with, the base of a leaf that goes on
    last: int
    above: int  # the line that it has forked from, -1 for a base
    rank: int  # which fork of that
    forks: int
    died: int  # since which step, 0 for living ones
    total: float  # log-prob of the path
    keys: int  # how many of the tokens, from the first, have slots
    tokens: list[int]
    logprobs: list[float | None]
    entries: slice  # of all chains' entries


def settle(thicket: Thicket, leaves: Sequence[Branch], given: Collection[Branch], where: str) -> Settled:
    """Make the branches and nodes of all that lives; of what was pruned once `BranchTree.unfold` is called.

    Parameters
    ----------
    thicket : Thicket
        It must not be changed any more.
    leaves : sequence of Branch
        Those below which it grew, as long as they were.
    given : collection of Branch
        What stays even if all its forks were pruned.
    where : str
        By whom branches were pruned.
    """
    thicket.finish()
    lines = thicket.lines()
    number, tree = len(leaves), leaves[0].tree
    living = np.zeros(thicket.size, bool)
    living[:number] = living[lines.line[thicket.standing]] = True
    before = np.array([leaf.logprob for leaf in leaves])
    entries, chains = _chains(thicket, lines, living, before)
    adoption = _Adoption(thicket, entries)

    begun: defaultdict[int, list[_Chain]] = defaultdict(list)  # the lines that begin where a line ends
    for chain in chains[number:]:
        begun[chain.above].append(chain)
    branches = dict(enumerate(leaves))
    first_forks: dict[int, int] = {}
    fallen: dict[Branch, int] = {}
    for chain in chains:
        if chain.start < number:
            branch = leaves[chain.start]
            branch.note_down(chain.tokens, chain.logprobs, [None] * len(chain.tokens))
        else:
            branch = branches[chain.start]
            branch.begin(chain.tokens, chain.logprobs, chain.total)
        if chain.keys:
            adoption.take(branch, chain)
        if chain.forks:
            first = first_forks[chain.start] = branch.num_forks
            below = begun[chain.start]
            ordinals = [first + fork.rank for fork in below]
            forked = branch.branch_off(branch.num_tokens, ordinals, chain.forks, branch.end())
            branches.update(zip([fork.start for fork in below], forked, strict=True))
        if chain.died and not (chain.forks and branch in given):
            fallen[branch] = chain.died

    if num_pruned := thicket.size - number - len(entries):
        tree.num_decoded += num_pruned
        tree.fallen.append(partial(_unfold, thicket, lines, living, branches, first_forks, before, where))
    rows, ended = ([branches[start] for start in lines.line[which].tolist()] for which in (thicket.rows, thicket.ended))
    return Settled(rows, ended, fallen)


def _chains(
    thicket: Thicket, lines: Lines, starts: NDArray[np.bool_], before: NDArray[np.float64]
) -> tuple[NDArray[np.int64], list[_Chain]]:
    """Return the entries of the lines that begin with `starts`, line by line, and the lines, parents first.

    `before` are the log-probs of the leaves when the thicket began.
    """
    number = len(thicket.bases)
    entries = np.flatnonzero(starts[lines.line[number:]]) + number
    entries = entries[np.argsort(lines.line[entries], kind="stable")]
    begins = np.flatnonzero(starts)
    bounds = np.searchsorted(lines.line[entries], np.append(begins, thicket.size))
    sizes = np.diff(bounds)
    last = begins.copy()
    last[sizes > 0] = entries[bounds[1:][sizes > 0] - 1]
    slots_before = np.concatenate([[0], np.cumsum(thicket.slot[entries] >= 0)])
    parent, base = thicket.parent[begins], thicket.base[begins]
    columns = (
        begins, last, np.where(parent < 0, -1, lines.line[parent]), lines.rank[begins], lines.children[last],
        thicket.died[last], before[base] + (thicket.total[last] - thicket.total[base]), np.diff(slots_before[bounds]),
    )  # fmt: skip
    own = list(map(slice, bounds[:-1].tolist(), bounds[1:].tolist()))
    own_values = (map(column[entries].tolist().__getitem__, own) for column in (thicket.token, thicket.logprob))
    return entries, [
        _Chain._make(facts) for facts in zip(*(column.tolist() for column in columns), *own_values, own, strict=True)
    ]


def _unfold(
    thicket: Thicket,
    lines: Lines,
    living: NDArray[np.bool_],
    branches: dict[int, Branch],
    first_forks: Mapping[int, int],
    before: NDArray[np.float64],
    where: str,
) -> None:
    """Make the branches that were pruned.

    Parameters
    ----------
    thicket, lines
    living : bool [entries]
        With which entries the lines of the others begin.
    branches : dict
        Those of the living by the entries with which their lines begin.
    first_forks : mapping
        Likewise, the ordinal of the first fork.
    before : float64 [bases]
        The log-probs of the leaves when the thicket began.
    where : str
    """
    _, chains = _chains(thicket, lines, ~living & (lines.line == np.arange(thicket.size)), before)
    touched: dict[Branch, None] = {}
    for chain in chains:
        above = int(thicket.parent[chain.start])
        parent = branches[chain.above]
        ordinal = first_forks.get(chain.above, 0) + chain.rank
        branch = branches[chain.start] = Branch(parent.tree, parent, int(thicket.length[above]), ordinal)
        branch.tokens, branch.logprobs = chain.tokens, chain.logprobs
        branch.logprob = chain.total
        branch.num_forks = chain.forks
        branch.state, branch.alive = f"{PRUNED} at {where} step {chain.died}", False
        del branch.tree.alive[branch]
        parent.known_children.append(branch)
        touched[parent] = None
    for parent in touched:
        parent.known_children.sort(key=lambda child: child.ordinal or 0)


class _Adoption:
    """Lets nodes have the keys of a thicket's entries, as far as there is room."""

    def __init__(self, thicket: Thicket, entries: NDArray[np.int64]) -> None:
        self._kv = thicket.kv
        self._keys = thicket.give_back(entries)
        self._left = MOST_ADOPTED

    def take(self, branch: Branch, chain: _Chain) -> None:
        """Take the keys of `chain`, whose tokens are the last of `branch`."""
        if chain.keys + NODE > self._left:
            return
        node = branch.end()
        begins = node.computed == len(node.tokens) - len(chain.tokens)
        follows = node.parent is None or node.parent.computed == len(node.parent.tokens)
        if begins and follows:
            try:
                self._kv.adopt(node, self._keys[chain.entries][: chain.keys])
                self._left -= chain.keys + NODE
            except OutOfSlots:
                self._left = 0
