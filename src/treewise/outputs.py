"""Results out of branches: completions, log-probs, and the nodes of a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from treewise.branch import Branch, BranchTree
from treewise.branch.walks import along_paths
from treewise.codec import Codec
from treewise.results import CompletionOutput, Logprob, NodeState, TreeNode
from treewise.sampler import Candidates
from treewise.settling import uncollected


class _Path(NamedTuple):
    """The tokens of a branch's path that were not given, the bytes of each, and what was likely at its place."""

    given: int  # tokens of the prompt above
    tokens: list[int]
    pieces: list[bytes]
    candidates: list[Candidates | None]

    def then(self, branch: Branch) -> _Path:
        """Return the path of `branch`, which leaves this one."""
        pieces = list(map(branch.tree.codec.token_bytes, branch.tokens))
        candidates: list[Candidates | None] = [None] * len(pieces)
        if branch.has_candidates:
            candidates = branch.candidates
        if branch.parent is None:
            given = len(branch.tree.prompt_tokens)
            return _Path(given, branch.tokens[given:], pieces[given:], candidates[given:])
        given = min(self.given, branch.start)
        shared = branch.start - given
        return _Path(
            given,
            self.tokens[:shared] + branch.tokens,
            self.pieces[:shared] + pieces,
            self.candidates[:shared] + candidates,
        )


@uncollected
def completions(branches: Sequence[Branch]) -> list[CompletionOutput]:
    """Return the path of each branch below the prompt as one answer."""
    paths = along_paths(branches, _Path(0, [], [], []), _Path.then)
    outputs = []
    for index, branch in enumerate(branches):
        path = paths[branch]
        text = b"".join(path.pieces).decode("utf-8", "replace")
        asked = [entry for entry in path.candidates if entry is not None] if any(path.candidates) else []
        outputs.append(
            CompletionOutput(
                index=index,
                text=text[: len(text) - branch.hidden_tail] if branch.hidden_tail else text,
                token_ids=path.tokens,
                cumulative_logprob=branch.logprob,
                logprobs=[logprobs(entry, branch.tree.codec) for entry in asked] or None,
                finish_reason=branch.finish_reason,
                stop_reason=branch.stop_reason,
                score=branch.score,
            )
        )
    return outputs


def logprobs(candidates: Candidates, codec: Codec) -> dict[int, Logprob]:
    """Return the candidates at one place with their texts."""
    return {token: Logprob(logprob, rank, plain([token], codec)) for token, (logprob, rank) in candidates.items()}


def plain(tokens: Sequence[int], codec: Codec) -> str:
    """Return the text of `tokens`, broken characters replaced."""
    return b"".join(codec.token_bytes(token) for token in tokens).decode("utf-8", "replace")


@uncollected
def draw(tree: BranchTree) -> tuple[list[TreeNode], dict[Branch, int]]:
    """Return the drawing's nodes, parents first, and the node in which each branch ends.

    A branch is one node, unless something forked off in the middle of it. Visits are those that its note counts, as
    the notes of Monte Carlo tree search do.
    """
    nodes: list[TreeNode] = []
    ends: dict[Branch, int] = {}
    reached: dict[tuple[Branch, int], int | None] = {}  # (branch, position) -> the node that ends there
    given = len(tree.prompt_tokens)
    for branch in tree.branches():
        begin = branch.start
        parent = None if branch.parent is None else reached[branch.parent, begin]
        reached[branch, begin] = parent
        cuts = {child.start for child in branch.all_children} | {branch.num_tokens}
        if branch.parent is None:
            cuts.add(given)
        for end in sorted(cut for cut in cuts if cut > begin):
            own = slice(begin - branch.start, end - branch.start)
            last = end == branch.num_tokens
            known = [logprob for logprob in branch.logprobs[own] if logprob is not None]
            tokens = branch.tokens[own]
            nodes.append(
                TreeNode(
                    id=len(nodes),
                    parent=parent,
                    text=branch.decode(tokens) if last else plain(tokens, tree.codec),
                    token_ids=tokens,
                    logprobs=branch.logprobs[own],
                    logprob=sum(known) + (0.0 if parent is None else nodes[parent].logprob),
                    state="prompt" if branch.parent is None and end <= given else _state(branch),
                    finish_reason=branch.finish_reason if last else None,
                    score=branch.score if last else None,
                    token_texts=[plain([token], tree.codec) for token in tokens],
                    visits=getattr(branch.note, "visits", None) if last else None,
                )
            )
            parent = reached[branch, end] = nodes[-1].id
            begin = end
        if parent is not None:
            ends[branch] = parent
    return nodes, ends


def _state(branch: Branch) -> NodeState:
    if branch.pruned:
        return "pruned"
    if branch.finished:
        return "finished"
    return "live" if branch.alive and not branch.num_children else "kept"
