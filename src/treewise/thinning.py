"""Thins out the keys of prompts, and of what is decoded behind them, as policies say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from treewise.batch import ACCEPTED, Batch
from treewise.branch import BranchTree
from treewise.kv import ContiguousPool, Count, KVManager, Stage, Thinning
from treewise.kv.kept import NEVER, num_pages
from treewise.plan.data import upload_together
from treewise.runner import Runner
from treewise.scheduler import Lane
from treewise.sparsity.observation import Observation, Seen
from treewise.sparsity.policy import KVSparsity
from treewise.survivors import Chosen, Places, Remembered, choose, pick, recall, remember, score_path, share_out
from treewise.thicket import Thicket
from treewise.tree import Node

AHEAD = 64
"""Most queries that are kept as they come along, before the stage has come at which they are looked at."""
NEAR = AHEAD + 2 * ACCEPTED
"""Tokens before a stage from which on a path is watched: a step brings at most as many as are accepted."""
BETWEEN = 64
"""Tokens that a path gains before it is thinned out again where the pool is short, if the policy does not say."""
MOST_HEADS = 2**31 - 1
"""Keys of single heads that a pool may have in all layers: so many numbers an int32 has."""


class _Stop(NamedTuple):
    """Where paths are thinned out next.

    Attributes
    ----------
    node : Node
        What leads there, or will.
    end : int
        The length of the path.
    goal : Stage or None
        What has to come of it, if that is known.
    """

    node: Node
    end: int
    goal: Stage | None


@dataclass(eq=False)
class _Watch:
    """What is known of the end of a path that is thinned out: its last queries and its last token.

    Attributes
    ----------
    base : Node or None
        The last of the path's nodes that have given up keys, which the queries have seen.
    observation : Observation
    last : Tensor [hidden] or None
        What comes of the last token before the output head, once it is computed.
    length : int
        Of the path when it was looked at last.
    """

    base: Node | None
    observation: Observation
    last: Tensor | None = None
    length: int = 0

    def takes(self, number: int, alone: bool) -> bool:
        """Whether it takes so many queries."""
        return (self.observation.end - self.observation.first, self.observation.alone) == (number, alone)


@dataclass(eq=False)
class _Case:
    """A tree whose keys are thinned out: who waits for logits of it, and what is known of the ends of its paths.

    Watches are by the node that leads to a path's end, and where that is. It `is_due` if some path is near that.
    """

    policy: KVSparsity
    lanes: Sequence[Lane | Thicket] = ()
    watches: dict[tuple[Node, int], _Watch] = field(default_factory=dict)
    is_due: bool = False


@dataclass(eq=False)
class _Part:
    """Consecutive nodes of a path, of which one node is to be that keeps some of their tokens.

    Attributes
    ----------
    nodes : list of Node
    stage : Stage
    above : _Part or None
        What comes before them on the path.
    places : Places
        Where their tokens are.
    lengths : list of tuples of int
        Of each layer how many they are in all heads together, or in each.
    chosen : Chosen or None
        Which of them stay, if the stage does not say.
    """

    nodes: list[Node]
    stage: Stage
    above: _Part | None
    places: Places = ()
    lengths: list[tuple[int, ...]] = field(default_factory=list)
    chosen: Chosen | None = None


class Thinner:
    """Watches paths being computed, and gives up those of their keys that their policies do not keep.

    That comes behind the forward in which a prompt ends, so that the first token is drawn from all keys; and again
    whenever a branch has gained as many tokens as its policy says, at places that follow from its length alone. A lone
    branch is thinned out behind the forward that brings it there. Several ones wait for each other: when all that go on
    have come to their stages, they are thinned out together, by the scores of all of them, before the next step. Which
    they are depends on their program alone, as all of them have drawn what follows.

    What the head makes of the last token is kept along with the keys: whoever comes later begins with the same.

    Where others need the room, what is left is given up like any keys, and comes to be the same again: a path is
    computed stage by stage, and thinned out at the same places. What several branches have chosen is remembered for it.

    Parameters
    ----------
    runner : Runner
    kv : KVManager
    max_num_rows : int
        The most rows of one step.
    """

    def __init__(self, runner: Runner, kv: KVManager, max_num_rows: int) -> None:
        self.runner = runner
        self.kv = kv
        self.max_num_rows = max_num_rows
        self._cases: dict[BranchTree, _Case] = {}
        self._last: dict[Node, Tensor] = {}  # of sealed nodes, see `_Case`
        self._asked: list[tuple[Node, int]] = []  # in this step: sealed nodes, and where their logits will be
        self._ending: list[tuple[_Watch, int]] = []  # in this step: where the logits of a stage's last token will be

    def check(self, policy: KVSparsity) -> None:
        """Refuse a policy that cannot work here.

        Raises
        ------
        ValueError
            It says why.
        """
        reasons = policy.refusals(self.runner.model.config)
        if policy.per_head and (heads := self.runner.k[..., 0].numel()) > MOST_HEADS:
            reasons.append(f"the pool has {heads} keys of single heads, of which {MOST_HEADS} can have a number")
        if isinstance(self.kv.pool, ContiguousPool):
            reasons.append("the pool 'contiguous' does not lend slots; choose 'paged'")
        if self.runner.num_ranks > 1 and policy.per_head:
            reasons.append(f"{policy.allocation!r} compares heads, which ranks share out; choose one of layers")
        if policy.second_pass and (policy.every is not None or policy.trigger == "pressure"):
            setting = "every" if policy.trigger == "prompt" else "trigger"
            reasons.append(
                f"{setting}: {policy.scoring!r} reads a prompt twice, and cannot read again what was decoded"
            )
        if reasons:
            raise ValueError(f"kv_sparsity: {'; '.join(reasons)}")

    def prepare(self, policy: KVSparsity) -> None:
        """Let steps do from now on what the policy needs of them, so that they are captured with it."""
        if policy.every is not None:
            self.runner.on_ranks(Runner.leave_queries)

    def kept_of(self, policy: KVSparsity, num_tokens: int) -> list[Count] | None:
        """Return how many tokens of such a prompt each layer keeps, in heads that differ as many; None if all."""
        counts, heads = self._counts(policy, num_tokens), self.runner.model.config.num_kv_heads
        if all(count == num_tokens for count in counts):
            return None
        return [(count,) * heads if policy.per_head and count < num_tokens else count for count in counts]

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept beside keys and values: queries that wait for the end of a stage, and last tokens."""
        watches = [watch for case in self._cases.values() for watch in case.watches.values()]
        kept = [*self._last.values(), *(watch.last for watch in watches if watch.last is not None)]
        observations = [watch.observation for watch in watches]
        queries = sum(each.queries.nbytes + each.lse.nbytes for each in observations)
        chosen = {id(stage.chosen): stage.chosen for tree in self._cases for stage in _remembered(tree)}
        few = [few for own in chosen.values() for layer in cast(Remembered, own) for few in layer or ()]
        indices = sum(each.which.nbytes for each in few)
        return sum(tensor.nbytes for tensor in kept) + (queries + indices) * self.runner.num_ranks

    def thinning(self, policy: KVSparsity, num_tokens: int) -> Thinning | None:
        """Return what a tree has to know whose prompt has so many tokens; None if the policy keeps all there will be.

        Raises
        ------
        ValueError
            If the policy cannot work here, see `check`.
        """
        self.check(policy)
        first, most = num_tokens, self.runner.model.config.max_positions
        if policy.trigger == "pressure":
            first = NEVER
        while first < NEVER and all(count == first for count in self._counts(policy, first)):
            if policy.every is None or first + policy.every > most:
                return None
            first += policy.every
        joint = (policy.joint or policy.second_pass) and first == num_tokens
        return Thinning(policy.key, self._num_queries(policy, num_tokens), first, joint, policy.every)

    def add(self, tree: BranchTree, policy: KVSparsity) -> None:
        """Thin out the keys of `tree`, which has the `thinning` that the policy asks for."""
        self.prepare(policy)
        self._cases[tree] = _Case(policy)

    def remove(self, tree: BranchTree) -> None:
        """Forget a tree that has ended."""
        self._cases.pop(tree, None)

    @torch.inference_mode()
    def begin(
        self,
        trees: Iterable[BranchTree],
        lanes: Callable[[], Iterable[tuple[Lane | Thicket, object]]],
        unsettled: Collection[BranchTree] = (),
    ) -> int:
        """Begin a step of all `trees`: those that have lost what was left of their keys start anew.

        Parameters
        ----------
        trees : iterable of BranchTree
        lanes : callable
            Returns the paths whose logits somebody waits for, and who does.
        unsettled : collection of BranchTree
            Those with tokens that are drawn and not known.

        Returns
        -------
        int
            How many trees had to give way, as branches that came to their stages together had no room for what is left.
        """
        if not self._cases:
            return 0
        for lane, _ in lanes():
            tree = cast(BranchTree, lane.tenant)
            if isinstance(lane, Thicket) and tree in self._cases:
                length = lane.length[lane.rows].max(initial=0)
                if length > min(tree.next_stage(base)[0] for base in lane.bases):
                    tree.settle()
        waiting: dict[object, list[Lane | Thicket]] = {}
        for lane, _ in lanes():
            waiting.setdefault(lane.tenant, []).append(lane)
        num_preempted = 0
        for tree, case in self._cases.items():
            tree.regrow()
            case.lanes = waiting.get(tree, ())
            self._look_ahead(tree)
            case.is_due = self._is_due(tree, case)
            if not case.is_due:
                continue
            num_preempted += self._thin_out_all(tree, case, trees)
            if tree not in unsettled and (stops := self._meeting(tree, case)):
                num_preempted += self._thin_out_together(tree, case, stops, trees)
        if any(case.policy.trigger == "pressure" for case in self._cases.values()):
            self._relieve(trees)
        return num_preempted

    def hurry(self) -> bool:
        """Let branches that wait for others of theirs wait no longer, of the first tree that has any; whether it has.

        For steps in which nobody else has room to go on.
        """
        for tree in sorted(self._cases, key=attrgetter("rank")):
            lanes = (lane for lane in self._cases[tree].lanes if isinstance(lane, Lane))
            if any(tree.rests(lane.tip()) for lane in lanes):
                tree.hurry()
                return True
        return False

    def num_missing(self) -> int:
        """Return how many rows `look_back` wants, as far as is known before the batch is."""
        return sum(
            len(watch.observation.missing) + (watch.last is None)
            for tree, case in self._due()
            for (node, end), watch in case.watches.items()
            if tree.computed(node, end)
        )

    def look_back(self, batch: Batch) -> Batch:
        """Return the batch, perhaps with more rows: last tokens of stages that nobody has looked at."""
        asked: dict[tuple[Node, int], BranchTree] = {}
        for tree, case in self._due():
            for (node, end), watch in self._watched(tree, case).items():
                path = self.kv.forest.path(node)
                if node.end < end or any(batch.computed(n) < min(len(n.tokens), end - n.start) for n in path):
                    continue  # some of them will come by themselves
                missing = {*watch.observation.missing, *([end - 1] if watch.last is None else [])}
                lacking = [
                    (node, position - node.start)
                    for node in path
                    for position in sorted(missing)
                    if node.start <= position < node.end and batch.row(node, position - node.start) is None
                ]
                room = max(0, self.max_num_rows - batch.num_rows - len(asked))
                asked.update(dict.fromkeys([each for each in lacking if each not in asked][:room], tree))
        return batch.asking([(*place, tree) for place, tree in asked.items()]) if asked else batch

    def watch(self, batch: Batch) -> Sequence[Seen]:
        """Return who takes queries of the rows of `batch`, which may want more logits from now on."""
        self._ending = []
        self._asked = [(node, place) for node, place in batch.asked() if node in self._last and node in self.kv.kept]
        taken: list[tuple[Observation, dict[int, int]]] = []
        for tree, case in self._due():
            for (node, end), watch in self._watched(tree, case).items():
                watch.length = node.end
                self._watch_last(watch, node, end, batch)
                rows = self._rows(watch.observation, node, batch)
                if rows:
                    watch.observation.missing.difference_update(rows)
                    taken.append((watch.observation, rows))
        if not taken:
            return []
        numbers = [
            np.array(each, np.int64)
            for observation, rows in taken
            for each in (list(rows.values()), [position - observation.first for position in rows])
        ]
        there = upload_together(numbers, self.runner.device)
        return [Seen(observation, *there[2 * i : 2 * i + 2]) for i, (observation, _) in enumerate(taken)]

    def see(self, hidden: Tensor) -> None:
        """Take what comes of stages' last tokens from the forward's rows [logit rows, hidden], or put it there."""
        for watch, place in self._ending:
            watch.last = hidden[place].clone()
        for node, place in self._asked:
            hidden[place].copy_(self._last[node])

    @torch.inference_mode()
    def thin_out(self, trees: Iterable[BranchTree]) -> int:
        """Thin out the paths that are at the end of a stage; of all `trees`, those behind may have to give way.

        Returns
        -------
        int
            How many trees had to.
        """
        num_preempted = 0
        for tree, case in self._due():
            num_preempted += self._thin_out_all(tree, case, trees)
        self._last = {node: last for node, last in self._last.items() if node in self.kv.kept}
        return num_preempted

    # ------------------------------------------------------------------ stages

    def _due(self) -> Iterator[tuple[BranchTree, _Case]]:
        """Yield the trees of which some path may come to a stage in this step or soon."""
        return ((tree, case) for tree, case in self._cases.items() if case.is_due)

    @staticmethod
    def _is_due(tree: BranchTree, case: _Case) -> bool:
        """Whether some path that somebody waits for is near a stage."""
        tips = dict.fromkeys(lane.tip() for lane in case.lanes if isinstance(lane, Lane))
        return not tree.begun or any(tree.next_stage(tip)[0] - tip.end <= NEAR for tip in tips)

    def _look_ahead(self, tree: BranchTree) -> None:
        """See whether anybody still comes to the prompt's end; several branches do without what one was to give up."""
        if not tree.begun and not any(self._is_prompt(tree, tip) for tip in set(tree.tips())):
            tree.begun = True
        if tree.pressed < NEVER and _lone(tree) is None:
            tree.pressed = NEVER

    def _is_prompt(self, tree: BranchTree, tip: Node) -> bool:
        """Whether the path to `tip` begins with the whole prompt."""
        return self.kv.forest.path_tokens(tip)[: len(tree.prompt_tokens)] == tree.prompt_tokens

    def _stops(self, tree: BranchTree, case: _Case) -> list[_Stop]:
        """Return where paths that somebody waits for are thinned out next, each place once."""
        stops: dict[tuple[Node, int], _Stop] = {}
        for tip in dict.fromkeys(lane.tip() for lane in case.lanes if isinstance(lane, Lane)):
            end, goal = tree.next_stage(tip)
            if end == NEVER or not (tree.begun or self._is_prompt(tree, tip)):
                continue
            node = _leading(tip, end)
            stops[node, end] = _Stop(node, end, goal)
        return list(stops.values())

    def _watched(self, tree: BranchTree, case: _Case) -> dict[tuple[Node, int], _Watch]:
        """Return the places whose last tokens are looked at, and what is known of them."""
        places: dict[tuple[Node, int], tuple[int, bool]] = {}  # how many queries, and whether these see the path alone
        for stop in self._stops(tree, case):
            asked = []
            if tree.given and not tree.begun:
                own = tree.own()
                asked = [each for each in tree.given.items() if each[0] in own]
            if case.policy.second_pass:  # behind the prompt, all but the token whose logits nobody asks for
                asked = [(tip, end - 1) for tip, end in asked if end > stop.end]
            for place in asked:  # those that have gone on from there meanwhile count as well
                places[place] = self._num_last(tree, case, *place), False
            known = asked or (stop.goal is not None and stop.goal.chosen is not None)
            number = 0 if known else self._num_last(tree, case, stop.node, stop.end)
            if stop.node.end >= stop.end or AHEAD >= number > stop.end - stop.node.end:
                places.setdefault((stop.node, stop.end), (number, True))
        watches: dict[tuple[Node, int], _Watch] = {}
        for (node, end), (number, alone) in places.items():
            watch, base = case.watches.get((node, end)), _base(node)
            # NOTE: what a path has above changes what its queries are.
            if watch is None or watch.base is not base or node.end < watch.length or not watch.takes(number, alone):
                observation = self.runner.on_ranks(_observe, end - number, end, alone)
                watch = _Watch(base, observation)
            watches[node, end] = watch
        case.watches = watches
        return watches

    def _is_seen(self, tree: BranchTree, node: Node, end: int, watch: _Watch | None) -> bool:
        """Whether all is known of a path that leads to `end`."""
        seen = watch is not None and watch.last is not None and not watch.observation.missing
        return seen and tree.computed(node, end)

    def _ready(self, tree: BranchTree, case: _Case) -> _Stop | None:
        """Return a place at which a path can be thinned out whatever other branches do, if there is one."""
        stops = [stop for stop in self._stops(tree, case) if tree.computed(stop.node, stop.end)]
        if tree.begun and stops and _lone(tree) is None:
            stops = [stop for stop in stops if stop.goal is not None]
        if not stops:
            return None
        watched = self._watched(tree, case)
        if not tree.begun and not all(self._is_seen(tree, *place, watch) for place, watch in watched.items()):
            return None
        there = (stop for stop in stops if self._is_seen(tree, stop.node, stop.end, watched.get((stop.node, stop.end))))
        return next(there, None)

    def _meeting(self, tree: BranchTree, case: _Case) -> list[_Stop]:
        """Return the places at which branches have come together to be thinned out; none as long as some are late."""
        stops = [stop for stop in self._stops(tree, case) if tree.computed(stop.node, stop.end)]
        if not tree.begun or not stops or _lone(tree) is not None:
            return []
        watched = self._watched(tree, case)
        there = {}
        for stop in stops:
            if stop.goal is None and self._is_seen(tree, stop.node, stop.end, watched.get((stop.node, stop.end))):
                there[stop.node, stop.end] = stop
        late = [lane for lane in case.lanes if not isinstance(lane, Lane) or not self._is_at(tree, lane, there)]
        return list(there.values()) if tree.hurries or not late else []

    @staticmethod
    def _is_at(tree: BranchTree, lane: Lane, stops: Collection[tuple[Node, int]]) -> bool:
        """Whether a path that somebody waits for goes on behind one of these places only."""
        end, _ = tree.next_stage(lane.tip())
        return lane.wanted >= end and (_leading(lane.tip(), end), end) in stops

    def _relieve(self, trees: Iterable[BranchTree]) -> None:
        """Where the pool may soon be short, say that lone paths are thinned out two tokens from now, the last first."""
        kv, size = self.kv, self.kv.pool.page_size
        tips = {tip for tree in trees for tip in tree.tips()}
        lacking = {node for tip in tips for node in kv.forest.path(tip) if node.computed < len(node.tokens)}
        wanted = 2 * size * len(tips) + sum(len(node.tokens) - node.computed for node in lacking)
        if kv.pool.num_free >= wanted or (wanted := wanted - kv.pool.num_free - kv.num_evictable()) <= 0:
            return
        pressed = [tree for tree, case in self._cases.items() if case.policy.trigger == "pressure"]
        for tree in sorted(pressed, key=attrgetter("rank"), reverse=True):
            case, tip = self._cases[tree], _lone(tree)
            if wanted <= 0:
                break
            if tip is None or tip.computed + 1 < len(tip.tokens) or tree.next_stage(tip)[1] is not None:
                continue
            stage, before = tip.end + 2, 0 if (base := _base(tip)) is None else base.end
            counts = self.kept_of(case.policy, stage)
            if tree.pressed < NEVER:
                wanted -= stage  # it is about to
            elif counts is not None and stage - before >= (case.policy.every or BETWEEN if before else 1):
                tree.pressed = stage
                wanted -= kv.num_held([tip]) - num_pages(counts, size) * size

    def _watch_last(self, watch: _Watch, node: Node, end: int, batch: Batch) -> None:
        """Note where the logits of the last token up to `end` will be, if it is computed in this step."""
        if node.start < end <= node.end and (row := batch.row(node, end - 1 - node.start)) is not None:
            self._ending.append((watch, batch.want_logits(row)))

    def _rows(self, observation: Observation, tip: Node, batch: Batch) -> dict[int, int]:
        """Return the rows of the path to `tip` whose queries are looked at, by their positions."""
        rows: dict[int, int] = {}
        for node in self.kv.forest.path(tip):
            begin = max(0, observation.first - node.start)
            for offset in range(begin, min(len(node.tokens), observation.end - node.start)):
                if (row := batch.row(node, offset)) is not None:
                    rows[node.start + offset] = row
        return rows

    def _thin_out_all(self, tree: BranchTree, case: _Case, trees: Iterable[BranchTree]) -> int:
        """Thin out the paths that wait for no other branch; return how many trees have given way."""
        num_preempted = 0
        while (stop := self._ready(tree, case)) is not None:
            num_preempted += self._thin_out(tree, case, stop, trees)
        return num_preempted

    def _thin_out(self, tree: BranchTree, case: _Case, stop: _Stop, trees: Iterable[BranchTree]) -> int:
        """Thin out one path; return how many other trees have given way."""
        kv, thinning, watch = self.kv, tree.thinning, case.watches[stop.node, stop.end]
        assert thinning is not None, "the tree is thinned out"
        end, joint = kv.prefix(stop.node, stop.end), thinning.joint and not tree.begun
        base = _base(end)
        stage = stop.goal or Stage(stop.end, None if base is None else tree.stages[base])
        tokens = kv.forest.path_tokens(end)
        # What branches have looked at is nobody else's.
        key = "" if thinning.joint or base is not None or tokens != tree.prompt_tokens else thinning.key
        tree.begun, tree.hurries, tree.pressed = True, False, NEVER
        if key and (known := kv.match_whole(tokens, tree.namespace, key)):
            tree.stand_on({end: (known, stage)})  # another has been there
            return 0
        self.runner.move(kv)
        line: list[Stage] = []
        above: Stage | None = stage
        while above is not None:
            line.append(above)
            above = above.above
        parts: list[_Part] = []
        for each in reversed(line):
            last, parent = kv.prefix(end, each.end), parts[-1] if parts else None
            nodes = [node for node in kv.forest.path(last) if parent is None or node.start >= parent.stage.end]
            parts.append(_Part(nodes, each, parent))
        self._place(parts)
        if stage.chosen is None:
            budgets = self._counts(case.policy, stop.end)
            watches = case.watches.values() if joint else [watch]
            observations = [each.observation for each in watches if each.observation.first < each.observation.end]
            chosen = self.runner.on_ranks(choose, case.policy, observations, stop.end, budgets, parts[0].places)
            parts[0].chosen = chosen
            if joint:
                stage.chosen = self.runner.on_ranks(remember, chosen, parts[0].places)
        del case.watches[stop.node, stop.end]
        if joint:  # what branches were given behind the prompt sees what is left of it
            kv.forget(end.children)
        return self._replace(tree, case, parts, {end: watch}, key, trees)

    def _thin_out_together(
        self, tree: BranchTree, case: _Case, stops: Sequence[_Stop], trees: Iterable[BranchTree]
    ) -> int:
        """Thin out several paths, what they share once; return how many other trees have given way."""
        kv, policy = self.kv, case.policy
        self.runner.move(kv)
        tree.hurries = False
        ends = {kv.prefix(stop.node, stop.end): case.watches[stop.node, stop.end] for stop in stops}
        own, tips = tree.own(), set(tree.tips())
        runs: dict[Node, _Part] = {}  # by the nodes that they consist of
        for node in dict.fromkeys(node for end in ends for node in kv.forest.path(end)):
            above = None if node.parent is None else runs[node.parent]
            if above is None or above.nodes[-1] in ends.keys() | tips or _divides(above.nodes[-1], own):
                base = _base(node)
                before = None if base is None else tree.stages[base]
                runs[node] = _Part([node], Stage(node.end, before, None if above is None else above.stage), above)
            else:
                above.nodes.append(node)
                above.stage.end = node.end
                if node.sealed:
                    above.stage.before = tree.stages[node]
                runs[node] = above
        parts = list(dict.fromkeys(runs.values()))
        number = {part: place for place, part in enumerate(parts)}
        lines = [list(dict.fromkeys(number[runs[node]] for node in kv.forest.path(end))) for end in ends]
        self._place(parts)
        lengths = [part.lengths for part in parts]
        budgets = [self._counts(policy, end.end) for end in ends]
        heads = self.runner.model.config.num_kv_heads

        def loses(layer: int) -> bool:
            held = [sum(own[layer]) * heads // len(own[layer]) for own in lengths]
            pairs = zip(budgets, lines, strict=True)
            return any(heads * own[layer] < sum(held[place] for place in line) for own, line in pairs)

        losing = list(filter(loses, range(len(budgets[0]))))
        scores = [
            self.runner.on_ranks(
                score_path, policy, watch.observation, end.end, own, losing, [parts[place].places for place in line]
            )
            for (end, watch), own, line in zip(ends.items(), budgets, lines, strict=True)
        ]
        counts = share_out(self.runner, policy, scores, budgets, losing, lines, lengths)
        for place, part in enumerate(parts):
            through = [path for path, line in enumerate(lines) if place in line]
            begins = [
                [
                    [
                        sum(lengths[each][layer][head] for each in lines[path][: lines[path].index(place)])
                        for head in range(len(part.lengths[layer]))
                    ]
                    for layer in range(len(part.lengths))
                ]
                for path in through
            ]
            part.chosen = self.runner.on_ranks(
                pick, [scores[path] for path in through], begins, part.lengths, counts[place]
            )
            part.stage.chosen = self.runner.on_ranks(remember, part.chosen, part.places)
        for stop in stops:
            del case.watches[stop.node, stop.end]
        return self._replace(tree, case, parts, ends, "", trees)

    def _place(self, parts: Sequence[_Part]) -> None:
        """Find out where the tokens of parts of paths are, in heads by themselves where those of any differ."""
        kv = self.kv
        kept = [kv.kept[node] for part in parts for node in part.nodes if node in kv.kept]
        for part in parts:
            slots = [
                [np.concatenate([kv.slots(node, layer, head) for node in part.nodes]) for head in kv.heads(kept, layer)]
                for layer in range(self.runner.model.config.num_layers)
            ]
            part.lengths = [tuple(map(len, own)) for own in slots]
            part.places = self.runner.on_ranks(Runner.places, slots)

    def _replace(
        self,
        tree: BranchTree,
        case: _Case,
        parts: Sequence[_Part],
        ends: Mapping[Node, _Watch],
        key: str,
        trees: Iterable[BranchTree],
    ) -> int:
        """Keep what has been chosen of parts of paths, parents first; return how many other trees have given way."""
        kv, runner = self.kv, self.runner
        sealed: dict[_Part, Node] = {}
        new: list[tuple[Node, list[Sequence[Tensor]]]] = []
        for part in parts:
            there = (node for node, stage in tree.stages.items() if stage is part.stage and node in kv.kept)
            if (node := next(there, None)) is None:
                tokens = [token for each in part.nodes for token in each.tokens]
                node = kv.seal(tokens, tree.namespace, key, None if part.above is None else sealed[part.above])
                chosen = part.chosen or runner.on_ranks(recall, part.stage.chosen, part.places)
                new.append((node, runner.on_ranks(Runner.gather, part.places, chosen)))
            sealed[part] = node
            if (watch := ends.get(part.nodes[-1])) is not None and watch.last is not None:
                self._last[node] = watch.last
        tree.stand_on({part.nodes[-1]: (node, part.stage) for part, node in sealed.items()})
        num_preempted, others = 0, sorted(trees, key=attrgetter("rank"), reverse=True)
        for node, thinned in new:
            if node.parent is not None and node.parent not in kv.kept:
                continue  # it starts anew with the next step, as what is above it does
            lengths = [tuple(both.shape[1] for both in own) for own in thinned]
            counts: list[Count] = [each if len(each) > 1 else each[0] for each in lengths]
            least = len(node.tokens) if case.policy.action == "hide" else 0
            kept = kv.keep(node, counts, least)
            while kept is None and others and others[0].rank >= tree.rank:
                other = others.pop(0)
                if not other.unsettled:  # else what it has decoded has no place in the forest yet
                    num_preempted += kv.preempt(other.tips() if other is not tree else _behind(tree, case, node))
                    kept = kv.keep(node, counts, least)
            if kept is not None:
                runner.move(kv)
                runner.on_ranks(Runner.store_kept, kept, thinned)
            elif min(trees, key=attrgetter("rank")) is tree:
                tree.hurry()  # nobody else will ever make room for it
        return num_preempted

    def _counts(self, policy: KVSparsity, num_tokens: int) -> list[int]:
        """Return how many of so many tokens each layer keeps; those with a window of their own keep all."""
        windows = self.runner.model.config.layer_windows
        budgets = iter(policy.budgets(num_tokens, windows.count(None)))
        return [num_tokens if window is not None else next(budgets) for window in windows]

    def _num_last(self, tree: BranchTree, case: _Case, node: Node, end: int) -> int:
        """Return how many queries up to `end` are looked at, none of which has been thinned out."""
        if case.policy.second_pass:
            return len(tree.prompt_tokens)
        base = _base(node)
        return self._num_queries(case.policy, end - (0 if base is None else base.end))

    @staticmethod
    def _num_queries(policy: KVSparsity, num_tokens: int) -> int:
        """Return how many of a path's last queries are looked at where a stage has so many tokens; one at least."""
        if policy.second_pass:
            return 1
        return max(1, num_tokens if policy.num_queries is None else min(policy.num_queries, num_tokens))


def _observe(runner: Runner, first: int, end: int, alone: bool) -> Observation:
    """Return what takes the queries of a runner at positions from `first` to `end`."""
    config = runner.model.config
    shape = (config.num_layers, config.num_heads, config.head_dim, first, end)
    return Observation(*shape, runner.dtype, runner.device, alone)


def _lone(tree: BranchTree) -> Node | None:
    """Return the node in which all live branches end, None if they end in several."""
    tips = set(tree.tips())
    return tips.pop() if len(tips) == 1 else None


def _leading(tip: Node, end: int) -> Node:
    """Return the node of the path to `tip` that has its token before `end`, or will if the path is shorter."""
    while tip.start >= end and tip.parent is not None:
        tip = tip.parent
    return tip


def _base(node: Node | None) -> Node | None:
    """Return the last node of a path that has given up keys."""
    while node is not None and not node.sealed:
        node = node.parent
    return node


def _behind(tree: BranchTree, case: _Case, node: Node) -> list[Node]:
    """Return where those branches end that come behind the first that stands on `node`, and do not stand on it.

    Those that wait for logits come first.
    """
    below = {node}
    for each in (stack := [node]):
        stack += each.children
        below.update(each.children)
    tips = list(tree.tips())
    waiting = [lane.tip() for lane in case.lanes if isinstance(lane, Lane)]
    line = list(dict.fromkeys([*waiting, *tips]))
    first = next((place for place, tip in enumerate(line) if tip in below), len(line))
    return [tip for tip in tips if tip in line[first:] and tip not in below]


def _divides(node: Node, own: Collection[Node]) -> bool:
    """Whether several of a tree's `own` nodes hang below `node`."""
    return sum(child in own for child in node.children) > 1


def _remembered(tree: BranchTree) -> Iterator[Stage]:
    """Yield all stages of a tree whose paths' choices are remembered."""
    seen: set[Stage] = set()
    stack: list[Stage | None] = [*tree.stages.values(), *tree.regrown.values()]
    while stack:
        stage = stack.pop()
        if stage is not None and stage not in seen:
            seen.add(stage)
            stack += [stage.before, stage.above]
            if stage.chosen is not None:
                yield stage
