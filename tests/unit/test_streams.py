"""Text that comes piece by piece: from one branch to its program, and from all branches to the caller."""

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from tiny import greedy, idle, tiny_llm, tiny_model

from treewise import (
    BeamSearch,
    BeamSearchParams,
    BudgetExceeded,
    SamplingParams,
    decode,
    gather,
    generate,
    limit,
    score,
    stream,
)
from treewise.branch import DeadBranchError

MODEL = tiny_model(max_positions=80)
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def text_of(tokens):
    return bytes(tokens).decode("utf-8", "replace")


def run(program, llm=None, prompt=(1, 2), **options):
    llm = llm or tiny_llm(MODEL)
    [result] = llm.run(program, [prompt], **options)
    idle(llm)
    return result.value


@pytest.mark.parametrize("stops", [False, True])
def test_pieces_join_to_the_text_and_nothing_of_a_stop_string_leaks(stops):
    params = SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True)

    async def program(root, params):
        [branch] = root.fork()
        pieces = [(piece, len(branch.tokens)) async for piece in stream(branch, params)]
        assert "".join(piece for piece, _ in pieces) == branch.new
        assert all(pieces[i][1] < pieces[i + 1][1] for i in range(len(pieces) - 1)), "one step a piece"
        return branch.new, branch.finish_reason, len(pieces)

    async def at_once(root):
        return (await generate(root.fork(), params))[0].new

    answer = run(at_once, seed=7)
    if not stops:
        assert run(program, seed=7, params=params) == (answer, "length", 30)
        return
    text, reason, count = run(program, seed=7, params=replace(params, stop=[answer[20:24], answer[2:5] + "no"]))
    assert (text, reason) == (answer[:20], "stop")
    assert 10 < count < 20, "what may be a stop string is held back"


def test_streams_run_side_by_side_and_beside_everything_else():
    async def reader(branch, seed):
        params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
        joined = ""
        async for piece in stream(branch, params):
            joined += piece
            [[yes, no]] = await score([branch], "?", ["yes", "no"])
            assert yes < 0 and no < 0
        assert joined == branch.new
        return branch.tokens

    async def program(root):
        return await gather(*(reader(branch, i) for i, branch in enumerate(root.fork(3))))

    async def at_once(root):
        params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
        return [branch.tokens for branch in await generate(root.fork(3), params)]

    assert run(program, seed=1) == run(at_once, seed=1)
    assert run(program, tiny_llm(MODEL, num_kv_slots=96), seed=1) == run(at_once, seed=1), "in a pool that is too small"


def test_a_stream_that_is_left_pauses_and_goes_on_where_it_was():
    async def program(root):
        [branch] = root.fork()
        pieces = stream(branch, LONG)
        first = [piece async for piece in take(pieces, 3)]
        length = len(branch.tokens)
        [twin] = branch.fork()
        [other] = root.fork()
        await generate([twin, other], LONG)
        assert len(branch.tokens) == length < 30, "nothing is decoded while nobody waits"
        rest = [piece async for piece in pieces]
        assert [piece async for piece in pieces] == []
        assert "".join(first + rest) == branch.new == text_of(greedy(MODEL, [1, 2], 30))
        assert other.tokens == branch.tokens
        return twin.token_ids

    async def take(pieces, count):
        for _ in range(count):
            yield await anext(pieces)

    assert run(program) == greedy(MODEL, [1, 2], 33)


def test_streams_of_branches_that_end_otherwise():
    async def program(root):
        short, dead, foreign = root.fork(3)
        with pytest.raises(BudgetExceeded, match=r"6 of its 6 tokens, while streaming branch \(0,\)"):
            await limit(read(short), tokens=6)
        assert len(short.tokens) == 6
        pieces = stream(dead, LONG)
        await anext(pieces)
        dead.prune("the test")
        with pytest.raises(DeadBranchError, match="pruned at the test"):
            await anext(pieces)
        with pytest.raises(ValueError, match=r"n: 2 continuations"):
            stream(foreign, SamplingParams(n=2))
        with pytest.raises(ValueError, match="its own tree only"):
            await read(other.tree.root)
        return "fine"

    async def read(branch):
        async for _ in stream(branch, LONG):
            pass

    llm = tiny_llm(MODEL)
    other = llm.engine.add(generate_all, [5, 6])
    [result] = llm.run(program, [[1, 2]])
    assert result.value == "fine"
    llm.engine.abort(other)
    idle(llm)


async def generate_all(root):
    return await generate(root.fork(), LONG)


def test_the_caller_can_follow_every_branch():
    async def program(root, n):
        first = await generate(root.fork(n), SamplingParams(temperature=1.2, max_tokens=6, ignore_eos=True))
        return await generate([branch.fork()[0] for branch in first], LONG)

    def follow(text):
        output = yield from llm.stream_program(program, [1, 2], seed=4, n=3)
        assert [branch.new for branch in output.value] == [text[branch] for branch in output.value]
        assert len(output.outputs) == 3 and output.tree.strategy == "program"

    llm = tiny_llm(MODEL)
    text = defaultdict(str)
    order = []
    for branch, piece in follow(text):
        text[branch] += piece
        order.append(branch.path)
    assert set(order) == {(i, *below) for i in range(3) for below in ((), (0,))}
    assert all(branch.new == joined for branch, joined in text.items())
    assert len(list(itertools.groupby(order))) > 20, "branches take turns"
    idle(llm)

    pieces = llm.stream_program(program, [1, 2], n=2)
    next(pieces)
    pieces.close()
    idle(llm)
    with pytest.raises(ValueError, match="prompt"):
        next(llm.stream_program(program, [], n=2))


def test_forks_of_a_controller_go_on_behind_their_parents():
    async def program(root):
        return await decode(root.fork(1), BeamSearch(BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)))

    llm = tiny_llm(MODEL)
    text = {}
    for branch, piece in llm.stream_program(program, [1, 2]):
        behind = next((text[line] for line in reversed(branch.lineage()) if line in text), "")
        text[branch] = behind + piece
    assert all(text[branch] == branch.text for branch in text if branch.finished)
    idle(llm)
