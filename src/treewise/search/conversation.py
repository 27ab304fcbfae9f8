"""Asks the model about a branch in the way that the branch's prompt was put: as a chat turn, or as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from treewise.awaitables import gather, score
from treewise.branch import Branch
from treewise.turns import PLACE, ChatCodec


async def ask(branches: Sequence[Branch], question: str, choices: Sequence[str]) -> list[list[float]]:
    """Ask `question` about what stands on each branch; how likely the model gives each of `choices` for an answer.

    Where the prompt is a conversation that the tokenizer's chat template has written, the question is the user's next
    turn; elsewhere it is a paragraph of its own, with "Answer:" under it. Nothing of it stays on the branches.

    Returns
    -------
    list of list of float
        Summed log-probability of each choice [branches][choices].

    Raises
    ------
    ValueError
        If a choice is empty text.
    """
    rated = await gather(*(_ask(branch, question, choices) for branch in branches))
    return [values for [values] in rated]


async def _ask(branch: Branch, question: str, choices: Sequence[str]) -> list[list[float]]:
    turn = _turn(branch, question)
    if turn is not None:
        return await score([branch], turn, choices)
    return await score([branch], f"\n\n{question}\nAnswer:", [choice and " " + choice for choice in choices])


def _turn(branch: Branch, question: str) -> list[int] | None:
    """Return the tokens that end the model's turn and let the user ask; None where the prompt is no conversation."""
    codec = branch.tree.codec
    if not isinstance(codec, ChatCodec) or not codec.has_chat_template:
        return None
    user, model = {"role": "user", "content": PLACE}, {"role": "assistant", "content": PLACE}
    _, before, after = codec.render_chat([user, model, user]).rsplit(PLACE, 2)
    opening, closing = (codec.encode(text, add_special_tokens=False, parse_special=True) for text in (before, after))
    if branch.tree.prompt_tokens[-len(closing) :] != closing:
        return None
    if opening[0] == branch.path_tokens[-1]:
        opening = opening[1:]  # the model ended its turn itself
    return [*opening, *codec.encode(question, add_special_tokens=False), *closing]
