"""Token-level policy: `step(tree, logprobs) -> Rows | None` says which tokens continue which leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewise.config import BeamSearchParams, SamplingParams
from treewise.constraint import Constraint
from treewise.replay import Schedule, Span
from treewise.sampler import Distributions, SamplingRow, sample
from treewise.text import Detokenizer

Numbers = TypeVar("Numbers", float, NDArray[np.float64])


class Rows(NamedTuple):
    """The next frontier: row ``i`` continues live leaf ``parent[i]`` with ``token[i]``.

    A leaf that no row names is pruned; a leaf named more than once branches, its children in the order of the rows.
    """

    parent: Sequence[int] | NDArray[Any] | Tensor  # [rows]
    token: Sequence[int] | NDArray[Any] | Tensor  # [rows]

    def arrays(self, num_leaves: int, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return parents and tokens, each int64 [rows].

        Raises
        ------
        ValueError
            A parent is not a live leaf, a token is not in the vocabulary, or the two lists differ in length.
        """
        parents, tokens = (
            np.asarray(values.cpu() if isinstance(values, Tensor) else values, np.int64) for values in self
        )
        if len(parents) != len(tokens):
            raise ValueError(f"Rows: parent and token must be equally long, not {len(parents)} and {len(tokens)}")
        for name, values, size in (("parent", parents, num_leaves), ("token", tokens, vocab_size)):
            wrong = values[(values < 0) | (values >= size)]
            if len(wrong):
                raise ValueError(f"Rows.{name} must be in [0, {size - 1}], not {wrong[0]}")
        return parents, tokens


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


class Leaves(Sequence[Leaf]):
    """Leaves, the numbers of all in arrays.

    The leaves themselves are made when one of them is asked for. That takes its time where there are thousands, so a
    controller of wide trees reads the arrays.

    Parameters
    ----------
    make : callable
        Returns the leaves.
    logprob, num_tokens, room
        See `Leaf`, each [leaves] of float64; `room` is infinite where there is no such end.

    Examples
    --------
    >>> Leaves.of([Leaf(logprob=-1.5), Leaf(logprob=-0.5, room=3)]).room
    array([inf,  3.])
    """

    def __init__(
        self,
        make: Callable[[], list[Leaf]],
        logprob: NDArray[np.float64],
        num_tokens: NDArray[np.float64],
        room: NDArray[np.float64],
    ) -> None:
        self.logprob = logprob
        self.num_tokens = num_tokens
        self.room = room
        self._make = make

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> Leaves:
        """Return leaves that are there already."""
        columns = [(leaf.logprob, leaf.num_tokens, math.inf if leaf.room is None else leaf.room) for leaf in leaves]
        return cls(lambda: list(leaves), *np.array(columns, np.float64).reshape(-1, 3).T)

    @cached_property
    def made(self) -> list[Leaf]:
        """The leaves themselves."""
        return self._make()

    @property
    def seen(self) -> bool:
        """Whether a leaf has been asked for."""
        return "made" in vars(self)

    def __len__(self) -> int:
        return len(self.logprob)

    @overload
    def __getitem__(self, place: int) -> Leaf: ...

    @overload
    def __getitem__(self, place: slice) -> list[Leaf]: ...

    def __getitem__(self, place: int | slice) -> Leaf | list[Leaf]:
        return self.made[place]


