"""Branch handles: a path of a tree as its program sees it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from treewise.codec import ChatCodec, checked_tokens
from treewise.grammar import Grammar
from treewise.sampler import Candidates, child_key, row_key
from treewise.tree import Node
from treewise.turns import Conversation, begun_by, next_turn, opens_reply

if TYPE_CHECKING:
    from treewise.branch.tree import BranchTree

FinishReason = Literal["stop", "length"]

PRUNED = "pruned"
"""How the state of a branch begins that was given up."""


class DeadBranchError(RuntimeError):
    """A branch was used after it had been pruned or its program had ended."""


class Branch:
    """A handle on one path of a tree: where it forked off, the tokens since then, and what became of it.

    Attributes
    ----------
    parent : Branch or None
    start : int
        How many tokens of the path belong to the ancestors.
    ordinal : int or None
        The how-manieth child of its parent this is; None for the root and for scratch forks.
    tokens : list of int
        Own tokens; the root's begin with the prompt.
    logprobs : list of (float or None)
        Log-probability of each own token where the model chose it, None where it was given.
    logprob : float
        Sum of the log-probabilities over the whole path.
    alive : bool
        Whether the branch was neither pruned nor ended with its program; `state` says what became of it.
    finish_reason : {"stop", "length"} or None
        Why decoding ended here last.
    stop_reason : str or int or None
        The stop string or token that ended it.
    guided : tuple of Grammar and int, or None
        The grammar of the text at the end of the path, if it has one, and the length of the path before that text.
    score : float or None
        The program's own verdict; shown in drawings.
    note : Any
        The program's own data.
    tip : Node or None
        The node in which the path ends, but for `num_unplanted` tokens, and which the branch holds. None while forks
        of its end hold the keys in its place, so that the last of them goes on where the branch ended; see `end`.
    num_unplanted : int
        Tokens at the end that are not in the forest yet.
    num_heirs : int
        Live forks of its end.
    num_forks : int
        Forks that it has ever had, but for scratch ones.
    """

    # What most branches begin with is the class's, as a wide search makes thousands at once.
    tip: Node | None = None
    num_unplanted = 0
    num_heirs = 0
    logprob = 0.0
    num_forks = 0
    num_children = 0  # of which were not pruned
    state: str = "live"
    alive = True
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    hidden_tail = 0  # characters of a stop string at the end of the text
    guided: tuple[Grammar, int] | None = None
    score: float | None = None
    note: Any = None
    _key: int | None = None

    def __init__(self, tree: BranchTree, parent: Branch | None, start: int, ordinal: int | None) -> None:
        self.tree = tree
        self.parent = parent
        self.start = start
        self.ordinal = ordinal
        self.tokens: list[int] = []
        self.logprobs: list[float | None] = []
        tree.alive[self] = None

    @cached_property
    def candidates(self) -> list[Candidates | None]:
        """For each own token, where they were asked for, the likeliest tokens at its place."""
        return [None] * len(self.tokens)

    @property
    def has_candidates(self) -> bool:
        """Whether there may be any of them."""
        return "candidates" in vars(self)

    @cached_property
    def known_children(self) -> list[Branch]:
        """The branch's forks in order, perhaps without some that were pruned; see `all_children`."""
        return []

    @cached_property
    def conversations(self) -> list[Conversation]:
        """The conversation as it was after each `message`."""
        return []

    # ------------------------------------------------------------------ what a program does with it

    def fork(self, n: int = 1, at: int | None = None) -> list[Branch]:
        """Return `n` new branches that share this path.

        Parameters
        ----------
        n : int
            How many.
        at : int, optional
            Share only the first `at` tokens of the path, prompt included; all of it by default. Any token will do.

        Raises
        ------
        ValueError
            If `n` is negative or `at` lies outside the path.
        DeadBranchError
            If this branch is no longer alive.
        """
        self.require_alive()
        if n < 0:
            raise ValueError(f"n: cannot fork {n} times")
        at = self.num_tokens if at is None else at
        if not 0 < at <= self.num_tokens:
            raise ValueError(f"at: {at} is not within the path's 1 to {self.num_tokens} tokens")
        owner = self
        while owner.parent is not None and at <= owner.start and (owner is not self or at < self.start):
            owner = owner.parent
        ordinals = range(owner.num_forks, owner.num_forks + n)
        return owner.branch_off(at, ordinals, n, self._carrier())

    def scratch(self) -> Branch:
        """Fork a branch that no drawing shows and that leaves the seeds of later forks alone."""
        self.require_alive()
        [child] = self._children(self.num_tokens, [None], self._carrier())
        return child

    def append(self, text: str | Sequence[int]) -> Branch:
        """Put text, tokenised on its own, or token ids at the end of the path; returns the branch itself.

        Raises
        ------
        ValueError
            If a token id is not in the vocabulary of the tokenizer.
        DeadBranchError
            If this branch is no longer alive.
        """
        self.require_alive()
        codec = self.tree.codec
        tokens = (
            codec.encode(text, add_special_tokens=False)
            if isinstance(text, str)
            else checked_tokens("text", text, codec.vocab_size)
        )
        if tokens:
            self.finish_reason = self.stop_reason = None
            self.hidden_tail = 0
            self.guided = None
            given = [None] * len(tokens)
            self.grow(tokens, given, given)
        return self

    def message(self, role: str, content: Any, *, reply: bool | None = None) -> Branch:
        """Put a turn of a conversation at the end of the path, in the words of the model's chat template.

        What was decoded since the model's turn began is the model's turn. The path is then, token for token, what the
        template makes of the whole conversation, as far as the model itself has written its turns as the tokenizer
        would. As in `LLM.chat`, names of special tokens in `content` become special tokens.

        The first turn follows the prompt, unless that ends where the model's turn begins, as the template writes it:
        then it is a conversation, and this is its next turn. Of turns that this does not know, the template must not
        make its words depend; `LLM.run` knows the turns of a prompt that is given as a conversation.

        Parameters
        ----------
        role : str
            ``"user"``, ``"assistant"``, ``"system"``, ``"tool"``, … as far as the template has it.
        content : str
            Or whatever else the template takes for it.
        reply : bool, optional
            End with the beginning of the model's turn; by default after every role but ``"system"``, ``"developer"``
            and ``"assistant"``.

        Returns
        -------
        Branch
            The branch itself.

        Raises
        ------
        ValueError
            If the model has no chat template, the template refuses the turns, or it edits earlier ones because of this
            one.
        DeadBranchError
            If this branch is no longer alive.
        """
        self.require_alive()
        codec, tokens = self.tree.codec, self.path_tokens
        reply = opens_reply(role) if reply is None else reply
        new, conversation = next_turn(codec, self.conversation(), tokens, {"role": role, "content": content}, reply)
        self.append(new)
        self.conversations.append(conversation)
        return self

    def prune(self, where: str | None = None) -> None:
        """Give up this branch and all below it; the keys that nobody else needs are free at once.

        Parameters
        ----------
        where : str, optional
            Named to whoever uses the branch afterwards; file and line of the caller by default.
        """
        prune([self], where)

    # ------------------------------------------------------------------ what it knows

    @property
    def pruned(self) -> bool:
        """Whether the branch was given up."""
        return self.state.startswith(PRUNED)

    @property
    def finished(self) -> bool:
        """Whether decoding ended here by itself."""
        return self.finish_reason is not None

    @property
    def all_children(self) -> list[Branch]:
        """Forks of this branch in order, the pruned ones too."""
        self.tree.unfold()
        return self.known_children

    @property
    def children(self) -> list[Branch]:
        """Forks of this branch that were not pruned."""
        return [child for child in self.known_children if not child.pruned]

    @property
    def num_tokens(self) -> int:
        """Length of the whole path in tokens, prompt included."""
        return self.start + len(self.tokens)

    @property
    def has_whole_prompt(self) -> bool:
        """Whether all of the prompt is on the path, which a fork from inside it has not."""
        return self._num_given(self.lineage()) == len(self.tree.prompt_tokens)

    @property
    def path(self) -> tuple[int, ...]:
        """Ordinals of the forks from the root down to here."""
        return tuple(branch.ordinal for branch in self.lineage() if branch.ordinal is not None)

    @property
    def path_tokens(self) -> list[int]:
        """All tokens of the path, prompt included."""
        return self.tree.prompt_tokens[: self._num_given(self.lineage())] + self.token_ids

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the path below the prompt."""
        root, *forks = line = self.lineage()
        given = self._num_given(line)
        tokens = root.tokens[len(self.tree.prompt_tokens) :]
        for branch in forks:
            del tokens[branch.start - given :]
            tokens += branch.tokens
        return tokens

    @property
    def text(self) -> str:
        """Text of the path below the prompt, without the stop string that ended it."""
        return self.decode(self.token_ids)

    @property
    def new(self) -> str:
        """Text of the branch's own tokens, without the stop string that ended it."""
        given = len(self.tree.prompt_tokens) if self.parent is None else 0
        return self.decode(self.tokens[given:])

    @property
    def key(self) -> int:
        """Key of the branch's random stream: follows from the request's seed and the branch's path alone."""
        if self._key is not None:
            return self._key
        key = row_key(self.tree.seed, ())
        for branch in self.lineage():
            if branch._key is None:
                branch._key = key if branch.ordinal is None else child_key(key, branch.ordinal)
            key = branch._key
        return key

    def lineage(self) -> list[Branch]:
        """Return the branches from the root down to this one."""
        branch, line = self, [self]
        while branch.parent is not None:
            branch = branch.parent
            line.append(branch)
        return line[::-1]

    def guided_at(self, at: int) -> tuple[Grammar, int] | None:
        """Return what `guided` is after the first `at` tokens of the path: nothing where that text has not begun.

        Nor where decoding ended the text by anything but a limit.
        """
        if self.guided is None or at < self.guided[1] or (at == self.num_tokens and self.finish_reason == "stop"):
            return None
        return self.guided

    def conversation(self) -> Conversation | None:
        """Return the turns on the path: what is known of them, or what can be seen of the prompt."""
        end, line = self.num_tokens, self.lineage()
        for branch in reversed(line):
            for conversation in reversed(branch.conversations):
                if conversation.end <= end:
                    return conversation
            end = min(end, branch.start)
        codec, prompt = self.tree.codec, self.tree.prompt_tokens
        if isinstance(codec, ChatCodec) and codec.has_chat_template and self._num_given(line) == len(prompt):
            return begun_by(codec, prompt)
        return None

    def __repr__(self) -> str:
        return f"Branch(path={self.path}, state={self.state!r}, new={self.new!r})"

    # ------------------------------------------------------------------ what the engine does with it

    def require_alive(self) -> None:
        """Refuse a branch that is no longer alive.

        Raises
        ------
        DeadBranchError
            It was pruned, or its program has ended.
        """
        if not self.alive:
            raise DeadBranchError(f"branch {self.path} is not alive: {self.state}")

    def end(self) -> Node:
        """Return the node in which the path ends, now at the latest; the branch holds it from now on."""
        if not self.alive:
            self.require_alive()
        if self.tip is None:
            kv = self.tree.kv
            self.tip = kv.hold(kv.prefix(self._carrier(), self.num_tokens))
        if self.num_unplanted:
            self.tip = self.plant(self.tokens[-self.num_unplanted :])
            self.num_unplanted = 0
        return self.tip

    def grow(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], candidates: Sequence[Candidates | None]
    ) -> None:
        """Put tokens with their log-probabilities at the end, in the forest as well."""
        if tokens:
            if self.num_heirs or self.num_unplanted:
                self.end()
            self.tip = self.plant(tokens)
            self._append(tokens, logprobs, candidates)

    def note_down(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], candidates: Sequence[Candidates | None]
    ) -> None:
        """Put tokens with their log-probabilities at the end; in the forest once somebody asks for the `end`."""
        if self.num_heirs:
            self.end()
        self.num_unplanted += len(tokens)
        self._append(tokens, logprobs, candidates)

    def begin(self, tokens: list[int], logprobs: list[float | None], logprob: float) -> None:
        """Begin with tokens that were decoded, in the forest once somebody asks for the `end`; `logprob` is the sum."""
        self.tokens, self.logprobs = tokens, logprobs
        self.logprob = logprob
        self.num_unplanted = len(tokens)
        self.tree.num_decoded += len(tokens)

    def _append(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], candidates: Sequence[Candidates | None]
    ) -> None:
        self.num_heirs = 0  # they are forks of its middle now
        self.candidates += candidates
        self.tokens += tokens
        self.logprobs += logprobs
        for logprob in logprobs:
            if logprob is not None:
                self.tree.num_decoded += 1
                self.logprob += logprob

    def reveal(self, token: int, logprob: float, candidates: Candidates | None) -> None:
        """Put the last token, and what there is to know about it, in the place of what stood for it in `grow`."""
        self.end().tokens[-1] = self.tokens[-1] = token
        self.logprobs[-1], self.candidates[-1] = logprob, candidates
        self.tree.num_decoded += 1
        self.logprob += logprob

    def retract(self) -> None:
        """Undo `grow` of a token that was never revealed."""
        kv, node = self.tree.kv, self.end()
        for values in (self.tokens, self.logprobs, self.candidates):
            values.pop()
        self.num_heirs = sum(child.alive and child._is_heir for child in self.known_children)
        if len(node.tokens) > 1:
            kv.shorten(node, len(node.tokens) - 1)
        else:
            self.tip = None if node.parent is None else kv.hold(node.parent)
            kv.drop([node], keep=0)

    def branch_off(self, at: int, ordinals: Iterable[int], count: int, carrier: Node) -> list[Branch]:
        """Fork `count` times after the first `at` tokens of the path, and return those forks that have `ordinals`.

        `carrier` is a node that the path leads to or through, with these tokens.
        """
        new = self._children(at, ordinals, carrier)
        self.known_children += new
        self.num_children += len(new)
        self.num_forks += count
        if new and at == self.num_tokens:
            self.num_heirs += len(new)
            if self.tip is not None:
                self.tip.holders -= 1
                self.tip = None
        return new

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` at the end of the path."""
        text = b"".join(map(self.tree.codec.token_bytes, tokens)).decode("utf-8", "replace")
        return text[: len(text) - self.hidden_tail] if self.hidden_tail else text

    def release(self, state: str) -> None:
        """Let go of the keys; what nobody else needs of them is free at once."""
        release([self], state)

    def plant(self, tokens: Sequence[int]) -> Node:
        """Put tokens into the forest, behind what the path has there; return the node, held, in which they end."""
        kv, old = self.tree.kv, self.tip
        tip = kv.forest.extend(old, tokens, self.tree.namespace)
        if tip is not old:
            kv.hold(tip)
            if old is not None:
                old.holders -= 1  # it has a child now, so it is in no danger
        return tip

    @property
    def _is_heir(self) -> bool:
        """Whether this is a fork of its parent's end; see `tip`."""
        return self.ordinal is not None and self.parent is not None and self.start == self.parent.num_tokens

    def _carrier(self) -> Node:
        """Return a node that a live branch holds, in which the path ends or goes on."""
        branch = self
        while branch.tip is None:
            branch = next(child for child in reversed(branch.known_children) if child.alive and child._is_heir)
        return branch.end()

    def _children(self, at: int, ordinals: Iterable[int | None], carrier: Node) -> list[Branch]:
        """Return a new branch for each of `ordinals`, see `branch_off`."""
        kv = self.tree.kv
        tip, guided = kv.prefix(carrier, at), self.guided_at(at)
        lost = [logprob for logprob in self.logprobs[at - self.start :] if logprob is not None]
        logprob = self.logprob - sum(lost)
        children = []
        for ordinal in ordinals:
            child = Branch(self.tree, self, at, ordinal)
            child.tip, child.logprob = kv.hold(tip), logprob
            if guided is not None:
                child.guided = guided
            children.append(child)
        return children

    def _num_given(self, line: Sequence[Branch]) -> int:
        """Return how much of the prompt is on the path: its first fork may cut it."""
        return min([len(self.tree.prompt_tokens), *(branch.start for branch in line[1:2])])

    def _descendants(self) -> list[Branch]:
        """Return the branches below that are known, children before parents."""
        below, stack = [], list(self.known_children)
        while stack:
            branch = stack.pop()
            below.append(branch)
            stack.extend(branch.known_children)
        return below[::-1]


def keep(branches: Sequence[Branch], values: Sequence[float], k: int) -> list[Branch]:
    """Keep the `k` branches of the highest values, best first, and prune the rest; ties keep their order.

    The values are recorded as the branches' scores.

    Raises
    ------
    ValueError
        If there are not as many values as branches, or `k` is negative.
    """
    if len(branches) != len(values):
        raise ValueError(f"values: {len(values)} values for {len(branches)} branches")
    if k < 0:
        raise ValueError(f"k: cannot keep {k} branches")
    for branch, value in zip(branches, values, strict=True):
        branch.score = float(value)
    ranked = sorted(range(len(branches)), key=lambda i: -values[i])
    prune(branches[i] for i in ranked[k:])
    return [branches[i] for i in ranked[:k]]


def prune(branches: Iterable[Branch], where: str | None = None) -> None:
    """Give up branches of one tree, in one go; see `Branch.prune`."""
    doomed: dict[Branch, None] = {}  # children before parents
    for branch in branches:
        if branch.alive and branch not in doomed:
            doomed.update((below, None) for below in branch._descendants() if below.alive)
            doomed[branch] = None
    if doomed:
        release(doomed, f"{PRUNED} at {_caller() if where is None else where}")


def release(branches: Collection[Branch], state: str) -> None:
    """Let branches of one tree go of their keys, in one go; see `Branch.release`."""
    lost: Counter[Branch] = Counter(
        branch.parent
        for branch in branches
        if branch.parent is not None and branch._is_heir and branch.parent not in branches
    )
    for parent, number in lost.items():
        if parent.num_heirs == number:
            parent.end()
        parent.num_heirs -= number
    tree = next(iter(branches)).tree
    tree.let_go(branches, state, min(tree.num_known if each.parent is None else each.start for each in branches))


def _caller() -> str:
    """Return file and line of the innermost frame outside this package."""
    frame = sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
