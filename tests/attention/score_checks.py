"""What column sums must be on a CPU, under the interpreter and on a GPU alike, against double precision."""

from __future__ import annotations

from typing import NamedTuple

import torch
from matrix import ancestor_mask, eight_bit_pools, place

from treewise.attention import TreeSpec, plan_tree, run_plan
from treewise.attention.scores import REDUCTIONS, column_sums

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Case(NamedTuple):
    """Queries at some positions, in some layers, and keys at positions 0 to `tokens` - 1."""

    tokens: int
    q_positions: list[int]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    layers: int = 1
    soft_cap: float | None = None
    page_size: int | None = 16
    scale: float = 0.25

    def __str__(self) -> str:
        values = self._replace(q_positions=len(self.q_positions), heads="/".join(map(str, self.heads)))
        return "-".join(f"{name}={value}" for name, value in values._asdict().items() if value is not None)


def last(number: int, tokens: int) -> list[int]:
    """Positions of the last queries of a prompt."""
    return list(range(max(0, tokens - number), tokens))


CASES = [
    Case(1, [0], heads=(7, 1), page_size=None),
    Case(200, [199], heads=(8, 8), head_dim=64),  # one query, a whole tile and a part of one
    Case(128, [126]),  # sees all of a tile but its last
    Case(127, last(16, 127), heads=(6, 2), head_dim=80, page_size=1),
    Case(128, last(64, 128), heads=(4, 2), head_dim=64, layers=3),
    Case(129, last(64, 129), heads=(9, 3), head_dim=128, page_size=64),
    Case(257, last(70, 257), heads=(16, 1), head_dim=96, page_size=None),
    Case(150, last(150, 150), heads=(7, 1), head_dim=24),  # every query of a prompt
    Case(16, last(16, 16)),  # nothing but the causal corner
    Case(40, last(64, 40)),  # a window larger than the prompt
    Case(140, last(20, 140), head_dim=256, soft_cap=3.0, scale=2.0),
    Case(260, last(70, 260), layers=2),
    Case(300, last(300, 300), heads=(2, 1), soft_cap=5.0, page_size=None),
    Case(140, [500, 501, 502, 620, 621, 622, 700]),  # branches, all of them behind
    Case(150, [*last(9, 150), *last(30, 150), 170, 171, 172], heads=(6, 2)),  # some of them within
    Case(150, list(range(149, 60, -1))),  # backwards
    Case(90, [3, 5, 9]),  # most keys are seen by none
    Case(64, []),
    Case(0, [3, 4], page_size=None),
]


