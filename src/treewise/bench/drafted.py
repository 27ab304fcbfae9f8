"""Speculative decoding without a drafter: every step verifies a tree of drafted tokens and accepts as recorded.

A drafted token is a scratch branch of one token that gives its row to the step. A branch cannot take over the keys of
another, so what was accepted is appended to the prompt's branch and computed once more beside the next drafted tokens:
a step has about four rows more than drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from treewise.awaitables import decode
from treewise.bench.case import Case
from treewise.branch import Branch
from treewise.config import SamplingParams
from treewise.controller import Rows, TreeView
from treewise.replay import Recordings


class Verify:
    """Look at the likeliest token after each drafted one, as verification does, and stop."""

    stopping = SamplingParams(temperature=0.0, ignore_eos=True)

    def step(self, tree: TreeView, logprobs: Tensor) -> Rows | None:
        """Wait for the tokens; what is accepted was recorded."""
        tree.logits.argmax(dim=-1).tolist()
        return None


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
    parent = [-1] * tree_size
    if topology == "real":
        parent = [-1, *(node + 1 for node in recordings.topologies[tree_size])]  # the first is the root
    work = recordings.speculation(parent, prompt_tokens + new_tokens, prompt_tokens)
    work = replace(work, accepted=work.accepted[: max_steps - 1 if max_steps else None])

    async def program(root: Branch) -> None:
        await decode([root], Verify())  # the prompt
        for accepted in (*work.accepted, 0):
            await _verify(root, parent)
            root.append([0] * accepted)

    final = prompt_tokens + sum(work.accepted)
    drafted, most = len(parent), max(work.accepted, default=0)
    return Case(
        f"speculation, {topology} of {tree_size}",
        program,
        prompt_tokens,
        longest=final + drafted,
        widest=drafted + most,
        decoded=sum(work.accepted),
        peak_tokens=final + drafted,
        peak_nodes=drafted + 1,
        work=work,
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
