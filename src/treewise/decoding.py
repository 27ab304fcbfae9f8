"""Decoding under way: leaves that grow, branch and are pruned as a controller says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewise.awaitables import Decode
from treewise.branch import Branch
from treewise.branch.walks import depth_first
from treewise.choices import Choices, Chosen, choose
from treewise.config import SamplingParams
from treewise.constraint import Constraint
from treewise.controller import Drawing, Leaf, Leaves, Ranking, TreeView
from treewise.distributions import distributions
from treewise.kv import OutOfSlots
from treewise.operations import Event, Gain, InvalidLogits, Limits, Run, check_own, gather_rows
from treewise.sampler import Candidates, Distributions, SamplingRow, grammar_biases, log_probs, ranked
from treewise.scheduler import Lane
from treewise.settling import settle, uncollected
from treewise.speculate.draft import Draft
from treewise.speculate.drafter import Stem
from treewise.tasks import Task
from treewise.text import Detokenizer
from treewise.thicket import Ints, Thicket

WIDE = 64
"""Rows from which on a step is kept in arrays; narrower trees go on with the plan of the step before where they can."""


@dataclass(slots=True)
class _Track:
    """What a run knows of a leaf."""

    place: int  # which of the operation's branches it descends from
    logprob: float  # of its path where the operation began
    limit: int  # length of the path at which it is full
    text: Detokenizer  # but for the last `num_unread` tokens
    constraint: Constraint | None
    num_decoded: int = 0  # in this operation
    num_unread: int = 0


class _Draw(NamedTuple):
    """What was drawn for a leaf: a choice by number, from a row of some logits; then those behind a draft's guesses."""

    number: int
    place: tuple[Tensor, int]
    draft: Draft | None


