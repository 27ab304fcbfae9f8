"""What an operation has decoded and nobody has looked at yet: one trie of tokens in arrays, a slot a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from treewise.kv import KVManager, Slots
from treewise.tree import Node

Ints = NDArray[Any]  # of whole numbers

_COLUMNS = ("parent", "base", "token", "length", "slot", "died", "logprob", "total", "_place")


class Lines(NamedTuple):
    """The entries of a thicket as branches: a line is what one branch has, from a fork to the next.

    Attributes
    ----------
    line : int32 [entries]
        The entry with which the line of each entry begins; below the number of bases, the base itself.
    rank : int32 [entries]
        Which child of its parent each entry is, those that died included.
    children : int32 [entries]
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
    below : int64 [nodes] or None
        Where nodes come depth first, how many stand below each, right behind it.
    """

    parent: Ints
    length: Ints
    slots: Ints
    row_node: Ints
    below: Ints | None = None


class Thicket:
    """A trie of decoded tokens below some leaves, as long as it is but numbers.

    A wide search makes and drops thousands of branches a step. Here each is an entry of a few arrays: a step is added,
    and what nothing goes on from is dropped, by a few operations on whole arrays, whatever the width. The tokens' keys
    lie in slots that the thicket borrows from the pool by the page and hands out one by one. Entries are never moved:
    those that died remain, so that the whole story can be told when somebody asks. The living are listed depth first,
    in chains whose entries lead to the same interval of *tips*, where paths end: when that is empty, a chain dies.

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
    parent, base, token, length, logprob, total, slot, died : arrays [entries and room for more]
        An entry's parent and base; its token; the length of its path; the token's log-prob, and the sum of its
        operation's; the slot of its key, -1 for none; the step at which it died, 0 as long as it lives.
    standing : int64 [living]
        Living entries, but for bases, depth first.
    num_computed : int
        How many of the rows, from the first, have their keys and their logits.
    """

    def __init__(self, kv: KVManager, tenant: Any, bases: Sequence[Node], totals: Sequence[float]) -> None:
        self.kv = kv
        self.tenant = tenant
        self.bases = list(bases)
        self.size = len(self.bases)
        room = 4 * self.size
        self.parent, self.base, self.token, self.length, self.slot, self.died = np.zeros((6, room), np.int32)
        self.logprob, self.total = np.zeros(room, np.float32), np.zeros(room, np.float64)
        self._place = np.zeros(room, np.int32)  # of entries in an array that somebody looks at
        self.rows = np.arange(self.size)
        self.base[: self.size] = self.rows
        self.length[: self.size] = [node.end for node in self.bases]
        self.total[: self.size] = totals
        self.parent[: self.size] = self.slot[: self.size] = -1
        self.ended = np.zeros(0, np.int64)
        self.num_computed = self.size
        self._starts: list[int] = []  # the first entry of each step
        self.standing = np.zeros(0, np.int64)
        # Chains of these that lead to the same tips [low, high), and how long they are.
        self._low = self._high = self._size = np.zeros(0, np.int64)
        self._rank = self.rows.copy()  # which tip each row is, depth first
        self._ended_rank = np.zeros(0, np.int64)
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
        self._starts.append(first)
        self._go_on(parents, step)
        self.rows = np.arange(first, self.size)
        self.num_computed = 0

    def end(self, which: NDArray[np.bool_]) -> None:
        """Let rows end here: they are kept, and do not go on."""
        self.ended = np.append(self.ended, self.rows[which])
        self._ended_rank = np.append(self._ended_rank, self._rank[which])
        self.rows, self._rank = self.rows[~which], self._rank[~which]

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
        low, high, length = self._low, self._high, self._size
        number, ends = np.arange(len(length)), np.cumsum(length)
        self._place[self.standing[ends - 1]] = number  # rows, and whatever forks, are the last of their chains
        above = self.parent[self.standing[ends - length]]
        parent = np.where(above < len(self.bases), -1 - above, self._place[above]).astype(np.int64)
        # Depth first, what begins before a node's tips end stands below it.
        begun = np.cumsum(np.bincount(low, minlength=len(self.rows) + len(self.ended)))
        slots = self.slot[self.standing]
        if not (has_slot := slots >= 0).all():
            slots, length = slots[has_slot], np.add.reduceat(has_slot, ends - length)
        return Shape(parent, length, slots, self._place[rows].astype(np.int64), begun[high - 1] - number - 1)

    def lines(self) -> Lines:
        """Tell which entries are of one branch."""
        line = np.arange(self.size, dtype=np.int32)
        rank, children = np.zeros((2, self.size), np.int32)
        starts = [0, *self._starts, self.size]
        for above, start, stop in zip(starts, starts[1:], starts[2:], strict=False):  # all children of [above, start)
            parent = self.parent[start:stop] - above
            count = np.bincount(parent, minlength=start - above)
            children[above:start] = count
            first = np.cumsum(count) - count  # of the children of each, side by side
            rank[start:stop][_stable_order(parent)] = np.arange(len(parent)) - first.repeat(count)
            line[start:stop] = np.where(count[parent] == 1, line[above:start][parent], line[start:stop])
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

    def _go_on(self, parents: Ints, step: int) -> None:
        """Put the last entries, children of rows `parents`, among the living, and let die what leads nowhere now."""
        first = self.size - len(parents)
        tips = np.empty(len(self.rows) + len(self.ended), np.int64)  # what becomes of each: so many tips
        tips[self._rank], tips[self._ended_rank] = np.bincount(parents, minlength=len(self.rows)), 1
        bounds = np.append(0, np.cumsum(tips))
        self._ended_rank = bounds[self._ended_rank]
        is_new = np.ones(bounds[-1], bool)
        is_new[self._ended_rank] = False
        order, rank = _stable_order(self._rank[parents]), np.flatnonzero(is_new)
        self._rank = np.empty_like(rank)
        self._rank[order] = rank

        low, high = bounds[self._low], bounds[self._high]
        lives = low < high
        stays = lives.repeat(self._size)
        self._bury(self.standing[~stays], step)
        # Before an old chain come the new entries of tips before its own, before a new entry the old up to its tip.
        low, kept, new = low[lives], np.arange(np.count_nonzero(lives)), np.arange(len(rank))
        place = kept + np.append(0, np.cumsum(is_new))[low]
        new_place = np.cumsum(np.bincount(low, minlength=len(is_new)))[rank] + new

        def merged(of_old: Ints, of_new: Ints | int) -> Ints:
            both = np.empty(len(kept) + len(new), np.int64)
            both[place], both[new_place] = of_old, of_new
            return both

        low, high, size = merged(low, rank), merged(high[lives], rank + 1), merged(self._size[lives], 1)
        new_last = np.cumsum(size)[new_place] - 1
        old = self.standing[stays]
        self.standing = np.empty(len(old) + len(new), np.int64)
        is_old = np.ones(len(self.standing), bool)
        is_old[new_last] = False
        self.standing[is_old], self.standing[new_last] = old, first + order
        differs = np.ones(len(low), bool)
        np.logical_or(low[1:] != low[:-1], high[1:] != high[:-1], out=differs[1:])
        begins = np.flatnonzero(differs)
        self._low, self._high, self._size = low[begins], high[begins], np.add.reduceat(size, begins)

    def _bury(self, fallen: Ints, step: int) -> None:
        """Let entries die, and the bases to which no tip leads back; their slots are free."""
        self.died[fallen] = step
        died = self.died[: len(self.bases)]
        leads_on = np.zeros(len(died), bool)
        leads_on[self.base[self.ended]] = leads_on[self.base[self._starts[-1] : self.size]] = True
        died[~leads_on & (died == 0)] = step
        slots = self.slot[fallen]
        self._free = np.concatenate([self._free, slots[slots >= 0]])
        self.slot[fallen] = -1

    def _make_room(self, size: int) -> None:
        self.size = size
        if size > len(self.parent):
            for name in _COLUMNS:
                column = getattr(self, name)
                grown = np.zeros(8 * size, column.dtype)  # takes no memory before it is written to
                grown[: len(column)] = column
                setattr(self, name, grown)


def _stable_order(keys: Ints) -> Ints:
    """Order small numbers, equal ones as they come; by digits, if 16 bits hold them."""
    return np.argsort(keys.astype(np.uint16) if keys.max(initial=0) < 2**16 else keys, kind="stable")
