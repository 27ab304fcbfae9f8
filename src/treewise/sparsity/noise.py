"""Random numbers that depend on what they are for, and on nothing else."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)
MASK = 0xFFFFFFFF


def mix(word: Word) -> Word:
    """Mix the lower 32 bits of numbers: a bijection, "lowbias32" of Chris Wellons' hash prospector."""
    # NOTE: products pass 2**63 and wrap round, which leaves their lower 32 bits right.
    word = word & MASK
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & MASK
    word = ((word ^ (word >> 15)) * 0x846CA68B) & MASK
    return word ^ (word >> 16)


def uniform(seed: int, layer: int, *indices: Tensor) -> Tensor:
    """Return numbers in (0, 1), each drawn for a seed, a layer and a number of each of the indices.

    Parameters
    ----------
    seed, layer : int
    indices : Tensor, int64
        They are broadcast against each other.

    Returns
    -------
    Tensor, float32
        Of their common shape; the same on every device.
    """
    word = mix(mix(mix(seed) ^ (seed >> 32)) ^ layer)
    words = torch.zeros((), dtype=torch.int64, device=indices[0].device) + word
    for index in indices:
        words = mix(words ^ index)
    return ((words >> 9).float() + 0.5) * 2.0**-23  # 24 bits, so that 1 is not rounded to
