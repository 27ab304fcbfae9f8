"""Token-level policy: `step(tree, logprobs) -> Rows | None` says which tokens continue which leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewise.config import BeamSearchParams, SamplingParams
from treewise.constraint import Constraint
from treewise.replay import Schedule, Span
from treewise.sampler import SamplingRow, sample
from treewise.text import Detokenizer


class Rows(NamedTuple):
    """The next frontier: row ``i`` continues live leaf ``parent[i]`` with ``token[i]``.

    A leaf that no row names is pruned; a leaf named more than once branches, its children in the order of the rows.
    """

    parent: Sequence[int] | NDArray[Any] | Tensor  # [rows]
    token: Sequence[int] | NDArray[Any] | Tensor  # [rows]

    def pairs(self, num_leaves: int, vocab_size: int) -> list[tuple[int, int]]:
        """Return the rows as ``(parent, token)`` pairs.

        Raises
        ------
        ValueError
            A parent is not a live leaf, a token is not in the vocabulary, or the two lists differ in length.
        """
        parents, tokens = (
            values.tolist() if isinstance(values, Tensor | np.ndarray) else list(values) for values in self
        )
        if len(parents) != len(tokens):
            raise ValueError(f"Rows: parent and token must be equally long, not {len(parents)} and {len(tokens)}")
        for name, values, size in (("parent", parents, num_leaves), ("token", tokens, vocab_size)):
            for value in values:
                if not 0 <= value < size:
                    raise ValueError(f"Rows.{name} must be in [0, {size - 1}], not {value}")
        return list(zip(parents, tokens, strict=True))


@dataclass
class Leaf:
    """A leaf as a controller sees it.

    Attributes
    ----------
    logprob : float
        Summed over the tokens that this operation decoded on the leaf's path.
    tokens : list of int
        All tokens on the leaf's path behind the prompt, those of earlier operations included.
    prompt_tokens : list of int
        The prompt's tokens.
    path : tuple of int
        Child ordinals from the root.
    num_tokens : int
        Tokens that this operation decoded on the leaf's path.
    key : int
        Key of the branch's random stream, see `treewise.sampler.row_key`.
    room : int or None
        Tokens that may still be decoded before ``max_tokens`` or the end of the context finishes the leaf;
        ``None``: no such end.
    detokenizer : Detokenizer or None
        The leaf's text; controllers read it only.
    constraint : Constraint or None
        How far the text has come in the grammar of `Controller.stopping`; controllers read it only.
    """

    logprob: float = 0.0
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    path: tuple[int, ...] = ()
    num_tokens: int = 0
    key: int = 0
    room: int | None = None
    detokenizer: Detokenizer | None = None
    constraint: Constraint | None = None


@dataclass
class TreeView:
    """One operation's tree as a controller sees it.

    Attributes
    ----------
    leaves : list of Leaf
        Live leaves, in the order of the rows that made them.
    logits : Tensor [leaves, vocab] float32
        Raw logits of each live leaf's next token; ``-inf`` where a grammar does not let it come.
    depth : int
        Tokens decoded by this operation on the path of each live leaf.
    finished : list of Leaf
        Leaves that ended in this operation, in the order in which they ended.
    eos_token_ids : frozenset of int
        The model's own end-of-text ids.
    """

    leaves: list[Leaf]
    logits: Tensor
    depth: int = 0
    finished: list[Leaf] = field(default_factory=list)
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def num_finished(self) -> int:
        """How many leaves ended in this operation."""
        return len(self.finished)


class Controller(Protocol):
    """Decides, step by step, how a tree of tokens grows.

    The engine itself ends a leaf as `stopping` says (end of text, ``stop_token_ids``, ``stop``, ``max_tokens``) or at
    the end of the context, and takes it out of the live leaves.
    """

    @property
    def stopping(self) -> SamplingParams:
        """When a leaf ends."""

    def step(self, tree: TreeView, logprobs: Tensor) -> Rows | None:
        """Choose the next rows.

        Parameters
        ----------
        tree : TreeView
            The live leaves and what is known about them.
        logprobs : Tensor [leaves, vocab] float32
            Natural log-probabilities of each live leaf's next token, normalised over the whole vocabulary; ``-inf``
            where a grammar does not let it come.

        Returns
        -------
        Rows or None
            The next frontier; ``None`` ends the operation and leaves the live leaves as they are.
        """


class Drawing:
    """A controller that continues every leaf with one token drawn as `params` says.

    The engine draws for all such controllers of a step at once, without calling `step`.
    """

    params: SamplingParams
    stopping: SamplingParams


class Sample(Drawing):
    """Continue every leaf with one token drawn as `params` says."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = self.stopping = params

    def step(self, tree: TreeView, logprobs: Tensor) -> Rows:
        """Draw from the raw logits: penalties and cuts come before their own normalisation."""
        rows = [
            SamplingRow(
                params=self.params,
                key=leaf.key,
                position=len(leaf.prompt_tokens) + len(leaf.tokens),
                num_tokens=leaf.num_tokens,
                prompt_tokens=leaf.prompt_tokens,
                output_tokens=leaf.tokens,
            )
            for leaf in tree.leaves
        ]
        return Rows(range(len(rows)), sample(tree.logits, rows, tree.eos_token_ids))


