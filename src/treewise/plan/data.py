"""The form of a plan: flat integer arrays, their copy on the device, and the count of the bytes they move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treewise.plan.layout import indptr, pairs, ranges, stable_order, unpack
from treewise.plan.spec import Ints, integers

# Columns of Plan.items: one row a work item, so that a kernel gets all it needs in one 32-byte load.
ROW_LOW, ROW_HIGH, KV_START, KV_END, FREE_END, ENTRY, MASK, GROUP = range(8)
PLACED = (
    "row_order", "row_position", "kv_slots", "kv_position", "items", "reduce_rows", "reduce_indptr", "reduce_entries",
    "mask_words", "mask_dense", "room", "room_readers", "kv_readers",
)  # fmt: skip
"""Arrays of a plan that kernels read."""


@dataclass(frozen=True)
class IO:
    """Bytes that one pass of attention moves through device memory, by kind.

    ``kv_once`` is ``kv`` without the re-reads of groups that have more rows than one row tile; it is not part of
    ``total``.
    """

    kv: int
    kv_once: int
    queries: int
    scores: int
    partials: int
    output: int
    masks: int
    metadata: int

    @property
    def total(self) -> int:
        """All bytes moved."""
        return self.kv + self.queries + self.scores + self.partials + self.output + self.masks + self.metadata


@dataclass(eq=False)
class Plan:
    """One partition of attention over a tree, as flat integer arrays.

    *Rows* are the queries in depth-first order, *key tokens* the arrays ``kv_*``. A *group* is a rectangle of rows ×
    key tokens; an *item* is one row tile of a group, trimmed to the key tokens that some row of the tile sees. Each
    (row, token) pair that the tree allows lies in exactly one item; the pairs of an item that the tree does not allow
    are masked. An item whose rows have no other item writes their results, its ``ENTRY`` is -1. The others write
    partial results ``items[i, ENTRY]`` onwards, one a row, and row ``reduce_rows[i]`` merges the entries
    ``reduce_entries[reduce_indptr[i] : reduce_indptr[i + 1]]`` in that order. A row without items is 0.

    Attributes
    ----------
    method, mask : str
        The partition, one of `METHODS`; how visibility is told: ``"intervals"``, ``"words"`` (64 rows of the item in
        a word a token), ``"bits"`` (64 tokens in a word, an item of one row) or ``"dense"`` (a byte a pair).
    why : str
        Why this method: that it was asked for, or the predicted times of all that ``"auto"`` considered.
    backend : str or None
        The backend that the method's name asks for; None lets the device decide.
    row_order : [rows]
        The caller's query at each depth-first place.
    row_position, kv_position : [rows], [tokens]
        Logical positions; ``kv_position`` is empty unless there is a window.
    kv_slots : [tokens]
        Slot in the pool of each key token.
    kv_readers : int64 [tokens]
        The interval of rows that see each key token, see `treewise.plan.layout.pack`.
    items : [items, 8]
        ``ROW_LOW, ROW_HIGH, KV_START, KV_END, FREE_END, ENTRY, MASK, GROUP``. Key tokens before ``FREE_END`` are seen
        by every row of the item; the others are masked.
    group_tokens : [groups]
        Key tokens of each group.
    mask_words, mask_dense : [words], [rows, tokens]
        The masks of the kinds that need them; empty otherwise.
    row_tile : int
        Most rows that read a key token together; a wider item reads its key tokens once a tile.
    num_slots : int
        The pool must have at least so many slots.
    kernel_bounds : tuple of int
        Packed rows (rows × group) up to which items are for one kernel, and for another.
    reduce_rows : [merged rows]
        The rows that do not get their result from one item.
    room : [steps, queries]
        Key tokens that `grow` fills, one row of them a call; nobody sees them before.
    room_readers : int64 [queries]
        What `grow` puts into ``kv_readers``, none without room.
    open_indptr, open_places : [open tokens + 1], [places]
        The key tokens that stand for each open token, see `fill`; those of a plan with room are its.
    unsent : tuple of int64 arrays
        What `fill` has said and `receive` is to be given, none if there is nothing.
    grown : int
        How often the plan has grown.
    tensors : dict
        What kernels read of the arrays above on the plan's device, see `place`; ``reduce_queries``
        are the queries of ``reduce_rows``.
    prepared : dict
        What a backend worked out once for this plan, by backend name.
    accepted_by : set of str
        The backends that were asked whether they can run this plan, and can.
    """

    method: str
    why: str
    mask: str
    backend: str | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    page_size: int
    window: int | None
    row_tile: int
    num_slots: int
    row_order: Ints
    row_position: Ints
    kv_slots: Ints
    kv_readers: Ints
    kv_position: Ints
    items: Ints
    group_tokens: Ints
    kernel_bounds: tuple[int, ...]
    reduce_rows: Ints
    reduce_indptr: Ints
    reduce_entries: Ints
    mask_words: Ints
    mask_dense: npt.NDArray[np.bool_]
    room: Ints
    room_readers: Ints
    open_indptr: Ints
    open_places: Ints
    unsent: tuple[Ints, ...] = ()
    grown: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    prepared: dict[str, Any] = field(default_factory=dict, repr=False)
    accepted_by: set[str] = field(default_factory=set, repr=False)

    @property
    def num_rows(self) -> int:
        """Queries of the plan."""
        return len(self.row_order)

    @property
    def kv_low(self) -> Ints:
        """First row that sees each key token."""
        return unpack(self.kv_readers)[0]

    @property
    def kv_high(self) -> Ints:
        """End of the rows that see each key token."""
        return unpack(self.kv_readers)[1]

    @property
    def num_entries(self) -> int:
        """Partial results that are merged, one a row of each item that writes any."""
        return len(self.reduce_entries)

    def place(self) -> Plan:
        """Put on the device what kernels read, and return the plan."""
        arrays = {name: getattr(self, name) for name in PLACED}
        arrays["reduce_queries"] = self.row_order[self.reduce_rows]
        self.tensors = upload(arrays, self.device)
        return self

    def grow(self, slots: npt.ArrayLike) -> None:
        """Let every branch append one token, for a plan that was made with room.

        Takes a few microseconds and waits for nothing; a CUDA graph that runs the plan needs no new capture.

        Parameters
        ----------
        slots : array_like of int, [queries]
            Slot of the token that each query appends, and at which it now sits.

        Raises
        ------
        ValueError
            If the room is used up, or the slots do not fit.
        """
        if self.grown == len(self.room):
            raise ValueError(f"room is used up: the plan was made for {len(self.room)} more tokens a branch")
        slot = integers("slots", slots, self.num_rows, "one a query").astype(np.int32)
        token, (kv_low, kv_high) = self.room[self.grown], unpack(self.kv_readers)
        row = np.empty_like(self.row_order)
        row[self.row_order] = np.arange(self.num_rows, dtype=row.dtype)
        self.kv_slots[token], kv_low[token], kv_high[token] = slot, row, row + 1
        self.row_position += 1
        self.num_slots = max(self.num_slots, int(slot.max()) + 1)
        on = self.tensors
        token_there = on["room"][self.grown]
        on["kv_slots"].index_copy_(0, token_there, upload({"slots": slot}, self.device)["slots"])
        on["kv_readers"].index_copy_(0, token_there, on["room_readers"])
        if self.window is not None:
            on["row_position"].copy_(upload({"positions": self.row_position}, self.device)["positions"])
        self.prepared.pop("cpu", None)  # it made copies
        self.grown += 1

    def places(self, tokens: Ints) -> tuple[Ints, Ints]:
        """Return where open tokens stand among the key tokens, and which of `tokens` stands at each place.

        Parameters
        ----------
        tokens : int64 [tokens]
            Numbers of open tokens, none twice.

        Returns
        -------
        int64 [places], int64 [places]
            A token that several tiles of rows read has several places.
        """
        if len(self.open_places) < len(self.open_indptr):  # nearly always: one place a token
            return self.open_places[tokens], np.arange(len(tokens))
        first, end = self.open_indptr[tokens], self.open_indptr[tokens + 1]
        return self.open_places[ranges(first, end)], np.repeat(np.arange(len(tokens)), end - first)

    def fill(self, places: Ints, slots: Ints, readers: Ints) -> None:
        """Say where open tokens are and who sees them, for a plan that was made with some; again, if need be.

        The device has yet to hear of it: `unsent` is for an upload, perhaps along with others, and then for `receive`;
        the plan is not filled again before.

        Parameters
        ----------
        places : int64 [places]
            All those of some open tokens, at least one, see `places`.
        slots : int [places]
        readers : int64 [places]
            The interval of rows, not queries, that see each; all of them below the token by the plan's tree.
        """
        self.kv_slots[places], self.kv_readers[places] = slots, readers
        self.num_slots = max(self.num_slots, int(slots.max()) + 1)
        words = np.zeros(-(-len(slots) // 2), np.int64)  # two slots each
        words.view(np.int32)[: len(slots)] = slots
        self.unsent = places, words, readers
        self.prepared.pop("cpu", None)  # it made copies

    def receive(self, there: Iterator[torch.Tensor]) -> None:
        """Take what was `unsent` from the device.

        Waits for nothing; a CUDA graph that runs the plan needs no new capture.
        """
        places, words, readers = next(there), next(there), next(there)
        slots = words.view(torch.int32).narrow(0, 0, places.shape[0])
        self.tensors["kv_slots"].index_copy_(0, places, slots)
        self.tensors["kv_readers"].index_copy_(0, places, readers)
        self.unsent = ()

    def renew(self) -> None:
        """Put on the device again what another plan may have overwritten there, see `PlanBuffers.load`."""
        names = ("row_order", "row_position", "kv_slots", "kv_readers", "kv_position", "reduce_entries")
        self.tensors |= upload({name: getattr(self, name) for name in names}, self.device)
        self.unsent = ()

    def visible(self, item: int) -> npt.NDArray[np.bool_]:
        """Decode the mask of one item.

        Returns
        -------
        array of bool, [rows of the item, key tokens of the item]
        """
        row_low, row_high, start, end, free, _, mask, _ = (int(x) for x in self.items[item])
        seen = np.ones((row_high - row_low, end - start), dtype=bool)
        masked = slice(free - start, end - start)
        if free == end:
            return seen
        if self.mask == "dense":
            seen[:, masked] = self.mask_dense[row_low:row_high, free:end]
        elif self.mask == "words":
            words = self.mask_words[mask : mask + end - start].view(np.uint64)
            seen[:] = (words[None, :] >> np.arange(row_high - row_low, dtype=np.uint64)[:, None]) & np.uint64(1)
        elif self.mask == "bits":
            token = np.arange(end - start)
            words = self.mask_words[mask + token // 64].view(np.uint64)
            seen[0] = (words >> (token % 64).astype(np.uint64)) & np.uint64(1)
        else:
            rows, tokens = np.arange(row_low, row_high), np.arange(free, end)
            seen[:, masked] = pairs(self, self.window, rows[:, None], tokens[None, :])
        return seen

    def io(self, dtype: torch.dtype | None = None, layers: int = 1, heads: int | None = None) -> IO:
        """Count the bytes that one pass over this plan moves.

        Parameters
        ----------
        dtype : torch.dtype, optional
            Element type of queries, keys and values; default the plan's types.
        layers : int
            Attention layers that run the plan.
        heads : int, optional
            Heads whose keys and values are read; default the plan's KV heads. The paper counts all query heads.
        """
        size, kv_size = (dtype or self.dtype).itemsize, (dtype or self.kv_dtype).itemsize
        heads = self.num_kv_heads if heads is None else heads
        rows = (self.items[:, ROW_HIGH] - self.items[:, ROW_LOW]).astype(np.int64)
        tokens = (self.items[:, KV_END] - self.items[:, KV_START]).astype(np.int64)
        hidden = self.kv_low[self.open_places] == self.kv_high[self.open_places]
        unused = np.sort(self.open_places[hidden])  # nobody sees them yet
        tokens -= np.searchsorted(unused, self.items[:, KV_END]) - np.searchsorted(unused, self.items[:, KV_START])
        token_bytes = 2 * heads * self.head_dim * kv_size * layers
        row_values = self.num_heads * self.head_dim * layers
        unfused = self.method == "medusa"
        # Unfused, the scores are written by the product, read and written by scale, mask and softmax, then read.
        scores = 8 * size * self.num_heads * layers * int((rows * tokens).sum()) if unfused else 0
        # On a GPU, partial outputs of float16 are float16; their LSE is always float32.
        part = 2 if (dtype or self.dtype) == torch.float16 and self.device.type == "cuda" else 4
        partials = 2 * self.num_entries * (part * row_values + 4 * self.num_heads * layers)
        if self.mask == "dense":
            masks = self.mask_dense.nbytes
        elif self.mask in ("words", "bits"):
            masks = self.mask_words.nbytes
        else:
            masked = self.items[:, FREE_END] < self.items[:, KV_END]
            masks = (8 if self.window is None else 12) * int((tokens * masked).sum())
        metadata = 4 * int(tokens.sum()) + self.items.nbytes + self.row_order.nbytes
        metadata += self.reduce_rows.nbytes + self.reduce_indptr.nbytes + self.reduce_entries.nbytes
        return IO(
            kv=token_bytes * int((tokens * -(-rows // self.row_tile)).sum()),
            kv_once=token_bytes * (int(self.group_tokens.sum()) - len(unused)),
            queries=int(rows.sum()) * row_values * size,
            scores=scores,
            partials=partials,
            output=self.num_rows * row_values * size,
            masks=masks * layers,
            metadata=metadata * layers,
        )


def merges(items: Ints, num_rows: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Give partial results their numbers, and list those of each row that has several or none.

    Returns
    -------
    entry : [items]
        First partial result of each item; -1 where all its rows have no other item.
    reduce_rows, reduce_indptr, reduce_entries
        See `Plan`.
    """
    low, high = items[:, ROW_LOW], items[:, ROW_HIGH]
    number = _items_of_rows(low, high, num_rows)
    several = indptr(number != 1)
    partial = several[high] > several[low]
    entry = np.where(partial, indptr(np.where(partial, high - low, 0))[:-1], -1)
    counts = _items_of_rows(low[partial], high[partial], num_rows)
    reduce_rows = np.flatnonzero(counts == number)
    row = ranges(low[partial], high[partial])
    return entry, reduce_rows, indptr(counts[reduce_rows]), stable_order(row, num_rows)


