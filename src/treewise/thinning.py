"""Thins out the keys of prompts, and of what is decoded behind them, as policies say."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from treewise.batch import Batch
from treewise.branch import BranchTree
from treewise.kv import ContiguousPool, Count, KVManager, Thinning
from treewise.kv.kept import num_pages
from treewise.plan.data import upload_together
from treewise.runner import Runner
from treewise.sparsity.observation import Observation, Seen
from treewise.sparsity.policy import KVSparsity
from treewise.survivors import Chosen, choose
from treewise.tree import Node

AHEAD = 64
"""Most queries that are kept as they come along, before the stage has come at which they are looked at."""
NEVER = sys.maxsize
"""The length of a path that nobody thins out as long as the pool is not short."""
BETWEEN = 64
"""Tokens that a path gains before it is thinned out again where the pool is short, if the policy does not say."""
MOST_HEADS = 2**31 - 1
"""Keys of single heads that a pool may have in all layers: so many numbers an int32 has."""


@dataclass(eq=False)
class _Case:
    """A tree whose keys are thinned out, with what is known of the stage that it comes to next.

    It has come to `num_reached` stages so far; to some of them perhaps again. Observations are by the node in which a
    branch ends that looks at the prompt, or by None where it is the path to the stage's end that counts. `last` is what
    comes of the stage's last token before the output head [hidden], once it is computed. `chosen` is what was kept of
    the prompt by the queries of branches, which may be others when it is computed again. `lone` is where the only
    branch ended when queries were taken last, and at what position; None if there were several.
    """

    policy: KVSparsity
    num_reached: int
    observations: dict[Node | None, Observation] = field(default_factory=dict)
    last: Tensor | None = None
    chosen: Chosen | None = None
    lone: tuple[Node, int] | None = None

    def forget(self) -> None:
        """Begin with the next stage, or with the first one again."""
        self.observations, self.last = {}, None


class Thinner:
    """Watches paths being computed, and gives up those of their keys that their policies do not keep.

    That comes behind the forward in which a prompt ends, so that the first token is drawn from all keys; and again
    whenever a lone branch has gained as many tokens as its policy says, at places that follow from its length alone.
    What the head makes of the last token is kept along with the keys: whoever comes later begins with the same.
    Branches that share what is left of a prompt keep all keys of their own.

    Where others need the room, what is left is given up like any keys, and comes to be the same again: a path is
    computed stage by stage, and thinned out at the same places.

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
        self._ending: list[tuple[_Case, int]] = []  # in this step: where the logits of a stage's last token will be

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
        kept = list(self._last.values()) + [case.last for case in self._cases.values() if case.last is not None]
        observations = [each for case in self._cases.values() for each in case.observations.values()]
        queries = sum(each.queries.nbytes + each.lse.nbytes for each in observations)
        return sum(tensor.nbytes for tensor in kept) + queries * self.runner.num_ranks

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
        return Thinning(policy.key, self._num_queries(policy, num_tokens), first, joint)

    def add(self, tree: BranchTree, policy: KVSparsity) -> None:
        """Thin out the keys of `tree`, which has the `thinning` that the policy asks for."""
        self.prepare(policy)
        self._cases[tree] = case = _Case(policy, tree.num_thinned)
        if tree.stump is not None:
            self._plan_stage(tree, case)

    def remove(self, tree: BranchTree) -> None:
        """Forget a tree that has ended."""
        self._cases.pop(tree, None)

    def begin(self, trees: Iterable[BranchTree]) -> None:
        """Begin a step of all `trees`: those that have lost what was left of their keys start anew."""
        for tree, case in self._cases.items():
            if tree.stump is not None and tree.stump not in self.kv.kept:
                tree.regrow()
                case.forget()
            if case.lone is not None and not _goes_on(tree, *case.lone):
                case.observations.pop(None, None)
            if case.num_reached == tree.num_thinned < len(tree.stages) and tree.stages[-1] > len(tree.prompt_tokens):
                self._look_ahead(tree, case)
        if any(case.policy.trigger == "pressure" for case in self._cases.values()):
            self._relieve(trees)

    def look_back(self, batch: Batch) -> Batch:
        """Return the batch, perhaps with more rows: queries of stages' last tokens that nobody has seen."""
        asked: list[tuple[Node, int, object]] = []
        for tree, case in self._cases.items():
            for tip, observation in self._watched(tree, case) if _end(tree) is not None else ():
                missing, path = observation.missing, self.kv.forest.path(tip)
                if any(batch.computed(node) < min(len(node.tokens), observation.end - node.start) for node in path):
                    continue  # some of them will come by themselves
                lacking = [
                    (node, position - node.start, tree)
                    for node in path
                    for position in sorted(missing)
                    if node.start <= position < node.end and batch.row(node, position - node.start) is None
                ]
                room = max(0, self.max_num_rows - batch.num_rows - len(asked))
                asked += [each for each in lacking if each not in asked][:room]
        return batch.asking(asked) if asked else batch

    def watch(self, batch: Batch) -> Sequence[Seen]:
        """Return who takes queries of the rows of `batch`, which may want more logits from now on."""
        self._ending = []
        self._asked = [(node, place) for node, place in batch.asked() if node in self.kv.kept]
        taken: list[tuple[Observation, dict[int, int]]] = []
        for tree, case in self._cases.items():
            if (end := _end(tree)) is not None:
                self._watch_last(tree, case, end, batch)
            for tip, observation in self._watched(tree, case):
                rows = self._rows(observation, tip, batch)
                if rows:
                    observation.missing.difference_update(rows)
                    taken.append((observation, rows))
            lone = _lone(tree)
            case.lone = None if lone is None else (lone, lone.end)
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
        for case, place in self._ending:
            case.last = hidden[place].clone()
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
        for tree, case in self._cases.items():
            if (stage := tree.stage) is None or (end := _end(tree)) is None or case.last is None:
                continue
            watched = self._watched(tree, case)
            stops = [(end, stage), *((tip, observation.end) for tip, observation in watched)]
            seen = not any(observation.missing for _, observation in watched)
            if seen and all(self._computed(tip, stop) for tip, stop in stops):
                num_preempted += self._thin_out(tree, case, self.kv.prefix(end, stage), trees)
                case.forget()
        self._last = {node: last for node, last in self._last.items() if node in self.kv.kept}
        return num_preempted

    # ------------------------------------------------------------------ stages

    def _plan_stage(self, tree: BranchTree, case: _Case) -> None:
        """Say where the next stage will be, if `tree` has never been as far."""
        case.num_reached = max(case.num_reached, tree.num_thinned)
        if case.num_reached == len(tree.stages):
            if case.policy.trigger == "pressure":
                tree.stages.append(NEVER)
            elif case.policy.every is not None:
                tree.stages.append(tree.stages[-1] + case.policy.every)

    def _look_ahead(self, tree: BranchTree, case: _Case) -> None:
        """Put the next stage off while several branches come to it, which share what is left of the path."""
        tips = list(tree.tips())
        while len(tips) > 1 and tree.stages[-1] <= max(tip.end for tip in tips):
            waits = case.policy.every is None or case.policy.trigger == "pressure"
            tree.stages[-1] = NEVER if waits else tree.stages[-1] + (case.policy.every or 0)

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
            if tip is None or tree.stage is None or not tip.computed + 1 >= len(tip.tokens):
                continue
            stage, before = tip.end + 2, 0 if tree.stump is None else tree.stump.end
            counts = self.kept_of(case.policy, stage)
            if tree.stage < NEVER:
                wanted -= stage  # it is about to
            elif counts is not None and stage - before >= (case.policy.every or BETWEEN if before else 1):
                tree.stages[-1] = stage
                wanted -= kv.num_held([tip]) - num_pages(counts, size) * size

    def _watched(self, tree: BranchTree, case: _Case) -> list[tuple[Node, Observation]]:
        """Return where the paths end whose last queries are looked at for the next stage, and what takes these."""
        stage, end = tree.stage, _end(tree)
        if stage is None or (case.chosen is not None and not tree.num_thinned):
            return []
        if end is None:
            end = _lone(tree)  # perhaps it comes near
            if end is None or not AHEAD >= self._num_last(tree, case, stage) > stage - end.end:
                return []
        watched: dict[Node | None, int] = {}
        if tree.given:  # those that have gone on from there meanwhile count as well
            needed = {node for tip in tree.tips() for node in self.kv.forest.path(tip)}
            watched.update((tip, stop) for tip, stop in tree.given.items() if tip in needed)
        if case.policy.second_pass:  # behind the prompt, all but the token whose logits nobody asks for
            watched = {tip: stop - 1 for tip, stop in watched.items() if stop > stage}
        observations: dict[Node | None, Observation] = {}
        for tip, stop in (watched or {None: stage}).items():
            observation = case.observations.get(tip)
            if observation is None or observation.end != stop:
                first = stop - self._num_last(tree, case, stop)
                observation = self.runner.on_ranks(_observe, first, stop, tip is None)
            observations[tip] = observation
        case.observations = observations  # without those of branches that are gone
        return [(end if tip is None else tip, observation) for tip, observation in observations.items()]

    def _computed(self, tip: Node, stop: int) -> bool:
        """Whether all tokens of the path to `tip` up to position `stop` have keys."""
        path = (node for node in self.kv.forest.path(tip) if node.start < stop)
        return all(node.computed >= min(len(node.tokens), stop - node.start) for node in path)

    def _watch_last(self, tree: BranchTree, case: _Case, end: Node, batch: Batch) -> None:
        """Note where the logits of the stage's last token will be, if it is computed in this step."""
        assert tree.stage is not None
        node = next(node for node in self.kv.forest.path(end) if tree.stage <= node.end)
        if (row := batch.row(node, tree.stage - 1 - node.start)) is not None:
            self._ending.append((case, batch.want_logits(row)))

    def _rows(self, observation: Observation, tip: Node, batch: Batch) -> dict[int, int]:
        """Return the rows of the path to `tip` whose queries are looked at, by their positions."""
        rows: dict[int, int] = {}
        for node in self.kv.forest.path(tip):
            begin = max(0, observation.first - node.start)
            for offset in range(begin, min(len(node.tokens), observation.end - node.start)):
                if (row := batch.row(node, offset)) is not None:
                    rows[node.start + offset] = row
        return rows

    def _thin_out(self, tree: BranchTree, case: _Case, end: Node, trees: Iterable[BranchTree]) -> int:
        """Thin out the path to `end`; return how many other trees have given way."""
        kv, thinning = self.kv, tree.thinning
        assert thinning is not None and case.last is not None, "the stage was watched"
        # What branches have looked at is nobody else's.
        key = thinning.key if end.end == len(tree.prompt_tokens) and not thinning.joint else ""
        if key and (known := kv.match_whole(tree.prompt_tokens, tree.namespace, key)):
            tree.stand_on(known, end)  # another has been there
            self._plan_stage(tree, case)
            return 0
        self.runner.move(kv)
        path = kv.forest.path(end)
        budgets, before = self._counts(case.policy, end.end), [kv.kept[node] for node in path if node in kv.kept]
        slots = [
            [np.concatenate([kv.slots(node, layer, head) for node in path]) for head in kv.heads(before, layer)]
            for layer in range(len(budgets))
        ]
        places = self.runner.on_ranks(Runner.places, slots)
        if tree.num_thinned or case.chosen is None:
            observations = list(case.observations.values())
            chosen = self.runner.on_ranks(choose, case.policy, observations, end.end, budgets, places)
        else:
            chosen = case.chosen
        if thinning.joint and not tree.num_thinned:
            case.chosen = chosen
        thinned = self.runner.on_ranks(Runner.gather, places, chosen)
        lengths = [tuple(both.shape[1] for both in parts) for parts in thinned]
        counts: list[Count] = [each if len(each) > 1 else each[0] for each in lengths]
        stump = kv.seal(kv.forest.path_tokens(end), tree.namespace, key)
        tree.stand_on(stump, end)
        self._plan_stage(tree, case)
        least = stump.end if case.policy.action == "hide" else 0
        kept, num_preempted = kv.keep(stump, counts, least), 0
        for other in sorted(trees, key=attrgetter("rank"), reverse=True):
            if kept is not None or other.rank <= tree.rank:
                break
            if not other.unsettled:  # else what it has decoded has no place in the forest yet
                num_preempted += kv.preempt(other.tips())
                kept = kv.keep(stump, counts, least)
        if kept is None:  # it starts anew with the next step
            return num_preempted
        self.runner.move(kv)
        self.runner.on_ranks(Runner.store_kept, kept, thinned)
        self._last[stump] = case.last
        return num_preempted

    def _counts(self, policy: KVSparsity, num_tokens: int) -> list[int]:
        """Return how many of so many tokens each layer keeps; those with a window of their own keep all."""
        windows = self.runner.model.config.layer_windows
        budgets = iter(policy.budgets(num_tokens, windows.count(None)))
        return [num_tokens if window is not None else next(budgets) for window in windows]

    def _num_last(self, tree: BranchTree, case: _Case, stop: int) -> int:
        """Return how many queries up to position `stop` are looked at, none of which has been thinned out."""
        if case.policy.second_pass:
            return len(tree.prompt_tokens)
        return self._num_queries(case.policy, stop - (0 if tree.stump is None else tree.stump.end))

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


def _end(tree: BranchTree) -> Node | None:
    """Return a node that the end of the stage leads to, None if no branch holds one any more."""
    stage = tree.stage
    return None if stage is None else next((tip for tip in tree.tips() if tip.end >= stage), None)


def _lone(tree: BranchTree) -> Node | None:
    """Return the node in which all live branches end, None if they end in several."""
    tips = set(tree.tips())
    return tips.pop() if len(tips) == 1 else None


def _goes_on(tree: BranchTree, tip: Node, end: int) -> bool:
    """Whether the path to `tip`, the only one then, still has the tokens that it had up to position `end`."""
    return len(tree.prompt_tokens) == tree.stage or (_lone(tree) is tip and tip.end >= end)
