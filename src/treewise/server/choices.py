"""What completions gain, as plain data that is handed to the event loop, and the same at once where nobody streams."""

from __future__ import annotations

import codecs
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from treewise.branch import Branch
from treewise.codec import Codec
from treewise.engine import Request
from treewise.operations import Gain
from treewise.outputs import completions, plain
from treewise.results import CompletionOutput, Logprob
from treewise.sampler import Candidates
from treewise.server.jobs import Outcome


class Entry(NamedTuple):
    """A token of a text, with what was likely at its place.

    The pieces of a text's tokens join to the text: one that ends inside a character is empty, and the character
    belongs to the token that completes it.
    """

    token: int
    piece: str
    offset: int  # of the piece, in characters
    candidates: Candidates | None


@dataclass(frozen=True)
class Delta:
    """What a choice has gained.

    Attributes
    ----------
    index : int
        Which choice of the response.
    text : str
    entries : list of Entry
        Tokens whose text is complete, where log-probabilities were asked for.
    finish_reason : str or None
    stop_reason : str or int or None
    """

    index: int
    text: str
    entries: list[Entry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Spelling:
    """Deals the characters of a growing text to its tokens.

    Parameters
    ----------
    codec : Codec
    offset : int
        Where in the whole text this one begins.
    """

    def __init__(self, codec: Codec, offset: int = 0) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: deque[tuple[int, str, Candidates | None]] = deque()
        self._start = self.offset = offset
        self.num_tokens = 0

    def push(self, tokens: Sequence[int], candidates: Sequence[Candidates | None], final: bool) -> None:
        """Take the next tokens, the last there will be if `final`."""
        for number, (token, likely) in enumerate(zip(tokens, candidates, strict=True), 1):
            piece = self._decoder.decode(self._codec.token_bytes(token), final and number == len(tokens))
            self._waiting.append((token, piece, likely))
        self.num_tokens += len(tokens)

    def take(self, length: int, final: bool) -> list[Entry]:
        """Return the tokens that lie within the first `length` characters of the text.

        At its end the token that reaches over that is cut, and those behind it are left out: they belong to a stop
        string.
        """
        entries: list[Entry] = []
        end = self._start + length
        while self._waiting:
            token, piece, candidates = self._waiting[0]
            if self.offset + len(piece) > end:
                if not final or self.offset >= end:
                    break
                piece = piece[: end - self.offset]
            self._waiting.popleft()
            entries.append(Entry(token, piece, self.offset, candidates))
            self.offset += len(piece)
        return entries


@dataclass
class _Progress:
    """How much of a choice has been told."""

    spelling: Spelling
    length: int = 0  # characters of the completion


class Prompt(NamedTuple):
    """A prompt that completions repeat: its text, and its tokens as they spell it."""

    text: str
    tokens: list[int]

    @classmethod
    def of(cls, codec: Codec, given: str | list[int], tokens: list[int]) -> Prompt:
        """Return a prompt of `tokens`, which was `given` as a text, or as these."""
        spelled = plain(tokens, codec)
        # Some vocabularies put a space before a text.
        return cls(given if isinstance(given, str) and spelled.endswith(given) else spelled, tokens)

    def entries(self, codec: Codec, candidates: Sequence[Candidates | None]) -> list[Entry]:
        """Return its tokens, the first of which has no candidates."""
        spelling = Spelling(codec)
        spelling.push(self.tokens, candidates, True)
        entries = spelling.take(sys.maxsize, True)
        before = spelling.offset - len(self.text)
        return [
            entry._replace(piece=entry.piece[max(0, before - entry.offset) :], offset=max(0, entry.offset - before))
            for entry in entries
        ]


class Choices:
    """Watches the completions of prompts, see `Watcher`: choice ``part * n + i`` is the i-th completion of a part.

    Parameters
    ----------
    codec : Codec
    n : int
        Choices of each part.
    stream : bool
        Tell of every step; else all is told at the end.
    logprobs : bool
        Tell of tokens, too.
    echo : sequence of Prompt, optional
        Each part's prompt, which its choices begin with.
    select : bool
        Of more completions than `n`, the likeliest a token are the choices.
    """

    def __init__(
        self,
        codec: Codec,
        n: int,
        *,
        stream: bool = False,
        logprobs: bool = False,
        echo: Sequence[Prompt] = (),
        select: bool = False,
    ) -> None:
        self.codec = codec
        self.n = n
        self.stream = stream
        self.logprobs = logprobs
        self.echo = echo
        self.select = select
        self._begun: dict[int, _Progress] = {}  # by choice
        self._cut = False

    def gained(self, part: int, request: Request, gain: Gain) -> list[Delta]:
        """See `Watcher.gained`."""
        if not self.stream:
            return []
        deltas = []
        for event in gain.events():
            branch = event.branch
            if event.text or branch.finished:
                index = part * self.n + branch.path[-1]
                deltas += self._advance(index, part, request, event.text, branch)
        return deltas

    def ended(self, part: int, request: Request) -> list[Delta]:
        """See `Watcher.ended`."""
        outputs = completions(request.result[1])
        if self.select:
            outputs = sorted(outputs, key=lambda each: -each.cumulative_logprob / max(1, len(each.token_ids)))
        outputs = outputs[: self.n]
        self._cut |= any(output.finish_reason == "length" for output in outputs)
        deltas = []
        for place, output in enumerate(outputs):
            index = part * self.n + place
            if index not in self._begun:
                deltas += self._whole(index, part, request, output)
        return deltas

    @property
    def outcome(self) -> Outcome:
        """See `Watcher.outcome`."""
        return "length" if self._cut else "stop"

    def _begin(self, index: int, part: int, request: Request) -> list[Delta]:
        """Tell of the prompt that a choice begins with, if it does and nothing has been told."""
        if index in self._begun:
            return []
        prompt = self.echo[part] if self.echo else None
        self._begun[index] = _Progress(Spelling(self.codec, 0 if prompt is None else len(prompt.text)))
        if prompt is None:
            return []
        entries = prompt.entries(self.codec, [None, *request.tree.root.note]) if self.logprobs else []
        return [Delta(index, prompt.text, entries)]

    def _advance(self, index: int, part: int, request: Request, text: str, branch: Branch) -> list[Delta]:
        """Tell of text that a branch has gained."""
        deltas = self._begin(index, part, request)
        progress = self._begun[index]
        progress.length += len(text)
        entries: list[Entry] = []
        if self.logprobs:
            new = slice(progress.spelling.num_tokens, None)
            progress.spelling.push(branch.tokens[new], branch.candidates[new], branch.finished)
            entries = progress.spelling.take(progress.length, branch.finished)
        return [*deltas, Delta(index, text, entries, branch.finish_reason, branch.stop_reason)]

    def _whole(self, index: int, part: int, request: Request, output: CompletionOutput) -> list[Delta]:
        """Tell of a completion at once."""
        deltas = self._begin(index, part, request)
        spelling = self._begun[index].spelling
        if self.logprobs:
            spelling.push(output.token_ids, [_candidates(each) for each in output.logprobs or ()], True)
        entries = spelling.take(len(output.text), True)
        return [*deltas, Delta(index, output.text, entries, output.finish_reason, output.stop_reason)]


def _candidates(logprobs: Mapping[int, Logprob]) -> Candidates:
    return {token: (each.logprob, each.rank) for token, each in logprobs.items()}
