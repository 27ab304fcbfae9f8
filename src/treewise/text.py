"""Tokens to text as they come: incremental UTF-8, and stop strings of which nothing leaks."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, Self


class TokenBytes(Protocol):
    """What a `Detokenizer` needs of a tokenizer."""

    def token_bytes(self, token: int, /) -> bytes:
        """Return the exact UTF-8 bytes that `token` stands for, ``b""`` for special tokens."""


class _StopStrings:
    """Stop strings in sorted order: all that start with some text lie side by side, where a bisection finds them."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.rank = {string: i for i, string in reversed(list(enumerate(strings)))}  # a repeated one counts once
        self.ordered = sorted(self.rank)

    def match(self, text: str) -> tuple[int | None, bool]:
        """Return `text`'s place in the user's list if it is a stop string, and whether it is the start of a longer one.

        NOTE: `text` must not be empty.
        """
        rank = self.rank.get(text)
        place = bisect_left(self.ordered, text) + (rank is not None)  # behind `text` itself
        return rank, place < len(self.ordered) and self.ordered[place].startswith(text)


# Forks and requests with one list share one index of it.
_stop_strings = lru_cache(maxsize=64)(_StopStrings)


class Detokenizer:
    """Text of one branch, grown token by token.

    Parameters
    ----------
    tokenizer : TokenBytes
        Gives each token's bytes.
    stop : sequence of str
        Strings that end the text, none of them empty. Of several, the one that is complete first wins; of those
        complete with the same character, the first of the list.
    include_stop : bool
        Leave the stop string at the end of the text.
    min_tokens : int
        Stop strings complete by this many tokens do not count.

    Attributes
    ----------
    stopped : str or None
        The stop string that ended the text.
    num_tokens : int
        Tokens taken so far, the one that completed the stop string included; later ones are not taken.

    Examples
    --------
    >>> class Letters:
    ...     def token_bytes(self, token):
    ...         return bytes([token])
    >>> detokenizer = Detokenizer(Letters(), stop=["cd"])
    >>> deltas = []
    >>> for token in b"abcecdx":
    ...     detokenizer.push(token)
    ...     deltas.append(detokenizer.delta())
    >>> deltas
    ['a', 'b', '', 'ce', '', '', '']
    >>> detokenizer.text, detokenizer.stopped, detokenizer.num_tokens
    ('abce', 'cd', 6)
    """

    __slots__ = (
        "_emitted",
        "_ended",
        "_include_stop",
        "_min_tokens",
        "_open_starts",
        "_pending",
        "_stops",
        "_text",
        "_tokenizer",
        "_unread",
        "num_tokens",
        "stopped",
    )

    def __init__(
        self, tokenizer: TokenBytes, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = _stop_strings(tuple(stop))
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._pending = b""  # the bytes of a character that is not complete
        self._open_starts: list[int] = []  # where in the text a stop string may have begun, ascending
        self._emitted = 0
        self._ended = False
        self._text = ""
        self._unread: list[int] = []  # tokens whose text nobody has asked for yet; none where a stop string may come
        self.stopped: str | None = None
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """All text so far; once stopped, up to the stop string (or with it)."""
        self._read()
        return self._text

    @property
    def settled(self) -> str:
        """All text so far that no later token can change or take back."""
        text = self.text
        return text[: self._open_starts[0]] if self._open_starts else text

    def push(self, token: int) -> None:
        """Take the next token; nothing happens once the text has stopped."""
        if self.stopped is None:
            self.num_tokens += 1
            self._unread.append(token)
            if self._stops.ordered:
                self._read()

    def push_all(self, tokens: Sequence[int]) -> None:
        """Take the next tokens; the same as `push` for each."""
        if self._stops.ordered:
            for token in tokens:
                self.push(token)
        else:
            self.num_tokens += len(tokens)
            self._unread += tokens

    def delta(self) -> str:
        """Return the text, since the last call, that no later token can change or take back."""
        text = self.settled
        new = text[self._emitted :]
        self._emitted = len(text)
        return new

    def finish(self) -> None:
        """End the text: what was held back is safe now, and an incomplete character becomes U+FFFD."""
        self._ended = True
        if self._stops.ordered:
            self._read()

    def fork(self) -> Self:
        """Return an independent copy, cheap however long the stop list is."""
        copy = type(self).__new__(type(self))
        copy._tokenizer, copy._stops = self._tokenizer, self._stops
        copy._include_stop, copy._min_tokens = self._include_stop, self._min_tokens
        copy._pending, copy._open_starts = self._pending, self._open_starts.copy()
        copy._emitted, copy._ended = self._emitted, self._ended
        copy._text, copy._unread = self._text, self._unread.copy()
        copy.stopped, copy.num_tokens = self.stopped, self.num_tokens
        return copy

    def completes(self, token: int) -> bool:
        """Whether `token` would complete a stop string now."""
        copy = self.fork()
        copy.push(token)
        return copy.stopped is not self.stopped

    def _read(self) -> None:
        if self._unread:
            data = b"".join(map(self._tokenizer.token_bytes, self._unread))
            self._unread.clear()
            self._decode(data, final=False)
        if self._ended and self.stopped is None:
            self._decode(b"", final=True)
            self._open_starts = []

    def _decode(self, data: bytes, final: bool) -> None:
        data = self._pending + data
        characters, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        if not self._stops.ordered:
            self._text += characters
            return
        for character in characters:
            self._append(character)
            if self.stopped is not None:
                return

    def _append(self, character: str) -> None:
        self._text += character
        starts, self._open_starts = [*self._open_starts, len(self._text) - 1], []
        complete: list[tuple[int, int]] = []
        for start in starts:
            rank, may_grow = self._stops.match(self._text[start:])
            if rank is not None and self.num_tokens > self._min_tokens:
                complete.append((rank, start))
            if may_grow:
                self._open_starts.append(start)
        if complete:
            _, start = min(complete)
            self.stopped = self._text[start:]
            if not self._include_stop:
                self._text = self._text[:start]
            self._open_starts = []
            self._pending = b""