class Greedy(Drawing):
    """Continue every leaf with its most likely token: the smallest controller there is."""

    params = SamplingParams(temperature=0.0)

    def __init__(self, stopping: SamplingParams | None = None) -> None:
        self.stopping = SamplingParams() if stopping is None else stopping

    def step(self, tree: TreeView, logprobs: Tensor) -> Rows:
        """Take the arg-max of the raw logits, which rounding to log-probs may turn into a tie."""
        return Rows(range(len(tree.leaves)), tree.logits.argmax(dim=-1))


class Candidate(NamedTuple):
    """A token that may continue a beam.

    Attributes
    ----------
    parent : int
        The live leaf that it continues.
    token : int
    total : float
        Summed log-prob, this token included.
    score : float
        The length-penalised total.
    """

    parent: int
    token: int
    total: float
    score: float


class Selection(NamedTuple):
    """What a step of beam search chose.

    Attributes
    ----------
    beams : list of Candidate
        The best candidates whose token does not end the text, the best first, whether or not they are worth going on
        with.
    rows : list of Candidate
        What the tree goes on with: hypotheses that end now and are among the best, then the next beams.
    """

    beams: list[Candidate]
    rows: list[Candidate]


class BeamSearch:
    """Beam search with Transformers' rules, hence its tokens and scores.

    Of the best candidates (twice the width, or more where several tokens end a text), the best ones that go on are the
    next beams; one that ends counts only among the first `beam_width`. The `beam_width` best finished hypotheses are
    kept, and the search ends as ``early_stopping`` says or when no beam can go on.

    Parameters
    ----------
    params : BeamSearchParams
        Width, length penalty, and what ends a hypothesis.

    Notes
    -----
    Once nothing can improve, the rows are the hypotheses that end now, or none at all: every beam is pruned.
    """

    def __init__(self, params: BeamSearchParams) -> None:
        self.params = params
        self.stopping = params.stopping

    def score(self, logprob: float, num_tokens: float) -> float:
        """Length-penalised score of a hypothesis, by which finished ones are ranked.

        Parameters
        ----------
        logprob : float
            Summed over the tokens that the search decoded.
        num_tokens : float
            How many those are, an end-of-text token included.
        """
        return logprob / math.pow(max(num_tokens, 1), self.params.length_penalty)

    def step(self, tree: TreeView, logprobs: Tensor) -> Rows:
        """Choose the next beams, and the hypotheses that end with this token and are among the best."""
        rows = self.select(tree, logprobs).rows
        return Rows([row.parent for row in rows], [row.token for row in rows])

    def select(self, tree: TreeView, logprobs: Tensor) -> Selection:
        """Choose what `step` returns as rows, and tell the beams apart; the arguments are those of `step`."""
        width = self.params.beam_width
        end_token_ids = self.stopping.end_token_ids(tree.eos_token_ids)
        totals = self._totals(tree, logprobs, end_token_ids)
        num_candidates = min(max(2, 1 + len(end_token_ids)) * width, totals.numel())
        best = totals.flatten().topk(num_candidates)

        beams: list[Candidate] = []
        ending: list[Candidate] = []
        for total, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if total == -math.inf or len(beams) == width:
                break
            parent, token = divmod(place, totals.shape[1])
            leaf = tree.leaves[parent]
            candidate = Candidate(parent, token, total, self.score(total, leaf.num_tokens + 1))
            if not self._ends(leaf, token, end_token_ids):
                beams.append(candidate)
            elif len(beams) + len(ending) < width:
                ending.append(candidate)

        going = [beam for beam in beams if tree.leaves[beam.parent].room != 1]
        ending += [beam for beam in beams if tree.leaves[beam.parent].room == 1]
        scores = [self.score(leaf.logprob, leaf.num_tokens) for leaf in tree.finished]
        scores = sorted(scores + [candidate.score for candidate in ending], reverse=True)
        bar = scores[width - 1] if len(scores) >= width else -math.inf
        rows = [candidate for candidate in ending if candidate.score >= bar]
        if going and self._can_improve(tree.leaves[going[0].parent], going[0], bar):
            rows += going
        return Selection(beams, rows)

    def _totals(self, tree: TreeView, logprobs: Tensor, end_token_ids: frozenset[int]) -> Tensor:
        """Log-probs of all candidates [leaves, vocab]; those that must not be are ``-inf``."""
        totals = logprobs + torch.tensor([[leaf.logprob] for leaf in tree.leaves], device=logprobs.device)
        seen: set[tuple[int, ...]] = set()
        for i, leaf in enumerate(tree.leaves):
            if leaf.num_tokens < self.params.min_tokens and leaf.constraint is None:
                totals[i, sorted(end_token_ids)] = -math.inf
            if tree.depth == 0:  # branches that were forked and not yet continued would give the same hypotheses twice
                text = (*leaf.prompt_tokens, *leaf.tokens)
                if text in seen:
                    totals[i] = -math.inf
                seen.add(text)
        return totals

    def _ends(self, leaf: Leaf, token: int, end_token_ids: frozenset[int]) -> bool:
        if token in end_token_ids or (leaf.constraint is not None and leaf.constraint.completes(token)):
            return True
        return bool(self.stopping.stop) and leaf.detokenizer is not None and leaf.detokenizer.completes(token)

    def _can_improve(self, leaf: Leaf, beam: Candidate, bar: float) -> bool:
        """Whether the best beam, which continues `leaf`, may yet pass `bar`, the worst of a full set of hypotheses."""
        if bar == -math.inf:
            return True
        if self.params.early_stopping is True:
            return False
        length: float = leaf.num_tokens + 1
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = math.inf if leaf.room is None else leaf.num_tokens + leaf.room
        return self.score(beam.total, length) > bar


