"""Beam search in groups that keep away from each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from treewise.config import BeamSearchParams
from treewise.controller import BeamSearch, Leaf, Ranking, Rows, TreeView
from treewise.sampler import Distributions


class DiverseBeamSearch(Ranking):
    """Diverse beam search: groups of beams, each a `BeamSearch` that avoids the tokens of the groups before it.

    Vijayakumar et al., "Diverse Beam Search: Decoding Diverse Solutions from Neural Sequence Models", 2016, with the
    Hamming distance. At each place the groups choose in order, and a token costs `diversity_penalty` for every beam of
    an earlier group that goes on with it there. As in Transformers, what a hypothesis has paid stays in its score, and
    each group keeps its own ``beam_width / num_beam_groups`` best hypotheses and ends by itself. An ended group costs
    the others nothing.

    Parameters
    ----------
    params : BeamSearchParams
    starts : sequence of tuple of int
        Paths of the branches from which the groups start, one a group; none the beginning of another.
    """

    def __init__(self, params: BeamSearchParams, starts: Sequence[tuple[int, ...]]) -> None:
        self.stopping = params.stopping
        self.penalty = params.diversity_penalty
        self.starts = list(starts)
        width = params.beam_width // params.num_beam_groups
        self.search = BeamSearch(
            replace(params, beam_width=width, num_beam_groups=1, diversity_penalty=0.0, num_return_sequences=None)
        )
        self._paid: list[dict[tuple[int, ...], float]] = [{} for _ in self.starts]  # by the tokens of a path

    def scores(
        self,
        paths: Sequence[tuple[int, ...]],
        tokens: Iterable[Sequence[int]],
        logprobs: Sequence[float],
        num_tokens: Sequence[int],
    ) -> list[float]:
        """Length-penalised scores of hypotheses, less what they have paid.

        Parameters
        ----------
        paths : sequence of tuple of int
            Of their branches.
        tokens : iterable of sequence of int
            Of each path, behind the prompt; not looked at where there is nothing to pay.
        logprobs : sequence of float
            Summed over the tokens that the search decoded.
        num_tokens : sequence of int
            How many those are.
        """
        totals = np.array(logprobs, np.float64)
        if self.penalty:
            own = zip(paths, tokens, strict=True)
            totals -= [self._paid[self._group(path)].get(tuple(each), 0.0) for path, each in own]
        return cast(list[float], self.search.score(totals, np.array(num_tokens, np.float64)).tolist())

    def best(self, paths: Sequence[tuple[int, ...]], scores: Sequence[float]) -> list[int]:
        """Return which of some hypotheses are the best, the best first: of a group as many as it has beams."""
        places: list[int] = []
        taken = [0] * len(self.starts)
        for place in sorted(range(len(scores)), key=lambda i: -scores[i]):
            group = self._group(paths[place])
            if taken[group] < self.search.params.beam_width:
                taken[group] += 1
                places.append(place)
        return places

    def rank(self, tree: TreeView, distributions: Distributions) -> Rows:
        """Choose the rows of each group, in the groups' order."""
        if len(self.starts) == 1:
            return self.search.rank(tree, distributions)
        logprobs = distributions.logprobs
        groups = [self._group(leaf.path) for leaf in tree.leaves]
        finished = [(self._group(leaf.path), leaf) for leaf in tree.finished]
        rows: list[tuple[int, int]] = []
        penalties: Tensor | None = None  # [vocab], once a group has chosen
        for group, paid in enumerate(self._paid):
            places = [place for place, own in enumerate(groups) if own == group]
            if not places:
                continue
            view = TreeView(
                [self._indebted(tree.leaves[place], paid) for place in places],
                tree.logits,  # beam search reads the log-probs only
                tree.depth,
                [self._indebted(leaf, paid) for own, leaf in finished if own == group],
                tree.eos_token_ids,
            )
            mine = logprobs if len(places) == len(groups) else logprobs[places]  # wide beams are not copied
            selection = self.search.select(view, Distributions.of(mine if penalties is None else mine - penalties))
            for parent, token in zip(selection.rows.parent.tolist(), selection.rows.token.tolist(), strict=True):
                rows.append((places[parent], token))
                if paid or penalties is not None:
                    tokens = tree.leaves[places[parent]].tokens
                    cost = 0.0 if penalties is None else float(penalties[token])
                    paid[*tokens, token] = paid.get(tuple(tokens), 0.0) + cost
            if self.penalty:
                penalties = torch.zeros_like(logprobs[0]) if penalties is None else penalties
                for token in selection.beams.token.tolist():
                    penalties[token] += self.penalty
        return Rows([parent for parent, _ in rows], [token for _, token in rows])

    def _group(self, path: tuple[int, ...]) -> int:
        if len(self.starts) == 1:
            return 0
        return next(i for i, start in enumerate(self.starts) if path[: len(start)] == start)

    @staticmethod
    def _indebted(leaf: Leaf, paid: dict[tuple[int, ...], float]) -> Leaf:
        return replace(leaf, logprob=leaf.logprob - paid.get(tuple(leaf.tokens), 0.0)) if paid else leaf
