"""A Triton kernel of column sums: key tokens stay on chip while queries pass by.

The product is key tokens × queries, so that what a key token got is the sum of a row, which one program holds: programs
add nothing to each other's results, and the same inputs give the same bits. Element offsets are 64-bit.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from treewise.attention.backend import FP8, power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)
SCANNED = 1024
"""Queries whose positions a program looks at together."""


def sum_columns(
    q: torch.Tensor,
    lse: torch.Tensor,
    k: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    slots: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    k_scale: torch.Tensor | None,
    reduce: str,
) -> torch.Tensor:
    """See `treewise.attention.scores.column_sums`."""
    layers, queries, heads, dim = q.shape
    kv_heads, tokens = k.shape[2], len(k_positions)
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or k.dtype not in (q.dtype, FP8):
        raise ValueError(
            f"q must be float32, float16 or bfloat16, and k of q's dtype or {FP8}; they are {q.dtype} and {k.dtype}"
        )
    if dim > 256:
        raise ValueError(f"head_dim is {dim}; the kernel holds up to 256")
    q, lse, k = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, lse, k))
    scale_log2, cap_log2 = scale * LOG2_E.value, 0.0
    if soft_cap is not None:
        scale_log2, cap_log2 = 2 * scale_log2 / soft_cap, soft_cap * LOG2_E.value
    k_scale = None if k_scale is None else k_scale.contiguous()
    tile = tiles(dim, q.element_size(), queries)
    out = torch.empty((layers, kv_heads, tokens), dtype=torch.float32, device=q.device)
    sum_of_queries[(triton.cdiv(tokens, tile["TOKENS"]) * kv_heads, layers)](
        q, lse, k, k_scale, slots, q_positions.contiguous(), k_positions.contiguous(), out,
        queries, tokens, scale_log2, cap_log2, *q.stride()[:3], *lse.stride()[:2], *k.stride()[:3],
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, **tile, CAPPED=soft_cap is not None, REDUCE=reduce,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return out


def tiles(dim: int, element_size: int, queries: int) -> dict[str, int]:
    """Return the sizes of the tiles of `sum_of_queries`: of the head, of key tokens, and of queries in two loops."""
    dim_pad = max(16, power_of_2(dim))
    few = max(16, power_of_2(queries))
    return {
        "DIM_PAD": dim_pad,
        "TOKENS": min(128, 2**15 // (dim_pad * element_size)),
        "QUERIES": min(few, 32 if element_size > 2 else 64),
        "SCANNED": min(few, SCANNED),
        "STAGES": 2,
    }


@triton.jit
def sum_of_queries(
    q, lse, k, k_scale, slots, q_positions, k_positions, out,
    num_queries, num_tokens, scale_log2, cap_log2, q_layer, q_row, q_head, lse_layer, lse_row, k_layer, k_slot, k_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TOKENS: tl.constexpr,
    QUERIES: tl.constexpr, SCANNED: tl.constexpr, CAPPED: tl.constexpr, REDUCE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sum what TOKENS key tokens of a KV head got: grid (tiles of key tokens × KV heads, layers)."""
    kv_head = tl.program_id(0) % KV_HEADS
    layer = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) // KV_HEADS * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    place = token.to(tl.int64)
    if slots is not None:
        place = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
    dim = tl.arange(0, DIM_PAD)
    keys = tl.load(
        k + layer * k_layer + kv_head * k_head + place[:, None] * k_slot + dim[None, :],
        mask=inside[:, None] & (dim < DIM)[None, :], other=0.0,
    ).to(q.dtype.element_ty)  # [tokens, dim]  # fmt: skip
    spot = tl.load(k_positions + token, mask=inside, other=0).to(tl.int32)
    first = tl.min(tl.where(inside, spot, 2**31 - 1), 0)
    last = tl.max(tl.where(inside, spot, -(2**31)), 0)
    # Only queries from `low` on see any of these key tokens, and those from `free` on all of them.
    low, free = num_queries, 0
    for start in range(0, num_queries, SCANNED):
        row = start + tl.arange(0, SCANNED)
        valid = row < num_queries
        position = tl.load(q_positions + row, mask=valid, other=0).to(tl.int32)
        low = tl.minimum(low, tl.min(tl.where(valid & (position >= first), row, num_queries), 0))
        free = tl.maximum(free, tl.max(tl.where(valid & (position < last), row + 1, 0), 0))
    if k_scale is not None:
        scale_log2 *= tl.load(k_scale + layer * KV_HEADS + kv_head)
    factor = cap_log2 if CAPPED else scale_log2
    sums = tl.zeros([TOKENS], tl.float32)
    most = tl.zeros([TOKENS], tl.float32)  # of the heads that are done
    q += layer * q_layer + kv_head * GROUP * q_head
    lse += layer * lse_layer + kv_head * GROUP
    column = tl.arange(0, QUERIES)
    head, start = 0, low
    for _ in tl.range(0, GROUP * tl.cdiv(num_queries - low, QUERIES), num_stages=STAGES):
        valid = start + column < num_queries
        queries = tl.load(
            q + head * q_head + start.to(tl.int64) * q_row + column[None, :] * q_row + dim[:, None],
            mask=valid[None, :] & (dim < DIM)[:, None], other=0.0,
        )  # [dim, queries]  # fmt: skip
        logs = tl.load(lse + start.to(tl.int64) * lse_row + head + column * lse_row, mask=valid, other=0.0)
        logs = tl.where(valid & (logs > float("-inf")), logs, float("inf"))  # who sees nothing gives nothing
        scores = tl.dot(keys, queries, input_precision=PRECISION)
        if CAPPED:  # cap * tanh(x) with 1 - 2 / (exp(2 x) + 1), which overflows to the right limits
            scores = 1.0 - 2.0 / (tl.exp2(scores * scale_log2) + 1.0)
        scores = scores * factor - (logs * LOG2_E)[None, :]
        if start < free:
            position = tl.load(q_positions + start + column, mask=valid, other=0).to(tl.int32)
            scores = tl.where(spot[:, None] <= position[None, :], scores, float("-inf"))
        sums += tl.sum(tl.exp2(scores), 1)
        start += QUERIES
        ends = start >= num_queries  # on to the next head
        head, start = head + ends.to(tl.int32), tl.where(ends, low, start)
        if REDUCE == "max":
            most = tl.where(ends, tl.maximum(most, sums), most)
            sums = tl.where(ends, 0.0, sums)
    if REDUCE == "max":
        sums = most
    elif REDUCE == "mean":
        sums = sums / GROUP
    tl.store(out + (layer * KV_HEADS + kv_head) * num_tokens + token, sums, mask=inside)