class Replay:
    """Repeat the branching and pruning of a recorded tree, whatever the tokens are.

    After its last step a node branches into its children, the ``i``-th of which starts with the ``i``-th most likely
    token, or is pruned if it has none; all other tokens are greedy. When the recording is over the last leaves
    stay. One object can drive any number of trees, each from one branch.

    Parameters
    ----------
    schedule : Schedule
        The recorded tree; its steps count from the end of the prompt, however long that is.
    max_tokens : int or None
        Ends every leaf after this many steps, if the recording is longer.
    """

    def __init__(self, schedule: Schedule, max_tokens: int | None = None) -> None:
        self.stopping = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        self._depth_first: list[
            tuple[Span, list[int]]
        ] = []  # with the ranks of the tokens that its children start with
        stack = [0]
        while stack:
            span = schedule.spans[stack.pop()]
            children = [schedule.spans[child] for child in span.children]
            self._depth_first.append((span, [rank for rank, child in enumerate(children) if child.end >= child.start]))
            stack.extend(reversed(span.children))

    def step(self, tree: TreeView, logprobs: Tensor) -> Rows | None:
        """Continue, branch or prune each leaf as the recording did."""
        live = [(span, starts) for span, starts in self._depth_first if span.start <= tree.depth <= span.end]
        if len(live) != len(tree.leaves):
            raise ValueError(
                f"Replay: {len(live)} leaves recorded at step {tree.depth}, {len(tree.leaves)} in the tree"
            )
        ranks = [[0] if tree.depth < span.end else starts for span, starts in live]
        if not any(ranks):
            return None
        most, vocab_size = 1 + max(max(own, default=0) for own in ranks), tree.logits.shape[-1]
        if most > vocab_size:
            raise ValueError(f"Replay: a node branches in {most}, more than the vocabulary's {vocab_size} tokens")
        ranked = tree.logits.topk(most, dim=-1).indices
        parents = [i for i, own in enumerate(ranks) for _ in own]
        return Rows(parents, ranked[parents, [rank for own in ranks for rank in own]])
