"""Room for the tokens that branches will append, so that one plan serves the steps between structural changes."""

from __future__ import annotations

import numpy as np

from treewise.plan.layout import indptr, stable_order
from treewise.plan.spec import Ints, TreeSpec, check


def with_room(tree: TreeSpec, slots: Ints, room: int) -> tuple[TreeSpec, Ints]:
    """Append `room` tokens to the node of each query, seen by that query.

    Their slots are ``-1 - (step * queries + query)``, by which they are found again after the plan was cut.

    Raises
    ------
    ValueError
        If a query does not sit at the last token of a leaf of its own.
    """
    node, number = tree.query_node, np.arange(tree.num_queries)
    queries_of = np.bincount(node, minlength=tree.num_nodes)
    children_of = np.bincount(tree.parent[tree.parent >= 0], minlength=tree.num_nodes)
    last = tree.query_offset == tree.length[node] - 1
    alone = (queries_of[node] == 1) & (children_of[node] == 0) & last
    check("query_node", node, alone, "be a leaf with one query, at its last token, for a plan with room")
    length = tree.length.copy()
    length[node] += room
    end = np.cumsum(tree.length)[node]  # where each query's new tokens go, in the caller's token order
    step = np.arange(room)
    reserved = -1 - (step[None, :] * tree.num_queries + number[:, None])
    position = tree.position
    if position is not None:
        depth = np.where(tree.length[node] > 0, position[np.maximum(end - 1, 0)], -1)
        check("query_node", node, tree.length[node] > 0, "have a token of its own, where positions are given")
        position = np.insert(position, np.repeat(end, room), (depth[:, None] + 1 + step[None, :]).ravel())
    grown = TreeSpec(tree.parent, length, node, tree.query_offset + room, position, tree.below)
    return grown, np.insert(slots, np.repeat(end, room), reserved.ravel())


def find_open(kv_slots: Ints, num_open: int) -> tuple[Ints, Ints, Ints]:
    """Find where open tokens, whose slots are ``-1 - number``, stand after the plan was cut.

    Returns
    -------
    indptr : [open tokens + 1]
        Offsets of each token's key tokens.
    places : [key tokens]
        Those of the first token, and so on: a token that several tiles of rows read has several.
    hidden : [key tokens]
        The same in ascending order.
    """
    hidden = np.flatnonzero(kv_slots < 0) if num_open else np.zeros(0, np.int64)
    number = -1 - kv_slots[hidden].astype(np.int64)
    return indptr(np.bincount(number, minlength=num_open)), hidden[stable_order(number, num_open)], hidden
