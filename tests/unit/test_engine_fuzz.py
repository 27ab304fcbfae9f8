"""Programs that misbehave, and random ones, several at once in a pool that may be too small."""

import gc
import sys
import threading
import time
from contextlib import suppress
from itertools import zip_longest

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import dense_logits, greedy, idle, tiny_llm, tiny_model

from treewise import (
    RequestsFailed,
    Rows,
    SamplingParams,
    call,
    decode,
    gather,
    generate,
    score,
)
from treewise.attention import METHODS
from treewise.branch import Branch, BranchTree, DeadBranchError, Observe
from treewise.engine import Request
from treewise.operations import Task
from treewise.scheduler import PoolTooSmall
from treewise.tree import Node

MODEL = tiny_model(windows=(None, 9), max_positions=80)
PROMPTS = [[7, 1, 9], [5] * 20, list(range(1, 30)), [*range(1, 20), 3, 3, 3], [11], [5] * 33]
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
TOLERANCE = 2e-3


def run_each(llm, programs, prompts):
    """Run a program of its own over each prompt; the values, an error where it failed."""
    started = iter(programs)
    try:
        return [output.value for output in llm.run(lambda root: next(started)(root), prompts)]
    except RequestsFailed as failure:
        return [failure.errors.get(i) or output.value for i, output in enumerate(failure.outputs)]


async def plain(root):
    [leaf] = await generate([root], SHORT)
    return leaf.token_ids


# ---------------------------------------------------------------------- coroutines on the same branches


def test_a_branch_that_is_extended_while_it_is_decoded_is_named_and_nobody_else_suffers():
    async def twice(root):
        await gather(generate([root], SHORT), generate([root], SHORT))

    async def appends(root):
        async def writer():
            await generate(root.fork(), SamplingParams(max_tokens=2, ignore_eos=True))
            root.append([5, 6])

        await gather(generate([root], SHORT), writer())

    llm = tiny_llm(MODEL)
    first, second, third = run_each(llm, [twice, appends, plain], [[1, 2], [1, 2], [3, 4]])
    for error in (first, second):
        assert isinstance(error, ValueError) and "() was extended from elsewhere" in str(error)
    assert third == greedy(MODEL, [3, 4], 6)
    idle(llm)


def test_observing_a_branch_that_another_coroutine_prunes_fails_that_program_only():
    async def program(root):
        [long] = root.fork()
        long.append([3] * 60)

        async def pruner():
            await generate(root.fork(), SamplingParams(max_tokens=2, ignore_eos=True))
            long.prune("the test")

        await gather(Observe([long], [1]), pruner())

    llm = tiny_llm(MODEL, max_num_rows=8)
    failed, fine = run_each(llm, [program, plain], [[1, 2], [3, 4]])
    assert isinstance(failed, DeadBranchError) and "pruned at the test" in str(failed)
    assert fine == greedy(MODEL, [3, 4], 6)
    idle(llm)


def test_a_dropped_leaf_does_not_take_along_the_leaf_that_forked_off_it():
    class KeepLast:
        stopping = SamplingParams(max_tokens=4, ignore_eos=True)

        def step(self, tree, logprobs):
            last = len(tree.leaves) - 1
            return Rows([last], [int(logprobs[last].argmax())])

    async def program(root):
        [trunk] = root.fork()
        trunk.append([8])
        [child] = trunk.fork()
        [leaf] = await decode([trunk, child.append([9])], KeepLast())
        assert leaf is child and child.alive
        return leaf.token_ids

    llm = tiny_llm(MODEL)
    [value] = run_each(llm, [program], [[1, 2]])
    assert value == [8, 9, *greedy(MODEL, [1, 2, 8, 9], 4)]
    idle(llm)


