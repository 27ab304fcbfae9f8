"""What a client has been told in a stream, so that the stream can go on from another replica."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from treewise.server.responses import to_json

DONE = b"data: [DONE]"
LOST = frozenset({"engine_failed", "draining"})
"""Codes of errors that mean the replica, not the request."""


STATES = ("live", "ended", "pruned")
"""Of a node, in the order in which they follow each other."""


class Parted(Exception):
    """A repeated stream does not begin with what was told before."""


class Interrupted(Exception):
    """A stream has ended with an error that another replica would not have."""


@dataclass
class _Choice:
    """How much of a choice was told: by the streams before, or by the one under way."""

    opened: bool = False
    length: int = 0  # characters
    check: int = 0  # of them
    entries: int = 0  # tokens with log-probabilities
    over: bool = False


class _Node(NamedTuple):
    """What was told of a node of a growing tree."""

    id: int
    length: int = 0
    tokens: int = -1
    state: str = "live"
    score: float | None = None


@dataclass
class Transcript:
    """Passes on the events of a stream, and of one that repeats it only what is new.

    Streams that repeat each other have the same text in each choice, and in each node of a search's tree. They may cut
    it into other pieces, take choices in another order, and number nodes otherwise. What the client gets is one stream.

    Attributes
    ----------
    is_over : bool
        Whether the last event has come.
    """

    is_over: bool = False
    _head: dict[str, Any] | None = None  # what all chunks of the first stream have in common
    _told: dict[int, _Choice] = field(default_factory=dict)  # by index of the choice
    _seen: dict[int, _Choice] = field(default_factory=dict)  # in this stream
    _nodes: dict[tuple[int, ...] | None, _Node] = field(default_factory=dict)  # told, by path
    _lengths: dict[tuple[int, ...] | None, int] = field(default_factory=dict)  # seen in this stream, by path
    _paths: dict[int, tuple[int, ...] | None] = field(default_factory=dict)  # of this stream's nodes, by id
    _repeats: bool = False
    _usage_is_told: bool = False

    def repeat(self) -> None:
        """Take the events from now on as those of a stream that begins anew."""
        self._repeats = self._head is not None
        for seen in (self._seen, self._lengths, self._paths):
            seen.clear()

    def take(self, event: bytes) -> bytes | None:
        """Return what the client is to be told of an event, without the blank line at its end; None if it knows all.

        Raises
        ------
        Interrupted
            If the replica says that it fails.
        Parted
            If it tells something else than was told before.
        """
        if event == DONE:
            self.is_over = True
            return event
        chunk = json.loads(event.removeprefix(b"data: "))
        if (error := chunk.get("error")) is not None:
            if error.get("code") in LOST:
                raise Interrupted(error.get("message"))
            return event
        if self._head is None:
            self._head = {name: chunk[name] for name in ("id", "created") if name in chunk}
        choices, more = chunk.get("choices", []), chunk.get("treewise", {})
        news = [choice for choice in choices if self._is_new(choice)]
        nodes = [told for node in more.get("nodes", []) if (told := self._grown(node)) is not None]
        is_known, has_usage = self._usage_is_told, chunk.get("usage") is not None
        self._usage_is_told |= has_usage
        if not self._repeats:
            return event
        if (choices or "nodes" in more) and not (news or nodes):
            return None
        if has_usage and is_known:
            return None
        chunk |= self._head | {"choices": news}
        if "nodes" in more:
            more["nodes"] = nodes
        if more.get("chosen") is not None:
            more["chosen"] = self._nodes[self._paths[more["chosen"]]].id
        return b"data: " + to_json(chunk)

    def _is_new(self, choice: dict[str, Any]) -> bool:
        """Tell whether there is something new in a piece of a choice, and cut off what is not."""
        index = choice["index"]
        told, seen = self._told.setdefault(index, _Choice()), self._seen.setdefault(index, _Choice())
        piece, name = (choice, "text") if "text" in choice else (choice["delta"], "content")
        text = piece.get(name) or ""
        known = min(max(0, told.length - seen.length), len(text))
        seen.check = crc32(text[:known].encode("utf-8", "replace"), seen.check)
        seen.length += len(text)
        reached = seen.length - len(text) + known
        ends = choice.get("finish_reason") is not None
        if (known and reached == told.length and seen.check != told.check) or (ends and reached < told.length):
            raise Parted(f"choice {index} is not what it was before")
        new = text[known:]
        if known:
            piece[name] = new
        entries = self._new_entries(choice, told, seen)
        opens = "role" in piece and not told.opened
        ends &= not told.over
        told.opened |= opens
        told.over |= ends
        if new:
            told.check = seen.check = crc32(new.encode("utf-8", "replace"), told.check)
            told.length = seen.length
        return bool(new or entries or opens or ends)

    def _new_entries(self, choice: dict[str, Any], told: _Choice, seen: _Choice) -> int:
        """Cut tokens off that were told before, and return how many are left."""
        logprobs = choice.get("logprobs")
        if not logprobs:
            return 0
        lists = {name: value for name, value in logprobs.items() if isinstance(value, list)}
        count = max(map(len, lists.values()), default=0)
        known = min(max(0, told.entries - seen.entries), count)
        if known:
            logprobs |= {name: value[known:] for name, value in lists.items()}
        seen.entries += count
        told.entries = max(told.entries, seen.entries)
        return count - known

    def _grown(self, node: dict[str, Any]) -> dict[str, Any] | None:
        """Return what is new of a node, with the id that it has for the client; None if nothing is."""
        path = None if node["path"] is None else tuple(node["path"])
        self._paths[node["id"]] = path
        before = self._lengths.get(path, 0)
        length = self._lengths[path] = before + len(node["text"])
        if (told := self._nodes.get(path)) is None:
            told = _Node(len(self._nodes))
        tokens, state, score = node["tokens"], node["state"], node["score"]
        is_behind = length < told.length or tokens < told.tokens or STATES.index(state) < STATES.index(told.state)
        if is_behind or (length, tokens, state, score) == told[1:]:
            return None
        above = None if node["parent"] is None else self._nodes[self._paths[node["parent"]]].id
        text = node["text"][max(0, told.length - before) :]
        self._nodes[path] = _Node(told.id, length, tokens, state, score)
        return {**node, "id": told.id, "parent": above, "text": text}