def dense_scores(q, k, q_positions, k_positions, scale, soft_cap=None):
    """Scores of all pairs in double precision, -inf where unseen: [layers, heads, queries, tokens]."""
    keys = k.double().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("lqhd,lkhd->lhqk", q.double(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return scores.masked_fill(k_positions > q_positions[:, None], -torch.inf)


def reduced(weights, num_kv_heads, reduce):
    """Column sums of weights [layers, heads, queries, tokens]."""
    by_head = weights.sum(2).unflatten(1, (num_kv_heads, -1))
    return {"mean": by_head.mean, "max": by_head.amax, "sum": by_head.sum}[reduce](2)


def close(found, expected, dtype):
    """Compare with double precision; a GPU sums products of half precision a little less precisely."""
    rough = found.is_cuda and dtype != torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4 if rough else 1e-5, atol=1e-5)


def agrees(case, device="cpu", dtype=torch.float32):
    """All reductions of a case, its keys gathered and scattered over a pool whose other slots hold NaN."""
    generator = torch.Generator().manual_seed(case.tokens)
    heads, kv_heads = case.heads
    slots, size = place(TreeSpec([-1], [max(1, case.tokens)], [0]), case.page_size, seed=1)
    slots = torch.as_tensor(slots[: case.tokens], device=device)
    q = torch.randn(case.layers, len(case.q_positions), heads, case.head_dim, generator=generator).to(device, dtype)
    keys = torch.randn(case.layers, case.tokens, kv_heads, case.head_dim, generator=generator).to(device, dtype)
    pool = torch.full((case.layers, size, kv_heads, case.head_dim), torch.nan, dtype=dtype, device=device)
    pool[:, slots] = keys
    at = torch.tensor(case.q_positions, dtype=torch.int64, device=device)
    positions = torch.arange(case.tokens, device=device)
    options = {"scale": case.scale, "soft_cap": case.soft_cap}
    scores = dense_scores(q, keys, at, positions, **options)
    lse = torch.logsumexp(scores, -1)  # of a query that sees nothing, -inf
    weights = torch.exp(scores - lse.nan_to_num(neginf=0)[..., None])
    lse = lse.float().transpose(1, 2)
    for reduce, k, where in zip(REDUCTIONS, (pool, keys, pool), (slots.int(), None, slots.long()), strict=True):
        found = column_sums(q, lse, k, at, positions, slots=where, reduce=reduce, **options)
        assert found.dtype == torch.float32
        expected = reduced(weights, kv_heads, reduce)
        close(found, expected, dtype)
    assert torch.equal(found, column_sums(q, lse, k, at, positions, slots=where, reduce=reduce, **options))


def eight_bits_are_read(device="cpu", dtype=torch.float32):
    """8-bit keys with a factor a head and layer, and without."""
    pools, factors, held = zip(*(eight_bit_pools(50, 2, 32, device) for _ in range(3)), strict=True)
    k, k_scale, keys = (torch.stack([both[0] for both in each]) for each in (pools, factors, held))
    q = torch.randn(3, 9, 6, 32, device=device).to(dtype)
    at, positions = torch.arange(41, 50, device=device), torch.arange(50, device=device)
    slots = torch.randperm(50, device=device)
    for factor, wide in ((k_scale, keys), (None, k.float())):
        scores = dense_scores(q, wide[:, slots], at, positions, 0.2)
        lse = torch.logsumexp(scores, -1)
        found = column_sums(
            q, lse.float().transpose(1, 2), k, at, positions, slots=slots, scale=0.2, k_scale=factor, reduce="max"
        )
        expected = reduced(torch.exp(scores - lse[..., None]), 2, "max")
        close(found, expected, dtype)


def any_view_will_do(device="cpu", dtype=torch.float32):
    """Queries out of a stack of queries, keys and values, layers within a slot, LSE and positions of a ring."""
    stacked = torch.randn(2, 9, 8, 16, device=device).to(dtype)
    q = stacked[:, 1:, :4]
    both = torch.randn(30, 2, 2, 2, 16, device=device).to(dtype)
    k = both[:, :, 0].transpose(0, 1)  # [layers, slots, kv_heads, head_dim]
    lse = torch.randn(4, 2, 9, device=device).permute(1, 2, 0)[:, 1:] + 4
    at, positions = torch.arange(22, 38, 2, device=device)[:8], torch.arange(60, device=device)[::2]
    found = column_sums(q, lse, k, at, positions, scale=0.25)
    scores = dense_scores(q, k, at, positions, 0.25)
    expected = reduced(torch.exp(scores - lse.double().transpose(1, 2)[..., None]), 2, "mean")
    close(found, expected, dtype)


def who_saw_nothing_gives_nothing(device="cpu"):
    """An LSE of -inf, as of rows that pad a batch, whatever the queries and positions."""
    q, k = torch.randn(1, 5, 4, 16, device=device), torch.randn(1, 9, 2, 16, device=device)
    lse = torch.full((1, 5, 4), 3.0, device=device)
    lse[0, [1, 4]] = -torch.inf
    at, positions = torch.full((5,), 9, device=device), torch.arange(9, device=device)
    found = column_sums(q, lse, k, at, positions, scale=0.25)
    some = [0, 2, 3]
    torch.testing.assert_close(found, column_sums(q[:, some], lse[:, some], k, at[some], positions, scale=0.25))
    assert not column_sums(q, torch.full_like(lse, -torch.inf), k, at, positions, scale=0.25).any()


def nodes_get_their_share_of_paths(spec, method, mask, backend, device="cpu", dtype=torch.float32):
    """Column sums of each node from the queries at it and below, by the LSE of whole paths, merged from many parts."""
    slots, size = place(spec, 16, seed=2)
    q = torch.randn(spec.num_queries, 6, 16, device=device).to(dtype)
    k, v = (torch.randn(size, 2, 16, device=device).to(dtype) for _ in range(2))
    plan = plan_tree(
        spec, method, num_heads=6, num_kv_heads=2, head_dim=16, slots=slots, mask=mask, row_tile=3, chunk=7,
        dtype=dtype, device=device,
    )  # fmt: skip
    _, lse = run_plan(plan, q, k, v, scale=0.3, return_lse=True, backend=backend)
    slots = torch.as_tensor(slots, device=device)
    seen = torch.from_numpy(ancestor_mask(spec)).to(device)
    nowhere = torch.zeros(1, dtype=torch.int64, device=device)
    scores = dense_scores(q[None], k[None, slots], nowhere, nowhere, 0.3)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    at, offsets = (torch.from_numpy(each).to(device) for each in (spec.query_node, spec.query_offset))
    for node, end in enumerate(spec.length.cumsum().tolist()):
        mine = slice(end - int(spec.length[node]), end)
        readers = ((at == node) | seen[:, mine].any(1)).nonzero()[:, 0]
        positions = torch.arange(mine.stop - mine.start, device=device)
        # Those further down are behind all of the node's tokens, each as far as its branch goes.
        behind = torch.where(at == node, offsets, len(positions) + at)[readers]
        found = column_sums(
            q[None, readers], lse[None, readers], k[None], behind, positions, slots=slots[mine], scale=0.3
        )
        expected = reduced(weights[:, :, :, mine], 2, "mean")
        close(found, expected, dtype)
