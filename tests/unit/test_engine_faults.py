"""Programs that misbehave, pools that are too small, odd arguments: nobody else suffers and nothing is left."""

import gc
import sys
import threading
import time
from itertools import zip_longest

import numpy as np
import pytest
import torch
from tiny import greedy, idle, tiny_llm, tiny_model

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
from treewise.awaitables import Observe
from treewise.branch import Branch, BranchTree, DeadBranchError
from treewise.engine import Request
from treewise.tasks import Task
from treewise.tree import Node

MODEL = tiny_model(windows=(None, 9), max_positions=80)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


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


def test_what_is_gathered_can_start_more_beside_itself():
    async def part(branch, forks):
        [one] = await generate([branch], SHORT)
        for fork in forks:
            together.add(part(fork, []))
        return one.token_ids

    async def program(root):
        nonlocal together
        first, second, *later = root.fork(4)
        together = gather(part(first, later))
        together.add(part(second, []))
        results = await together
        with pytest.raises(ValueError, match="are over"):
            together.add(generate([root], SHORT))
        with pytest.raises(RuntimeError, match="awaited once"):
            await together
        return results

    together = None
    llm = tiny_llm(MODEL)
    assert run_each(llm, [program], [[1, 2]]) == [[greedy(MODEL, [1, 2], 6)] * 4]
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
            scratch.release("scratch")
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


def test_an_error_tells_the_coroutines_and_branches_that_it_has_been_in():
    class Stubborn:
        stopping = SHORT

        def step(self, tree, logprobs):
            raise KeyError("no idea")

    async def grade(branches):
        await decode(branches, Stubborn())

    async def after(root):
        await generate(root.fork(5), SHORT)
        raise KeyError("mine")

    async def inside(root):
        await gather(grade(root.fork(2)), plain(root.fork()[0]))

    async def at_once(root):
        raise KeyError("early")

    async def recovers(root):
        with pytest.raises(KeyError):
            await grade([root])
        return await plain(root)

    llm = tiny_llm(MODEL)
    *failed, value = run_each(llm, [after, inside, at_once, recovers], [[1, 2]] * 4)
    assert [error.__notes__ for error in failed] == [
        ["in after, after decoding branches (0,), (1,), (2,) and 2 more"],
        ["in grade, while decoding branches (0,), (1,)", "in inside, while gathering grade, plain"],
        ["in at_once, after it began"],
    ]
    assert value == greedy(MODEL, [1, 2], 6)
    started = iter([plain, inside])
    with pytest.raises(
        RequestsFailed, match=r"^prompts\[1\]: 'no idea' \(in grade, while decoding .*; in inside, while"
    ):
        llm.run(lambda root: next(started)(root), [[1, 2], [3, 4]])
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
    with pytest.raises(ValueError, match="params: 'n' is not of type SamplingParams"):
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
