"""Cuts rows × slots into groups: by query, node, node-chunk, flatten, dense; counts the IO.

A query of a tree sees the tokens on its path from the root. Laid out depth-first, the readers of every token are one
interval of rows, so visibility takes two integers a token, and every attention method is a way to cut the
rows × tokens rectangle into groups. A plan is that list of groups as flat integer arrays; the kernels, the slow
reference and the IO count all read the same arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treewise.plan import partition
from treewise.plan.data import IO, ROW_HIGH, ROW_LOW, Plan, upload
from treewise.plan.layout import indptr, lay_out, ranges
from treewise.plan.partition import default_chunk
from treewise.plan.spec import TreeSpec, check, integers

__all__ = ["IO", "METHODS", "Plan", "TreeSpec", "plan_tree"]

METHODS = (
    "flash_decoding",
    "radix",
    "medusa",
    "specinfer",
    "vanilla",
    "deft:node",
    "deft:node_chunk",
    "deft:flatten",
)
"""The partitions that a plan can be made with. ``"auto"`` and ``"reference"`` are names for one of them."""

PAGE_SIZES = (1, 16, 32, 64)
MASKS = ("intervals", "words")


def plan_tree(
    tree: TreeSpec,
    method: str = "auto",
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    slots: npt.ArrayLike | None = None,
    page_size: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    window: int | None = None,
    mask: str = "intervals",
    chunk: int | None = None,
    row_tile: int | None = None,
) -> Plan:
    """Plan attention of a tree's queries over its tokens.

    Parameters
    ----------
    tree : TreeSpec
        The tree or forest.
    method : str
        One of `METHODS`; ``"auto"`` is ``"deft:flatten"``, which is plain split-KV decoding where nothing is shared;
        ``"reference"`` runs in double precision.
    num_heads, num_kv_heads, head_dim : int
        Shape of the layer; query heads are a multiple of KV heads.
    slots : array_like of int, [tokens], optional
        Slot in the pool of each token, nodes in order; default 0, 1, 2, ...
    page_size : int
        1, 16, 32 or 64: slots of a node advance by one inside a page. A hint for kernels, never needed to be right.
    dtype : torch.dtype
        Element type of queries, keys and values.
    device : str or torch.device
        Where `run_plan` will run; the plan's arrays are uploaded to it.
    window : int, optional
        Sliding window: a query at position p sees keys at positions above ``p - window``.
    mask : str
        How ``deft:*`` methods tell visibility: ``"intervals"``, or ``"words"`` of 64 rows.
    chunk : int, optional
        Most key tokens of a group, where the method cuts; default a rule of the method and the device.
    row_tile : int, optional
        Most rows of an item; default a rule of the device.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError
        If an argument does not fit; the message names it and the choices.
    """
    device = torch.device(device)
    backend = "reference" if method == "reference" else None
    method = {"auto": "deft:flatten", "reference": "deft:node"}.get(method, method)
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; choose one of {', '.join((*METHODS, 'auto', 'reference'))}")
    for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads is {num_heads}; it must be a multiple of num_kv_heads, {num_kv_heads}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size is {page_size}; choose one of {', '.join(map(str, PAGE_SIZES))}")
    if mask not in MASKS:
        raise ValueError(f"mask is {mask!r}; choose one of {', '.join(MASKS)}")
    if mask == "words" and not method.startswith("deft:"):
        raise ValueError(f"mask='words' is for deft:* methods; method {method!r} has a mask of its own")
    for name, limit in (("window", window), ("chunk", chunk), ("row_tile", row_tile)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} is {limit}; it must be at least 1")
    slots = np.arange(tree.num_tokens) if slots is None else slots
    slot = integers("slots", slots, tree.num_tokens, "one a token, nodes in order")
    check("slots", slot, (slot >= 0) & (slot < 2**31), "be 0 to 2147483647")

    group_size = num_heads // num_kv_heads
    if device.type == "cuda" and (row_tile or 1) * group_size > 256 and method.startswith("deft:"):
        raise ValueError(f"row_tile is {row_tile}; on cuda it may hold at most 256 rows × heads of a KV head")
    asked_tile, asked_chunk = row_tile, chunk
    if row_tile is None:
        row_tile = 128 if device.type == "cpu" else max(1, 64 // group_size)
    if mask == "words":
        asked_tile = row_tile = min(row_tile, 64)
    if method == "medusa":
        row_tile = tree.num_queries

    layout = lay_out(tree, slot, window)
    if chunk is None:
        shared = row_tile if method.startswith("deft:") else 1
        chunk = 256 if method == "deft:node_chunk" else default_chunk(layout, shared, device, num_kv_heads)
    match method:
        case "flash_decoding" | "radix":
            cut = partition.by_query(layout, window, row_tile, chunk)
        case "specinfer":
            cut, mask = partition.by_query_over_trees(layout, window), "bits"
        case "medusa" | "vanilla":
            cut, mask = partition.dense(layout, window), "dense"
        case "deft:node":
            cut = partition.by_node(layout, window, row_tile, max(1, tree.num_tokens))
        case "deft:node_chunk":
            cut = partition.by_node(layout, window, row_tile, chunk)
        case _:
            sizes = partition.blocks(device, num_kv_heads, group_size, asked_tile, asked_chunk)
            row_tile = max(sizes.shared.rows, sizes.paths.rows)
            cut = partition.flatten(layout, window, sizes)
    if mask == "words":
        cut = partition.with_words(cut, window)

    cut = partition.in_launch_order(cut, group_size)
    entry_rows = ranges(cut.items[:, ROW_LOW], cut.items[:, ROW_HIGH])
    # A stable sort of 16-bit keys is a radix sort, linear in the entries.
    entry_keys = entry_rows.astype(np.uint16) if tree.num_queries < 2**16 else entry_rows
    flat = {
        "row_order": cut.layout.row_order,
        "row_position": cut.layout.row_position,
        "kv_slots": cut.layout.kv_slots,
        "kv_low": cut.layout.kv_low,
        "kv_high": cut.layout.kv_high,
        "kv_position": cut.layout.kv_position,
        "items": cut.items,
        "reduce_indptr": indptr(np.bincount(entry_rows, minlength=tree.num_queries)),
        "reduce_entries": np.argsort(entry_keys, kind="stable"),
    }
    arrays: dict[str, Any] = {name: np.ascontiguousarray(array, dtype=np.int32) for name, array in flat.items()}
    arrays.update(mask_words=cut.mask_words, mask_dense=cut.mask_dense)
    readers = np.stack((arrays["kv_low"], arrays["kv_high"]), axis=1).view(np.int64)[:, 0]  # one load for both
    return Plan(
        method=method,
        mask=mask,
        backend=backend,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        page_size=page_size,
        window=window,
        row_tile=row_tile,
        num_slots=int(slot.max(initial=-1)) + 1,
        group_tokens=cut.group_tokens,
        tensors=upload(arrays | {"kv_readers": readers}, device),
        **arrays,
    )
