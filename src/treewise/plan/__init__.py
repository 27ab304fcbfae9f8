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
from treewise.plan.cost import Layer
from treewise.plan.cut import Task
from treewise.plan.cut import cut as cut_layout
from treewise.plan.data import ENTRY, FREE_END, IO, KV_START, Plan, merges
from treewise.plan.devices import default_backend
from treewise.plan.growth import find_open, with_room
from treewise.plan.layout import lay_out
from treewise.plan.spec import TreeSpec, check, whole_numbers

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
    kv_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    window: int | None = None,
    mask: str = "intervals",
    chunk: int | None = None,
    row_tile: int | None = None,
    room: int = 0,
    open_tokens: int = 0,
    backend: str | None = None,
) -> Plan:
    """Plan attention of a tree's queries over its tokens.

    Parameters
    ----------
    tree : TreeSpec
        The tree or forest.
    method : str
        One of `METHODS`; ``"auto"`` is the one that is predicted to be fastest, see `treewise.plan.cost` and
        ``Plan.why``; ``"reference"`` runs in double precision.
    num_heads, num_kv_heads, head_dim : int
        Shape of the layer; query heads are a multiple of KV heads.
    slots : array_like of int, [tokens], optional
        Slot in the pool of each token, nodes in order; default 0, 1, 2, ...
    page_size : int
        1, 16, 32 or 64: slots of a node advance by one inside a page. A hint for kernels, never needed to be right.
    dtype : torch.dtype
        Element type of queries and results.
    kv_dtype : torch.dtype, optional
        Element type of keys and values, default that of queries; ``torch.float8_e4m3fn`` halves what is read.
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
    room : int
        Tokens that each branch may append by `Plan.grow` before a new plan is needed; 16 or 32 make planning cheap
        while branches only grow. Each query must then sit at the last token of a leaf of its own.
    open_tokens : int
        Tokens whose slots are not known yet, nor who sees them: slot ``-1 - i`` stands for the ``i``-th. The tree says
        who may see them at most; nobody does until `Plan.fill`. Not together with `room` or a window.
    backend : str, optional
        What `run_plan` will run the plan with, one of `treewise.attention.BACKENDS`; default what the method's name
        asks for, else the device's. ``"hopper"`` wants other items than ``"triton"``, but each runs all of them.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError
        If an argument does not fit; the message names it and the choices.
    """
    device = torch.device(device)
    backend = "reference" if method == "reference" else backend
    method = "deft:node" if method == "reference" else method
    _check(method, mask, page_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    for name, limit in (("window", window), ("chunk", chunk), ("row_tile", row_tile)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} is {limit}; it must be at least 1")
    if room < 0 or (room and mask != "intervals") or (room and method in ("medusa", "vanilla", "specinfer")):
        raise ValueError(f"room is {room}; it must be at least 0, and needs a method with mask='intervals'")
    if open_tokens < 0 or (
        open_tokens and (room or window or mask != "intervals" or method in ("medusa", "vanilla", "specinfer"))
    ):
        raise ValueError(
            f"open_tokens is {open_tokens}; it must be at least 0, and needs a method with mask='intervals', "
            "no room and no window"
        )
    if slots is None:
        slot, num_slots = np.arange(tree.num_tokens, dtype=np.int32), tree.num_tokens
    else:
        given = whole_numbers("slots", slots, tree.num_tokens, "one a token, nodes in order")
        num_slots = int(given.max(initial=-1)) + 1
        if given.min(initial=0) < -open_tokens or num_slots > 2**31:
            check("slots", given, (given >= -open_tokens) & (given < 2**31), f"be {-open_tokens} to 2147483647")
        slot = given.astype(np.int32)
    if room:
        tree, slot = with_room(tree, slot, room)

    group_size = num_heads // num_kv_heads
    if device.type == "cuda" and (row_tile or 1) * group_size > 256 and method.startswith(("auto", "deft:")):
        raise ValueError(f"row_tile is {row_tile}; on cuda it may hold at most 256 rows × heads of a KV head")
    if mask == "words":
        row_tile = min(row_tile or 64, 64 if device.type == "cpu" else max(1, 64 // group_size))
    reach = None if window is None else window + room  # what a row sees before and after it has grown
    layout = lay_out(tree, slot, reach)
    layer = Layer(
        device, num_heads, num_kv_heads, head_dim, dtype, kv_dtype or dtype, backend or default_backend(device)
    )
    cut, method, why, row_tile = cut_layout(method, Task(layout, layer, reach, row_tile, chunk), mask)
    if mask == "words":
        cut = partition.with_words(cut, window)
    cut = partition.in_launch_order(cut, group_size)
    items, cells = cut.items, cut.layout
    kv_slots, kv_readers = cells.kv_slots, cells.kv_readers
    open_indptr, open_places, hidden = find_open(kv_slots, open_tokens + room * tree.num_queries)
    place = open_places[: room * tree.num_queries].reshape(room, tree.num_queries)
    room_readers = kv_readers[place[:1].ravel()]
    if len(hidden):
        kv_slots[hidden] = kv_readers[hidden] = 0
        following = np.append(hidden, len(kv_slots))[np.searchsorted(hidden, items[:, KV_START])]
        items[:, FREE_END] = np.minimum(items[:, FREE_END], following)
        if window is not None:
            items[:, FREE_END] = items[:, KV_START]
    items[:, ENTRY], reduce_rows, reduce_indptr, reduce_entries = merges(items, tree.num_queries)
    arrays: dict[str, Any] = {
        "row_order": cells.row_order,
        "row_position": cells.row_position - room,
        "kv_slots": kv_slots,
        "kv_position": cells.kv_position,
        "items": items,
        "reduce_rows": reduce_rows,
        "reduce_indptr": reduce_indptr,
        "reduce_entries": reduce_entries,
    }
    arrays = {name: np.ascontiguousarray(array, dtype=np.int32) for name, array in arrays.items()}
    return Plan(
        method=method,
        why=why,
        mask={"specinfer": "bits", "medusa": "dense", "vanilla": "dense"}.get(method, mask),
        backend=backend,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        kv_dtype=layer.kv_dtype,
        device=device,
        page_size=page_size,
        window=window,
        row_tile=row_tile,
        num_slots=num_slots,
        group_tokens=cut.group_tokens,
        kernel_bounds=cut.bounds,
        room=place,
        room_readers=room_readers,
        open_indptr=open_indptr,
        open_places=open_places,
        kv_readers=kv_readers,
        mask_words=cut.mask_words,
        mask_dense=cut.mask_dense,
        **arrays,
    ).place()


def _check(method: str, mask: str, page_size: int, **shape: int) -> None:
    if method not in (*METHODS, "auto"):
        raise ValueError(f"method is {method!r}; choose one of {', '.join((*METHODS, 'auto', 'reference'))}")
    for name, value in shape.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if shape["num_heads"] % shape["num_kv_heads"]:
        raise ValueError(
            f"num_heads is {shape['num_heads']}; it must be a multiple of num_kv_heads, {shape['num_kv_heads']}"
        )
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size is {page_size}; choose one of {', '.join(map(str, PAGE_SIZES))}")
    if mask not in MASKS:
        raise ValueError(f"mask is {mask!r}; choose one of {', '.join(MASKS)}")
    if mask == "words" and not method.startswith(("auto", "deft:")):
        raise ValueError(f"mask='words' is for deft:* methods; method {method!r} has a mask of its own")
