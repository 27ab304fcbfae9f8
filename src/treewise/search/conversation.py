"""Asks the model about a branch as what stands there would go on: as the next turn of a chat, or as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from treewise.awaitables import gather, score
from treewise.branch import Branch
from treewise.turns import next_turn


async def ask(branches: Sequence[Branch], question: str, choices: Sequence[str]) -> list[list[float]]:
    """Ask `question` about what stands on each branch; how likely the model gives each of `choices` for an answer.

    Where it is the model's turn in a conversation, the question is the user's next turn, as `Branch.message` puts it;
    elsewhere it is a paragraph of its own, with "Answer:" under it. Nothing of it stays on the branches.

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
    known = branch.conversation()
    if known is None or not known.open:
        return await score([branch], f"\n\n{question}\nAnswer:", [choice and " " + choice for choice in choices])
    message = {"role": "user", "content": question}
    turn, _ = next_turn(branch.tree.codec, known, branch.path_tokens, message, reply=True)
    return await score([branch], turn, choices)
