"""How fast attention over a tree could be on the machine at hand, from rates measured in the same run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Protocol

import torch

from treewise.attention import TreeSpec
from treewise.bench.measure import copy_bandwidth, time_calls
from treewise.bench.trees import visible_lengths

LAUNCH = {"cuda": 5e-6, "cpu": 0.0}
"""Seconds that a kernel takes in graph replay whatever it does."""
MERGE = {"cuda": 1.5e-6, "cpu": 0.0}
"""Seconds that a kernel which waits for another takes at least."""
REACHED = 0.9
"""The share of the rate of a large matrix product that is within reach: 700 of 790 TFLOP/s on an H200."""


class Rates(Protocol):
    """How fast a device is: bytes a second of a large copy, and operations a second of a large matrix product."""

    @property
    def bandwidth(self) -> float:
        """See `Machine`."""

    @property
    def matrix(self) -> float:
        """See `Machine`."""


@dataclass
class Machine:
    """The rates of a device, measured once.

    Attributes
    ----------
    bandwidth : float
        Bytes a second that a large copy moves, reads and writes together.
    matrix : float
        Operations a second of a large matrix product.
    """

    device: torch.device
    dtype: torch.dtype
    bandwidth: float = field(init=False)
    matrix: float = field(init=False)
    reads: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Measure the rates."""
        self.bandwidth = copy_bandwidth(self.device)
        self.matrix = matrix_rate(self.device, self.dtype)

    def read_time(self, nbytes: int) -> float:
        """Time the fastest kernel that only reads so many bytes, cold on a CUDA device; measured once a size."""
        if nbytes not in self.reads:
            if self.device.type == "cuda":
                from treewise.bench.reading import readers

                tried = readers(nbytes, self.device)
            else:
                source = torch.ones(max(1, nbytes // 4))
                tried = [lambda: source.sum()]
            self.reads[nbytes] = min(statistics.median(time_calls(read, self.device, 21)) for read in tried)
        return self.reads[nbytes]

    def floors_us(self, tree: TreeSpec, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, float]:
        """Bound the time of one layer's attention over a tree from below, in microseconds.

        Returns
        -------
        dict
            ``floor_us``: keys and values, each once, at the bandwidth of a large copy. ``flop_floor_us``: the products
            of every query with what it sees, and of the weights with the values, at nine tenths of the matrix rate.
            ``practical_floor_us``: the larger of a kernel that only reads those bytes and a launch with those products,
            plus a merge.
        """
        nbytes = 2 * tree.num_tokens * num_kv_heads * head_dim * self.dtype.itemsize
        pairs = int(visible_lengths(tree).sum())
        products = 4 * pairs * num_heads * head_dim / (REACHED * self.matrix)
        kind = self.device.type
        practical = max(self.read_time(nbytes), products + LAUNCH[kind]) + MERGE[kind]
        floors = {"floor_us": nbytes / self.bandwidth, "flop_floor_us": products, "practical_floor_us": practical}
        return {name: seconds * 1e6 for name, seconds in floors.items()}


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations a second of a large matrix product of random numbers."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / statistics.median(time_calls(lambda: torch.mm(left, right, out=out), device, 10))
