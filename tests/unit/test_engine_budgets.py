"""Parts of programs that run out of tokens or time, or are cancelled: what was decoded stays, nothing else does."""

import threading
import time

import pytest
from tiny import greedy, idle, tiny_llm, tiny_model

from treewise import BudgetExceeded, Cancelled, RequestsFailed, SamplingParams, call, gather, generate, limit, score

MODEL = tiny_model(max_positions=80)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture
def stop():
    """Whatever still waits for this in a worker thread goes on when the test has ended."""
    event = threading.Event()
    yield event
    event.set()


async def plain(root):
    [leaf] = await generate([root], SHORT)
    return leaf.token_ids


def test_a_part_out_of_tokens_keeps_what_it_has_and_the_rest_goes_on():
    async def part(branches):
        await generate(branches, LONG)

    async def program(root):
        inside, outside = root.fork(2)
        leaves = inside.fork(2)

        async def bounded():
            with pytest.raises(BudgetExceeded) as caught:
                await limit(part(leaves), tokens=9)
            return caught.value

        error, [beside] = await gather(bounded(), generate([outside], LONG))
        assert (error.resource, error.limit, error.used) == ("tokens", 9, 10)
        assert str(error) == ("tokens: part has used 10 of its 9 tokens, while decoding branches (0, 0), (0, 1)")
        return [leaf.token_ids for leaf in leaves], beside.token_ids

    llm = tiny_llm(MODEL)
    [result] = llm.run(program, [[1, 2]])
    assert result.value == ([greedy(MODEL, [1, 2], 5)] * 2, greedy(MODEL, [1, 2], 30))
    idle(llm)


def test_an_operation_that_fits_exactly_has_its_result_and_the_next_has_none():
    async def part(branch):
        await generate([branch], SHORT)
        assert branch.finish_reason == "length"
        with pytest.raises(BudgetExceeded, match=r"6 of its 6 tokens, while scoring branch \(0,\)"):
            await score([branch], "?", ["a", "b"])
        with pytest.raises(BudgetExceeded, match="calling sleep"):
            await call(time.sleep, 1)
        await generate([branch], SHORT)

    async def program(root):
        [branch] = root.fork()
        with pytest.raises(BudgetExceeded):
            await gather(limit(part(branch), tokens=6))
        assert [each for each in root.tree.alive] == [root, branch], "no scratch fork is left"
        return await plain(branch)

    llm = tiny_llm(MODEL)
    [result] = llm.run(program, [[1, 2]])
    assert result.value == greedy(MODEL, [1, 2], 12)
    idle(llm)


def test_time_runs_out_for_functions_and_for_decoding(stop):
    async def endless(branch):
        while True:
            [branch] = branch.fork()
            await generate([branch], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
            branch.prune()
            branch = branch.parent

    async def program(root):
        began = time.perf_counter()
        with pytest.raises(BudgetExceeded, match=r"seconds: .* calling wait"):
            await limit(call(stop.wait, 30), seconds=0.05)
        with pytest.raises(BudgetExceeded, match=r"seconds: endless .* of its 0.05 seconds, while decoding branch"):
            await limit(endless(root), seconds=0.05)
        assert time.perf_counter() - began < 10
        return await plain(root)

    llm = tiny_llm(MODEL)
    [result] = llm.run(program, [[1, 2]])
    assert result.value == greedy(MODEL, [1, 2], 6)
    idle(llm)


def test_budgets_nest_and_every_coroutine_of_a_part_is_told():
    told = []

    async def patient(branch):
        try:
            await generate([branch], LONG)
        except BudgetExceeded as error:
            told.append(error.limit)
        return branch

    async def inner(branches):
        return await limit(gather(*(patient(branch) for branch in branches)), tokens=4)

    async def outer(root):
        branches = await inner(root.fork(2))
        assert told == [4, 4]
        await generate(branches, LONG)

    async def program(root):
        with pytest.raises(BudgetExceeded, match="outer has used 10 of its 10"):
            await limit(outer(root), tokens=10)
        return [len(branch.token_ids) for branch in root.children]

    llm = tiny_llm(MODEL)
    [result] = llm.run(program, [[1, 2]])
    assert result.value == [5, 5]
    idle(llm)


def test_a_part_can_be_cancelled_by_another_that_runs_beside_it(stop):
    async def search(branch):
        await gather(generate(branch.fork(2), LONG), call(stop.wait, 30))

    async def program(root):
        part = limit(search(root))

        async def first():
            with pytest.raises(Cancelled, match=r"search was cancelled while .*: enough"):
                await part

        async def watcher():
            await generate(root.fork(), SHORT)
            part.cancel("enough")
            return "done"

        assert await gather(first(), watcher()) == [None, "done"]
        part.cancel()
        return await plain(root)

    llm = tiny_llm(MODEL)
    [result] = llm.run(program, [[1, 2]])
    assert result.value == greedy(MODEL, [1, 2], 6)
    assert sum(len(node.token_ids) for node in result.tree.nodes if node.state != "prompt") < 30
    idle(llm)


@pytest.mark.parametrize(("pool", "page_size"), [("paged", 16), ("contiguous", 1)])
def test_requests_have_budgets_and_failed_ones_can_return_their_trees(pool, page_size):
    async def program(root):
        await generate(root.fork(root.path_tokens[0]), LONG)

    llm = tiny_llm(MODEL, pool=pool, page_size=page_size)
    prompts = [[1, 2], [3, 4]]
    with pytest.raises(RequestsFailed, match=r"prompts\[1\]: tokens: program has used 42 of its 40 tokens") as failure:
        llm.run(program, prompts, token_budget=40)
    assert failure.value.outputs[0].error is None and failure.value.outputs[1] is None
    idle(llm)
    fine, failed = llm.run(program, prompts, token_budget=40, on_error="return")
    assert fine.error is None and isinstance(failed.error, BudgetExceeded)
    assert [len(output.token_ids) for output in failed.outputs] == [14] * 3
    assert failed.tree.usage.completion_tokens == 42
    with pytest.raises(BudgetExceeded, match="seconds: program"):
        llm.run(program, [[1, 2]], time_budget=1e-9)
    with pytest.raises(ValueError, match="on_error: 'ignore' is not one of raise, return"):
        llm.run(program, prompts, on_error="ignore")
    idle(llm)


def test_budgets_that_cannot_be_are_refused():
    for wrong, message in (
        ({"tokens": 0}, "tokens must be an integer of at least 1"),
        ({"seconds": -1}, "seconds must be a positive number"),
        ({"seconds": "long"}, "seconds must be a positive number"),
    ):
        with pytest.raises(ValueError, match=message):
            limit(call(time.sleep), **wrong)
    with pytest.raises(ValueError, match="5 is neither a coroutine nor an operation"):
        limit(5)
