"""Branches out of a thicket: those that live at once, those that were pruned when somebody asks for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treewise.branch import Branch
from treewise.kv import OutOfSlots
from treewise.thicket import Lines, Thicket

MOST_ADOPTED = 16_384
"""Tokens whose keys are moved to where nodes keep theirs; others are computed again, should anybody go on from them."""


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
    tokens: list[int]
    logprobs: list[float]
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
    lines = thicket.lines()
    number, tree = len(leaves), leaves[0].tree
    living = np.zeros(thicket.size, bool)
    living[:number] = living[lines.line[thicket.standing]] = True
    entries, chains = _chains(thicket, lines, living)
    adoption = _Adoption(thicket, entries)
    before = [leaf.logprob for leaf in leaves]

    begun: dict[int, list[int]] = {}  # the lines that begin where a line ends
    for chain in chains[number:]:
        begun.setdefault(int(lines.line[thicket.parent[chain.start]]), []).append(chain.start)
    branches = dict(enumerate(leaves))
    first_forks: dict[int, int] = {}
    fallen: dict[Branch, int] = {}
    for chain in chains:
        branch, forks = branches[chain.start], int(lines.children[chain.last])
        branch.grow(chain.tokens, chain.logprobs, [None] * len(chain.tokens))
        adoption.take(branch, chain.entries)
        if forks:
            first_forks[chain.start] = branch.num_forks
            starts = begun.get(chain.start, [])
            ordinals = [branch.num_forks + int(lines.rank[start]) for start in starts]
            branches.update(
                zip(starts, branch.branch_off(branch.num_tokens, ordinals, forks, branch.end()), strict=True)
            )
        if (died := int(thicket.died[chain.last])) and not (forks and branch in given):
            fallen[branch] = died

    if num_pruned := thicket.size - number - len(entries):
        tree.num_decoded += num_pruned
        tree.fallen.append(partial(_unfold, thicket, lines, living, branches, first_forks, before, where))
    rows, ended = ([branches[start] for start in lines.line[which].tolist()] for which in (thicket.rows, thicket.ended))
    return Settled(rows, ended, fallen)


def _chains(thicket: Thicket, lines: Lines, starts: NDArray[np.bool_]) -> tuple[NDArray[np.int64], list[_Chain]]:
    """Return the entries of the lines that begin with `starts`, line by line, and the lines, parents first."""
    number = len(thicket.bases)
    entries = np.flatnonzero(starts[lines.line[number:]]) + number
    entries = entries[np.argsort(lines.line[entries], kind="stable")]
    begins = np.flatnonzero(starts)
    bounds = np.searchsorted(lines.line[entries], np.append(begins, thicket.size)).tolist()
    tokens, logprobs, all_entries = (
        column.tolist() for column in (thicket.token[entries], thicket.logprob[entries], entries)
    )
    return entries, [
        _Chain(
            start,
            all_entries[high - 1] if high > low else start,
            tokens[low:high],
            logprobs[low:high],
            slice(low, high),
        )
        for start, low, high in zip(begins.tolist(), bounds[:-1], bounds[1:], strict=True)
    ]


def _unfold(
    thicket: Thicket,
    lines: Lines,
    living: NDArray[np.bool_],
    branches: dict[int, Branch],
    first_forks: Mapping[int, int],
    before: Sequence[float],
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
    before : sequence of float
        The log-probs of the leaves when the thicket began.
    where : str
    """
    _, chains = _chains(thicket, lines, ~living & (lines.line == np.arange(thicket.size)))
    touched: dict[Branch, None] = {}
    for chain in chains:
        above = int(thicket.parent[chain.start])
        line = int(lines.line[above])
        parent, base = branches[line], int(thicket.base[above])
        ordinal = first_forks.get(line, 0) + int(lines.rank[chain.start])
        branch = branches[chain.start] = Branch(parent.tree, parent, int(thicket.length[above]), ordinal)
        branch.tokens, branch.logprobs = chain.tokens, [*chain.logprobs]
        branch.candidates = [None] * len(chain.tokens)
        branch.logprob = before[base] + float(thicket.total[chain.last] - thicket.total[base])
        branch.num_forks = int(lines.children[chain.last])
        branch.state = f"pruned at {where} step {thicket.died[chain.last]}"
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

    def take(self, branch: Branch, entries: slice) -> None:
        """Take the keys of `entries`, the last tokens of `branch`, as far as these have any."""
        node, keys = branch.end(), self._keys[entries]
        keys = keys[: np.argmin(np.append(keys, -1) >= 0)]
        begins = node.computed == len(node.tokens) - (entries.stop - entries.start)
        follows = node.parent is None or node.parent.computed == len(node.parent.tokens)
        if begins and follows and 0 < len(keys) <= self._left:
            try:
                self._kv.adopt(node, keys)
                self._left -= len(keys)
            except OutOfSlots:
                self._left = 0