def test_branches_whose_leaves_were_all_pruned_hold_no_keys():
    class Comb:
        """Every leaf branches in two, then only the last two leaves go on."""

        stopping = SamplingParams(max_tokens=20, ignore_eos=True)

        def step(self, tree, logprobs):
            leaves = range(len(tree.leaves))
            parents = list(leaves[-2:]) if tree.depth % 2 else [i for i in leaves for _ in range(2)]
            return Rows(parents, logprobs[parents].argmax(-1))

    async def program(root):
        leaves = await decode(root.fork(), Comb())
        needed = {node for leaf in leaves for node in llm.engine.kv.forest.path(leaf.tip)}
        assert {node for node in llm.engine.kv.forest if node.holders} <= needed
        return all(branch.pruned or branch.children or branch in leaves for branch in root.tree.branches())

    llm = tiny_llm(MODEL)
    assert run_each(llm, [program], [[1, 2]]) == [True]
    idle(llm)


def test_forks_of_a_fork_that_cut_the_prompt():
    async def program(root):
        [cut] = root.fork(at=2)
        await generate([cut], SHORT)
        [child] = cut.fork(at=5)
        await generate([child.append([50])], SamplingParams(temperature=0, max_tokens=3, logprobs=0))
        return child

    llm = tiny_llm(MODEL)
    [output] = llm.run(program, [[9, 8, 7, 6]])
    head = [9, 8, *greedy(MODEL, [9, 8], 3), 50]
    assert output.value.path_tokens == head + greedy(MODEL, head, 3)
    assert output.value.token_ids == output.value.path_tokens[2:]
    assert len(output.best.logprobs) == 3
    assert [node.state for node in output.tree.nodes] == ["prompt", "prompt", "finished", "finished", "finished"]
    idle(llm)


# ---------------------------------------------------------------------- gathering, ending, errors


def test_gather_takes_operations_and_refuses_what_it_cannot_run():
    async def program(root):
        left, right = root.fork(2)
        [[one], [two]] = await gather(generate([left], SHORT), generate([right.append([3])], SHORT))
        with pytest.raises(ValueError, match="5 is neither a coroutine nor an operation"):
            gather(5)
        again = generate([left], SHORT)
        with pytest.raises(ValueError, match="named twice"):
            gather(again, again)
        return one.token_ids, two.token_ids

    llm = tiny_llm(MODEL)
    assert run_each(llm, [program], [[1, 2]]) == [(greedy(MODEL, [1, 2], 6), [3, *greedy(MODEL, [1, 2, 3], 6)])]
    idle(llm)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_the_first_error_of_a_gather_ends_the_others_and_those_that_gather_them():
    ended = []

    async def leaf(branch, name):
        try:
            await generate([branch], LONG)
        finally:
            ended.append(name)
            await generate([branch], SHORT)  # nobody waits for it any more

    async def inner(branch):
        scratch = branch.scratch()
        try:
            await gather(leaf(branch.fork()[0], "a"), leaf(branch.fork()[0], "b"))
        finally:
            scratch.release("scratch", keep=False)
            ended.append("inner")
            raise KeyError("on the way out")

    async def fails(branch):
        await generate([branch], SamplingParams(max_tokens=2, ignore_eos=True))
        raise KeyError("first")

    async def program(root):
        with pytest.raises(KeyError, match="first"):
            await gather(inner(root), fails(root.fork()[0]))
        assert ended == ["a", "b", "inner"]
        assert not any(branch.ordinal is None for branch in root.tree.alive if branch is not root)
        return await plain(root)

    llm = tiny_llm(MODEL)
    assert run_each(llm, [program, plain], [[1, 2], [3, 4]]) == [
        greedy(MODEL, [1, 2], 6),
        greedy(MODEL, [3, 4], 6),
    ]
    idle(llm)


def test_an_aborted_program_is_ended_from_the_innermost_coroutine_outwards():
    ended = []

    async def child(branch):
        try:
            await call(time.sleep, 0.05)
            await generate([branch], LONG)
        finally:
            ended.append("child")

    async def program(root):
        try:
            await gather(child(root.fork()[0]))
        finally:
            ended.append("root")

    for steps in (0, 1, 3):
        llm = tiny_llm(MODEL)
        request = llm.engine.add(program, [1, 2, 3])
        for _ in range(steps):
            llm.engine.step()
        llm.engine.abort(request)
        llm.engine.abort(request)
        assert request.done and "aborted" in str(request.error)
        assert ended == ([] if steps == 0 else ["child", "root"])
        ended.clear()
        idle(llm)


