"""A drafted tree in a step: rows beside those of nodes, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from treewise.branch import BranchTree
from treewise.constraint import Constraint, GrammarError
from treewise.kv import Slots
from treewise.sampler import SamplingRow
from treewise.speculate.drafter import Stem
from treewise.speculate.trees import TokenTree
from treewise.thicket import Ints, Shape
from treewise.tree import Node


class Draft:
    """Guesses of what follows a leaf, as rows of a step; see `treewise.batch.Growth`.

    Parameters
    ----------
    stem : Stem
    tree : TokenTree
        Depth first.
    constraints : sequence of Constraint, optional
        Of each node, where the leaf has a grammar.

    Attributes
    ----------
    begin : int
        Length of the path behind which the guesses stand.
    below : int64 [nodes]
        How many guesses follow each in the order of the rows that depend on it, itself included.
    slot : int32 [nodes]
        Where the keys of the guesses go, -1 where that is not known yet.
    first : int
        Where the logits of its first row stand in the runner's answer.
    accepted : list of int
        The nodes that were right.
    """

    def __init__(self, stem: Stem, tree: TokenTree, constraints: Sequence[Constraint | None] = ()) -> None:
        self.stem = stem
        self.tree = tree
        self.constraints = constraints
        self.tenant: BranchTree = stem.branch.tree
        self.bases: Sequence[Node] = [stem.node]
        self.begin = stem.node.end
        self.token = tree.tokens
        self.length = self.begin + tree.depths
        self.below = tree.sizes
        self.slot: Slots = np.full(len(tree), -1, np.int32) if tree.slots is None else tree.slots.copy()
        self.rows = np.arange(len(tree))
        self.first = 0
        self.accepted: list[int] = []

    def shape(self, rows: Ints) -> Shape:
        """Return the guesses as nodes of one token each."""
        return Shape(self.tree.parents.copy(), np.ones(len(self.tree), np.int64), self.slot, rows)

    def sampling_rows(self, nodes: Iterable[int]) -> list[SamplingRow]:
        """Return how the token behind each of `nodes` is chosen."""
        params, key, position, num_tokens, prompt, output, _ = self.stem.row
        depths, penalised = self.tree.depths.tolist(), params.has_penalties
        rows = []
        for node in nodes:
            depth, mine = depths[node], [*output, *self.tree.path(node)] if penalised else ()
            constraint = self.constraints[node] if self.constraints else None
            rows.append(SamplingRow(params, key, position + depth, num_tokens + depth, prompt, mine, constraint))
        return rows

    def right(self, choices: Sequence[int]) -> list[int]:
        """Return the nodes that agree with the tokens chosen behind the path and behind each node."""
        return self.tree.accepted(choices)


class Allowed(NamedTuple):
    """Guesses of what follows a leaf that its grammar, if it has one, lets come.

    Attributes
    ----------
    stem : Stem
    tree : TokenTree
    constraints : sequence of (Constraint or None)
        How far each node has come in the grammar, None where the text is complete, behind which nothing is chosen;
        empty without a grammar.
    """

    stem: Stem
    tree: TokenTree
    constraints: Sequence[Constraint | None]

    @classmethod
    def of(cls, stem: Stem, tree: TokenTree) -> Allowed:
        """Leave out the guesses that the grammar refuses."""
        constraint = stem.row.constraint
        if constraint is None or not len(tree):
            return cls(stem, tree, ())
        nodes: list[int] = []
        known: dict[int, Constraint] = {-1: constraint}
        for node, (above, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
            if above in known and not known[above].complete:
                known[node] = known[above].fork()
                try:
                    known[node].accept(token)
                    nodes.append(node)
                except GrammarError:
                    del known[node]
        constraints = [None if known[node].complete else known[node] for node in nodes]
        return cls(stem, tree.take(np.array(nodes, np.int64)), constraints)

    def take(self, nodes: Ints) -> Allowed:
        """Return some nodes, in ascending order, with all above them."""
        return self if len(nodes) == len(self.tree) else Allowed(self.stem, self.tree.take(nodes), self._at(nodes))

    def draft(self) -> Draft:
        """Return them as rows."""
        order = self.tree.form.depth_first
        return Draft(self.stem, self.tree.depth_first(), self.constraints if order is None else self._at(order))

    def _at(self, nodes: Ints) -> Sequence[Constraint | None]:
        return [self.constraints[node] for node in nodes.tolist()] if self.constraints else ()
