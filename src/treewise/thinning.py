"""Thins out the keys of prompts once all of them are there, as policies say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treewise.batch import Batch
from treewise.branch import BranchTree
from treewise.kv import ContiguousPool, KVManager, Thinning
from treewise.plan.data import upload_together
from treewise.runner import Runner
from treewise.sparsity.evidence import Evidence
from treewise.sparsity.observation import Observation, Seen
from treewise.sparsity.policy import KVSparsity
from treewise.tree import Node


@dataclass(eq=False)
class _Case:
    """A prompt whose keys will be thinned out, as many tokens as `counts` says staying in each layer.

    `last` is what comes of the last token before the output head [hidden], once it is computed.
    """

    policy: KVSparsity
    counts: list[int]
    observation: Observation
    last: Tensor | None = None


class Thinner:
    """Watches prompts being computed, and gives up those of their keys that their policies do not keep.

    That comes behind the forward in which a prompt ends, so that the first token is drawn from all keys. What the head
    makes of the prompt's last token is kept along with the keys: whoever comes later begins with the same.

    Parameters
    ----------
    runner : Runner
    kv : KVManager
    """

    def __init__(self, runner: Runner, kv: KVManager) -> None:
        self.runner = runner
        self.kv = kv
        self._cases: dict[BranchTree, _Case] = {}
        self._last: dict[Node, Tensor] = {}  # of sealed nodes, see `_Case`
        self._asked: list[tuple[Node, int]] = []  # in this step: sealed nodes, and where their logits will be
        self._ending: list[tuple[_Case, int]] = []  # in this step: where the logits of a prompt's last token will be

    def check(self, policy: KVSparsity) -> None:
        """Refuse a policy that cannot work here.

        Raises
        ------
        ValueError
            It says why.
        """
        reasons = policy.refusals(self.runner.model.config)
        if policy.per_head:
            reasons.append("heads of a layer keep different numbers of tokens, which pages of whole layers cannot hold")
        if isinstance(self.kv.pool, ContiguousPool):
            reasons.append("the pool 'contiguous' does not lend slots; choose 'paged'")
        if len(self.runner.followers) > 1:
            reasons.append("the drafter has keys of its own, which would not follow; choose 'ngram' or 'medusa'")
        if reasons:
            raise ValueError(f"kv_sparsity: {'; '.join(reasons)}")

    def thinning(self, policy: KVSparsity, num_tokens: int) -> Thinning | None:
        """Return what a tree has to know whose prompt has so many tokens; None if the policy keeps all of them.

        Raises
        ------
        ValueError
            If the policy cannot work here, see `check`.
        """
        self.check(policy)
        if all(count == num_tokens for count in self._counts(policy, num_tokens)):
            return None
        return Thinning(policy.key, self._num_queries(policy, num_tokens))

    def add(self, tree: BranchTree, policy: KVSparsity) -> None:
        """Thin out the prompt of `tree`, which has the `thinning` that the policy asks for."""
        config, num_tokens = self.runner.model.config, len(tree.prompt_tokens)
        first = num_tokens - self._num_queries(policy, num_tokens)
        shape = (config.num_layers, config.num_heads, config.head_dim, first, num_tokens)
        observation = Observation(*shape, dtype=self.runner.dtype, device=self.runner.device)
        self._cases[tree] = _Case(policy, self._counts(policy, num_tokens), observation)

    def remove(self, tree: BranchTree) -> None:
        """Forget a tree that has ended."""
        self._cases.pop(tree, None)

    def watch(self, batch: Batch) -> Sequence[Seen]:
        """Return who takes queries of the rows of `batch`; logits of prompts' last tokens are wanted from now on."""
        self._asked = [(node, place) for node, place in batch.asked() if node in self.kv.kept]
        self._ending = []
        seen = []
        for tree, case in self._cases.items():
            if tree.horizon is None or (end := _end(tree)) is None:
                continue
            rows, places = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
            for node in self.kv.forest.path(end):
                if (new := batch.new_rows(node)) is None:
                    continue
                row, begin, stop = new
                at = np.arange(node.start + begin, node.start + stop)
                observed = (case.observation.first <= at) & (at < case.observation.end)
                rows.append(row + np.flatnonzero(observed))
                places.append(at[observed] - case.observation.first)
                if node.start + begin < tree.horizon == node.start + stop:
                    self._ending.append((case, batch.want_logits(row + stop - begin - 1)))
            if any(map(len, rows)):
                there = upload_together([np.concatenate(rows), np.concatenate(places)], self.runner.device)
                seen.append(Seen(case.observation, *there))
        return seen

    def see(self, hidden: Tensor) -> None:
        """Take what comes of prompts' last tokens from the forward's rows [logit rows, hidden], or put it there."""
        for case, place in self._ending:
            case.last = hidden[place].clone()
        for node, place in self._asked:
            hidden[place].copy_(self._last[node])

    @torch.inference_mode()
    def thin_out(self) -> None:
        """Thin out the prompts that are there now."""
        for tree, case in self._cases.items():
            if (horizon := tree.horizon) is None or (end := _end(tree)) is None:
                continue
            path = [node for node in self.kv.forest.path(end) if node.start < horizon]
            if all(node.computed >= min(len(node.tokens), horizon - node.start) for node in path):
                self._thin_out(tree, case)
        self._last = {node: last for node, last in self._last.items() if node in self.kv.kept}

    def _thin_out(self, tree: BranchTree, case: _Case) -> None:
        kv, stump = self.kv, tree.stump
        assert tree.thinning is not None
        if stump is None and (known := kv.match_whole(tree.prompt_tokens, tree.namespace, tree.thinning.key)):
            tree.transplant(kv.prefix(_tip(tree), known.end), known)  # another has been there
            return
        self.runner.move(kv)
        end = kv.prefix(_tip(tree), len(tree.prompt_tokens)) if stump is None else stump
        thinned = self.runner.thin_out(kv.path_slots(end), lambda layer, *both: self._select(case, layer, *both))
        if stump is None:
            stump = kv.seal(tree.prompt_tokens, tree.namespace, tree.thinning.key)
            tree.transplant(end, stump)
        kept = kv.keep(stump, case.counts)
        if kept is None:  # others need all that there is: it is computed again where nobody shares its pages
            return
        self.runner.move(kv)
        self.runner.store_kept(kept, thinned)
        assert case.last is not None, "the prompt's last token has been computed"
        self._last[stump] = case.last

    def _select(self, case: _Case, layer: int, keys: Tensor, values: Tensor) -> Tensor | None:
        """Return which tokens a layer keeps, see `Runner.thin_out`."""
        config, observation, num_tokens = self.runner.model.config, case.observation, len(keys)
        if case.counts[layer] == num_tokens:
            return None
        evidence = Evidence(
            layer=sum(window is None for window in config.layer_windows[:layer]),
            num_layers=config.layer_windows.count(None),
            keys=keys,
            values=values,
            positions=torch.arange(num_tokens, device=keys.device),
            queries=observation.queries[layer],
            query_positions=observation.positions,
            lse=observation.lse[layer],
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            rope=config.layer_ropes[layer],
        )
        return case.policy.keep(evidence, case.counts[layer])

    def _counts(self, policy: KVSparsity, num_tokens: int) -> list[int]:
        """Return how many tokens of a prompt each layer keeps; those with a window of their own keep all."""
        windows = self.runner.model.config.layer_windows
        budgets = iter(policy.budgets(num_tokens, windows.count(None)))
        return [num_tokens if window is not None else next(budgets) for window in windows]

    @staticmethod
    def _num_queries(policy: KVSparsity, num_tokens: int) -> int:
        return max(1, num_tokens if policy.num_queries is None else min(policy.num_queries, num_tokens))


def _end(tree: BranchTree) -> Node | None:
    """Return a node that the end of the prompt leads to, None if no branch holds one any more."""
    num_tokens = len(tree.prompt_tokens)
    return next((tip for tip in tree.tips() if tip.end >= num_tokens), None)


def _tip(tree: BranchTree) -> Node:
    tip = _end(tree)
    assert tip is not None, "the tree has branches behind its prompt"
    return tip
