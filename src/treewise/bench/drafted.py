"""Speculative decoding without a drafter: every step verifies a tree of drafted tokens and accepts as recorded.

A real topology goes the way of all guesses, but that as many of them are taken for right as was recorded. In a star of
drafted tokens no path is as long as what was accepted. There, a drafted token is a scratch branch of one token that
gives its row to the step, and what was accepted is appended to the prompt's branch and computed beside the next
drafted tokens: a step has about four rows more than drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from treewise.awaitables import decode, generate
from treewise.bench.case import Case
from treewise.branch import Branch
from treewise.config import SamplingParams
from treewise.controller import Rows, TreeView
from treewise.replay import Recordings
from treewise.speculate.drafter import Stem, Step
from treewise.speculate.trees import EMPTY, TokenTree


class Verify:
    """Look at the likeliest token after each drafted one, as verification does, and stop."""

    stopping = SamplingParams(temperature=0.0, ignore_eos=True)

    def step(self, tree: TreeView, logprobs: Tensor) -> Rows | None:
        """Wait for the tokens; what is accepted was recorded."""
        tree.logits.argmax(dim=-1).tolist()
        return None


@dataclass(frozen=True, eq=False)
class RecordedTree(TokenTree):
    """Guesses, depth first, of which `right` are right whatever is chosen, and none is left out."""

    right: tuple[int, ...] = ()

    def best(self, size: int, room: int | None = None) -> TokenTree:
        """Return all of it."""
        return self

    def depth_first(self) -> TokenTree:
        """Return it as it is."""
        return self

    def accepted(self, choices: Sequence[int]) -> list[int]:
        """Return what was recorded."""
        return list(self.right)


class RecordedDrafter:
    """Guesses a tree of one shape behind the token that follows the prompt, and so on, for a single path.

    Parameters
    ----------
    parents : sequence of int
        Of each guess.
    prompt_tokens : int
    accepted : sequence of int
        Tokens by which each step makes the path longer, the one behind the right guesses included.
    """

    wants_hidden = False

    def __init__(self, parents: Sequence[int], prompt_tokens: int, accepted: Sequence[int]) -> None:
        self._guesses = TokenTree.of(np.zeros(len(parents), np.int64), parents).depth_first()
        self._path = [int(np.argmax(self._guesses.depths))]  # downwards to the deepest
        while (above := int(self._guesses.parents[self._path[0]])) >= 0:
            self._path.insert(0, above)
        self._prompt_tokens = prompt_tokens
        self._accepted = iter(accepted)

    def draft(self, stems: Sequence[Stem], size: int, step: Step) -> list[TokenTree]:
        """See `Drafter.draft`."""
        [stem] = stems
        if stem.node.end == self._prompt_tokens:
            return [EMPTY]
        tree, right = self._guesses, self._path[: next(self._accepted) - 1]
        return [RecordedTree(tree.tokens, tree.parents, tree.probabilities, right=tuple(right))]


def speculation(
    recordings: Recordings, max_steps: int | None, prompt_tokens: int, new_tokens: int, tree_size: int, topology: str
) -> Case:
    """Return the request that verifies drafted trees until `new_tokens` were accepted.

    Parameters
    ----------
    recordings : Recordings
        Gives the accepted lengths and the real topologies.
    max_steps : int or None
        Ends it after so many steps of verification.
    prompt_tokens, new_tokens : int
    tree_size : int
        Rows of a step.
    topology : str
        ``"star"``, every drafted token right behind the prompt, or ``"real"``.

    Raises
    ------
    ValueError
        If there is no such topology, or no real one of this size.
    """
    if topology not in ("star", "real"):
        raise ValueError(f"topology: {topology!r} is not one of star, real")
    if topology == "real" and tree_size not in recordings.topologies:
        known = ", ".join(map(str, recordings.topologies))
        raise ValueError(f"tree_size: no real topology has {tree_size} tokens; recorded are {known}")
    parent, guesses = [-1] * tree_size, recordings.topologies.get(tree_size, [])
    if topology == "real":
        parent = [-1, *(node + 1 for node in guesses)]  # the first is the root
    work = recordings.speculation(parent, prompt_tokens + new_tokens, prompt_tokens)
    work = replace(work, accepted=work.accepted[: max_steps - 1 if max_steps else None])

    async def real(root: Branch) -> None:
        # One token comes with the prompt, and two with the last step, behind which nothing is recorded.
        await generate([root], SamplingParams(temperature=0.0, max_tokens=sum(work.accepted) + 3, ignore_eos=True))

    async def star(root: Branch) -> None:
        await decode([root], Verify())  # the prompt
        for accepted in (*work.accepted, 0):
            await _verify(root, parent)
            root.append([0] * accepted)

    final = prompt_tokens + sum(work.accepted)
    drafted, most = len(parent), max(work.accepted, default=0)
    return Case(
        f"speculation, {topology} of {tree_size}",
        real if topology == "real" else star,
        prompt_tokens,
        longest=final + drafted,
        widest=drafted + most,
        decoded=sum(work.accepted),
        peak_tokens=final + drafted,
        peak_nodes=drafted + 1,
        work=work,
        drafter=partial(RecordedDrafter, guesses, prompt_tokens, (*work.accepted, 2)) if topology == "real" else None,
    )


async def _verify(root: Branch, parent: Sequence[int]) -> None:
    """Compute a drafted token a row, each on a scratch branch that is given up afterwards."""
    drafted: list[Branch] = []
    for token, above in enumerate(parent):
        drafted.append((root if above < 0 else drafted[above]).scratch())
        drafted[-1].append([token % root.tree.codec.vocab_size])
    await decode(drafted, Verify())
    for branch in reversed(drafted):
        branch.prune("verification")
