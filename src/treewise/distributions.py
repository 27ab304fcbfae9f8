"""Next-token distributions of many rows out of their logits: on a GPU in one pass over them."""

from __future__ import annotations

from torch import Tensor

from treewise.ops import INTERPRETED
from treewise.sampler import Distributions, log_probs


def distributions(logits: Tensor) -> Distributions:
    """Return the distributions of raw `logits` [rows, vocab]."""
    if logits.is_cuda or INTERPRETED:
        # Imported here because Triton is not there on every machine, and reads TRITON_INTERPRET when imported.
        from treewise import peaks

        found, tops, totals = peaks.peaks_and_totals(logits)
        return Distributions(logits, tops, totals, found)
    return Distributions.of(log_probs(logits))
