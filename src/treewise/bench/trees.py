"""Named trees that attention is measured on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from treewise.attention import TreeSpec


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


TREES: dict[str, Callable[[], TreeSpec]] = {
    "few-shot": lambda: level_tree([1, 20], [4000, 200]),
    "few-shot-50": lambda: level_tree([1, 50], [4000, 200]),
    "cpu-few-shot": lambda: level_tree([1, 20], [2000, 16]),
    "deep": lambda: level_tree([1, 2, 4, 8, 16, 32, 64, 128, 1024], [256, 128, 64, 16, 16, 16, 16, 16, 16]),
    "tot": lambda: level_tree([1, 10, 100], [1000, 300, 150]),
    "drafted": lambda: drafted_tree(4000, 64),
    "drafted-256": lambda: drafted_tree(4000, 256),
    "unshared": lambda: level_tree([8], [2000]),
}
"""Two levels with 20 or 50 branches; tiny nodes nine levels down; Tree of Thoughts; drafted tokens; nothing shared."""


def find_tree(name: str) -> TreeSpec:
    """Return a named tree, or a level tree written as ``nodes a level : tokens a node``, such as ``1/20:4000/200``.

    Raises
    ------
    ValueError
        If the name is neither.
    """
    if name in TREES:
        return TREES[name]()
    if re.fullmatch(r"\d+(/\d+)*:\d+(/\d+)*", name):
        counts, lengths = ([int(part) for part in side.split("/")] for side in name.split(":"))
        if len(counts) == len(lengths) and counts == sorted(counts) and counts[0] > 0:
            return level_tree(counts, lengths)
    raise ValueError(f"trees: {name!r} is neither of the form 1/20:4000/200 nor one of {', '.join(TREES)}")
