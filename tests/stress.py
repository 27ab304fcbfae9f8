"""Requests of all kinds, coming, branching, ending and failing in any order; what must hold whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from guesses import Noise, Rivals
from tiny import dense_logits, tiny_llm, tiny_model

from treewise import Rows, SamplingParams, call, decode, gather, generate, keep
from treewise.branch import DeadBranchError
from treewise.engine import Request
from treewise.sparsity.policy import KVSparsity
from treewise.speculate.ngram import NgramDrafter
from treewise.speculate.speculator import Speculator

MODEL = tiny_model(max_positions=96)
PREFIXES = [[7, 1, 9], [5] * 20, list(range(1, 30)), [*range(1, 20), 3, 3, 3], [11]]
KINDS = ("plain", "wide", "deep", "beams", "pruned", "gathered", "called", "failing", "late")


class Mischief(Exception):
    """What programs raise on purpose."""


class Widening:
    """Branches in two as long as it may, then drops every second leaf; keeps the likeliest tokens."""

    def __init__(self, width: int, steps: int) -> None:
        self.width, self.steps = width, steps
        self.stopping = SamplingParams(max_tokens=steps, ignore_eos=True)

    def step(self, tree: Any, logprobs: Any) -> Rows:
        leaves = range(len(tree.leaves))
        chosen = list(leaves)[::2] if len(leaves) >= self.width else [leaf for leaf in leaves for _ in range(2)]
        best = logprobs.topk(2).indices.tolist()
        seen: set[int] = set()
        tokens = [best[leaf][leaf in seen or bool(seen.add(leaf))] for leaf in chosen]
        return Rows(chosen, tokens)


class Load:
    """An engine of the tiny model under load.

    Greedy tokens are compared with those of each path alone; the rest with the invariants.

    Parameters
    ----------
    guesses : bool
        Whether leaves have guesses of what follows, some of them right.
    policies : sequence of KVSparsity
        Of which each request has one: its tokens are not compared.
    options
        Of the `LLM`.
    """

    def __init__(self, guesses: bool = False, policies: Sequence[KVSparsity] = (), **options: Any) -> None:
        self.policies = policies
        self.llm = tiny_llm(MODEL, **options)
        if guesses and options.get("pool", "paged") == "paged":
            drafter = Rivals([Noise(), NgramDrafter()])
            self.llm.engine.speculator = Speculator(drafter, self.llm.engine.kv, tree_size=9, adaptive=False)
        self.engine = self.llm.engine
        self.running: list[Request] = []
        self.num_ended = 0

    def add(self, kind: str, seed: int) -> None:
        """Start a request of one of `KINDS`."""
        draw = random.Random(f"{kind} {seed}")
        prompt = [*draw.choice(PREFIXES), *(draw.randrange(1, 100) for _ in range(draw.randrange(0, 12)))]
        program: Callable[..., Any] = getattr(self, "_" + kind)
        policy = draw.choice(self.policies) if self.policies else None
        terms: dict[str, Any] = {
            "priority": draw.choice([0, 0, 0, 1, -1]),
            "namespace": draw.choice(["", "", "tenant"]),
        }
        self.running.append(self.engine.add(lambda root: program(root, draw), prompt, seed, sparsity=policy, **terms))

    def abort(self, index: int) -> None:
        """End one of the running requests."""
        if self.running:
            self.engine.abort(self.running[index % len(self.running)])

    def step(self) -> None:
        """Step once, and look at what has ended."""
        self.engine.step()
        for request in [request for request in self.running if request.done]:
            self.running.remove(request)
            self.num_ended += 1
            aborted = "aborted" in str(request.error)
            assert request.error is None or aborted or isinstance(request.error, Mischief), repr(request.error)

    def finish(self) -> None:
        """Step until all requests have ended; nothing of them may be left then."""
        for _ in range(100_000):
            if not self.engine.requests:
                break
            self.step()
        self.engine.step()  # whatever was aborted last
        assert not self.engine.requests and not self.engine.runs, "some request never ends"
        self.engine.check_integrity()
        self.engine.kv.clear_cache()
        self.engine.check_integrity()
        assert self.engine.kv.pool.num_free == self.engine.kv.num_slots
        assert not list(self.engine.kv.forest)

    # ------------------------------------------------------------------ programs

    def check(self, branch: Any, start: int) -> None:
        """Compare the tokens of a path from `start` on with the greedy ones after what stands before them."""
        if branch.tree.thinning is not None:
            return
        tokens = branch.path_tokens
        best = dense_logits(MODEL, tokens)[start - 1 : -1].argmax(-1).tolist()
        assert best == tokens[start:], f"{tokens[start:]} after {tokens[:start]}, not {best}"

    async def _greedy(self, branches: list[Any], count: int) -> list[Any]:
        starts = [branch.num_tokens for branch in branches]
        ended = await generate(branches, SamplingParams(temperature=0, max_tokens=count))
        for branch, start in zip(branches, starts, strict=True):
            self.check(branch, start)
        return ended

    async def _plain(self, root: Any, draw: random.Random) -> None:
        await self._greedy([root], draw.randrange(1, 30))

    async def _wide(self, root: Any, draw: random.Random) -> None:
        branches = [branch.append([draw.randrange(1, 100)]) for branch in root.fork(draw.randrange(2, 9))]
        await self._greedy(branches, draw.randrange(1, 16))
        await generate(branches, SamplingParams(max_tokens=draw.randrange(1, 6), temperature=0.9))

    async def _deep(self, root: Any, draw: random.Random) -> None:
        branch = root
        for _ in range(draw.randrange(2, 7)):
            [branch, *_] = branch.fork(draw.randrange(1, 3))
            await self._greedy([branch], 3)
        back = branch.fork(at=draw.randrange(1, branch.num_tokens + 1))
        await self._greedy([back[0].append([50])], 4)

    async def _beams(self, root: Any, draw: random.Random) -> None:
        leaves = await decode(root.fork(), Widening(draw.choice([2, 5, 8]), draw.randrange(3, 16)))
        await self._greedy(leaves[:3], 4)

    async def _pruned(self, root: Any, draw: random.Random) -> None:
        branches = await generate(root.fork(6), SamplingParams(max_tokens=draw.randrange(1, 9), temperature=0.9))
        branches = keep(branches, [draw.random() for _ in branches], 3)
        await self._greedy([twin for branch in branches for twin in branch.fork(2)], 4)
        branches[0].prune()
        await self._greedy(branches[1:], 3)

    async def _gathered(self, root: Any, draw: random.Random) -> None:
        await gather(*(self._plain(branch, draw) for branch in root.fork(3)), self._wide(root.fork()[0], draw))

    async def _called(self, root: Any, draw: random.Random) -> None:
        branches = await generate(root.fork(3), SamplingParams(max_tokens=8, temperature=0.9))
        best = await call(max, range(3))
        await self._greedy([branches[best]], 6)

    async def _failing(self, root: Any, draw: random.Random) -> None:
        async def fails(branch: Any) -> None:
            await generate([branch], SamplingParams(max_tokens=draw.randrange(1, 9)))
            raise Mischief

        await gather(self._wide(root.fork()[0], draw), fails(root.fork()[0]))

    async def _late(self, root: Any, draw: random.Random) -> None:
        """Uses a branch that another coroutine prunes."""

        async def pruner() -> None:
            await generate(root.fork(), SamplingParams(max_tokens=2))
            victim.prune()

        [victim] = root.fork()
        try:
            await gather(self._greedy([victim], 20), pruner())
        except DeadBranchError:
            await self._greedy(root.fork(2), 3)
