"""The bodies of responses: objects of OpenAI's API out of what choices gain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Response

from treewise.codec import Codec
from treewise.outputs import plain
from treewise.results import Usage
from treewise.server.choices import Delta, Entry

LOWEST_LOGPROB = -9999.0
"""Stands for what JSON has no number for; OpenAI's own."""


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class JsonResponse(Response):
    """JSON in ASCII, so that no text of a user's can be more than UTF-8 holds."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write the body."""
        return to_json(content)


def to_json(content: Any) -> bytes:
    """Write JSON in ASCII, without blanks; numbers that are not finite are an error."""
    return _ENCODER.encode(content).encode()


def usage(cost: Usage) -> dict[str, Any]:
    """Return what a request has cost, in OpenAI's words."""
    return {
        "prompt_tokens": cost.prompt_tokens,
        "completion_tokens": cost.completion_tokens,
        "total_tokens": cost.prompt_tokens + cost.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cost.cached_tokens},
    }


class Form(Protocol):
    """How one endpoint writes choices."""

    id_prefix: str
    whole: str
    chunk: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk's choice, if there is one before all text."""

    def piece(self, delta: Delta) -> dict[str, Any]:
        """Return the choice of a chunk."""

    def choice(self, index: int, text: str, entries: Sequence[Entry], last: Delta) -> dict[str, Any]:
        """Return a whole choice; `last` says how it ended."""


@dataclass
class CompletionForm:
    """`/v1/completions`; log-probs of the likeliest tokens if `top` says how many."""

    codec: Codec
    top: int | None
    id_prefix = "cmpl"
    whole = chunk = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        """See `Form.opening`."""
        return None

    def piece(self, delta: Delta) -> dict[str, Any]:
        """See `Form.piece`."""
        return self.choice(delta.index, delta.text, delta.entries, delta)

    def choice(self, index: int, text: str, entries: Sequence[Entry], last: Delta) -> dict[str, Any]:
        """See `Form.choice`."""
        return {
            "index": index,
            "text": text,
            "logprobs": None if self.top is None else self._logprobs(entries),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        likeliest: list[dict[str, float] | None] = []
        for entry in entries:
            if entry.candidates is None:
                likeliest.append(None)
                continue
            texts: dict[str, float] = {}
            for token, (logprob, _) in entry.candidates.items():
                text = entry.piece if token == entry.token else plain([token], self.codec)
                texts[text] = max(_finite(logprob), texts.get(text, LOWEST_LOGPROB))
            likeliest.append(texts)
        return {
            "tokens": [entry.piece for entry in entries],
            "token_logprobs": [
                None if entry.candidates is None else _finite(entry.candidates[entry.token][0]) for entry in entries
            ],
            "top_logprobs": likeliest,
            "text_offset": [entry.offset for entry in entries],
        }


@dataclass
class ChatForm:
    """`/v1/chat/completions`; log-probs of the likeliest tokens if `top` says how many."""

    codec: Codec
    top: int | None
    id_prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        """See `Form.opening`."""
        return self._chunk(index, {"role": "assistant", "content": ""}, (), Delta(index, ""))

    def piece(self, delta: Delta) -> dict[str, Any]:
        """See `Form.piece`."""
        return self._chunk(delta.index, {"content": delta.text} if delta.text else {}, delta.entries, delta)

    def choice(self, index: int, text: str, entries: Sequence[Entry], last: Delta) -> dict[str, Any]:
        """See `Form.choice`."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if self.top is None else self._logprobs(entries),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _chunk(self, index: int, delta: dict[str, Any], entries: Sequence[Entry], last: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(entries) if entries else None,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: Entry) -> dict[str, Any]:
        candidates = entry.candidates or {}
        likeliest = sorted(candidates.items(), key=lambda each: each[1][1])[: self.top]
        return self._token(entry.token, entry.piece, candidates[entry.token][0]) | {
            "top_logprobs": [
                self._token(token, plain([token], self.codec), logprob) for token, (logprob, _) in likeliest
            ]
        }

    def _token(self, token: int, text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": _finite(logprob), "bytes": list(self.codec.token_bytes(token))}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
