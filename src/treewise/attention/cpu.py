"""The CPU backend: one call of PyTorch's fused attention for each work item, or for many small ones, then a merge.

An item whose slots are consecutive reads the pool in place; others gather their key tokens once for all their rows.
Items too small to be worth a call of their own are padded to a few common shapes and run in batches. Partial results
are merged in fixed order.
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
class _Part:
    """Items of about one shape, padded, that run in one call; a padded key token is hidden."""

    queries: torch.Tensor  # [items * rows], the caller's
    slots: slice | torch.Tensor  # [items * tokens]
    items: int
    bias: torch.Tensor | None  # [items, rows, 1, tokens], 0 or -inf
    blind: torch.Tensor | None  # [items, 1, rows, 1], rows that see none of the tokens, if there are any


@dataclass(frozen=True)
class _Work:
    """The parts write their results one behind the other, the merged ones come last."""

    parts: list[_Part]
    merge: torch.Tensor  # [merged rows, most partial results a row], padded with the place behind all parts
    places: torch.Tensor  # [queries], where the caller's are


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
        rows = q.float().view(plan.num_rows, plan.num_kv_heads, -1, plan.head_dim)
        if scoring.k_scale is not None:
            rows = rows * scoring.k_scale[:, None, None]
        outs, lses = zip(*(_run(part, rows, k, v, scoring) for part in work.parts), strict=True)
        if len(work.merge):
            outs += (rows.new_zeros((1, *rows.shape[1:])),)
            lses += (rows.new_full((1, *rows.shape[1:-1]), -torch.inf),)
            out, lse = _merge(torch.cat(outs), torch.cat(lses), work.merge)
            outs, lses = (*outs, out), (*lses, lse)
        out = torch.cat(outs).index_select(0, work.places)  # [queries, kv_heads, group, dim]
        if scoring.v_scale is not None:
            out *= scoring.v_scale[:, None, None]
        out = out.flatten(1, 2).to(q.dtype)
        return out, torch.cat(lses).index_select(0, work.places).flatten(1) if return_lse else None

    def store(self, new: Pair, pool: Pair, slots: torch.Tensor, factors: Factors = (None, None)) -> None:
        """See `AttentionBackend`."""
        for rows, target, factor in zip(new, pool, factors, strict=True):
            narrow = quantise(rows, target, factor)
            if target.dtype == FP8:  # not every operation knows the type
                narrow, target = narrow.view(torch.uint8), target.view(torch.uint8)
            target.index_copy_(0, slots, narrow)


def _run(
    part: _Part, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with a part's rows of [queries, kv_heads, group, dim].

    Returns the output [items * rows, kv_heads, group, dim] and the LSE [items * rows, kv_heads, group].
    """
    _, heads, group, dim = rows.shape
    # [items, kv_heads, rows, group, dim]
    mine = rows.index_select(0, part.queries).view(part.items, -1, heads, group, dim).transpose(1, 2)
    # [items, kv_heads, tokens, dim]
    keys, values = (
        read(pool, part.slots, None, torch.float32).view(part.items, -1, heads, dim).transpose(1, 2) for pool in (k, v)
    )
    bias = None if part.bias is None else part.bias.expand(-1, -1, group, -1).flatten(1, 2).unsqueeze(1)
    out, lse = _attend(mine.flatten(2, 3), keys, values, bias, scoring)
    out, lse = out.view(mine.shape), lse.view(mine.shape[:-1])
    if part.blind is not None:
        out, lse = out.masked_fill(part.blind[..., None], 0), lse.masked_fill(part.blind, -torch.inf)
    return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _attend(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from rows [items, kv_heads, rows, dim] to keys and values [items, kv_heads, tokens, dim].

    ``bias`` [items, 1, rows, tokens] is added to the scores. Returns the output, shaped as rows, and the LSE, both of
    no meaning where a row sees nothing.
    """
    if scoring.soft_cap is None:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = attend(rows, keys, values, attn_mask=bias, scale=scoring.scale)
        return out, lse
    scores = scoring.cap(rows * scoring.scale @ keys.transpose(2, 3))
    if bias is not None:
        scores += bias
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)


def _merge(out: torch.Tensor, lse: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge each row's places [rows, most]; one of LSE -inf changes nothing."""
    merged, merged_lse = [], []
    for some in entries.split(max(1, MERGE // (entries.shape[1] * out[0].numel()))):
        parts = lse[some]  # [rows, most, kv_heads, group]
        total = parts.logsumexp(1, keepdim=True)
        weights = (parts - total.masked_fill(total == -torch.inf, 0)).exp_()
        merged.append((out[some] * weights[..., None]).sum(1))
        merged_lse.append(total[:, 0])
    return torch.cat(merged), torch.cat(merged_lse)


def _prepare(plan: Plan) -> _Work:
    rows = plan.items[:, ROW_HIGH] - plan.items[:, ROW_LOW]
    tokens = plan.items[:, KV_END] - plan.items[:, KV_START]
    alone = rows.astype(np.int64) * tokens >= ALONE
    calls = list(np.flatnonzero(alone)[:, None])
    small = np.flatnonzero(~alone)
    shapes = np.stack([_round_up(rows[small]), _round_up(tokens[small])], axis=1)
    kinds, kind = np.unique(shapes, axis=0, return_inverse=True)
    for number, (_, most_tokens) in enumerate(kinds):
        members = small[kind.reshape(-1) == number]
        size = max(1, BATCH // int(most_tokens * plan.num_kv_heads * plan.head_dim))
        calls += [members[first : first + size] for first in range(0, len(members), size)]
    place = np.empty(plan.num_rows + plan.num_entries, np.int64)  # of results: those of rows, then the partial ones
    parts, end = [], 0
    for members in calls:
        row, places = _rows(plan, members, int(rows[members].max()))
        place[places[places >= 0]] = end + np.flatnonzero(places >= 0)
        parts.append(_part(plan, members, row, int(tokens[members].max())))
        end += places.size
    counts = np.diff(plan.reduce_indptr)
    most = int(counts.max(initial=1))
    merge = np.full((len(counts), most), end)
    merge[np.arange(most) < counts[:, None]] = place[plan.num_rows + plan.reduce_entries]
    place[plan.reduce_rows] = end + 1 + np.arange(len(counts))
    places = np.empty(plan.num_rows, np.int64)
    places[plan.row_order] = place[: plan.num_rows]
    return _Work(parts, torch.from_numpy(merge), torch.from_numpy(places))


def _rows(plan: Plan, members: Ints, most: int) -> tuple[Ints, Ints]:
    """Return the rows of items, padded with the first, and which results they are, -1 where padded: [items, most]."""
    items, number = plan.items[members], np.arange(most)
    padded = number >= (items[:, ROW_HIGH] - items[:, ROW_LOW])[:, None]
    first = np.where(items[:, ENTRY] < 0, items[:, ROW_LOW], plan.num_rows + items[:, ENTRY])
    low = items[:, ROW_LOW, None]
    return np.where(padded, low, low + number), np.where(padded, -1, first[:, None] + number)


def _part(plan: Plan, members: Ints, row: Ints, most: int) -> _Part:
    items = plan.items[members]
    token = items[:, KV_START, None] + np.arange(most)
    padded = token >= items[:, KV_END, None]
    token = np.where(padded, items[:, KV_START, None], token)
    bias = blind = None
    if padded.any() or (items[:, FREE_END] < items[:, KV_END]).any():
        hidden = np.repeat(padded[:, None], row.shape[1], axis=1)
        for place, number in enumerate(members):
            if plan.items[number, FREE_END] < plan.items[number, KV_END]:
                seen = plan.visible(int(number))
                hidden[place, : seen.shape[0], : seen.shape[1]] = ~seen
        bias = torch.zeros((*row.shape, 1, most)).masked_fill_(torch.from_numpy(hidden)[:, :, None], -torch.inf)
        if (sightless := hidden.all(-1)).any():
            blind = torch.from_numpy(sightless)[:, None, :, None]
    slots = plan.kv_slots[token.ravel()]
    in_place = len(members) == 1 and (np.diff(slots) == 1).all()
    return _Part(
        queries=torch.from_numpy(plan.row_order[row.ravel()].astype(np.int64)),
        slots=slice(int(slots[0]), int(slots[-1]) + 1) if in_place else torch.from_numpy(slots.astype(np.int64)),
        items=len(members),
        bias=bias,
        blind=blind,
    )


def _round_up(sizes: Ints) -> Ints:
    """Round up to one of four sizes a power of two, at most a quarter larger."""
    unit = 2 ** np.maximum(np.frexp(sizes - 1)[1] - 3, 0)
    rounded: Ints = -(-sizes // unit) * unit
    return rounded