def test_an_abort_during_a_step_waits_for_its_end():
    async def program(root):
        llm.engine.abort(request)
        return await plain(root)

    llm = tiny_llm(MODEL)
    request = llm.engine.add(program, [1, 2, 3])
    llm.engine.step()
    assert request.done and "aborted" in str(request.error)
    idle(llm)


def test_programs_that_cannot_start_leave_nothing_behind():
    async def wants_more(root, width):
        return root

    llm = tiny_llm(MODEL)
    with pytest.raises(TypeError, match="width"):
        llm.run(wants_more, [[1, 2], [3, 4]])
    with pytest.raises(ValueError, match=r"program: an async function is wanted, not one that returns \[1\]"):
        llm.run(lambda root: [1], [[1, 2]])
    idle(llm)
    assert run_each(llm, [plain], [[1, 2]]) == [greedy(MODEL, [1, 2], 6)]


def test_leaving_the_interpreter_and_bad_controllers_are_errors_of_their_program():
    class NoStopping:
        def step(self, tree, logprobs):
            return None

    async def leaves(root):
        sys.exit(3)

    async def bad(root):
        await decode([root], NoStopping())

    async def worker(root):
        await call(sys.exit, 4)

    llm = tiny_llm(MODEL)
    errors = run_each(llm, [leaves, bad, worker, plain], [[1, 2], [1, 2, 3], [4], [3, 4]])
    assert [type(error) for error in errors[:3]] == [SystemExit, AttributeError, SystemExit]
    assert errors[3] == greedy(MODEL, [3, 4], 6)
    idle(llm)


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("pool", ["paged", "contiguous"])
def test_after_a_failed_forward_the_engine_goes_on_as_if_it_had_not_happened(failure, pool):
    model = tiny_model(windows=(None, 9), max_positions=80)
    steps = 0

    def forward(*arguments):
        nonlocal steps
        steps += 1
        if steps in (3, 4):
            for tensor in (llm.engine.runner.k, llm.engine.runner.v):
                tensor.fill_(float("nan") if steps == 3 else 1.0)  # who knows what was written
            raise failure
        return type(model).forward(model, *arguments)

    model.forward = forward
    prompts = [[1, 2, 3], [1, 2, 4], list(range(1, 40))]
    llm = tiny_llm(model, pool=pool, max_num_rows=16)
    requests = [llm.engine.add(plain, prompt) for prompt in prompts]
    failures = 0
    while llm.engine.requests:
        try:
            llm.engine.step()
        except (RuntimeError, KeyboardInterrupt) as error:
            assert error is failure
            failures += 1
        llm.engine.check_integrity()
    assert failures == 2
    assert [request.result for request in requests] == [greedy(MODEL, prompt, 6) for prompt in prompts]
    steps = 2
    with pytest.raises(type(failure)):
        llm.generate(prompts, SHORT)
    idle(llm)


def test_a_program_cannot_step_the_engine_that_runs_it():
    async def nested(root):
        return llm.generate([[7]], SHORT)

    async def from_a_worker(root):
        return await call(llm.generate, [[7]], SHORT)

    llm = tiny_llm(MODEL)
    for program in (nested, from_a_worker):
        with pytest.raises(RuntimeError, match=r"await generate"):
            llm.run(program, [[1, 2]])
    idle(llm)


# ---------------------------------------------------------------------- the pool


def test_a_tree_that_waits_for_a_function_gives_way_when_nobody_else_can():
    async def holder(root):
        await generate([root], LONG)
        await call(time.sleep, 0.2)
        return await plain(root)

    async def other(root):
        await call(time.sleep, 0.05)
        [leaf] = await generate([root], LONG)
        return leaf.token_ids

    llm = tiny_llm(MODEL, num_kv_slots=80)
    prompts = [[1] * 15, [3] * 15]
    first, second = run_each(llm, [holder, other], prompts)
    assert first == greedy(MODEL, prompts[0], 36) and second == greedy(MODEL, prompts[1], 30)
    idle(llm)