def _items_of_rows(low: Ints, high: Ints, num_rows: int) -> Ints:
    """Count the items of each row."""
    begin, end = (np.bincount(bounds, minlength=num_rows + 1) for bounds in (low, high))
    return np.cumsum(begin - end)[:-1]


def upload(arrays: dict[str, npt.NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Put the arrays on the device in one copy that nothing waits for, each on a 16-byte boundary."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    offsets = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for array in arrays.values())]).tolist()
    host = torch.empty(max(16, offsets[-1]), dtype=torch.uint8, pin_memory=True)
    target = host.numpy()
    for array, offset in zip(arrays.values(), offsets, strict=False):
        target[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    whole = host.to(device, non_blocking=True)
    kinds = {np.dtype(name): whole.view(getattr(torch, name)) for name in ("int32", "int64", "bool")}
    placed = {}
    for (name, array), offset in zip(arrays.items(), offsets, strict=False):
        flat = kinds[array.dtype].narrow(0, offset // array.itemsize, array.size)
        placed[name] = flat if array.ndim == 1 else flat.view(array.shape)
    return placed


def upload_together(parts: Sequence[Ints], device: torch.device) -> Sequence[torch.Tensor]:
    """Put arrays of whole numbers on the device as int64, all in one copy that nothing waits for."""
    lengths = [len(part) for part in parts]
    host = torch.empty(sum(lengths), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(parts, out=host.numpy())
    return host.to(device, non_blocking=True).split_with_sizes(lengths)
