"""The slow reference: any plan, item by item in double precision, merged by LSE."""

from __future__ import annotations

import numpy as np
import torch

from treewise.attention.backend import AttentionSpec, Factors, Pair, Scoring, quantise, read
from treewise.plan import Plan
from treewise.plan.data import KV_END, KV_START, ROW_HIGH, ROW_LOW


class ReferenceBackend:
    """Runs every plan on every device, slowly, with nothing clever in it."""

    name = "reference"

    def unsupported(self, spec: AttentionSpec) -> list[str]:
        """See `AttentionBackend`."""
        return []

    def run(
        self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `AttentionBackend`."""
        order = torch.from_numpy(plan.row_order).long().to(q.device)
        rows = q[order].double()
        out = torch.zeros_like(rows)  # [rows, heads, dim]
        lse = torch.full(rows.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
        group_size = plan.num_heads // plan.num_kv_heads
        for number, item in enumerate(plan.items):
            mine = slice(item[ROW_LOW], item[ROW_HIGH])
            slots = torch.from_numpy(plan.kv_slots[item[KV_START] : item[KV_END]].astype(np.int64)).to(q.device)
            keys, values = (
                read(pool, slots, factor, torch.float64).repeat_interleave(group_size, dim=1)  # [tokens, heads, dim]
                for pool, factor in ((k, scoring.k_scale), (v, scoring.v_scale))
            )
            scores = scoring.cap(torch.einsum("rhd,thd->rht", rows[mine], keys) * scoring.scale)
            seen = torch.from_numpy(plan.visible(number)).to(q.device)
            scores = scores.masked_fill(~seen[:, None, :], -torch.inf)
            part_lse = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - part_lse.masked_fill(part_lse == -torch.inf, 0)[..., None])
            part = torch.einsum("rht,thd->rhd", weights, values)
            out[mine], lse[mine] = merge(out[mine], lse[mine], part, part_lse)
        result, result_lse = torch.empty_like(q), torch.empty_like(lse, dtype=torch.float32)
        result[order], result_lse[order] = out.to(q.dtype), lse.float()
        return result, result_lse

    def store(self, new: Pair, pool: Pair, slots: torch.Tensor, factors: Factors = (None, None)) -> None:
        """See `AttentionBackend`."""
        for rows, target, factor in zip(new, pool, factors, strict=True):
            narrow = quantise(rows, target, factor)
            for row, slot in enumerate(slots.tolist()):
                target[slot] = narrow[row]


def merge(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two partial softmax results over disjoint keys.

    Parameters
    ----------
    out, other_out : [..., dim]
        Partial outputs, each normalised over its own keys.
    lse, other_lse : [...]
        Their natural-log sums of exponentials; -inf where there was no key, which changes nothing.
    """
    total = torch.logaddexp(lse, other_lse)
    finite = total.masked_fill(total == -torch.inf, 0)
    mine, theirs = torch.exp(lse - finite), torch.exp(other_lse - finite)
    return out * mine[..., None] + other_out * theirs[..., None], total