def test_a_long_prompt_gets_its_room_however_many_short_ones_arrive():
    llm = tiny_llm(MODEL, num_kv_slots=96, enable_prefix_caching=False)
    for i in range(2):
        llm.engine.add(plain, [60 + i] * 20)
    llm.engine.step()
    long = llm.engine.add(plain, list(range(1, 71)))
    for i in range(40):
        if long.done:
            break
        llm.engine.add(plain, [1 + i, 7])
        llm.engine.step()
    assert long.result == greedy(MODEL, list(range(1, 71)), 6), "others overtook it for ever"
    while llm.engine.requests:
        llm.engine.step()
    idle(llm)


# ---------------------------------------------------------------------- what users pass


def test_prompts_may_be_arrays_tensors_and_generators():
    llm = tiny_llm(MODEL)
    one, two = greedy(MODEL, [1, 2, 3], 6), greedy(MODEL, [4], 6)
    for prompts in (
        np.array([1, 2, 3]),
        torch.tensor([1, 2, 3]),
        [np.int64(1), np.int64(2), np.int64(3)],
        [torch.tensor([1, 2, 3])],
        (prompt for prompt in ["\x01\x02\x03"]),
        (1, 2, 3),
    ):
        [output] = llm.generate(prompts, SHORT)
        assert output.outputs[0].token_ids == one
        assert all(type(token) is int for token in output.prompt_token_ids)
    both = llm.generate((prompt for prompt in [np.array([1, 2, 3]), [4]]), (SHORT for _ in range(2)))
    assert [output.outputs[0].token_ids for output in both] == [one, two]
    for prompts in ({"prompt": "a"}, [{"prompt": "a"}], None, b"ab", [b"ab"], 5, [1.5], ["a", None], [[1.5]]):
        with pytest.raises(ValueError, match="prompt"):
            llm.generate(prompts, SHORT)
    with pytest.raises(ValueError, match="params: 'n' is not a SamplingParams"):
        llm.generate([[1]], {"n": 1})
    idle(llm)


def test_tokens_appended_from_arrays_are_plain_integers():
    async def program(root):
        for tokens in (np.array([3, 4]), torch.tensor([3, 4]), (np.int32(3), 4)):
            root.append(tokens)
        for tokens in ([1.5], ["a"], 5, b"ab", [-1], [True + 500]):
            with pytest.raises(ValueError, match="text: "):
                root.append(tokens)
        return root.token_ids

    llm = tiny_llm(MODEL)
    [tokens] = run_each(llm, [program], [[1, 2]])
    assert tokens == [3, 4] * 3 and all(type(token) is int for token in tokens)


def test_seeds_of_any_size_and_kind():
    llm = tiny_llm(MODEL)

    def drawn(seed):
        return llm.generate([[1, 2]], SamplingParams(seed=seed, max_tokens=8))[0].outputs[0].token_ids

    assert drawn(-5) == drawn(2**64 - 5) == drawn(np.int64(-5))
    assert drawn(7) == drawn(np.int64(7)) == drawn(7 + 2**80)


def test_streams_lose_nothing_to_whoever_else_steps():
    llm = tiny_llm(MODEL)
    prompts = [[1, 2, 3], [4, 5], [6]]
    whole = [output.outputs[0].text for output in llm.generate(prompts, LONG)]
    streams = [llm.stream(prompt, LONG) for prompt in prompts[:2]]
    pieces = list(zip_longest(*streams, fillvalue=""))
    assert ["".join(column) for column in zip(*pieces, strict=True)] == whole[:2]
    text = ""
    for piece in llm.stream(prompts[2], LONG):
        text += piece
        assert llm.generate([[9]], SHORT)[0].outputs[0].token_ids == greedy(MODEL, [9], 6)
    assert text == whole[2]
    idle(llm)


def test_paths_and_positions_out_of_range_are_refused():
    async def program(root):
        for starts, message in (([0], "at least 1"), ([1, 1], "2 starts for 1 branches")):
            with pytest.raises(ValueError, match=message):
                Observe([root], starts)
        with pytest.raises(ValueError, match="103 tokens, more than max_model_len=80"):
            await score([root], [3] * 100, ["a"])
        return await plain(root)

    llm = tiny_llm(MODEL)
    assert run_each(llm, [program], [[1, 2]]) == [greedy(MODEL, [1, 2], 6)]
    idle(llm)


