"""One list of cases for all backends: method × tree × heads × head_dim × pool, and the dense oracle.

The full product would take hours. Cases follow an orthogonal array over the residues modulo 5: every method meets
every tree, and every pair of tree, heads, head_dim and pool occurs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from treewise.attention import METHODS, TreeSpec, plan_tree, store_kv

HEADS = [(9, 3), (14, 2), (8, 8), (16, 1), (7, 1)]
HEAD_DIMS = [56, 64, 80, 128, 256]
PAGE_SIZES = [None, 1, 16, 32, 64]  # None: a contiguous pool
PARTITIONS = [(method, "intervals") for method in METHODS] + [("deft:node", "words"), ("deft:flatten", "words")]


def few_shot() -> TreeSpec:
    """A prompt and branches of uneven lengths."""
    return TreeSpec([-1, 0, 0, 0, 0, 0], [150, 9, 1, 70, 33, 2], [1, 2, 3, 4, 5])


def small_nodes() -> TreeSpec:
    """A deep tree of tiny nodes with more than 64 queries."""
    parent = [-1, *((node - 1) // 2 for node in range(1, 131))]
    return TreeSpec(parent, [2 + node % 4 for node in range(131)], range(65, 131))


def forest() -> TreeSpec:
    """A lone sequence, a tree with an empty tip, a branch without readers, and a third root."""
    return TreeSpec([-1, -1, 1, 1, 1, -1, 5, 5], [90, 40, 20, 0, 30, 17, 3, 70], [0, 3, 2, 6, 7, 5])


def drafted() -> TreeSpec:
    """A tree of one-token nodes below a prompt, a query at each, as speculative decoding verifies."""
    parent = [-1, 0, 0, 0, *((node // 3) for node in range(4, 27))]
    return TreeSpec(parent, [100] + [1] * 26, range(1, 27))


def prompt_chunk() -> TreeSpec:
    """A causal chunk of rows at the end of a prompt, whose earlier tokens are there already, and a second prompt."""
    return TreeSpec([-1, -1], [170, 14], [0] * 66 + [1] * 14, [*range(104, 170), *range(14)])


def everything() -> TreeSpec:
    """Chunks, drafts and decoding in one batch; queries that share a token; queries before a node's first token."""
    parent = [-1, 0, 0, 2, 2, 2, -1, 6, 6, 8]
    length = [80, 25, 12, 1, 1, 1, 66, 10, 0, 1]
    node = [1] * 15 + [0, 0, 2, 3, 4, 5, 5, 7, 8, 9, 7]
    offset = [*range(10, 25), 79, 40, -1, 0, 0, 0, 0, 9, -1, 0, 3]
    return TreeSpec(parent, length, node, offset)


TREES = [few_shot, small_nodes, forest, drafted, prompt_chunk, everything]
SMALL_TREES = [few_shot, forest, drafted, prompt_chunk, everything]


class Case(NamedTuple):
    """One point of the matrix."""

    method: str
    mask: str
    tree: object
    heads: tuple[int, int]
    head_dim: int
    page_size: int | None

    def __str__(self) -> str:
        pool = "contiguous" if self.page_size is None else f"page{self.page_size}"
        heads = "/".join(map(str, self.heads))
        return f"{self.method}-{self.mask}-{self.tree.__name__}-{heads}x{self.head_dim}-{pool}"


def cases(trees: list) -> list[Case]:
    """Build the covering list of cases over some trees."""
    return [
        Case(method, mask, tree, HEADS[(i + j) % 5], HEAD_DIMS[(i + 2 * j) % 5], PAGE_SIZES[(i + 3 * j) % 5])
        for i, (method, mask) in enumerate(PARTITIONS)
        for j, tree in enumerate(trees)
    ]


def place(tree: TreeSpec, page_size: int | None, seed: int) -> tuple[np.ndarray, int]:
    """Give each node pages of its own, scattered over a pool; return the slots and the pool's size."""
    if page_size is None:
        return np.arange(tree.num_tokens) + 3, tree.num_tokens + 3
    pages = [-(-int(length) // page_size) for length in tree.length]
    shuffled = np.random.default_rng(seed).permutation(sum(pages) + 3)[: sum(pages)]
    slots = []
    for length, own in zip(tree.length, np.split(shuffled, np.cumsum(pages)[:-1]), strict=True):
        offset = np.arange(length)
        slots.append(own[offset // page_size] * page_size + offset % page_size)
    return np.concatenate(slots), (sum(pages) + 3) * page_size


def inputs(case: Case, window: int | None, dtype=torch.float32, device="cpu", **options):
    """Plan a case and its reference, with random queries, keys and values; slots of no token hold NaN."""
    tree = case.tree()
    slots, size = place(tree, case.page_size, seed=1)
    num_heads, num_kv_heads = case.heads
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": case.head_dim, "slots": slots}
    shape |= {"window": window, "dtype": dtype, "device": device, "page_size": case.page_size or 1}
    plan = plan_tree(tree, case.method, mask=case.mask, **shape, **options)
    reference = plan_tree(tree, "reference", **shape)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tree.num_queries, num_heads, case.head_dim, generator=generator)
    k, v = (torch.full((size, num_kv_heads, case.head_dim), torch.nan) for _ in range(2))
    for pool in (k, v):
        pool[slots] = torch.randn(len(slots), *pool.shape[1:], generator=generator)
    return plan, reference, *(tensor.to(device, dtype) for tensor in (q, k, v))


def ancestor_mask(tree: TreeSpec, window: int | None = None) -> np.ndarray:
    """Tell which token, nodes in order, each query sees: walked up from every query, one node at a time."""
    first = np.cumsum(tree.length) - tree.length
    seen = np.zeros((tree.num_queries, tree.num_tokens), dtype=bool)
    for query in range(tree.num_queries):
        node, end = int(tree.query_node[query]), int(tree.query_offset[query]) + 1
        path: list[int] = []
        while node >= 0:
            path = [*range(first[node], first[node] + end), *path]
            node = int(tree.parent[node])
            end = int(tree.length[node])
        position = np.arange(len(path)) if tree.position is None else tree.position[path]
        near = np.ones(len(path), bool) if window is None else position > position[-1] - window
        seen[query, np.array(path)[near]] = True
    return seen


def eight_bit_pools(size: int, num_kv_heads: int, head_dim: int, device="cpu"):
    """Fill 8-bit pools through `store_kv`; return them, their factors, and what they hold in single precision."""
    wide = [torch.randn(size, num_kv_heads, head_dim, device=device) for _ in range(2)]
    pools = [torch.empty(pool.shape, dtype=torch.float8_e4m3fn, device=device) for pool in wide]
    factors = [torch.rand(num_kv_heads, device=device) + 0.5 for _ in range(2)]
    store_kv(*wide, *pools, torch.arange(size, device=device), k_scale=factors[0], v_scale=factors[1])
    held = [pool.float() * factor[:, None] for pool, factor in zip(pools, factors, strict=True)]
    return pools, factors, held


def dense_attention(tree, slots, q, k, v, scale, window=None, soft_cap=None):
    """Plain softmax attention in double precision under the explicit mask of `ancestor_mask`."""
    group = q.shape[1] // k.shape[1]
    keys, values = (pool[torch.as_tensor(slots)].double().repeat_interleave(group, dim=1) for pool in (k, v))
    scores = torch.einsum("qhd,thd->qht", q.double(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    seen = torch.from_numpy(ancestor_mask(tree, window))
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return torch.einsum("qht,thd->qhd", torch.softmax(scores, -1), values), torch.logsumexp(scores, -1)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())
