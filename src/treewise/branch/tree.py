"""The tree of one request: all its branches, and what they share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from treewise.branch.handle import PRUNED, Branch
from treewise.codec import Codec
from treewise.kv import KVManager, Thinning
from treewise.tree import Node


class BranchTree:
    """The tree of one request: its branches and what they share.

    Parameters
    ----------
    kv : KVManager
    codec : Codec
    prompt_tokens : sequence of int
        Never empty.
    seed : int
        The random stream of a branch follows from this and the branch's path.
    order : int
        Rank of arrival among all requests.
    priority : int
        The higher goes first; of equal ones the earlier.
    namespace : str
        Only requests of one namespace share cached prefixes.
    thinning : Thinning, optional
        How the keys of the prompt are thinned out, if at all.

    Attributes
    ----------
    stump : Node or None
        The sealed node that the branches stand on once keys have been thinned out.
    stages : list of int
        Lengths of the path at which its keys are thinned out, in order: the prompt's, as a rule, and perhaps more as it
        grows.
    num_thinned : int
        How many of these have been reached.
    given : dict of Node to int, or None
        Where branches end, and at what position, when the first rows of the prompt are wanted: what they were given may
        be computed before the prompt is thinned out. None where nobody waits for it.
    """

    def __init__(
        self,
        kv: KVManager,
        codec: Codec,
        prompt_tokens: Sequence[int],
        seed: int,
        order: int,
        priority: int = 0,
        namespace: str = "",
        thinning: Thinning | None = None,
    ) -> None:
        self.kv = kv
        self.codec = codec
        self.prompt_tokens = list(prompt_tokens)
        self.seed = seed
        self.rank = (-priority, order)
        self.namespace = namespace
        self.alive: dict[Branch, None] = {}  # an ordered set
        self.num_decoded = 0
        self.unsettled: dict[Callable[[], None], None] = {}  # make branches of what operations under way have decoded
        self.fallen: list[Callable[[], None]] = []  # make branches of what these have pruned
        self.thinning = thinning
        self.stump: Node | None = None
        self.stages = [] if thinning is None else [thinning.first]
        if thinning is not None and thinning.first == len(prompt_tokens):
            self.stump = kv.match_whole(self.prompt_tokens, namespace, thinning.key)
        known = kv.match(self.prompt_tokens, namespace, self._most_known) if self.stump is None else self.stump
        self.num_thinned = int(self.stump is not None)
        waits = thinning is not None and thinning.joint and self.stump is None
        self.given: dict[Node, int] | None = {} if waits else None
        self.cached_tokens = 0 if known is None else _computed_tokens(kv, known)
        self.num_known = 0 if known is None else known.end
        self.root = Branch(self, None, 0, None)
        if known is not None:
            self.root.tip = kv.hold(known)
        if self.num_known < len(self.prompt_tokens):
            self.root.tip = self.root.plant(self.prompt_tokens[self.num_known :])
        self.root.tokens = list(self.prompt_tokens)
        self.root.logprobs = [None] * len(self.prompt_tokens)

    @property
    def stage(self) -> int | None:
        """The length at which the path is thinned out next; None if it is not."""
        return self.stages[self.num_thinned] if self.num_thinned < len(self.stages) else None

    def horizon(self, tip: Node) -> int | None:
        """Return the position up to which keys of the path to `tip` may be computed now.

        Those behind it wait until what is there is thinned out. None where there is nothing to wait for.
        """
        stage = self.stage
        if stage is None or self.given is None:
            return stage
        if not self.given:
            self.given = {end: end.end for end in self.tips() if end.end >= stage}
        node: Node | None = tip
        while node is not None and node not in self.given:
            node = node.parent
        return stage if node is None else self.given[node]

    @property
    def _most_known(self) -> int | None:
        """How much of the prompt may be taken from others: all but what a policy looks at."""
        if self.thinning is None or self.thinning.first > len(self.prompt_tokens):
            return None
        return max(0, len(self.prompt_tokens) - self.thinning.num_queries)

    def stand_on(self, stump: Node, end: Node) -> None:
        """Let branches stand on `stump`, what is left of the path to `end`, from now on."""
        self.stump = stump
        self.given = None
        self.num_thinned += 1
        self._transplant(end, stump)

    def regrow(self) -> None:
        """Go back to the beginning, as the stump has lost its keys: they will be computed again, stage by stage."""
        stump = self.stump
        assert stump is not None, "there is a stump"
        self.stump, self.num_thinned = None, 0
        if stump.idle:  # nobody stands on it any more
            self.stages = []
            return
        known = self.kv.match(self.prompt_tokens, self.namespace, self._most_known)
        start = 0 if known is None else known.end
        self._transplant(stump, self.kv.forest.add(known, stump.tokens[start:], self.namespace))

    def _transplant(self, end: Node, place: Node) -> None:
        """Let all that branches have below `end` be below `place`, which ends in the same token."""
        moved = {end: place}
        left = []
        for branch in self.alive:
            line: list[Node] = []
            node = branch.tip
            while node is not None and node is not end:
                line.append(node)
                node = node.parent
            if branch.tip is None or node is None:  # a fork from further up keeps all that it has
                continue
            below = place
            for node in reversed(line):
                if node not in moved:
                    moved[node] = self.kv.forest.add(below, node.tokens)
                below = moved[node]
            left.append(branch.tip)
            branch.tip = self.kv.hold(below)
        self.kv.drop(left, sys.maxsize)

    def tips(self) -> Iterator[Node]:
        """Yield the node in which each live branch ends, but for those whose forks hold their keys."""
        return (branch.tip for branch in self.alive if branch.tip is not None)

    def branches(self) -> Iterator[Branch]:
        """Return every branch there ever was, parents first, the pruned ones too."""
        self.settle()
        self.unfold()
        return self.known_branches()

    def known_branches(self) -> Iterator[Branch]:
        """Yield the branches, parents first, perhaps without some that were pruned."""
        stack = [self.root]
        while stack:
            branch = stack.pop()
            yield branch
            stack.extend(reversed(branch.known_children))

    def settle(self) -> None:
        """Make branches of all that has been decoded, as somebody may look at them now."""
        while self.unsettled:
            settle, _ = self.unsettled.popitem()
            settle()

    def unfold(self) -> None:
        """Make branches of what operations have pruned as well."""
        while self.fallen:
            self.fallen.pop()()

    def close(self) -> None:
        """End the request: every branch lets go of its keys, which stay behind as cached prefixes."""
        self.settle()
        self.let_go(list(self.alive), "closed", sys.maxsize)

    def let_go(self, branches: Iterable[Branch], state: str, keep: int) -> None:
        """Give up what `branches` hold; see `KVManager.drop` for `keep`."""
        tips, pruned = [], state.startswith(PRUNED)
        for branch in branches:
            branch.state, branch.alive = state, False
            if pruned and branch.ordinal is not None and branch.parent is not None:
                branch.parent.num_children -= 1
            del self.alive[branch]
            if (tip := branch.tip) is not None:
                tips.append(tip)
                branch.tip = None
        self.kv.drop(tips, keep)


def _computed_tokens(kv: KVManager, tip: Node) -> int:
    return sum(node.computed for node in kv.forest.path(tip))
