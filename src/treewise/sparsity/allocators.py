"""How many tokens each layer keeps, and each head of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treewise.config import check_integer, check_number
from treewise.sparsity.select import ranked

BISECTIONS = 64
"""Steps to the factor by which weights become shares: to the last bit of it."""


class Allocator(Protocol):
    """Spreads a budget over layers, and a layer's over its KV heads.

    Attributes
    ----------
    per_head : bool
        Whether the heads of a layer may keep different numbers of tokens.
    """

    @property
    def per_head(self) -> bool: ...  # noqa: D102

    def layers(self, tokens: int, budget: int, num_layers: int, least: int = 1) -> list[int]:
        """Return how many tokens each layer keeps: together exactly ``num_layers * min(budget, tokens)``.

        Parameters
        ----------
        tokens : int
            How many there are; a layer keeps no more.
        budget : int
            Of a layer, in the mean, at least `least`.
        num_layers : int
        least : int
            What a layer keeps whatever happens, at most `tokens`: the recent window and the sinks.
        """

    def heads(self, scores: Sequence[Tensor], budget: int, layer: int) -> list[int]:
        """Return how many tokens each KV head of a layer keeps: together exactly ``kv_heads * budget``.

        Parameters
        ----------
        scores : sequence of Tensor [tokens], float32
            Of each KV head's tokens, which may be of different numbers: finite, but infinite where they have to stay.
        budget : int
            Of a head, in the mean; there are as many tokens.
        layer : int
            Which of the layers it is.
        """


def round_to(total: int, shares: Sequence[float]) -> list[int]:
    """Round shares that sum to `total` so that they still do, by the largest-remainder method; lower indices first.

    >>> round_to(10, [3.5, 3.5, 3.0])
    [4, 3, 3]
    """
    whole = [math.floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda index: whole[index] - shares[index])
    for index in order[: total - sum(whole)]:
        whole[index] += 1
    return whole


def round_in_stairs(total: int, shares: Sequence[float], stairs: int) -> list[int]:
    """Make shares that sum to `total` equal in each of `stairs` stretches of neighbours, and round them together.

    Stretches get another one each by the largest remainders; where that does not come out even, only the first shares
    of the last of them do.

    >>> round_in_stairs(21, [8, 6, 4, 3], stairs=2)
    [7, 7, 4, 3]
    """
    bounds = [round(stair * len(shares) / stairs) for stair in range(stairs + 1)]
    means = [sum(shares[low:high]) / (high - low) for low, high in pairwise(bounds)]
    whole = [math.floor(means[stair]) for stair in range(stairs) for _ in range(bounds[stair], bounds[stair + 1])]
    left = total - sum(whole)
    for stair in sorted(range(stairs), key=lambda stair: math.floor(means[stair]) - means[stair]):
        low, high = bounds[stair], bounds[stair + 1]
        for index in range(low, min(high, low + left)):
            whole[index] += 1
        left = max(0, left - (high - low))
    return whole


def spread(total: int, weights: Sequence[float], low: Sequence[int], high: Sequence[int]) -> list[int]:
    """Share `total` out in proportion to positive weights, each share a whole number within bounds of its own.

    >>> spread(10, [5, 3, 1, 1], low=[1, 1, 1, 1], high=[4, 4, 4, 4])
    [4, 4, 1, 1]
    """
    lower, upper = 0.0, max(high) / min(weights)
    for _ in range(BISECTIONS):
        factor = (lower + upper) / 2
        shares = [
            min(max(factor * weight, least), most) for weight, least, most in zip(weights, low, high, strict=True)
        ]
        lower, upper = (factor, upper) if sum(shares) < total else (lower, factor)
    return round_to(total, shares)


class EvenHeads:
    """The part of an allocator whose heads all keep the same number of tokens."""

    per_head: ClassVar[bool] = False

    def heads(self, scores: Sequence[Tensor], budget: int, layer: int) -> list[int]:
        """See `Allocator.heads`."""
        return [budget] * len(scores)


@dataclass(frozen=True)
class Full(EvenHeads):
    """Every layer keeps everything, whatever the budget."""

    def layers(self, tokens: int, budget: int, num_layers: int, least: int = 1) -> list[int]:
        """See `Allocator.layers`."""
        return [tokens] * num_layers


@dataclass(frozen=True)
class Uniform(EvenHeads):
    """Every layer keeps the same."""

    def layers(self, tokens: int, budget: int, num_layers: int, least: int = 1) -> list[int]:
        """See `Allocator.layers`."""
        return [min(tokens, budget)] * num_layers


@dataclass(frozen=True)
class Pyramid(EvenHeads):
    """Less from layer to layer, on a straight line.

    PyramidKV (Cai et al., 2024, arXiv 2406.02069). Of what may go, ``C = budget - least`` of ``N = tokens - least``,
    the last layer keeps ``m = C / beta`` and the first ``M = 2 C - m``; where that is more than there is, ``M = N`` and
    ``m = 2 C - N``. Shares are rounded together, not each by itself, so that small budgets are not overspent.

    Attributes
    ----------
    beta : float
        How steep it is, in [1, 1e6]; 1 is flat.
    stairs : int or None
        Make the line one of so many stairs: neighbouring layers that keep as many tokens are planned, scored and read
        together, which takes a fraction of the time. None for the paper's line.
    """

    beta: float = 20.0
    stairs: int | None = 8

    def __post_init__(self) -> None:
        check_number("beta", self.beta, 1, 1e6)
        if self.stairs is not None:
            check_integer("stairs", self.stairs, 1, also=" or None")

    def layers(self, tokens: int, budget: int, num_layers: int, least: int = 1) -> list[int]:
        """See `Allocator.layers`."""
        available, mean = tokens - least, budget - least
        if mean >= available or num_layers == 1:
            return [min(tokens, budget)] * num_layers
        first = min(2 * mean - mean / self.beta, available)
        step = 2 * (first - mean) / (num_layers - 1)
        line = [max(0.0, first - layer * step) for layer in range(num_layers)]
        stairs = num_layers if self.stairs is None else min(self.stairs, num_layers)
        return [least + share for share in round_in_stairs(num_layers * mean, line, stairs)]


@dataclass(frozen=True)
class Ada:
    """More for the KV heads of a layer whose best tokens have the higher scores.

    Ada-KV (Feng et al., 2024, arXiv 2407.11550): the best ``kv_heads * budget`` of all tokens of all heads of the layer
    count for their heads, and a head gets ``(1 - floor) * count + floor * budget``; where a head has fewer tokens than
    the budget, the others share the rest of its part evenly. It compares the scores of different heads, so that they
    have to mean the same in all of them, as shares of attention do. Where heads are on several devices, these have to
    exchange their scores.

    Attributes
    ----------
    floor : float
        Part of the budget that is shared out evenly, in [0, 1].
    over : Allocator
        Spreads the budget over the layers.
    """

    floor: float = 0.2
    over: Allocator = Uniform()

    per_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("floor", self.floor, 0, 1)

    def layers(self, tokens: int, budget: int, num_layers: int, least: int = 1) -> list[int]:
        """See `Allocator.layers`."""
        return self.over.layers(tokens, budget, num_layers, least)

    def heads(self, scores: Sequence[Tensor], budget: int, layer: int) -> list[int]:
        """See `Allocator.heads`."""
        num_heads, total = len(scores), len(scores) * budget
        # Position by position, so that of equal scores the lower position wins, in whichever head.
        best = ranked(pad_sequence(list(scores), padding_value=-torch.inf).flatten())[:total] % num_heads
        counts = torch.bincount(best, minlength=num_heads).tolist()
        evenly = spread(total, [1] * num_heads, low=[0] * num_heads, high=[len(row) for row in scores])
        return round_to(total, [(1 - self.floor) * x + self.floor * y for x, y in zip(counts, evenly, strict=True)])


@dataclass(frozen=True)
class Table:
    """What somebody has found out before: tokens for each layer, or for each KV head of each layer.

    The policy's budget does not count.

    Attributes
    ----------
    rows : tuple
        For each layer how many tokens it keeps; a tuple of such numbers, one for each KV head, whose mean is a whole
        number; or None for all tokens. A prompt that has fewer than a head's number leaves more to the other heads.
    """

    rows: tuple[int | tuple[int, ...] | None, ...]

    def __post_init__(self) -> None:
        for layer, row in enumerate(self.rows):
            for count in row if isinstance(row, tuple) else (row,) if row is not None else ():
                check_integer(f"rows[{layer}]", count, 1, also=" or None")
            if isinstance(row, tuple) and (not row or sum(row) % len(row)):
                raise ValueError(f"rows[{layer}] must have a whole number as its mean, not {row!r}")

    @property
    def per_head(self) -> bool:
        """Whether there is a row with numbers for heads."""
        return any(isinstance(row, tuple) for row in self.rows)

    def layers(self, tokens: int, budget: int, num_layers: int, least: int = 1) -> list[int]:
        """See `Allocator.layers`; the sum is the table's own.

        Raises
        ------
        ValueError
            If the table has another number of layers.
        """
        if num_layers != len(self.rows):
            raise ValueError(f"rows must be {num_layers}, one for each layer, not {len(self.rows)}")
        means = [sum(row) // len(row) if isinstance(row, tuple) else row for row in self.rows]
        return [tokens if mean is None else max(least, min(tokens, mean)) for mean in means]

    def heads(self, scores: Sequence[Tensor], budget: int, layer: int) -> list[int]:
        """See `Allocator.heads`."""
        row = self.rows[layer]
        if not isinstance(row, tuple):
            return [budget] * len(scores)
        if len(row) != len(scores):
            raise ValueError(f"rows[{layer}] must have {len(scores)} numbers, one for each KV head, not {len(row)}")
        least, most = [int(head.isinf().sum()) for head in scores], [len(head) for head in scores]
        return spread(len(row) * budget, row, least, most)


@dataclass(frozen=True)
class FirstFull:
    """The first layers keep everything; another allocator spreads the budget over the others, as if alone.

    Attributes
    ----------
    count : int
        How many layers keep everything; fewer than there are.
    then : Allocator
    """

    count: int
    then: Allocator

    @property
    def per_head(self) -> bool:
        """Whether it is so in the other layers."""
        return self.then.per_head

    def layers(self, tokens: int, budget: int, num_layers: int, least: int = 1) -> list[int]:
        """See `Allocator.layers`; the budget is that of the other layers.

        Raises
        ------
        ValueError
            If there are no other layers.
        """
        if self.count >= num_layers:
            raise ValueError(f"first_full must be less than the {num_layers} layers there are, not {self.count}")
        return [tokens] * self.count + self.then.layers(tokens, budget, num_layers - self.count, least)

    def heads(self, scores: Sequence[Tensor], budget: int, layer: int) -> list[int]:
        """See `Allocator.heads`."""
        return [budget] * len(scores) if layer < self.count else self.then.heads(scores, budget, layer - self.count)


ALLOCATORS: dict[str, Callable[[], Allocator]] = {"full": Full, "uniform": Uniform, "pyramid": Pyramid, "ada": Ada}
"""Those that can be chosen by name; a `Table` is given as it is."""
