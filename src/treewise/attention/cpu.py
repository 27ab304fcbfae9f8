"""The CPU backend: one product a KV head for each work item, over all its rows at once, then a merge in fixed order.

An item whose slots are consecutive reads the pool in place; others gather their key tokens once for all their rows.
Items too small to be worth a product of their own are padded to a few common shapes and run in batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from treewise.attention.backend import FP8, AttentionSpec, Factors, Pair, Scoring, quantise, read
from treewise.plan import Plan
from treewise.plan.data import ENTRY, FREE_END, KV_END, KV_START, ROW_HIGH, ROW_LOW
from treewise.plan.partition import ALONE, BATCH
from treewise.plan.spec import Ints

MERGE = 1 << 22
"""Most elements of partial outputs that are merged at once."""


@dataclass(frozen=True)
class _Item:
    """One item that runs alone. Its places are those of its results, see `_Work`."""

    rows: slice
    slots: slice | torch.Tensor
    free: int  # leading key tokens that need no mask
    hidden: torch.Tensor | None  # [rows, key tokens after those]
    places: slice


@dataclass(frozen=True)
class _Batch:
    """Items of about one shape, padded; a padded row writes to the spare place, a padded key token is hidden."""

    rows: torch.Tensor  # [items, rows]
    slots: torch.Tensor  # [items, tokens]
    hidden: torch.Tensor | None  # [items, rows, tokens]
    places: torch.Tensor  # [items * rows]


@dataclass(frozen=True)
class _Work:
    """Results have a place each: first those of the rows, then the partial ones, then a spare one."""

    order: torch.Tensor  # [rows]
    alone: list[_Item]
    batches: list[_Batch]
    merged: torch.Tensor  # [merged rows]
    merge: torch.Tensor  # [merged rows, most partial results a row], places, padded with the spare one


class CPUBackend:
    """Runs every plan with torch on a CPU, in single precision whatever the pool holds."""

    name = "cpu"

    def unsupported(self, spec: AttentionSpec) -> list[str]:
        """See `AttentionBackend`."""
        return [] if spec.device.type == "cpu" else [f"it runs on a CPU, not on {spec.device}"]

    def run(
        self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `AttentionBackend`."""
        work = plan.prepared.get(self.name)
        if work is None:
            work = plan.prepared[self.name] = _prepare(plan)
        kv_heads, dim = plan.num_kv_heads, plan.head_dim
        rows = q.index_select(0, work.order).float().mul_(scoring.scale).view(plan.num_rows, kv_heads, -1, dim)
        if scoring.k_scale is not None:
            rows *= scoring.k_scale[:, None, None]
        spare = plan.num_rows + plan.num_entries
        out = torch.empty((spare + 1, *rows.shape[1:]))  # [places, kv_heads, group, dim]
        lse = torch.empty(out.shape[:-1])
        for item in work.alone:
            mine = rows[item.rows].transpose(0, 1)  # [kv_heads, rows, group, dim]
            # [kv_heads, tokens, dim]
            keys, values = (read(pool, item.slots, None, torch.float32).transpose(0, 1) for pool in (k, v))
            part, part_lse = _attend(mine, keys, values, item.hidden, item.free, scoring)
            out[item.places], lse[item.places] = part.transpose(0, 1), part_lse.transpose(0, 1)
        for batch in work.batches:
            count = len(batch.slots)
            mine = rows[batch.rows].transpose(1, 2).flatten(0, 1)  # [items * kv_heads, rows, group, dim]
            keys, values = (_gather(pool, batch.slots) for pool in (k, v))
            hidden = batch.hidden
            if hidden is not None and kv_heads > 1:
                hidden = hidden[:, None].expand(-1, kv_heads, -1, -1).flatten(0, 1)
            part, part_lse = _attend(mine, keys, values, hidden, 0, scoring)
            shape = (count, kv_heads, *part.shape[1:])
            out[batch.places] = part.view(shape).transpose(1, 2).flatten(0, 1)
            lse[batch.places] = part_lse.view(shape[:-1]).transpose(1, 2).flatten(0, 1)
        out[spare], lse[spare] = 0, -torch.inf  # after padded rows wrote to it
        if len(work.merged):
            out[work.merged], lse[work.merged] = _merge(out, lse, work.merge)
        out, lse = out[: plan.num_rows], lse[: plan.num_rows]
        if scoring.v_scale is not None:
            out *= scoring.v_scale[:, None, None]
        result, result_lse = torch.empty_like(q), torch.empty(q.shape[:2])
        result[work.order] = out.flatten(1, 2).to(q.dtype)
        result_lse[work.order] = lse.flatten(1, 2)
        return result, result_lse

    def store(self, new: Pair, pool: Pair, slots: torch.Tensor, factors: Factors = (None, None)) -> None:
        """See `AttentionBackend`."""
        for rows, target, factor in zip(new, pool, factors, strict=True):
            narrow = quantise(rows, target, factor)
            if target.dtype == FP8:  # not every operation knows the type
                narrow, target = narrow.view(torch.uint8), target.view(torch.uint8)
            target.index_copy_(0, slots, narrow)


