"""What the engine needs of a tokenizer, and token ids that users give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

Message = Mapping[str, Any]
"""One turn of a conversation: ``role`` and ``content``."""


class Codec(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of `text`."""

    def token_bytes(self, token: int, /) -> bytes:
        """Return the UTF-8 bytes that `token` stands for, none for a special token."""


class TokenTexts(dict[int, bytes]):
    """The bytes of tokens, each worked out when it is first asked for; after that a look-up costs no call of Python.

    Parameters
    ----------
    write : callable
        Gives the bytes of a token.
    known : mapping of int to bytes
        What needs no working out.
    """

    def __init__(self, write: Callable[[int], bytes], known: Mapping[int, bytes] | None = None) -> None:
        super().__init__(known or {})
        self._write = write

    def __missing__(self, token: int) -> bytes:
        """Work out the bytes of `token`."""
        text = self[token] = self._write(token)
        return text


@runtime_checkable
class ChatCodec(Codec, Protocol):
    """A tokenizer that knows how a conversation is written."""

    @property
    def has_chat_template(self) -> bool:
        """Whether it really does."""

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Write a conversation as text."""


def checked_tokens(name: str, tokens: Iterable[Any], vocab_size: int) -> list[int]:
    """Return `tokens`, which may be a tensor or an array, as a list of int.

    Raises
    ------
    ValueError
        If one of them is no token id below `vocab_size`; `name` says where it came from.
    """
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    if isinstance(tokens, bytes | Mapping) or not isinstance(tokens, Iterable):
        raise ValueError(f"{name}: {tokens!r} is neither text nor a list of token ids")
    checked = []
    for token in tokens:
        number = int(token) if isinstance(token, Integral) else -1
        if not 0 <= number < vocab_size:
            raise ValueError(f"{name}: {token!r} is not a token id of this model (0 to {vocab_size - 1})")
        checked.append(number)
    return checked
