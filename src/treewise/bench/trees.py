"""Named trees that attention is measured on, and how to write others."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from treewise.attention import TreeSpec

Ints = npt.NDArray[np.int64]


def level_tree(counts: Sequence[int], lengths: Sequence[int]) -> TreeSpec:
    """Make a tree with ``counts[i]`` nodes of ``lengths[i]`` tokens at level ``i``, a query at each leaf.

    Examples
    --------
    >>> level_tree([1, 20], [4000, 200]).num_tokens
    8000
    """
    parent, length, above, first = [], [], [-1], 0
    for count, tokens in zip(counts, lengths, strict=True):
        parent += [above[index * len(above) // count] for index in range(count)]
        length += [tokens] * count
        first = len(parent) - count
        above = list(range(first, len(parent)))
    return TreeSpec(parent, length, query_node=above)


def drafted_tree(prompt: int, candidates: int) -> TreeSpec:
    """Make a prompt and drafted tokens, a query at each; the likelier a token, the more are drafted after it."""
    parent, frontier, width = [-1, 0], [1], 10
    while len(parent) <= candidates:
        after = [node for rank, node in enumerate(frontier) for _ in range(max(1, width // (rank + 1)))]
        after = after[: candidates + 1 - len(parent)]
        frontier = list(range(len(parent), len(parent) + len(after)))
        parent += after
        width = max(1, width - 3)
    return TreeSpec(parent, [prompt] + [1] * candidates, query_node=range(1, candidates + 1))


def prompt_tree(tokens: int) -> TreeSpec:
    """Make a prompt with a query at each token, which is causal attention."""
    return TreeSpec([-1], [tokens], query_node=[0] * tokens, query_offset=range(tokens))


TREES: dict[str, tuple[str, ...]] = {
    "few-shot": ("1/20:4000/200",),
    "few-shot-50": ("1/50:4000/200",),
    "cpu-few-shot": ("1/20:2000/16",),
    "deep": ("1/2/4/8/16/32/64/128/1024:256/128/64/16/16/16/16/16/16",),
    "tot": ("1/10/100:1000/300/150",),
    "drafted": ("4000+64",),
    "drafted-256": ("4000+256",),
    "fasttree": (
        "1/2/64:8/256/32",
        "1/4/256:8/256/32",
        "1/4/8/256:8/256/256/32",
        "1/256:256/32",
        "1/1024:2048/32",
        "1/16/64:1024/256/32",
        "1/4/16/512:1024/256/128/32",
        "1/4/16/64/256/1024:256/8/256/64/32/256",
        "1/10:4000/400",
        "1/2/4/8/16/32/64/128/1024:16/16/16/16/16/16/16/16/16",
        "1/2/4/8/16/32/64/128/1024:256/128/64/16/16/16/16/16/16",
        "1/8/16/32/64/128/1024:256/128/64/16/16/16/16",
        "1/16/32/64/128/1024:256/128/64/16/16/16",
    ),
    "deft": (
        *(f"1/{branches}:4000/200" for branches in (20, 30, 50)),
        *("4000+64", "4000+128", "4000+256", "16000+64"),
        "1/10/100:1000/300/150",
    ),
    "prefill": ("causal:4000",),
    "large": ("1/16:131072/64", "64:4096"),
    "unshared": ("1:16000", "8:2000", "32:1000"),
}
"""Names for one tree or several. fasttree: the set that FastTree was published with; deft: the DeFT paper's few-shot
prompts, drafted tokens and Tree of Thoughts; large: 100 MB of keys and values and more; unshared: nothing is shared."""

NOTATIONS = "1/20:4000/200 (nodes a level, tokens a node), 4000+64 (a prompt, drafted tokens) or causal:4000 (a prompt)"


def find_trees(names: str) -> dict[str, TreeSpec]:
    """Return the trees that names with commas between stand for, each under its notation.

    Examples
    --------
    >>> list(find_trees("few-shot,unshared,64+8"))
    ['1/20:4000/200', '1:16000', '8:2000', '32:1000', '64+8']

    Raises
    ------
    ValueError
        If one is neither a name nor a tree as `NOTATIONS` says.
    """
    return {text: _read_tree(text) for name in names.split(",") for text in TREES.get(name, (name,))}


def _read_tree(text: str) -> TreeSpec:
    if drafted := re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", text):
        return drafted_tree(*map(int, drafted.groups()))
    if prompt := re.fullmatch(r"causal:([1-9]\d*)", text):
        return prompt_tree(int(prompt[1]))
    if re.fullmatch(r"\d+(/\d+)*:\d+(/\d+)*", text):
        counts, lengths = ([int(part) for part in side.split("/")] for side in text.split(":"))
        if len(counts) == len(lengths) and counts == sorted(counts) and counts[0] > 0:
            return level_tree(counts, lengths)
    raise ValueError(f"trees: {text!r} is neither one of {', '.join(TREES)} nor of the form {NOTATIONS}")


def indptr(lengths: npt.ArrayLike) -> Ints:
    """Return where each of several runs starts, and where the last ends."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def paths(tree: TreeSpec) -> list[list[int]]:
    """Return each query's nodes, from the root down."""
    to_node: list[list[int]] = []
    for node, parent in enumerate(tree.parent.tolist()):
        to_node.append([*(to_node[parent] if parent >= 0 else []), node])
    return [to_node[node] for node in tree.query_node.tolist()]


def visible_slots(tree: TreeSpec) -> list[Ints]:
    """Return the tokens that each query sees, from the root down."""
    starts = indptr(tree.length)
    ends = starts[tree.query_node] + tree.query_offset + 1
    seen = []
    for path, end in zip(paths(tree), ends.tolist(), strict=True):
        above = [np.arange(starts[node], starts[node + 1]) for node in path[:-1]]
        seen.append(np.concatenate([*above, np.arange(starts[path[-1]], end)]))
    return seen


def visible_lengths(tree: TreeSpec) -> Ints:
    """Return how many tokens each query sees."""
    depth: list[int] = []
    for parent, length in zip(tree.parent.tolist(), tree.length.tolist(), strict=True):
        depth.append(length + (depth[parent] if parent >= 0 else 0))
    return np.array(depth)[tree.query_node] - tree.length[tree.query_node] + tree.query_offset + 1


def at_node_ends(tree: TreeSpec) -> bool:
    """Tell whether every query sits at its node's last token."""
    return bool((tree.query_offset == tree.length[tree.query_node] - 1).all())