# ---------------------------------------------------------------------- size


def test_worker_threads_end_with_their_engine():
    async def program(root):
        return await call(lambda: threading.current_thread())

    llm = tiny_llm(MODEL)
    [thread] = run_each(llm, [program], [[1, 2]])
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_ended_requests_are_forgotten():
    def known():
        gc.collect()
        return sum(type(thing) in (Branch, BranchTree, Node, Request, Task) for thing in gc.get_objects())

    llm = tiny_llm(MODEL, enable_prefix_caching=False)
    before = known()
    for i in range(20):
        llm.generate([[1, 2 + i]], SHORT)
    assert known() == before


def test_a_chain_of_a_thousand_forks():
    async def program(root):
        branch = root
        for i in range(1000):
            [branch] = branch.fork()
            branch.append([1 + i % 100])
        await generate([branch], SamplingParams(temperature=0, max_tokens=3))
        return branch

    llm = tiny_llm(tiny_model(max_positions=2048), page_size=1)
    [output] = llm.run(program, [[1]])
    assert output.value.path_tokens[:-3] == [1, *(1 + i % 100 for i in range(1000))]
    assert len(output.tree.to_text()) > 0 and len(output.tree.to_json()) > 0
    output.value.tree.root.prune()
    idle(llm)


# ---------------------------------------------------------------------- random programs


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
        if seed % 2 == 0:
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
        with suppress(Mischief):
            await gather(*(self.carry_out(some, part, shared) for some, part in zip(own, (first, second), strict=True)))

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
    st.tuples(st.just("control"), small, st.integers(1, 6)),
    st.tuples(st.just("rate"), small),
    st.tuples(st.just("observe"), small, small),
    st.tuples(st.just("work"), small),
)
rare = st.sampled_from([("misbehave",), ("end",)])
operations = st.recursive(
    st.lists(simple, min_size=1, max_size=6),
    lambda inner: st.lists(
        st.one_of(simple, simple, simple, st.tuples(st.just("both"), inner, inner, st.booleans()), rare), max_size=6
    ),
    max_leaves=6,
)
pools = st.sampled_from([("paged", 1), ("paged", 16), ("contiguous", 1)])


@settings(max_examples=60, deadline=None)
@given(
    scripts=st.lists(st.tuples(st.sampled_from(PROMPTS), operations), min_size=1, max_size=3),
    attention=st.sampled_from(METHODS),
    pool=pools,
    num_kv_slots=st.sampled_from([96, 160, 4096]),
    max_num_rows=st.sampled_from([1, 5, 17, 256]),
    caching=st.booleans(),
    aborted=st.tuples(small, small),
)
def test_random_programs(scripts, attention, pool, num_kv_slots, max_num_rows, caching, aborted):
    llm = tiny_llm(
        MODEL,
        attention=attention,
        pool=pool[0],
        page_size=pool[1],
        num_kv_slots=num_kv_slots,
        max_num_rows=max_num_rows,
        enable_prefix_caching=caching,
    )
    engine = llm.engine
    programs = [Script(operations) for _, operations in scripts]
    requests = [
        engine.add(program.run, prompt, seed=i)
        for i, (program, (prompt, _)) in enumerate(zip(programs, scripts, strict=True))
    ]
    for step in range(5000):
        if not engine.requests:
            break
        if step == aborted[0]:
            engine.abort(requests[aborted[1] % len(requests)])
        engine.step()
        engine.check_integrity()
    assert not engine.requests, "some request never ends"
    for program, request in zip(programs, requests, strict=True):
        program.check(request.tree)
        if request.error is not None and "aborted" not in str(request.error):
            assert isinstance(
                request.error,
                (Mischief, DeadBranchError, PoolTooSmall) if num_kv_slots < 4096 else (Mischief, DeadBranchError),
            ), repr(request.error)
    engine.kv.clear_cache()
    engine.check_integrity()
    assert engine.kv.pool.num_free == engine.kv.num_slots