def _attend(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    free: int,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from rows [batch, rows, group, dim], already scaled, to keys and values [batch, tokens, dim].

    ``hidden`` [(batch,) rows, tokens - free] tells which pairs to leave out. Returns the output, shaped as rows, and
    the LSE [batch, rows, group].
    """
    shape = rows.shape
    scores = torch.bmm(rows.reshape(shape[0], -1, shape[-1]), keys.transpose(1, 2))  # [batch, rows * group, tokens]
    scores = scoring.cap(scores)
    if hidden is not None:
        scores.view(*shape[:-1], -1)[..., free:].masked_fill_(hidden.unsqueeze(-2), -torch.inf)
    top = scores.amax(-1)
    weights = torch.softmax(scores, dim=-1)
    # The largest weight is exp(top - LSE), which spares a second pass over the exponentials.
    lse = top - weights.amax(-1).log_()
    if hidden is not None and free == 0:
        blind = top == -torch.inf  # softmax makes NaN of a row that sees nothing here; its part is empty
        if blind.any():
            weights.masked_fill_(blind[..., None], 0)
            lse.masked_fill_(blind, -torch.inf)
    return torch.bmm(weights, values).view(shape), lse.view(shape[:-1])


def _gather(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gather slots [items, tokens] of a pool as [items * kv_heads, tokens, dim]."""
    (items, tokens), (_, heads, dim) = slots.shape, pool.shape
    if heads > 1 and pool.is_contiguous():  # by head, which saves a second copy
        by_head = slots[:, None] * heads + torch.arange(heads)[:, None]
        return read(pool.view(-1, dim), by_head.flatten(), None, torch.float32).view(items * heads, tokens, dim)
    gathered = read(pool, slots.flatten(), None, torch.float32).view(items, tokens, heads, dim)
    return gathered.transpose(1, 2).reshape(items * heads, tokens, dim)


def _merge(out: torch.Tensor, lse: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge each row's places [rows, most]; one of LSE -inf changes nothing."""
    merged, merged_lse = [], []
    for some in entries.split(max(1, MERGE // (entries.shape[1] * out[0].numel()))):
        parts = lse[some]  # [rows, most, kv_heads, group]
        top = parts.amax(1, keepdim=True)
        weights = (parts - top.masked_fill(top == -torch.inf, 0)).exp_()
        total = weights.sum(1)
        weights /= total.masked_fill(total == 0, 1)[:, None]
        merged.append((out[some] * weights[..., None]).sum(1))
        merged_lse.append(total.log_() + top[:, 0].masked_fill(total == -torch.inf, 0))
    return torch.cat(merged), torch.cat(merged_lse)


def _prepare(plan: Plan) -> _Work:
    rows = plan.items[:, ROW_HIGH] - plan.items[:, ROW_LOW]
    tokens = plan.items[:, KV_END] - plan.items[:, KV_START]
    alone = rows.astype(np.int64) * tokens >= ALONE
    slots = torch.from_numpy(plan.kv_slots.astype(np.int64))
    small = np.flatnonzero(~alone)
    shapes = np.stack([_round_up(rows[small]), _round_up(tokens[small])], axis=1)
    kinds, kind = np.unique(shapes, axis=0, return_inverse=True)
    batches = []
    for number, (most_rows, most_tokens) in enumerate(kinds):
        members = small[kind.reshape(-1) == number]
        size = max(1, BATCH // int(most_tokens * plan.num_kv_heads * plan.head_dim))
        for first in range(0, len(members), size):
            batches.append(_batch(plan, members[first : first + size], int(most_rows), int(most_tokens)))
    counts = np.diff(plan.reduce_indptr)
    most = int(counts.max(initial=1))
    merge = np.full((len(counts), most), plan.num_rows + plan.num_entries)
    merge[np.arange(most) < counts[:, None]] = plan.num_rows + plan.reduce_entries
    return _Work(
        order=torch.from_numpy(plan.row_order.astype(np.int64)),
        alone=[_item(plan, item, slots) for item in np.flatnonzero(alone).tolist()],
        batches=batches,
        merged=torch.from_numpy(plan.reduce_rows.astype(np.int64)),
        merge=torch.from_numpy(merge),
    )


def _item(plan: Plan, number: int, slots: torch.Tensor) -> _Item:
    row_low, row_high, start, end, free, entry = plan.items[number, :6].tolist()
    place = row_low if entry < 0 else plan.num_rows + entry
    mine: slice | torch.Tensor = slots[start:end]
    if (
        plan.kv_slots[end - 1] - plan.kv_slots[start] == end - 1 - start
        and (np.diff(plan.kv_slots[start:end]) == 1).all()
    ):
        mine = slice(int(plan.kv_slots[start]), int(plan.kv_slots[end - 1]) + 1)
    hidden = None
    if free < end:
        hidden = torch.from_numpy(~plan.visible(number)[:, free - start :])
    return _Item(slice(row_low, row_high), mine, free - start, hidden, slice(place, place + row_high - row_low))


def _batch(plan: Plan, members: Ints, most_rows: int, most_tokens: int) -> _Batch:
    items = plan.items[members]
    row = items[:, ROW_LOW, None] + np.arange(most_rows)
    token = items[:, KV_START, None] + np.arange(most_tokens)
    no_row, no_token = row >= items[:, ROW_HIGH, None], token >= items[:, KV_END, None]
    row, token = np.where(no_row, items[:, ROW_LOW, None], row), np.where(no_token, items[:, KV_START, None], token)
    first = np.where(items[:, ENTRY] < 0, items[:, ROW_LOW], plan.num_rows + items[:, ENTRY])
    places = np.where(no_row, plan.num_rows + plan.num_entries, first[:, None] + np.arange(most_rows))
    hidden = None
    if no_token.any() or (items[:, FREE_END] < items[:, KV_END]).any():
        hidden = np.repeat(no_token[:, None], most_rows, axis=1)
        for place, number in enumerate(members):
            if plan.items[number, FREE_END] < plan.items[number, KV_END]:
                seen = plan.visible(int(number))
                hidden[place, : seen.shape[0], : seen.shape[1]] = ~seen
    return _Batch(
        rows=torch.from_numpy(row.astype(np.int64)),
        slots=torch.from_numpy(plan.kv_slots[token].astype(np.int64)),
        hidden=None if hidden is None else torch.from_numpy(hidden),
        places=torch.from_numpy(places.ravel()),
    )


def _round_up(sizes: Ints) -> Ints:
    """Round up to one of four sizes a power of two, at most a quarter larger."""
    unit = 2 ** np.maximum(np.frexp(sizes - 1)[1] - 3, 0)
    rounded: Ints = -(-sizes // unit) * unit
    return rounded
