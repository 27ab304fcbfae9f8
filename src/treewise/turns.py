"""Conversations that grow turn by turn at the end of a path, in the words of the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treewise.codec import ChatCodec, Message

PLACE = "«content»"  # stands where a message's text goes, to find the template's own words around it
CLOSED_ROLES = ("system", "developer", "assistant")  # after these it is not the model's turn


@dataclass(frozen=True)
class Conversation:
    """The turns on a path.

    Attributes
    ----------
    messages : tuple of mappings
        Without the turn that the model has begun, if it has.
    open : bool
        Whether the model's turn has begun: what follows `end` is its text.
    end : int
        Where the last of `messages`, or the beginning of the model's turn, ends on the path, in tokens.
    """

    messages: tuple[Message, ...]
    open: bool
    end: int


def opens_reply(role: str) -> bool:
    """Whether it is the model's turn after a turn of `role`, where nobody says otherwise."""
    return role not in CLOSED_ROLES


def written(codec: ChatCodec, messages: Sequence[Message], reply: bool) -> list[int]:
    """Return the tokens of a whole conversation, as `Tokenizer.apply_chat_template` does."""
    return codec.encode(codec.render_chat(messages, reply), add_special_tokens=False, parse_special=True)


def begun_by(codec: ChatCodec, tokens: Sequence[int]) -> Conversation | None:
    """Return the conversation that a prompt of `tokens` must be: it ends where the model's turn begins.

    Its turns are unknown; one of the user's stands for them.
    """
    user = {"role": "user", "content": PLACE}
    opening = codec.render_chat([user], True).rpartition(PLACE)[2]
    beginning = codec.encode(opening, add_special_tokens=False, parse_special=True)
    if not beginning or list(tokens[-len(beginning) :]) != beginning:
        return None
    return Conversation((user,), True, len(tokens))


def next_turn(
    codec: Any, known: Conversation | None, path: Sequence[int], message: Message, reply: bool
) -> tuple[list[int], Conversation]:
    """Return the tokens that put `message` at the end of a path, and the conversation that it belongs to then.

    Where the path is, token for token, how the template writes the conversation, so it is afterwards. Where it is not,
    because the model has written its turn in other tokens or the template edits earlier turns, what the template puts
    behind the model's turn follows it.

    Parameters
    ----------
    codec : ChatCodec
    known : Conversation or None
        What the path has of a conversation; None where this is the first turn.
    path : sequence of int
        All tokens of the path.
    message : mapping
    reply : bool
        End with the beginning of the model's turn.

    Raises
    ------
    ValueError
        If the model has no chat template, the template refuses the messages, or the turn cannot follow what is there.
    """
    if not isinstance(codec, ChatCodec) or not codec.has_chat_template:
        raise ValueError("message: this model has no chat template; put plain text on the branch with append")
    if known is None:
        whole = written(codec, [message], reply)
        new = whole[len(path) :] if whole[: len(path)] == list(path) else whole
        return new, Conversation((message,), reply, len(path) + len(new))
    earlier, said = list(known.messages), list(path[known.end :])
    own = [*written(codec, earlier, known.open), *said]
    if said and not known.open:
        raise ValueError(f"message: {len(said)} tokens that belong to no turn stand behind the last one")
    answered = known.open and (bool(said) or message["role"] != "assistant")
    if answered:
        text = b"".join(map(codec.token_bytes, said)).decode("utf-8", "replace")
        earlier.append({"role": "assistant", "content": text})
    whole = written(codec, [*earlier, message], reply)
    if whole[: len(own)] == own:
        new = whole[len(own) :]
    elif answered:
        new = _behind_reply(codec, [*earlier[:-1], {"role": "assistant", "content": PLACE}, message], reply, own[-1])
    else:
        raise ValueError("message: the chat template writes the earlier turns in another way once this turn follows")
    return new, Conversation((*earlier, message), reply, len(path) + len(new))


def _behind_reply(codec: ChatCodec, messages: Sequence[Message], reply: bool, last: int) -> list[int]:
    """Return what the template puts behind the reply among `messages` that is `PLACE`, and which `last` has ended."""
    _, place, text = codec.render_chat(messages, reply).rpartition(PLACE)
    if not place:
        raise ValueError("message: the chat template leaves out what the model said in the turn before")
    tokens = codec.encode(text, add_special_tokens=False, parse_special=True)
    ended = tokens[:1] == [last] and not codec.token_bytes(last)  # the model ended its turn itself
    return tokens[1:] if ended else tokens