@dataclass
class TreeView:
    """One operation's tree as a controller sees it.

    Attributes
    ----------
    leaves : Leaves
        Live leaves, in the order of the rows that made them; or any sequence of `Leaf` to make these of.
    logits : Tensor [leaves, vocab] float32
        Raw logits of each live leaf's next token; ``-inf`` where a grammar does not let it come.
    depth : int
        Tokens decoded by this operation on the path of each live leaf.
    finished : Leaves
        Leaves that ended in this operation, in the order in which they ended; or what these are made of.
    eos_token_ids : frozenset of int
        The model's own end-of-text ids.
    """

    leaves: Sequence[Leaf]
    logits: Tensor
    depth: int = 0
    finished: Sequence[Leaf] = ()
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Bring leaves in the form in which controllers get them."""
        for name in ("leaves", "finished"):
            given = getattr(self, name)
            setattr(self, name, given if isinstance(given, Leaves) else Leaves.of(given))

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
    """A controller that continues every leaf with one token drawn as `params` says, in all steps or in most.

    The engine draws for all such controllers of a step at once, without calling `step`, and need not know the tokens to
    go on with them.

    Attributes
    ----------
    params : SamplingParams
    in_step : bool
        Whether all leaves go on by one token in each step; otherwise each goes on by itself, as fast as it can.
    observe : callable or None
        Called with the path of each leaf that is drawn for, and the self-certainty of the distribution before the
        token, see `treewise.choices.Chosen`.
    """

    params: SamplingParams
    stopping: SamplingParams
    in_step = False
    observe: Callable[[tuple[int, ...], float], None] | None = None

    def draws(self, depth: int) -> bool:
        """Whether a token is drawn for every leaf after `depth` tokens; `step` is called otherwise."""
        return True


class Ranking:
    """A controller that looks for the likeliest tokens of all leaves: of thousands, nobody writes all log-probs down.

    The engine calls `rank` in place of `step`, unless a subclass has a `step` of its own.
    """

    @property
    def ranks(self) -> bool:
        """Whether `step` does nothing but `rank`."""
        return type(self).step is Ranking.step

    def rank(self, tree: TreeView, distributions: Distributions) -> Rows | None:
        """Do what `Controller.step` does, with the leaves' distributions in place of all their log-probabilities.

        ``tree.logits`` are as the model gave them, perhaps of 16 bits.
        """
        raise NotImplementedError

    def step(self, tree: TreeView, logprobs: Tensor) -> Rows | None:
        """See `Controller.step`."""
        return self.rank(tree, Distributions.of(logprobs))


class Sample(Drawing):
    """Continue every leaf with one token drawn as `params` says.

    Parameters
    ----------
    params : SamplingParams
    in_step : bool
        See `Drawing`.
    """

    def __init__(self, params: SamplingParams, in_step: bool = False) -> None:
        self.params = self.stopping = params
        self.in_step = in_step

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


class Hypotheses(NamedTuple):
    """Beams that go on with a token each, in arrays.

    Attributes
    ----------
    parent : int64 [hypotheses]
        The live leaves that they continue.
    token : int64 [hypotheses]
    total : float64 [hypotheses]
        Summed log-probs, this token included.
    """

    parent: NDArray[np.int64]
    token: NDArray[np.int64]
    total: NDArray[np.float64]

    def take(self, which: NDArray[Any] | slice) -> Hypotheses:
        """Return some of them, by a mask or by places."""
        return Hypotheses(self.parent[which], self.token[which], self.total[which])

    def and_then(self, others: Hypotheses) -> Hypotheses:
        """Return these and then others."""
        return Hypotheses(*(np.concatenate(columns) for columns in zip(self, others, strict=True)))


class Selection(NamedTuple):
    """What a step of beam search chose.

    Attributes
    ----------
    beams : Hypotheses
        The best whose token does not end the text, the best first, whether or not they are worth going on with.
    rows : Hypotheses
        What the tree goes on with: those that end now and are among the best, then the next beams.
    """

    beams: Hypotheses
    rows: Hypotheses


class BeamSearch(Ranking):
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

    def score(self, logprob: Numbers, num_tokens: Numbers) -> Numbers:
        """Length-penalised scores of hypotheses, by which finished ones are ranked.

        Parameters
        ----------
        logprob : float, or array of them
            Summed over the tokens that the search decoded.
        num_tokens : float, or array of them
            How many those are, an end-of-text token included.
        """
        penalised: Numbers = logprob / np.maximum(num_tokens, 1.0) ** self.params.length_penalty
        return penalised

    def rank(self, tree: TreeView, distributions: Distributions) -> Rows:
        """Choose the next beams, and the hypotheses that end with this token and are among the best."""
        rows = self.select(tree, distributions).rows
        return Rows(rows.parent, rows.token)

    def select(self, tree: TreeView, distributions: Distributions) -> Selection:
        """Choose what `rank` returns as rows, and tell the beams apart; the arguments are those of `rank`."""
        leaves, finished = cast(Leaves, tree.leaves), cast(Leaves, tree.finished)
        width = self.params.beam_width
        end_token_ids = self.stopping.end_token_ids(tree.eos_token_ids)
        if self.stopping.grammar is None and (leaves.num_tokens < self.params.min_tokens).any():
            short = np.flatnonzero(leaves.num_tokens < self.params.min_tokens)
            logprobs = distributions.logprobs
            logprobs[short[:, None], sorted(end_token_ids)] = -math.inf
            distributions = Distributions.of(logprobs)
        table = distributions.table
        offsets = torch.from_numpy(self._offsets(tree)).to(table.device)
        count = min(max(2, 1 + len(end_token_ids)) * width, table.numel())
        values, places = distributions.top_sums(offsets, count)
        total = values.cpu().numpy().astype(np.float64)
        parent, token = np.divmod(places.cpu().numpy(), table.shape[1])
        found = Hypotheses(parent, token, total).take(slice(np.searchsorted(-total, math.inf)))  # those that may be

        ends = self._ends(tree, found, end_token_ids)
        beams = found.take(np.flatnonzero(~ends)[:width])
        ending = found.take(np.flatnonzero(ends[:width]))
        full = leaves.room[beams.parent] == 1
        going = beams
        if full.any():
            going, ending = beams.take(~full), ending.and_then(beams.take(full))
        own_scores = self.score(ending.total, leaves.num_tokens[ending.parent] + 1)
        scores = np.append(self.score(finished.logprob, finished.num_tokens), own_scores)
        bar = -np.partition(-scores, width - 1)[width - 1] if len(scores) >= width else -math.inf
        rows = ending.take(own_scores >= bar)
        if len(going.parent) and self._can_improve(leaves, going, float(bar)):
            rows = rows.and_then(going)
        return Selection(beams, rows)

    def _offsets(self, tree: TreeView) -> NDArray[np.float32]:
        """Return the summed log-prob of each leaf; ``-inf`` for those that must not go on."""
        leaves = cast(Leaves, tree.leaves)
        offsets = leaves.logprob.astype(np.float32)
        if tree.depth == 0 and len(leaves) > 1:
            # Branches that were forked and not yet continued would give the same hypotheses twice.
            seen: set[tuple[int, ...]] = set()
            for i, leaf in enumerate(leaves):
                text = (*leaf.prompt_tokens, *leaf.tokens)
                if text in seen:
                    offsets[i] = -math.inf
                seen.add(text)
        return offsets

    def _ends(self, tree: TreeView, found: Hypotheses, end_token_ids: frozenset[int]) -> NDArray[np.bool_]:
        """Whether each hypothesis ends with its token."""
        ends = np.isin(found.token, list(end_token_ids))
        if self.stopping.stop or self.stopping.grammar is not None:
            for i in np.flatnonzero(~ends).tolist():
                leaf, token = tree.leaves[found.parent[i]], int(found.token[i])
                texts = (leaf.constraint, leaf.detokenizer)
                ends[i] = any(text is not None and text.completes(token) for text in texts)
        return ends

    def _can_improve(self, leaves: Leaves, going: Hypotheses, bar: float) -> bool:
        """Whether the first of `going` may yet pass `bar`, the worst of a full set of hypotheses."""
        if bar == -math.inf:
            return True
        if self.params.early_stopping is True:
            return False
        num_tokens, room = (float(column[going.parent[0]]) for column in (leaves.num_tokens, leaves.room))
        length = num_tokens + 1
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = num_tokens + room
        return self.score(float(going.total[0]), length) > bar


class Replay(Drawing):
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
        self.params = self.stopping = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        self.in_step = True
        self._ends = {span.end for span in schedule.spans}
        self._depth_first: list[
            tuple[Span, list[int]]
        ] = []  # with the ranks of the tokens that its children start with
        stack = [0]
        while stack:
            span = schedule.spans[stack.pop()]
            children = [schedule.spans[child] for child in span.children]
            self._depth_first.append((span, [rank for rank, child in enumerate(children) if child.end >= child.start]))
            stack.extend(reversed(span.children))

    def draws(self, depth: int) -> bool:
        """Whether no leaf branches or is pruned."""
        return depth not in self._ends and depth < max(self._ends)

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
