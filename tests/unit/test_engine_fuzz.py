"""Random programs, several at once in a pool that may be too small: whatever they do, every token is as if alone."""

import re
from contextlib import suppress

import pytest
import torch
from guesses import Noise, Rivals
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import dense_logits, tiny_llm, tiny_model

from treewise import (
    Cancelled,
    Rows,
    SamplingParams,
    call,
    decode,
    gather,
    generate,
    limit,
    score,
    stream,
)
from treewise.attention import METHODS
from treewise.awaitables import Observe
from treewise.branch import DeadBranchError
from treewise.scheduler import PoolTooSmall
from treewise.speculate.ngram import NgramDrafter
from treewise.speculate.speculator import Speculator

MODEL = tiny_model(windows=(None, 9), max_positions=80)
PROMPTS = [[7, 1, 9], [5] * 20, list(range(1, 30)), [*range(1, 20), 3, 3, 3], [11], [5] * 33]
TOLERANCE = 2e-3


class Mischief(Exception):
    """What programs raise on purpose."""


class Branching:
    """Grows, branches, prunes and stops as a seed says."""

    def __init__(self, seed: int, steps: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.steps = steps
        self.stopping = SamplingParams(max_tokens=12, stop=["<"])

    def step(self, tree, logprobs):
        if tree.depth == self.steps:
            return None
        uses = torch.randint(0, 3, (len(tree.leaves),), generator=self.generator).tolist()
        parents = [i for i, number in enumerate(uses) for _ in range(number)][:6]
        ranks = torch.randint(0, 4, (len(parents),), generator=self.generator).tolist()
        best = logprobs.topk(4).indices
        return Rows(parents, [int(best[parent, rank]) for parent, rank in zip(parents, ranks, strict=True)])


class Script:
    """A program made of random operations; remembers what it claims to have got."""

    def __init__(self, operations) -> None:
        self.operations = operations
        self.greedy = []  # (branch, first position, end)
        self.sharing = 0  # where two sub-programs decode the same branches, nobody knows whose a token is
        self.observed = []  # (tokens, first position, log-probabilities)

    async def run(self, root):
        await self.carry_out(root.fork(2), self.operations, guard=False)
        assert all(branch is root or branch.ordinal is not None for branch in root.tree.alive), "a scratch fork is left"

    async def carry_out(self, branches, operations, guard):
        branches = list(branches)
        try:
            for name, *arguments in operations:
                branches = [branch for branch in branches if branch.alive][:8]
                if not branches or (await getattr(self, name)(branches, *arguments)) == "return":
                    break
        except (Mischief, DeadBranchError, ValueError) as error:
            if not guard or (isinstance(error, ValueError) and "extended from elsewhere" not in str(error)):
                raise
        finally:
            if branches and branches[-1].alive:
                branches[-1].score = 1.0

    async def fork(self, branches, which, n, at):
        branch = branches[which % len(branches)]
        branches += branch.fork(n, at=1 + at % branch.num_tokens if at % 3 else None)

    async def append(self, branches, which, tokens):
        branches[which % len(branches)].append(tokens)

    async def prune(self, branches, which):
        branches[which % len(branches)].prune()

    async def sample(self, branches, seed, max_tokens, stop):
        # Greedy where the seed is even.
        params = SamplingParams(
            temperature=0.9 * (seed % 2), max_tokens=max_tokens, stop=stop, min_p=0.05, ignore_eos=seed % 3 == 0
        )
        starts = {branch: branch.num_tokens for branch in branches}
        ended = await generate(branches, params)
        if seed % 2 == 0 and not self.sharing:
            self.greedy += [(branch, starts[branch], branch.num_tokens) for branch in ended]

    async def control(self, branches, seed, steps):
        branches[:] = (await decode(branches, Branching(seed, steps)))[:6]

    async def rate(self, branches, which):
        branch = branches[which % len(branches)]
        if branch.num_tokens > 70:
            return
        tokens = branch.path_tokens
        [values] = await score([branch], [1, 2], ["a", "bc"])
        for choice, value in zip([[97], [98, 99]], values, strict=True):
            self.observed.append(([*tokens, 1, 2, *choice], len(tokens) + 2, value))

    async def observe(self, branches, which, at):
        branch = branches[which % len(branches)]
        if branch.num_tokens > 80 or branch.num_tokens < 2:
            return
        tokens, start = branch.path_tokens, 1 + at % (branch.num_tokens - 1)
        [entries] = await Observe([branch], [start])
        sums = sum(entry[token][0] for entry, token in zip(entries, tokens[start:], strict=True))
        self.observed.append((tokens, start, sums))

    async def work(self, branches, value):
        assert await call(lambda: value) == value

    async def both(self, branches, first, second, shared):
        """Two sub-programs, on the same branches or on forks of their own; there the first to misbehave ends both."""
        own = [branches, branches] if shared else [[b.fork()[0] for b in branches[:2]] for _ in range(2)]
        self.sharing += shared
        try:
            with suppress(Mischief):
                parts = zip(own, (first, second), strict=True)
                await gather(*(self.carry_out(some, part, shared) for some, part in parts))
        finally:
            self.sharing -= shared

    async def within(self, branches, tokens, cancels, part):
        """A sub-program that may run out of tokens, or be cancelled while it runs."""
        bounded = limit(self.carry_out(branches, part, guard=False), tokens=tokens + 1)

        async def cancel():
            await call(int)
            bounded.cancel()

        with suppress(Cancelled):
            await gather(bounded, *([cancel()] if cancels else []))

    async def read(self, branches, which, pieces, stop):
        branch, joined = branches[which % len(branches)], ""
        start = branch.num_tokens
        async for piece in stream(branch, SamplingParams(temperature=0.9, max_tokens=9, min_p=0.05, stop=stop)):
            joined += piece
            pieces -= 1
            if pieces < 0:
                return
        if branch.finished:
            assert branch.decode(branch.path_tokens[start:]) == joined

    async def misbehave(self, branches):
        raise Mischief

    async def end(self, branches):
        return "return"

    def check(self, tree):
        """Compare everything that was said about the tree with full forwards."""
        known = {}

        def reference(tokens):
            key = tuple(tokens)
            if key not in known:
                known[key] = dense_logits(MODEL, tokens).log_softmax(-1)
            return known[key]

        for branch in tree.branches():
            tokens = branch.path_tokens
            if any(logprob is not None for logprob in branch.logprobs):
                for position, logprob in enumerate(branch.logprobs, branch.start):
                    if logprob is not None:
                        exact = float(reference(tokens)[position - 1, tokens[position]])
                        assert logprob == pytest.approx(exact, abs=TOLERANCE)
        for branch, start, end in self.greedy:
            tokens = branch.path_tokens
            for position in range(start, min(end, branch.num_tokens)):
                if branch.logprobs[position - branch.start] is None:
                    continue  # the other sub-program appended it before this one heard of its result
                row = reference(tokens)[position - 1]
                assert row[tokens[position]] > row.max() - TOLERANCE, "not the greedy choice"
        for tokens, start, total in self.observed:
            exact = sum(float(reference(tokens)[p - 1, tokens[p]]) for p in range(start, len(tokens)))
            assert total == pytest.approx(exact, abs=len(tokens) * TOLERANCE)


small = st.integers(0, 50)
simple = st.one_of(
    st.tuples(st.just("fork"), small, st.integers(1, 3), small),
    st.tuples(st.just("append"), small, st.lists(st.integers(1, 100), min_size=1, max_size=9)),
    st.tuples(st.just("prune"), small),
    st.tuples(st.just("sample"), small, st.integers(0, 9), st.sampled_from([(), ("<",), ("l", "ll")])),
    st.tuples(st.just("read"), small, st.integers(0, 12), st.sampled_from([(), ("<",), ("l", "ll")])),
    st.tuples(st.just("control"), small, st.integers(1, 6)),
    st.tuples(st.just("rate"), small),
    st.tuples(st.just("observe"), small, small),
    st.tuples(st.just("work"), small),
)
rare = st.sampled_from([("misbehave",), ("end",)])
operations = st.recursive(
    st.lists(simple, min_size=1, max_size=6),
    lambda inner: st.lists(
        st.one_of(
            *[simple] * 3,
            st.tuples(st.just("both"), inner, inner, st.booleans()),
            st.tuples(st.just("within"), small, st.booleans(), inner),
            rare,
        ),
        max_size=6,
    ),
    max_leaves=6,
)
pools = st.sampled_from([("paged", 1), ("paged", 16), ("contiguous", 1)])


def step_to_the_end(engine, requests, aborted):
    """Step until all requests have ended; the ``aborted[1]``-th is aborted behind ``aborted[0]`` steps."""
    for step in range(5000):
        if not engine.requests:
            break
        if step == aborted[0]:
            engine.abort(requests[aborted[1] % len(requests)])
        engine.step()
        engine.check_integrity()
    assert not engine.requests, "some request never ends"


@settings(max_examples=60, deadline=None)
@given(
    scripts=st.lists(st.tuples(st.sampled_from(PROMPTS), operations), min_size=1, max_size=3),
    attention=st.sampled_from(METHODS),
    pool=pools,
    num_kv_slots=st.sampled_from([96, 160, 4096]),
    max_num_rows=st.sampled_from([1, 5, 17, 256]),
    caching=st.booleans(),
    looks_ahead=st.booleans(),
    guesses=st.sampled_from([None, False, True]),
    aborted=st.tuples(small, small),
)
def test_random_programs(scripts, attention, pool, num_kv_slots, max_num_rows, caching, looks_ahead, guesses, aborted):
    llm = tiny_llm(
        MODEL,
        attention=attention,
        pool=pool[0],
        page_size=pool[1],
        num_kv_slots=num_kv_slots,
        max_num_rows=max_num_rows,
        enable_prefix_caching=caching,
        looks_ahead=looks_ahead,
    )
    engine = llm.engine
    if guesses is not None and pool[0] == "paged":  # right, wrong or senseless, in trees of any shape
        drafter = Rivals([Noise(), NgramDrafter()])
        engine.speculator = Speculator(drafter, engine.kv, tree_size=9, adaptive=guesses)
    programs = [Script(operations) for _, operations in scripts]
    requests = [
        engine.add(program.run, prompt, seed=i)
        for i, (program, (prompt, _)) in enumerate(zip(programs, scripts, strict=True))
    ]
    step_to_the_end(engine, requests, aborted)
    for program, request in zip(programs, requests, strict=True):
        program.check(request.tree)
        if isinstance(request.error, PoolTooSmall):
            taken, slots = re.search(r"which takes (\d+) of (\d+) slots", str(request.error)).groups()
            assert int(taken) > int(slots), "other branches had to give way instead"
        elif request.error is not None and "aborted" not in str(request.error):
            assert isinstance(request.error, Mischief | DeadBranchError), repr(request.error)
    engine.kv.clear_cache()
    engine.check_integrity()
    assert engine.kv.pool.num_free == engine.kv.num_slots
