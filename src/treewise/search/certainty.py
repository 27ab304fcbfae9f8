"""Self-certainty: how far the model's distributions are from knowing nothing."""

from __future__ import annotations

import math
from collections import defaultdict

from torch import Tensor

from treewise.config import SamplingParams
from treewise.controller import Sample


def self_certainty(logprobs: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of each distribution from the uniform one, ``KL(U || p)``, in nats.

    It is 0 for a model that thinks every token equally likely. Kang, Zhao and Song, "Scalable Best-of-N Selection for
    Large Language Models via Self-Certainty", 2025, whose measure of an answer is the mean over its tokens.

    Parameters
    ----------
    logprobs : Tensor [..., vocab] float32
        Natural log-probabilities.

    Returns
    -------
    Tensor [...] float32
    """
    return -logprobs.mean(dim=-1) - math.log(logprobs.shape[-1])


class CertaintySample(Sample):
    """Draw as `Sample` does, the same tokens, and keep the self-certainty of the distribution before each.

    Attributes
    ----------
    values : dict of tuple of int to list of float
        In nats, one a decoded token, by the paths of the branches.
    """

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params)
        self.values: dict[tuple[int, ...], list[float]] = defaultdict(list)
        self.observe = lambda path, certainty: self.values[path].append(certainty)

    def mean(self, path: tuple[int, ...]) -> float:
        """Return the mean over the tokens of a branch; 0 where none was decoded."""
        values = self.values.get(path, ())
        return sum(values) / max(len(values), 1)