class DecodeRun:
    """Decodes leaves token by token under a controller.

    As long as a step concerns no leaf by itself, what it decodes is kept in a `Thicket`: where the controller reads
    the numbers of `TreeView.leaves` only, and no text is looked at to see whether a leaf ends. It is made into branches
    as soon as somebody may see them, see `settle`.

    Parameters
    ----------
    task : Task
    operation : Decode
    limits : Limits
    """

    def __init__(self, task: Task, operation: Decode, limits: Limits) -> None:
        check_own(task, operation.branches)
        self.task = task
        self.controller = controller = operation.controller
        self._ranking = controller if isinstance(controller, Ranking) and controller.ranks else None
        self._drawing = controller if isinstance(controller, Drawing) else None
        self._observe = None if self._drawing is None else self._drawing.observe
        self.stopping = stopping = operation.controller.stopping
        self._has_listeners = self._observe is not None or stopping.grammar is not None
        self._end_tokens = stopping.end_token_ids(limits.eos_token_ids)
        self.limits = limits
        self.tracks: dict[Branch, _Track] = {}  # of all leaves
        self.given = set(operation.branches)
        self.finished: list[Branch] = []
        self.leaves: list[Branch] = []
        self.depth = 0
        self.stopped = False
        self._lanes: dict[Lane, Branch] = {}
        self._logits: dict[Branch, tuple[Tensor, int]] = {}
        self._drawn: dict[Branch, _Draw] = {}
        self._assumed: dict[Branch, _Draw] = {}
        self._thicket: Thicket | None = None  # below `leaves`
        self._parts: list[Tensor] = []  # the logits of its rows, as far as they are there
        self._gained: list[Branch] = []  # in the last step
        stopping.check_vocabulary(limits.vocab_size)
        constraints: dict[tuple[int, ...], Constraint] = {}
        for i, branch in enumerate(operation.branches):
            constraint = self._constraint(branch, constraints)
            branch.finish_reason, branch.stop_reason, branch.hidden_tail = None, None, 0
            limit, length = limits.max_model_len, branch.num_tokens
            if stopping.max_tokens is not None:
                limit = min(limit, length + stopping.max_tokens)
            text = Detokenizer(
                branch.tree.codec, stopping.stop, stopping.include_stop_str_in_output, stopping.min_tokens
            )
            self.tracks[branch] = _Track(i, branch.logprob, limit, text, constraint)
            if length >= limit:
                branch.finish_reason = "length"
            self._file(branch)
        self._await_logits()

    def _constraint(self, branch: Branch, known: dict[tuple[int, ...], Constraint]) -> Constraint | None:
        """Return how far a branch has come in the operation's grammar: its text goes on where a limit has cut it off.

        `known` are the constraints of texts, for branches that are alike so far.
        """
        grammar = self.stopping.grammar
        if grammar is None:
            branch.guided = None
            return None
        guided = branch.guided_at(branch.num_tokens)
        branch.guided = (grammar, branch.num_tokens) if guided is None or guided[0] != grammar else guided
        text = tuple(branch.path_tokens[branch.guided[1] :])
        if text not in known:
            known[text] = self.limits.lexicon.start(grammar, text)
        return known[text].fork()

    @property
    def width(self) -> int:
        """See `Run.width`."""
        return len(self.leaves if self._thicket is None else self._thicket.rows)

    def lanes(self) -> list[Lane | Thicket]:
        """See `Run.lanes`."""
        if self._thicket is not None:
            return [] if self._thicket.done else [self._thicket]
        return [lane for lane, leaf in self._lanes.items() if leaf.alive and not lane.done]

    def ready(self) -> bool:
        """See `Run.ready`."""
        return self.drawing is None and not self.lanes()

    def deliver(self, lane: Lane | Thicket, start: int, logits: Tensor, places: Sequence[int]) -> None:
        """See `Run.deliver`."""
        if isinstance(lane, Thicket):
            self._parts.append(logits[places[0] : places[-1] + 1])
        else:
            self._logits[self._lanes[lane]] = logits, places[0]

    @property
    def drawing(self) -> SamplingParams | None:
        """How the next tokens are drawn, if the controller does nothing else."""
        controller = self._drawing
        return controller.params if controller is not None and controller.draws(self.depth) else None

    @property
    def is_foreseeable(self) -> bool:
        """Whether the token after the next can be drawn before the next is known."""
        params = self.drawing
        if params is None or params.has_penalties:
            return False
        return self.stopping.grammar is None and self.stopping.logprobs is None

    @property
    def speculates(self) -> bool:
        """Whether what follows leaves may be guessed."""
        return self._drawing is not None and not self._drawing.in_step

    def stem(self, lane: Lane | Thicket, place: int) -> Stem | None:
        """Return the leaf of `lane` as drafters see it, None if nothing is to be guessed of what follows it.

        `place` is where its logits will stand in the runner's answer.
        """
        params = self.drawing
        if params is None or isinstance(lane, Thicket) or self._assumed or not self.speculates:
            return None
        leaf = self._lanes[lane]
        room = self.tracks[leaf].limit - leaf.num_tokens
        if (budget := self.task.tokens_left()) is not None:
            room = min(room, -(-budget // len(self._lanes)))
        room = max(0, room - 1)  # behind the last token that it may have, no guess is of use
        if (horizon := leaf.tree.horizon(leaf.end())) is not None:
            room = max(0, min(room, horizon - leaf.num_tokens))
        return Stem(leaf, leaf.end(), place, room, self._row(leaf, params, params.has_penalties))

    def draw(self, first: int, drafts: Mapping[Branch, Draft]) -> list[tuple[SamplingRow, tuple[Tensor, int]]]:
        """Return how to draw the next token of each leaf that has its logits, and from which row of which logits.

        What is drawn will be the choices number `first` and the ones behind it, see `Drawn`. Leaves do not wait for
        each other, so that they need not all have room for their keys at once. Behind the choice for a leaf come those
        behind the guesses of its draft, if it is in `drafts`.
        """
        if (params := self.drawing) is None:
            return []
        self.settle()
        leaves, penalised = self._served(), params.has_penalties
        logits, self._logits = self._logits, {}
        self._drawn = {}
        draws: list[tuple[SamplingRow, tuple[Tensor, int]]] = []
        for leaf in leaves:
            own = self._drawn[leaf] = _Draw(first + len(draws), logits[leaf], drafts.get(leaf))
            draws.append((self._row(leaf, params, penalised), own.place))
            if own.draft is not None:
                rows = own.draft.sampling_rows(range(len(own.draft.rows)))
                draws += [(guess, (own.place[0], own.draft.first + node)) for node, guess in enumerate(rows)]
        return draws

    def assume(self) -> None:
        """Let the leaves go on with what was drawn for them; token ``-1 - i`` stands for choice ``i``."""
        self._check_lengths()
        self.depth += 1
        self._assumed = {leaf: drawn for leaf, drawn in self._drawn.items() if leaf.alive}
        self._drawn = {}
        for leaf, drawn in self._assumed.items():
            leaf.grow((-1 - drawn.number,), (None,), (None,))
            self.tracks[leaf].num_decoded += 1
        if len(self._assumed) == len(self._lanes) == len(self.leaves) and not any(map(self._is_full, self.leaves)):
            for lane in self._lanes:  # nearly always
                lane.end += 1
        else:
            self._await_logits()

    def take_back(self) -> None:
        """Undo `assume`, and forget what was drawn since."""
        for leaf in self._assumed:
            leaf.retract()
            self.tracks[leaf].num_decoded -= 1
        self.depth -= bool(self._assumed)
        self._assumed = {}
        self.forgo()

    def forgo_guesses(self) -> None:
        """Forget what was drawn behind guesses, as if there had been none."""
        self._drawn = {leaf: drawn._replace(draft=None) for leaf, drawn in self._drawn.items()}

    def forgo(self) -> None:
        """Forget what was drawn: the leaves will get their logits again."""
        self._drawn = {}
        self._await_logits()

    def know(self, choices: Chosen) -> Gain:
        """Take what was assumed for what it is; after an error, the leaves end before what is not known of them.

        Raises
        ------
        InvalidLogits
        """
        self._gained = []
        assumed, self._assumed = self._assumed, {}
        try:
            self._reveal(assumed, choices)
        except BaseException:
            for leaf in list(assumed)[len(self._gained) :]:
                leaf.retract()
            raise
        num_guessed = sum(self._follow(leaf, drawn, choices) for leaf, drawn in assumed.items() if drawn.draft)
        ended = [leaf for leaf in assumed if leaf.finish_reason is not None]
        if ended:
            self.finished += ended
            self.leaves = [leaf for leaf in self.leaves if leaf.finish_reason is None]
            self._lanes = {lane: leaf for lane, leaf in self._lanes.items() if leaf.finish_reason is None}
            for leaf in ended:  # what follows was drawn in vain
                self._drawn.pop(leaf, None)
        if num_guessed:
            self._await_logits()
        return self._gain(len(assumed) + num_guessed)

    def _reveal(self, drawn: Mapping[Branch, _Draw], choices: Chosen) -> None:
        """Put the drawn tokens in the places that leaves have for them, and take their texts."""
        numbers = [each.number for each in drawn.values()]
        if not choices.invalid.isdisjoint(numbers):
            raise InvalidLogits
        candidates = self._candidates(choices, numbers, (each.place for each in drawn.values()))
        for leaf, number, best in zip(drawn, numbers, candidates, strict=True):
            if self._has_listeners:
                self._tell(leaf, choices, number)
            token = choices.tokens[number]
            leaf.reveal(token, choices.logprobs[number], best)
            self._gained.append(leaf)
            self._read(leaf, token)

    def _follow(self, leaf: Branch, drawn: _Draw, choices: Chosen) -> int:
        """Let a leaf go on behind guesses that were right, token by token; return how many tokens it gained so."""
        draft = cast(Draft, drawn.draft)
        first = drawn.number + 1
        right = draft.right(choices.tokens[drawn.number : first + len(draft.rows)])
        numbers = [first + node for node in right]
        candidates = self._candidates(choices, numbers, ((drawn.place[0], draft.first + node) for node in right))
        for node, number, best in zip(right, numbers, candidates, strict=True):
            draft.accepted.append(node)
            if leaf.finish_reason is not None:
                return len(draft.accepted) - 1
            if number in choices.invalid:
                raise InvalidLogits
            if self._has_listeners:
                self._tell(leaf, choices, number)
            token = choices.tokens[number]
            leaf.grow((token,), (choices.logprobs[number],), (best,))
            self.tracks[leaf].num_decoded += 1
            self._read(leaf, token)
        return len(right)

    def _tell(self, leaf: Branch, choices: Chosen, number: int) -> None:
        """Let the controller and the grammar, which may refuse the token, know what a leaf goes on with."""
        if self._observe is not None:
            self._observe(leaf.path, choices.certainties[number])
        self._accept(leaf, choices.tokens[number])

    def _candidates(
        self, choices: Chosen, numbers: Sequence[int], places: Iterable[tuple[Tensor, int]]
    ) -> Sequence[Candidates | None]:
        """Return what was likely where choices were made, from the logits at `places`, if asked for."""
        if self.stopping.logprobs is None or not numbers:
            return [None] * len(numbers)
        tokens = [choices.tokens[number] for number in numbers]
        return ranked(log_probs(gather_rows(list(places))), tokens, self.stopping.logprobs)

    def _row(self, leaf: Branch, params: SamplingParams, penalised: bool) -> SamplingRow:
        track = self.tracks[leaf]
        return SamplingRow(
            params,
            leaf.key,
            leaf.num_tokens,
            track.num_decoded,
            leaf.tree.prompt_tokens if penalised else (),
            leaf.token_ids if penalised else (),
            track.constraint,
        )

    def advance(self) -> Gain:
        """See `Run.advance`."""
        self._gained = []
        if self._thicket is None:
            self._check_lengths()
            if not self._served():
                self._await_logits()
                return self._gain(0)
        return self._choose()

    def _check_lengths(self) -> None:
        for lane, leaf in self._lanes.items():
            if leaf.num_tokens != lane.end and leaf.alive:
                raise ValueError(
                    f"branches: {leaf.path} was extended from elsewhere while it was decoded; fork it instead"
                )

    def _choose(self) -> Gain:
        """Continue the leaves as the controller says."""
        if self._thicket is None:
            served = self._served()
            if not served:
                self._await_logits()
                return self._gain(0)
            logits = gather_rows([self._logits[leaf] for leaf in served])
        else:
            logits = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        found = distributions(logits) if self._ranking else Distributions.of(log_probs(logits))
        invalid = found.invalid_rows().any()
        leaves, finished = self._leaves()  # while the device works
        if invalid:
            raise InvalidLogits
        seen, bias = found, self._grammar_bias(logits.device)
        if bias is not None:
            logits, seen = logits + bias, Distributions.of(found.logprobs + bias)
        view = TreeView(
            leaves=leaves,
            logits=logits if self._ranking else logits.float(),
            depth=self.depth,
            finished=finished,
            eos_token_ids=self.limits.eos_token_ids,
        )
        rows = self._ranking.rank(view, seen) if self._ranking else self.controller.step(view, seen.table)
        if rows is None:
            self.stopped = True
            return self._gain(0)
        try:
            parents, tokens = rows.arrays(*logits.shape)
        except ValueError as error:
            raise ValueError(f"{type(self.controller).__name__}: {error}") from None
        chosen = found.at(*torch.from_numpy(np.stack((parents, tokens))).to(logits.device))
        stopping = self.stopping
        reads = bool(stopping.stop) or stopping.grammar is not None or stopping.logprobs is not None
        if reads or leaves.seen or finished.seen or not (self._thicket or self._plant(len(parents))):
            self.settle()
            return self._commit(self._served(), parents.tolist(), tokens.tolist(), chosen.tolist(), found)
        return self._add(parents, tokens, chosen.double().cpu().numpy())

    def _grammar_bias(self, device: torch.device) -> Tensor | None:
        """Return what keeps tokens that the grammar does not let come next from the controller."""
        if self.stopping.grammar is None:
            return None
        leaves = self._served()
        rows = [self._row(leaf, self.stopping, False) for leaf in leaves]
        bias = grammar_biases(rows, self.limits.eos_token_ids, device)
        constraints = [constraint for leaf in leaves if (constraint := self.tracks[leaf].constraint) is not None]
        if all(constraint.stuck for constraint in constraints):
            raise constraints[0].error()
        return bias

    def result(self) -> Any:
        """See `Run.result`."""
        going = any(leaf.alive for leaf in self.leaves) if self._thicket is None else len(self._thicket.rows) > 0
        return None if going and not self.stopped else self._ended()

    @uncollected
    def _ended(self) -> list[Branch]:
        """Return the leaves that live, those of each of the operation's branches side by side."""
        self.settle()
        leaves = depth_first(leaf for leaf in [*self.finished, *self.leaves] if leaf.alive)
        return sorted(leaves, key=lambda leaf: self.tracks[leaf].place)

    def settle(self) -> None:
        """Make branches of what was decoded, as all but this may look at them from now on."""
        if self._thicket is not None:
            self._settle(self._thicket)

    @uncollected
    def _settle(self, thicket: Thicket) -> None:
        self._thicket = None
        self.task.tree.unsettled.pop(self.settle, None)
        old = [self.tracks[leaf] for leaf in self.leaves]
        rows, ended, fallen = settle(thicket, self.leaves, self.given, type(self.controller).__name__)
        entries = np.concatenate([thicket.ended, thicket.rows])
        base = thicket.base[entries]
        unread = thicket.length[entries] - thicket.length[base]
        decoded = self._decoded[base] + unread
        for leaf in self.leaves:
            del self.tracks[leaf]
        for branch, place, new, number in zip(
            [*ended, *rows], base.tolist(), unread.tolist(), decoded.tolist(), strict=True
        ):
            track = old[place]
            self.tracks[branch] = _Track(track.place, track.logprob, track.limit, track.text, None, number, new)
        for branch in ended:
            self._end(branch, branch.tokens[-1])
        self.finished += ended
        self.leaves = rows
        # One may be another's parent.
        for leaf in sorted(fallen, key=lambda leaf: len(leaf.lineage()), reverse=True):
            self._prune(leaf, fallen[leaf])
        self._await_logits()
        places = ((part, place) for part in self._parts for place in range(len(part)))
        self._logits = dict(zip(rows, places, strict=False))
        for lane, _ in zip(self._lanes, self._logits, strict=False):
            lane.take(1)
        self._parts = []
        gained = [*ended, *rows]
        self._gained = [gained[i] for i in np.argsort(entries).tolist()]

    def _commit(
        self,
        old: list[Branch],
        parents: list[int],
        tokens: list[int],
        chosen: list[float],
        found: Distributions,
    ) -> Gain:
        """Extend, branch and prune the leaves `old` as the rows say; `chosen` are the tokens' log-probs."""
        self.depth += 1
        candidates: Sequence[Candidates | None] = [None] * len(tokens)
        if self.stopping.logprobs is not None and tokens:
            candidates = ranked(found.logprobs[parents], tokens, self.stopping.logprobs)
        self.leaves = []
        for leaf, token, logprob, best in zip(self._branch(old, parents), tokens, chosen, candidates, strict=True):
            self._accept(leaf, token)
            leaf.grow((token,), (logprob,), (best,))
            self.tracks[leaf].num_decoded += 1
            self._read(leaf, token)
            self._file(leaf)
            self._gained.append(leaf)
        self._await_logits()
        return self._gain(len(tokens))

    def _add(self, parents: Ints, tokens: Ints, logprobs: NDArray[np.float64]) -> Gain:
        """Let the thicket grow as the rows say; `logprobs` are the tokens' log-probs."""
        self.depth += 1
        thicket = cast(Thicket, self._thicket)
        thicket.add(parents, tokens, logprobs, self.depth)
        self._parts = []
        ended = np.isin(tokens, list(self._end_tokens))
        full = thicket.length[thicket.rows] >= self._limits[thicket.base[thicket.rows]]
        thicket.end(ended | full)
        try:
            thicket.reserve()
        except OutOfSlots:
            self.settle()
        return self._gain(len(tokens))

    def _plant(self, num_rows: int) -> Thicket | None:
        """Let a thicket grow below the leaves, if that pays and they have not lost keys since they got their logits."""
        bases = [leaf.end() for leaf in self.leaves]
        if num_rows < WIDE or any(node.computed < len(node.tokens) for node in bases):
            return None
        tracks = [self.tracks[leaf] for leaf in self.leaves]
        totals = [leaf.logprob - track.logprob for leaf, track in zip(self.leaves, tracks, strict=True)]
        self._thicket = Thicket(self.task.tree.kv, self.task.tree, bases, totals)
        self._limits = np.array([track.limit for track in tracks])
        self._decoded = np.array([track.num_decoded for track in tracks])
        self._finished = self._columns(self.finished)
        self.task.tree.unsettled[self.settle] = None
        return self._thicket

    def _gain(self, num_tokens: int) -> Gain:
        return Gain(self.task.tree, num_tokens, self._events)

    def _events(self) -> list[Event]:
        self.settle()
        return [Event(leaf, self._text(leaf)) for leaf in self._gained]

    def _branch(self, old: list[Branch], parents: list[int]) -> list[Branch]:
        """Return the leaf for each row: its parent if it is the only row of it, else a fork; prune who has no row."""
        uses = Counter(parents)
        if len(uses) == len(old) == len(parents):
            return [old[i] for i in parents]
        # All forks come before any leaf grows: a fork must end where its parent ended.
        grown = [old[i] if uses[i] == 1 else self._fork(old[i]) for i in parents]
        for i, leaf in enumerate(old):
            if uses[i] != 1:
                del self.tracks[leaf]
        dropped = [leaf for i, leaf in enumerate(old) if uses[i] == 0]
        for leaf in sorted(dropped, key=lambda leaf: len(leaf.lineage()), reverse=True):  # one may be another's parent
            self._prune(leaf, self.depth)
        return grown

    def _fork(self, leaf: Branch) -> Branch:
        [child] = leaf.fork()
        track = self.tracks[leaf]
        constraint = None if track.constraint is None else track.constraint.fork()
        self.tracks[child] = replace(track, text=self._text(leaf).fork(), constraint=constraint, num_unread=0)
        return child

    def _prune(self, leaf: Branch, step: int) -> None:
        """Give up a leaf, and what this operation forked and leads nowhere any more; never what others go on from."""
        branch: Branch | None = leaf
        while branch is not None and not branch.num_children:
            branch.prune(f"{type(self.controller).__name__} step {step}")
            branch = None if branch in self.given or branch.parent in self.given else branch.parent

    def _accept(self, leaf: Branch, token: int) -> None:
        """Go on in the grammar, which may refuse the token."""
        constraint = self.tracks[leaf].constraint
        if constraint is not None:
            constraint.accept(token)

    def _read(self, leaf: Branch, token: int) -> None:
        """Take the new token's text and see whether the branch ends with it."""
        self._text(leaf).push(token)
        self._end(leaf, token)

    def _text(self, leaf: Branch) -> Detokenizer:
        """Return the leaf's text, with the tokens that came while it was but numbers."""
        track = self.tracks[leaf]
        if track.num_unread:
            track.text, new = track.text.fork(), leaf.path_tokens[leaf.num_tokens - track.num_unread :]
            track.num_unread = 0
            track.text.push_all(new)
            if leaf.finished:
                track.text.finish()
        return track.text

    def _end(self, leaf: Branch, token: int) -> None:
        """See whether the branch ends with `token`, its last, whose text was taken or has no stop strings."""
        track = self.tracks[leaf]
        text = track.text
        if text.stopped is not None:
            leaf.finish_reason, leaf.stop_reason = "stop", text.stopped
        elif token in self._end_tokens:
            leaf.finish_reason, leaf.stop_reason = "stop", token if token in self.stopping.stop_token_ids else None
        elif track.constraint is not None and track.constraint.complete:
            leaf.finish_reason = "stop"
        elif leaf.num_tokens >= track.limit:
            leaf.finish_reason = "length"
        else:
            return
        if not track.num_unread:
            text.finish()
            if text.stopped is not None:
                own = leaf.path_tokens[leaf.num_tokens - track.num_decoded :]
                leaf.hidden_tail = len(leaf.decode(own)) - len(text.text)

    def _file(self, leaf: Branch) -> None:
        """Put the leaf with those that go on or with those that have ended."""
        (self.leaves if leaf.finish_reason is None else self.finished).append(leaf)

    def _served(self) -> list[Branch]:
        """Return the leaves that have their logits."""
        logits = self._logits
        self.leaves = leaves = [leaf for leaf in self.leaves if leaf.alive]  # another coroutine may have pruned some
        return [leaf for leaf in leaves if leaf in logits]

    def _leaves(self) -> tuple[Leaves, Leaves]:
        """Return the live leaves and those that have ended, as a controller sees them."""

        def live() -> list[Leaf]:
            self.settle()
            return [self._leaf(leaf) for leaf in self._served()]

        def ended() -> list[Leaf]:
            self.settle()
            return [self._leaf(leaf) for leaf in self.finished]

        if (thicket := self._thicket) is None:
            return Leaves(live, *self._columns(self._served())), Leaves(ended, *self._columns(self.finished))

        def columns(entries: Ints) -> NDArray[np.float64]:
            base, length = thicket.base[entries], thicket.length[entries]
            num_decoded = self._decoded[base] + length - thicket.length[base]
            return np.stack([thicket.total[entries], num_decoded, self._limits[base] - length])

        finished = np.concatenate([self._finished, columns(thicket.ended)], axis=1)
        return Leaves(live, *columns(thicket.rows)), Leaves(ended, *finished)

    def _columns(self, leaves: Sequence[Branch]) -> NDArray[np.float64]:
        """Return the arrays of `Leaves`."""
        tracks = [self.tracks[leaf] for leaf in leaves]
        columns = [
            (leaf.logprob - track.logprob, track.num_decoded, track.limit - leaf.num_tokens)
            for leaf, track in zip(leaves, tracks, strict=True)
        ]
        return np.array(columns, np.float64).reshape(-1, 3).T

    def _await_logits(self) -> None:
        self._logits = {}
        self.leaves = [leaf for leaf in self.leaves if leaf.alive]  # another coroutine may have pruned some
        self._lanes = {
            Lane(leaf.tree, leaf.end, leaf.num_tokens - 1, leaf.num_tokens): leaf
            for leaf in self.leaves
            if not self._is_full(leaf)
        }

    def _is_full(self, leaf: Branch) -> bool:
        return leaf.num_tokens >= self.tracks[leaf].limit

    def _leaf(self, leaf: Branch) -> Leaf:
        track = self.tracks[leaf]
        return Leaf(
            logprob=leaf.logprob - track.logprob,
            tokens=leaf.token_ids,
            prompt_tokens=leaf.tree.prompt_tokens,
            path=leaf.path,
            num_tokens=track.num_decoded,
            key=leaf.key,
            room=track.limit - leaf.num_tokens,
            detokenizer=self._text(leaf),
            constraint=track.constraint,
        )


class Drawn(NamedTuple):
    """The next tokens of the leaves of some runs, which a forward can do with before the host knows them."""

    runs: list[DecodeRun]
    choices: Choices

    @property
    def is_foreseeable(self) -> bool:
        """Whether the tokens after these can be drawn before these are known."""
        return all(run.is_foreseeable for run in self.runs)


def draw(runs: Iterable[Run], eos_token_ids: Collection[int], drafts: Mapping[Branch, Draft]) -> Drawn | None:
    """Draw the next tokens of all runs that only draw, with one call of the sampler; None if there are no such runs.

    `drafts` are the guesses of what follows leaves, which were computed beside them.
    """
    drawing: list[DecodeRun] = []
    draws: list[tuple[SamplingRow, tuple[Tensor, int]]] = []
    for run in runs:
        if isinstance(run, DecodeRun) and (own := run.draw(len(draws), drafts)):
            drawing.append(run)
            draws += own
    if not draws:
        return None
    try:
        logits = gather_rows([place for _, place in draws])
        return Drawn(drawing, choose(logits, [row for row, _ in draws], eos_token_ids))
    except BaseException:
        for run in drawing:  # should anybody step on, they get their logits again
            run.forgo()
        raise
