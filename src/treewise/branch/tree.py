"""The tree of one request: all its branches, and what they share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from treewise.branch.handle import PRUNED, Branch
from treewise.codec import Codec
from treewise.kv import KVManager, Stage, Thinning
from treewise.kv.kept import NEVER
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
    stages : dict of Node to Stage
        The sealed nodes that branches stand on, whether they have keys or have lost them, and what these came from.
    regrown : dict of Node to Stage
        Nodes that end where a sealed one did which has lost its keys, and will be replaced by the like of it.
    begun : bool
        Whether nobody waits any more for the prompt to be thinned out.
    pressed : int
        Where the only branch is thinned out as the pool is short.
    hurries : bool
        Whether branches that have come to their stages do not wait for the others, as these have no room.
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
        self.stages: dict[Node, Stage] = {}
        self.regrown: dict[Node, Stage] = {}
        self.pressed = NEVER
        self.hurries = False
        self._next: dict[Node, tuple[int, Stage | None]] = {}  # see `next_stage`, as long as nothing changes
        self._next_since: tuple[int, bool, int] | None = None
        self.begun = thinning is None or thinning.first != len(prompt_tokens)
        known = None
        if thinning is not None and not self.begun:
            known = kv.match_whole(self.prompt_tokens, namespace, thinning.key)
        self.given: dict[Node, int] | None = None
        if known is not None:
            self.begun, self.stages[known] = True, Stage(known.end)
        else:
            known = kv.match(self.prompt_tokens, namespace, self._most_known)
            if thinning is not None and thinning.joint:
                self.given = {}
        self.cached_tokens = 0 if known is None else _computed_tokens(kv, known)
        self.num_known = 0 if known is None else known.end
        self.root = Branch(self, None, 0, None)
        if known is not None:
            self.root.tip = kv.hold(known)
        if self.num_known < len(self.prompt_tokens):
            self.root.tip = self.root.plant(self.prompt_tokens[self.num_known :])
        self.root.tokens = list(self.prompt_tokens)
        self.root.logprobs = [None] * len(self.prompt_tokens)

    def next_stage(self, tip: Node) -> tuple[int, Stage | None]:
        """Return the length at which the path to `tip` is thinned out next, and what comes of it, if that is known.

        The length is `NEVER` if it is not. Where it lies follows from the length of the path alone.
        """
        if self.thinning is None:
            return NEVER, None
        # All that it depends on; what is regrown and sealed changes with the forest.
        now = self.kv.forest.version, self.begun, self.pressed
        if now != self._next_since:
            self._next, self._next_since = {}, now
        if tip not in self._next:
            self._next[tip] = self._next_stage(self.thinning, tip)
        return self._next[tip]

    def _next_stage(self, thinning: Thinning, tip: Node) -> tuple[int, Stage | None]:
        node, goal = self._goal(tip)
        base = None if node is None else self.stages[node]
        while goal is not None:
            if goal.before is base:
                return goal.end, goal
            goal = goal.before
        first, every = thinning.first, thinning.every
        if first == NEVER:
            return self.pressed, None
        if base is None:
            return first if every is not None or not self.begun else NEVER, None
        return NEVER if every is None else first + ((base.end - first) // every + 1) * every, None

    def horizon(self, tip: Node) -> int | None:
        """Return the position up to which keys of the path to `tip` may be computed now.

        Those behind it wait until what is there is thinned out. None where there is nothing to wait for.
        """
        if self.thinning is None:
            return None
        stage, _ = self.next_stage(tip)
        if self.begun or self.given is None:
            return None if stage == NEVER else stage
        if not self.given:
            self.given = {end: end.end for end in self.tips() if end.end >= stage}
        node: Node | None = tip
        while node is not None and node not in self.given:
            node = node.parent
        return stage if node is None else self.given[node]

    def rests(self, tip: Node) -> bool:
        """Whether the path to `tip` is as far as it may be now, and has to wait for other branches to come as far."""
        if self.thinning is None or self.hurries or not (self.begun or self.given):
            return False
        horizon = self.horizon(tip)
        return horizon is not None and self.computed(tip, horizon)

    def hurry(self) -> None:
        """Let branches that are as far as they may be wait for others no more, as these have no room."""
        self.hurries = True
        if self.given:
            self.given = {tip: end for tip, end in self.given.items() if self.computed(tip, end)}

    def computed(self, tip: Node, stop: int) -> bool:
        """Whether all tokens of the path to `tip` up to position `stop` are there and have keys."""
        path = (node for node in self.kv.forest.path(tip) if node.start < stop)
        return stop <= tip.end and all(node.computed >= min(len(node.tokens), stop - node.start) for node in path)

    @property
    def _most_known(self) -> int | None:
        """How much of the prompt may be taken from others: all but what a policy looks at."""
        if self.thinning is None or self.thinning.first > len(self.prompt_tokens):
            return None
        return max(0, len(self.prompt_tokens) - self.thinning.num_queries)

    def stand_on(self, sealed: Mapping[Node, tuple[Node, Stage]]) -> None:
        """Let branches stand from now on on new sealed nodes.

        Parameters
        ----------
        sealed : mapping of Node to (Node, Stage)
            Of old nodes, parents first, the new ones that end where they do. What hangs below an old one, and is
            neither old itself nor of another tree, hangs below the new one then.
        """
        self._replant(sealed)
        self.stages.update(sealed.values())
        self._tidy()

    def regrow(self) -> None:
        """Begin again with the paths whose sealed nodes have lost their keys: they will be computed stage by stage."""
        lost = [node for node in self.stages if node not in self.kv.kept]
        if not lost:
            return
        places: dict[Node, tuple[Node, Stage]] = {}
        for node in sorted(self.own().intersection(lost), key=attrgetter("start")):
            stage = self.stages[node]
            above: Node | None
            if node.parent in places:
                above, tokens = places[node.parent][0], node.tokens
            else:
                above = self._known(stage)
                tokens = self.kv.forest.path_tokens(node)[0 if above is None else above.end :]
            if above is not None and not tokens:  # another has been there
                places[node] = above, stage
                continue
            place = self.kv.forest.add(above, tokens, self.namespace)
            self.regrown[place], places[node] = stage, (place, stage)
        self._replant(places)
        self._tidy()

    def _known(self, stage: Stage) -> Node | None:
        """Return what there is of the path on which `stage` lies: of the prompt what is left, or some that is whole."""
        assert self.thinning is not None, "keys were given up"
        while stage.before is not None:
            stage = stage.before
        if stage.end == len(self.prompt_tokens) and not self.thinning.joint:
            known = self.kv.match_whole(self.prompt_tokens, self.namespace, self.thinning.key)
            if known is not None:
                self.stages[known] = stage
                return known
        return self.kv.match(self.prompt_tokens, self.namespace, self._most_known)

    def _goal(self, tip: Node) -> tuple[Node | None, Stage | None]:
        """Return the last sealed node of a path, and what the path behind it is to become again.

        A path that ends inside of one that is regrown comes to the same stages as far as it goes.
        """
        goal: Stage | None = None
        node: Node | None = tip
        while node is not None and not node.sealed:
            goal = self.regrown.get(node) if goal is None else goal
            node = node.parent
        for other, stage in self.regrown.items() if goal is None else ():
            if goal is None and tip in self.kv.forest.path(other):
                goal = stage
                while goal is not None and goal.end > tip.end:
                    goal = goal.before
        return node, goal

    def _goes_along(self, tip: Node, stage: Stage) -> bool:
        """Whether the path to `tip` comes to `stage`, or never has been further."""
        _, goal = self._goal(tip)
        if goal is None:
            return True
        while goal is not None and goal is not stage:
            goal = goal.before
        return goal is stage

    def own(self) -> set[Node]:
        """Return the nodes on the paths of live branches."""
        return {node for tip in set(self.tips()) for node in self.kv.forest.path(tip)}

    def _replant(self, places: Mapping[Node, tuple[Node, Stage]]) -> None:
        """Let what branches have below some nodes, parents first, be below others that end in the same tokens.

        What is regrown and comes to another stage than that of the new node stays.
        """
        own, tips = self.own(), set(self.tips())
        ends = [self.kv.hold(node) for node in places]  # which are there until all have moved
        moving = {tip for tip in tips if tip in places and self._goes_along(tip, places[tip][1])}
        staying = {
            old: {node for tip in tips if not self._goes_along(tip, stage) for node in self.kv.forest.path(tip)}
            for old, (_, stage) in places.items()
        }
        for old, (new, _) in places.items():
            for child in [child for child in old.children if child in own]:
                if child not in places and child not in staying[old]:
                    self.kv.forest.move(child, new)
        for branch in self.alive:
            if branch.tip in moving:
                ends.append(branch.tip)
                branch.tip = self.kv.hold(places[branch.tip][0])
        self.kv.drop(ends, sys.maxsize)

    def _tidy(self) -> None:
        """Forget nodes that no branch needs any more."""
        own = self.own()
        self.stages = {node: stage for node, stage in self.stages.items() if node in own}
        self.regrown = {node: stage for node, stage in self.regrown.items() if node in own}
        self._next_since = None

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
