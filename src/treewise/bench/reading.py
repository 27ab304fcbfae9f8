"""The fastest way to read memory once, as a Triton kernel: what no attention kernel can beat."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

SHAPES = ((1024, 2, 8), (1024, 1, 4), (2048, 1, 4))
"""Words a step, steps a program, warps; the best of them counts."""


@triton.jit
def _read(source, sink, count, WORDS: tl.constexpr, STEPS: tl.constexpr):
    total = tl.zeros([WORDS], tl.int32)
    first = tl.program_id(0).to(tl.int64) * (WORDS * STEPS)
    for step in tl.static_range(STEPS):
        word = first + step * WORDS + tl.arange(0, WORDS)
        total += tl.load(source + word, mask=word < count, other=0)
    tl.store(sink + tl.program_id(0), tl.sum(total, 0))


def readers(nbytes: int, device: torch.device) -> list[Callable[[], object]]:
    """Make functions that each read so many bytes once, by kernels of different shapes."""
    source = torch.randint(-(2**31), 2**31 - 1, (max(1, nbytes // 4),), dtype=torch.int32, device=device)
    sink = torch.empty(-(-len(source) // 1024), dtype=torch.int32, device=device)

    def reader(words: int, steps: int, warps: int) -> Callable[[], object]:
        grid = (triton.cdiv(len(source), words * steps),)
        return lambda: _read[grid](source, sink, len(source), words, steps, num_warps=warps)

    return [reader(*shape) for shape in SHAPES]
