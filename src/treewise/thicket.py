"""What an operation has decoded and nobody has looked at yet: one trie of tokens in arrays, a slot a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from treewise.kv import KVManager, Slots
from treewise.tree import Node

Ints = NDArray[Any]  # of whole numbers

_COLUMNS = ("parent", "base", "token", "length", "slot", "needed", "died", "logprob", "total", "_place")


class Lines(NamedTuple):
    """The entries of a thicket as branches: a line is what one branch has, from a fork to the next.

    Attributes
    ----------
    line : int64 [entries]
        The entry with which the line of each entry begins; below the number of bases, the base itself.
    rank : int64 [entries]
        Which child of its parent each entry is, those that died included.
    children : int64 [entries]
        How many children each entry had, those that died included.
    """

    line: Ints
    rank: Ints
    children: Ints


class Shape(NamedTuple):
    """The living tokens that have slots as nodes: chains of tokens that all rows above or below them share.

    Attributes
    ----------
    parent : int64 [nodes]
        An earlier node, or ``-1 - base``.
    length : int64 [nodes]
    slots : int64 [tokens]
        Nodes in order.
    row_node : int64 [rows]
        Each row is the last token of its node.
    """

    parent: Ints
    length: Ints
    slots: Ints
    row_node: Ints


class Thicket:
    """A trie of decoded tokens below some leaves, as long as it is but numbers.

    A wide search makes and drops thousands of branches a step. Here each is an entry of a few arrays: a step is added,
    and what nothing goes on from is dropped, by a few operations on whole arrays, whatever the width. The tokens' keys
    lie in slots that the thicket borrows from the pool by the page and hands out one by one. Entries are never moved:
    those that died remain, so that the whole story can be told when somebody asks.

    The first entries stand for the leaves below which all this grows, the *bases*. The *rows* are the entries that go
    on, in the order of the controller's rows.

    Parameters
    ----------
    kv : KVManager
    tenant : object
        The tree that all of it belongs to.
    bases : sequence of Node
        Where the leaves end; all their tokens have keys.
    totals : sequence of float
        What the leaves' log-probs add up to so far.

    Attributes
    ----------
    rows : int64 [rows]
    ended : int64 [ended]
        Entries that are kept and do not go on.
    parent, base, token, length, logprob, total, slot, needed, died : arrays [entries and room for more]
        An entry's parent and base; its token; the length of its path; the token's log-prob, and the sum of its
        operation's; the slot of its key, -1 for none; by how many children and ends it is needed; the step at which it
        died, 0 as long as it lives.
    standing : int64 [living]
        Living entries, but for bases, in ascending order.
    num_computed : int
        How many of the rows, from the first, have their keys and their logits.
    """

    def __init__(self, kv: KVManager, tenant: Any, bases: Sequence[Node], totals: Sequence[float]) -> None:
        self.kv = kv
        self.tenant = tenant
        self.bases = list(bases)
        self.size = len(self.bases)
        room = 4 * self.size
        self.parent, self.base, self.token, self.length, self.slot, self.needed, self.died = np.zeros(
            (7, room), np.int32
        )
        self.logprob, self.total = np.zeros(room, np.float32), np.zeros(room, np.float64)
        self._place = np.zeros(room, np.int64)  # of entries in an array that somebody looks at
        self.rows = np.arange(self.size)
        self.base[: self.size] = self.rows
        self.length[: self.size] = [node.end for node in self.bases]
        self.total[: self.size] = totals
        self.parent[: self.size] = self.slot[: self.size] = -1
        self.ended = np.zeros(0, np.int64)
        self.num_computed = self.size
        self._starts: list[int] = []  # the first entry of each step
        self.standing = np.zeros(0, np.int64)
        self._free = np.zeros(0, np.int64)  # borrowed slots without a token
        self._borrowed: list[Slots] = []

    @property
    def done(self) -> bool:
        """Whether all rows have their logits."""
        return not self.num_wanted

    @property
    def num_wanted(self) -> int:
        """How many rows still wait for their logits."""
        return len(self.rows) - self.num_computed

    def add(self, parents: Ints, tokens: Ints, logprobs: NDArray[Any], step: int) -> None:
        """Let row ``parents[i]`` go on with ``tokens[i]``; a row that is not named dies, as `step` happens."""
        first, above = self.size, self.rows[parents]
        self._make_room(first + len(above))
        new = slice(first, self.size)
        self.parent[new], self.base[new], self.token[new], self.logprob[new] = above, self.base[above], tokens, logprobs
        self.length[new] = self.length[above] + 1
        self.total[new] = self.total[above] + logprobs
        self.slot[new] = -1
        uses = np.bincount(parents, minlength=len(self.rows))
        self.needed[self.rows] += uses
        fallen = self.rows[uses == 0]
        self.rows = np.arange(first, self.size)
        self._starts.append(first)
        self.num_computed = 0
        self._drop(fallen, step)
        standing = self.standing[self.died[self.standing] == 0]
        self.standing = np.concatenate([standing, self.rows])

    def end(self, which: NDArray[np.bool_]) -> None:
        """Let rows end here: they are kept, and do not go on."""
        ended = self.rows[which]
        self.needed[ended] += 1
        self.ended = np.append(self.ended, ended)
        self.rows = self.rows[~which]

    def reserve(self) -> None:
        """Find a slot for each row.

        Raises
        ------
        OutOfSlots
            If the pool cannot lend enough; nothing was changed then.
        """
        lacking = len(self.rows) - len(self._free)
        if lacking > 0:
            lent = self.kv.lend(lacking)
            self._borrowed.append(lent)
            self._free = np.concatenate([self._free, lent[::-1]])
        left = len(self._free) - len(self.rows)
        self.slot[self.rows] = self._free[left:][::-1]
        self._free = self._free[:left]

    def finish(self) -> None:
        """Have no more rows computed: those that wait for it give up their slots."""
        self.slot[self.rows[self.num_computed :]] = -1

    def give_back(self, entries: Ints) -> Ints:
        """Give all slots back to the pool; return where the keys of `entries` lie until the next forward, or -1."""
        keys = self.kv.origins(self.slot[entries].astype(np.int32))
        for slots in self._borrowed:
            self.kv.take_back(slots)
        return keys

    def take(self, count: int) -> None:
        """Note that the next `count` rows have their keys and their logits."""
        self.num_computed += count

    def lengths(self, start: int, count: int) -> Sequence[int]:
        """Return how long the paths of rows ``start`` to ``start + count`` are."""
        return cast(list[int], self.length[self.rows[start : start + count]].tolist())

    def shape(self, rows: Ints) -> Shape:
        """Return what `rows` see of this as nodes, and perhaps more."""
        entries = self.standing[self.slot[self.standing] >= 0]
        number = len(self.bases)
        place = self._place
        place[entries] = own = np.arange(len(entries))
        parent = self.parent[entries]
        heads = (parent < number) | (self.needed[parent] != 1)
        hop = np.where(heads, own, place[parent])
        while not np.array_equal(further := hop[hop], hop):  # doubling the reach each time
            hop = further
        node = (np.cumsum(heads) - 1)[hop]
        above = parent[heads]
        inside = above >= number
        above_node = -1 - above
        above_node[inside] = node[place[above[inside]]]
        order = _stable_order(node)
        slots = self.slot[entries[order]]
        return Shape(above_node, np.bincount(node), slots, node[place[rows]])

    def lines(self) -> Lines:
        """Tell which entries are of one branch."""
        number, size = len(self.bases), self.size
        children = np.bincount(self.parent[number:size], minlength=size)
        line, rank = np.arange(size), np.zeros(size, np.int64)
        for start, stop in zip(self._starts, [*self._starts[1:], size], strict=True):  # all children of an entry
            parent = self.parent[start:stop]
            order = _stable_order(parent - parent.min(initial=size))
            sorted_parent = parent[order]
            rank[start:stop][order] = np.arange(len(parent)) - np.searchsorted(sorted_parent, sorted_parent)
            goes_on = children[parent] == 1
            line[start:stop][goes_on] = line[parent[goes_on]]
        return Lines(line, rank, children)

    def paths(self, entries: Ints) -> list[list[int]]:
        """Return the tokens from the base down to each of `entries`."""
        columns = []
        number, here = len(self.bases), entries
        while (inside := here >= number).any():
            columns.append(np.where(inside, self.token[here], -1))
            here = np.where(inside, self.parent[here], here)
        if not columns:
            return [[] for _ in entries]
        lengths = (self.length[entries] - self.length[self.base[entries]]).tolist()
        upwards = np.stack(columns[::-1], axis=1)  # shorter paths have their padding in front
        return [path[len(columns) - length :] for path, length in zip(upwards.tolist(), lengths, strict=True)]

    def _drop(self, fallen: Ints, step: int) -> None:
        """Let entries die, and those above them that nothing goes on from any more; their slots are free."""
        freed: list[Ints] = [self._free]
        while len(fallen):
            self.died[fallen] = step
            fallen = fallen[fallen >= len(self.bases)]
            slots = self.slot[fallen]
            freed.append(slots[slots >= 0])
            self.slot[fallen] = -1
            above = self.parent[fallen]
            np.subtract.at(self.needed, above, np.int32(1))
            above = above[self.needed[above] == 0]
            order = self._place[above] = np.arange(len(above))
            fallen = above[self._place[above] == order]  # each once
        self._free = np.concatenate(freed)

    def _make_room(self, size: int) -> None:
        self.size = size
        if size > len(self.parent):
            for name in _COLUMNS:
                column = getattr(self, name)
                grown = np.zeros(2 * size, column.dtype)
                grown[: len(column)] = column
                setattr(self, name, grown)


def _stable_order(keys: Ints) -> Ints:
    """Order small numbers, equal ones as they come; by digits, if 16 bits hold them."""
    return np.argsort(keys.astype(np.uint16) if keys.max(initial=0) < 2**16 else keys, kind="stable")
