"""Trees of the rows of a batch whose cached keys begin alike, and plans over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treewise.attention import Plan, TreeSpec, plan_tree


@dataclass
class Reads:
    """What attention over trees has read, summed over steps and layers.

    Attributes
    ----------
    kv_bytes_read : int
        Bytes of keys and values that its plans read.
    kv_bytes_of_rows : int
        What the same rows would have read one at a time.
    """

    kv_bytes_read: int = 0
    kv_bytes_of_rows: int = 0


class Tree(NamedTuple):
    """A forest of rows of a batch.

    Attributes
    ----------
    parent : list of int, [nodes]
        -1 for a root.
    spans : list of (row, start, end), [nodes]
        The columns of a node, and a row that has them.
    leaves : list of int, [rows]
        The node in which each row ends.
    """

    parent: list[int]
    spans: list[tuple[int, int, int]]
    leaves: list[int]


@dataclass
class Step:
    """One forward of a token a row: plans are made at the first layer of a kind and serve those like it.

    Parameters
    ----------
    common : list of int
        Leading columns that each row shares with the row before it.
    length : int
        Columns so far, that of this step included.
    method : str
        How to attend over trees.
    reads : Reads
        Where to count.
    """

    common: list[int]
    length: int
    method: str
    reads: Reads
    plans: dict[Any, tuple[Plan | None, Tensor | None, Reads]] = field(default_factory=dict)

    def plan(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Plan | None:
        """Return the plan of a layer, whose reads are counted, or None where the layer is no tree.

        Parameters
        ----------
        query : [batch, heads, 1, head_dim]
        key, value : [batch, kv_heads, keys, head_dim]
        mask : Tensor, optional
            As Transformers makes it for ``"sdpa"``.
        """
        if key.shape != value.shape or key.stride() != value.stride() or key.dtype != query.dtype:
            return None
        kind = (id(mask), query.shape, query.dtype, key.shape, key.stride(), key.device)
        if kind not in self.plans:
            plan, read = None, Reads()
            spans = self._spans(query, key, mask)
            if spans is not None:
                first, shared = spans
                plan = self._plan(query, key, _tree(first, shared, key.shape[2]))
                a_token = 2 * key.shape[1] * key.shape[3] * key.element_size()
                read = Reads(plan.io().kv, a_token * sum(key.shape[2] - start for start in first))
            self.plans[kind] = plan, mask, read  # the mask is kept so that no other gets its id
        plan, _, read = self.plans[kind]
        self.reads.kv_bytes_read += read.kv_bytes_read
        self.reads.kv_bytes_of_rows += read.kv_bytes_of_rows
        return plan

    def _spans(self, query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[list[int], list[int]] | None:
        """Return where each row begins to see, and where the row before it departs; None where that is not all."""
        batch, length = key.shape[0], key.shape[2]
        if query.shape[2] != 1 or key.stride(3) != 1 or key.stride(0) % key.stride(2):
            return None
        first = [0] * batch
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != (batch, 1, 1, length):
                return None
            seen = mask[:, 0, 0].cpu()
            start = seen.int().argmax(1)
            if not torch.equal(seen, torch.arange(length) >= start[:, None]):
                return None
            first = start.tolist()
        behind = self.length - length  # columns that a sliding window has left behind
        shared = [0] * batch
        for i in range(1, batch):
            if first[i - 1] == first[i] < self.common[i] - behind:
                shared[i] = self.common[i] - behind
        return (first, shared) if any(shared) else None

    def _plan(self, query: Tensor, key: Tensor, tree: Tree) -> Plan:
        rows = key.stride(0) // key.stride(2)
        return plan_tree(
            TreeSpec(tree.parent, [end - start for _, start, end in tree.spans], tree.leaves),
            self.method,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            slots=np.concatenate([row * rows + np.arange(start, end) for row, start, end in tree.spans]),
            dtype=query.dtype,
            device=key.device,
        )


def common_columns(tokens: Tensor, *others: Tensor | None) -> list[int]:
    """Count the leading columns in which each row is as the row before it; 0 for the first."""
    same = tokens[1:] == tokens[:-1]
    for other in others:
        if other is not None and other.shape == tokens.shape:
            same &= (other[1:] == other[:-1]).to(same.device)
        elif other is not None and len(other) != 1:
            return [0] * len(tokens)  # of another form, such as a mask of pairs
    return [0, *same.int().cumprod(1).sum(1).tolist()]


def flat(keys: Tensor) -> Tensor:
    """View [batch, kv_heads, keys, dim] as a pool of slots [slots, kv_heads, dim], which overlap and copy nothing."""
    batch, heads, length, dim = keys.shape
    slots = (batch - 1) * (keys.stride(0) // keys.stride(2)) + length
    return keys.as_strided((slots, heads, dim), (keys.stride(2), keys.stride(1), 1))


def _tree(first: Sequence[int], shared: Sequence[int], length: int) -> Tree:
    """Make a forest of rows that see the columns from `first` on; up to `shared` they are as the row before."""
    tree = Tree([], [], [0] * len(first))
    stack = [(0, len(first), -1, 0)]
    while stack:
        low, high, above, start = stack.pop()
        cuts = [low, *(i for i in range(low + 1, high) if shared[i] <= start), high]
        for row, after in pairwise(cuts):
            end = min(shared[row + 1 : after], default=length)
            node = len(tree.parent)
            tree.parent.append(above)
            tree.spans.append((row, first[row] if above < 0 else start, end))
            if after - row == 1:
                tree.leaves[row] = node
            else:
                stack.append((row, after, node, end))
    return tree
