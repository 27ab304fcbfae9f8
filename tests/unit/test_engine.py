"""The whole line on a tiny model: whatever shares keys must decode what each sequence decodes alone."""

import asyncio
import time

import pytest
import torch
from tiny import EOS, dense_logits, greedy, idle, tiny_llm, tiny_model

from treewise import BeamSearchParams, RequestsFailed, Rows, SamplingParams, call, decode, gather, generate, keep, score
from treewise.attention import METHODS
from treewise.branch import DeadBranchError

MODEL = tiny_model()
PROMPTS = [
    [7, 1, 9],
    [5] * 40,
    list(range(1, 100)),
    [*range(1, 60), 3, 3, 3],
    [11],
    [64, 2, *range(30, 90)],
]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def expected(prompts=PROMPTS, count=12, model=MODEL):
    return [greedy(model, prompt, count) for prompt in prompts]


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


# ---------------------------------------------------------------------- token for token


@pytest.mark.parametrize(("pool", "page_size"), [("paged", 1), ("paged", 16), ("paged", 32), ("contiguous", 1)])
@pytest.mark.parametrize("method", METHODS)
def test_batched_greedy_is_each_sequence_alone(method, pool, page_size):
    llm = tiny_llm(MODEL, attention=method, pool=pool, page_size=page_size, max_num_rows=50)
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected()
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected(), "with a warm cache"
    idle(llm)


@pytest.mark.parametrize("max_num_rows", [1, 7, 64, 4096])
def test_chunk_size_does_not_change_the_tokens(max_num_rows):
    llm = tiny_llm(MODEL, max_num_rows=max_num_rows)
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected()


def test_sliding_windows_beside_full_layers():
    model = tiny_model(windows=(16, None, 5))
    llm = tiny_llm(model, max_num_rows=30)
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected(model=model)


def test_log_probs_are_those_of_a_full_forward():
    llm = tiny_llm(MODEL)
    params = SamplingParams(temperature=0.9, max_tokens=10, logprobs=3, prompt_logprobs=2, seed=5, n=3)
    [output] = llm.generate([PROMPTS[2]], params)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(PROMPTS[2])
    for completion in output.outputs:
        tokens = PROMPTS[2] + completion.token_ids
        reference = dense_logits(MODEL, tokens).log_softmax(-1)
        entries = output.prompt_logprobs[1:] + completion.logprobs
        for position, entry in enumerate(entries):
            token = tokens[position + 1]
            assert entry[token].logprob == pytest.approx(float(reference[position, token]), abs=1e-4)
            assert entry[token].rank == int((reference[position] > reference[position, token]).sum()) + 1
            best = int(reference[position].argmax())
            assert entry[best].rank == 1
        own = sum(float(reference[i - 1, tokens[i]]) for i in range(len(PROMPTS[2]), len(tokens)))
        assert completion.cumulative_logprob == pytest.approx(own, abs=1e-3)


# ---------------------------------------------------------------------- prefix cache


def test_cold_and_warm_cache_agree_however_the_warm_up_ended():
    """B01: a warm-up that ended on a stop string leaves nothing wrong behind."""
    targets = [[*PROMPTS[2], 5, 6], [*PROMPTS[2][:70], 9]]
    first = greedy(MODEL, PROMPTS[2], 8)
    stop = bytes(first[2:4]).decode()
    warm = tiny_llm(MODEL)
    warm.generate([PROMPTS[2]] * 3, SamplingParams(temperature=0, max_tokens=8, stop=[stop]))
    for n in (1, 4):
        outputs = warm.generate(targets, SamplingParams(temperature=0, max_tokens=12, n=n))
        for output, answer in zip(outputs, expected(targets), strict=True):
            assert [completion.token_ids for completion in output.outputs] == [answer] * n
            assert output.tree.usage.cached_tokens > 0
    idle(warm)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_fully_cached_prompts(page_size, max_tokens):
    """B03: a prompt of whole pages, twice, and 513 copies of it at once."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    for length in (16, 32):
        prompt = list(range(1, length + 1))
        llm = tiny_llm(MODEL, page_size=page_size, num_kv_slots=16384)
        answer = greedy(MODEL, prompt, max_tokens)
        assert tokens_of(llm.generate([prompt], params)) == [answer]
        assert tokens_of(llm.generate([prompt], params)) == [answer]
        assert tokens_of(llm.generate([prompt] * 513, params)) == [answer] * 513
        idle(llm)


def test_shared_prefixes_are_told_by_identity_while_requests_end():
    """B05: 8 requests share a prefix, 7 do not; most of the first end in the middle."""
    shared = list(range(1, 49))
    prompts = [[*shared, 50 + i] for i in range(8)] + [[60 + i, *range(1, 48)] for i in range(7)]
    params = [SamplingParams(temperature=0, max_tokens=3 if i < 7 else 12) for i in range(15)]
    llm = tiny_llm(MODEL)
    outputs = tokens_of(llm.generate(prompts, params))
    for prompt, tokens, own in zip(prompts, outputs, params, strict=True):
        assert tokens == greedy(MODEL, prompt, own.max_tokens)
    idle(llm)


# ---------------------------------------------------------------------- branches


@pytest.mark.parametrize(("pool", "page_size"), [("paged", 1), ("paged", 16), ("contiguous", 1)])
def test_forks_in_mid_page_at_different_speeds(pool, page_size):
    """B06: each branch of a torn page decodes what it would alone."""

    async def program(root):
        branches = [branch.append([20 + i]) for i, branch in enumerate(root.fork(4))]
        await gather(
            *(
                generate_all([branch], SamplingParams(temperature=0, max_tokens=4 + 3 * i))
                for i, branch in enumerate(branches)
            )
        )
        return branches

    async def generate_all(branches, params):
        return await generate(branches, params)

    prompt = list(range(1, 20))
    llm = tiny_llm(MODEL, pool=pool, page_size=page_size)
    [output] = llm.run(program, [prompt])
    for i, branch in enumerate(output.value):
        assert branch.token_ids == [20 + i, *greedy(MODEL, [*prompt, 20 + i], 4 + 3 * i)]
    idle(llm)


@pytest.mark.parametrize("width", [127, 128, 129])
def test_a_root_with_very_many_children(width):
    """B23: no limit hides at 128 children."""

    async def program(root):
        children = [branch.append([1 + i % 100, 1 + i // 100]) for i, branch in enumerate(root.fork(width))]
        return await generate(children, SamplingParams(temperature=0, max_tokens=2))

    llm = tiny_llm(MODEL)
    [output] = llm.run(program, [[3, 1, 4]])
    assert len(output.value) == width
    for i in (0, 63, 64, 126, width - 1):
        given = [1 + i % 100, 1 + i // 100]
        assert output.value[i].token_ids == given + greedy(MODEL, [3, 1, 4, *given], 2)
    idle(llm)


def test_fork_at_any_token_of_the_path():
    async def program(root):
        [first] = await generate(root.fork(), SamplingParams(temperature=0, max_tokens=10))
        forks = [first.fork(at=at)[0].append([99]) for at in (3, 7, 12, 14)]
        await generate(forks, SamplingParams(temperature=0, max_tokens=3))
        return first, forks

    prompt = [9, 8, 7, 6, 5]
    llm = tiny_llm(MODEL)
    [output] = llm.run(program, [prompt])
    first, forks = output.value
    path = prompt + greedy(MODEL, prompt, 10)
    assert first.path_tokens == path
    for at, fork in zip((3, 7, 12, 14), forks, strict=True):
        assert fork.path_tokens == [*path[:at], 99, *greedy(MODEL, [*path[:at], 99], 3)]
    idle(llm)


def test_fork_inside_the_prompt():
    async def program(root):
        [fork] = root.fork(at=3)
        return await generate([fork.append([50])], SamplingParams(temperature=0, max_tokens=4))

    llm = tiny_llm(MODEL)
    [output] = llm.run(program, [[9, 8, 7, 6, 5]])
    [fork] = output.value
    assert fork.path_tokens == [9, 8, 7, 50, *greedy(MODEL, [9, 8, 7, 50], 4)]
    assert fork.token_ids == fork.path_tokens[3:]
    assert [node.token_ids for node in output.tree.nodes[:2]] == [[9, 8, 7], [6, 5]]
    idle(llm)


def test_score_is_the_log_prob_of_each_choice_and_leaves_nothing_behind():
    async def program(root):
        branches = [branch.append(text) for branch, text in zip(root.fork(3), ["abc", "de", "f"], strict=True)]
        return await score(branches, "??", ["yes", "no"])

    llm = tiny_llm(MODEL)
    [output] = llm.run(program, ["prompt"])
    for text, scores in zip(["abc", "de", "f"], output.value, strict=True):
        for choice, value in zip(["yes", "no"], scores, strict=True):
            tokens = llm.tokenizer.encode(f"prompt{text}??{choice}")
            reference = dense_logits(MODEL, tokens).log_softmax(-1)
            start = len(tokens) - len(choice)
            total = sum(float(reference[i - 1, tokens[i]]) for i in range(start, len(tokens)))
            assert value == pytest.approx(total, abs=1e-4)
    assert len(output.tree.nodes) == 4, "scratch forks are not drawn"
    idle(llm)


def test_every_third_step_each_leaf_branches_in_two():
    """The example of the DeFT paper, as a controller and as a program."""

    class BranchEveryThird:
        stopping = SamplingParams(max_tokens=9, ignore_eos=True)

        def step(self, tree, logprobs):
            if tree.depth % 3 < 2:
                return Rows(range(len(tree.leaves)), logprobs.argmax(-1))
            best = logprobs.topk(2).indices  # [leaves, 2]
            return Rows([i for i in range(len(tree.leaves)) for _ in range(2)], best.flatten())

    async def as_controller(root):
        return await decode([root], BranchEveryThird())

    async def as_program(root):
        leaves = [root]
        for _ in range(3):
            leaves = await decode([leaf for branch in leaves for leaf in branch.fork(2)], TwoBest())
        return leaves

    class TwoBest:
        """Siblings start with the first and the second choice, then go on greedily."""

        stopping = SamplingParams(max_tokens=3, ignore_eos=True)

        def step(self, tree, logprobs):
            ranked = logprobs.topk(2).indices
            choice = [leaf.path[-1] % 2 if tree.depth == 0 else 0 for leaf in tree.leaves]
            return Rows(range(len(choice)), ranked[range(len(choice)), choice])

    llm = tiny_llm(MODEL)
    [first] = llm.run(as_controller, [[5, 6, 7]])
    assert len(first.value) == 8 and len({tuple(leaf.token_ids) for leaf in first.value}) == 8
    for leaf in first.value:
        reference = dense_logits(MODEL, leaf.path_tokens).log_softmax(-1)
        assert leaf.logprob == pytest.approx(
            sum(float(reference[i - 1, leaf.path_tokens[i]]) for i in range(3, 12)), abs=1e-3
        )
    [second] = llm.run(as_program, [[5, 6, 7]])
    assert len(second.value) == 8
    idle(llm)


def test_pruned_branches_free_their_keys_at_once_and_name_where_they_died():
    async def program(root):
        branches = await generate(root.fork(4), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        before = llm.engine.kv.pool.num_free
        [kept] = keep(branches, [0.1, 0.9, 0.5, 0.2], 1)
        assert llm.engine.kv.pool.num_free > before
        assert kept is branches[1] and kept.score == 0.9
        with pytest.raises(DeadBranchError, match=r"pruned at .*test_engine.py:\d+"):
            branches[0].fork()
        return kept

    llm = tiny_llm(MODEL)
    [output] = llm.run(program, [[1, 2, 3]])
    assert [node.state for node in output.tree.nodes] == ["prompt", "pruned", "finished", "pruned", "pruned"]
    idle(llm)


def test_a_program_can_only_decode_living_branches_of_its_own_tree():
    other = []

    async def lender(root):
        other.append(root)
        await generate([root], SamplingParams(max_tokens=1))

    async def thief(root):
        await generate(other, SamplingParams(max_tokens=1))

    async def twice(root):
        await generate([root, root])

    llm = tiny_llm(MODEL)
    with pytest.raises(RequestsFailed, match="tree"):
        started = iter([lender, thief])
        llm.run(lambda root: next(started)(root), [[1, 2], [3, 4]])
    with pytest.raises(ValueError, match="twice"):
        llm.run(twice, [[1, 2]])
    idle(llm)


# ---------------------------------------------------------------------- programs


def test_calls_run_while_other_trees_decode_and_gather_keeps_order():
    async def slow(root):
        value = await call(lambda x: (time.sleep(0.3), x)[1], 42)
        return value, await gather(small(root.fork()[0], 2), small(root.fork()[0], 5))

    async def small(branch, count):
        [leaf] = await generate([branch], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        return len(leaf.tokens)

    llm = tiny_llm(MODEL)
    outputs = llm.run(slow, [[1, 2], [3]])
    assert [output.value for output in outputs] == [(42, [2, 5])] * 2
    idle(llm)


def test_errors_reach_the_program_and_nobody_else():
    class Broken:
        stopping = SamplingParams()

        def step(self, tree, logprobs):
            if tree.depth == 2:
                raise KeyError("mine")
            return Rows([0], [5])

    async def catches(root):
        try:
            await decode([root], Broken())
        except KeyError:
            return await call(lambda: "caught")

    async def fails(root):
        await gather(decode_once(root.fork()[0]), generate_long(root.fork()[0]))

    async def decode_once(branch):
        await decode([branch], Broken())

    async def generate_long(branch):
        await generate([branch], SamplingParams(max_tokens=400, ignore_eos=True))

    async def bad_rows(root):
        class Wild:
            stopping = SamplingParams()

            def step(self, tree, logprobs):
                return Rows([3], [5])

        await decode([root], Wild())

    async def fine(root):
        return await generate([root], SamplingParams(temperature=0, max_tokens=6))

    async def foreign(root):
        await asyncio.sleep(0)

    programs = iter([catches, fails, bad_rows, fine, foreign])
    llm = tiny_llm(MODEL)
    with pytest.raises(RequestsFailed) as failure:
        llm.run(lambda root: next(programs)(root), [[1, 2, 3 + i] for i in range(5)])
    errors, outputs = failure.value.errors, failure.value.outputs
    assert sorted(errors) == [1, 2, 4]
    assert isinstance(errors[1], KeyError)
    assert "Wild: Rows.parent" in str(errors[2])
    assert "call(" in str(errors[4])
    assert outputs[0].value == "caught"
    assert outputs[3].value[0].token_ids == greedy(MODEL, [1, 2, 6], 6)
    idle(llm)


def test_logits_that_are_not_numbers_fail_only_their_request():
    model = tiny_model()
    model.embedding.weight[77] = torch.nan  # whoever has token 77 in the prompt
    model.config.raw.clear()
    llm = tiny_llm(model)
    clean = tiny_model()

    def forward(tokens, positions, attend, wanted=None, see=None):
        hidden = type(clean).forward(clean, tokens, positions, attend, wanted, see)
        bad = (tokens == 77) if wanted is None else (tokens == 77)[wanted]
        return hidden.masked_fill(bad[:, None], torch.nan)

    model.forward, model.logits = forward, clean.logits
    with pytest.raises(RequestsFailed, match="not numbers") as failure:
        llm.generate([[1, 2, 77], [1, 2, 3]], GREEDY)
    assert list(failure.value.errors) == [0]
    assert failure.value.outputs[1].outputs[0].token_ids == greedy(clean, [1, 2, 3], 12)
    idle(llm)


# ---------------------------------------------------------------------- limits and memory


def test_empty_prompts_are_refused_and_the_others_complete():
    """B18."""
    llm = tiny_llm(MODEL)
    for prompt in ("", [""], [[]]):
        with pytest.raises(ValueError, match="prompt: it has no tokens"):
            llm.generate(prompt, GREEDY)
    with pytest.raises(RequestsFailed, match=r"prompts\[1\]") as failure:
        llm.generate(["ab", "", "cd"], GREEDY)
    encode = llm.tokenizer.encode
    assert failure.value.outputs[1] is None
    assert failure.value.outputs[2].outputs[0].token_ids == greedy(MODEL, encode("cd"), 12)
    idle(llm)


@pytest.mark.parametrize("max_num_rows", [16, 256])
@pytest.mark.parametrize("max_tokens", [1, 16])
def test_prompts_at_the_context_limit(max_num_rows, max_tokens):
    """B19."""
    limit = 64
    llm = tiny_llm(MODEL, max_model_len=limit, max_num_rows=max_num_rows)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    [shorter] = llm.generate([[3] * (limit - 1)], params)
    assert len(shorter.outputs[0].token_ids) == 1 and shorter.outputs[0].finish_reason == "length"
    [full] = llm.generate([[3] * limit], params)
    assert full.outputs[0].token_ids == [] and full.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="max_model_len=64"):
        llm.generate([[3] * (limit + 1)], params)
    assert tokens_of(llm.generate([[1, 2]], GREEDY)) == expected([[1, 2]])
    idle(llm)


def test_scoring_only():
    """B10: max_tokens=0 gives the prompt's log-probs and no token."""
    llm = tiny_llm(MODEL)
    [output] = llm.generate(["Your answer: Yes"], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    [plain] = llm.generate(["Your answer: Yes"], SamplingParams(max_tokens=0))
    assert plain.prompt_logprobs is None and plain.outputs[0].text == ""
    idle(llm)


def test_prompt_logprobs_do_not_depend_on_order_or_cache():
    """B09."""
    prompts = [[1 + (i * j) % 100 for j in range(1, 40)] for i in range(1, 6)]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)

    def scores(llm, order):
        outputs = llm.generate([prompts[i] for i in order], params)
        values = {}
        for i, output in zip(order, outputs, strict=True):
            tokens = output.prompt_token_ids
            values[i] = [e[t].logprob for e, t in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
        return values

    llm = tiny_llm(MODEL)
    cold, reordered, warm = (
        scores(llm, [0, 1, 2, 3, 4]),
        scores(tiny_llm(MODEL), [4, 2, 0, 3, 1]),
        scores(llm, range(5)),
    )
    for i, prompt in enumerate(prompts):
        reference = dense_logits(MODEL, prompt).log_softmax(-1)
        exact = [float(reference[p, prompt[p + 1]]) for p in range(len(prompt) - 1)]
        for values in (cold, reordered, warm):
            assert values[i] == pytest.approx(exact, abs=1e-4)
    idle(llm)


def test_a_request_larger_than_the_pool_is_refused_and_the_next_is_served():
    """X07."""
    llm = tiny_llm(MODEL, num_kv_slots=64, page_size=16)
    with pytest.raises(ValueError, match="KV pool"):
        llm.generate([[3] * 100], GREEDY)
    assert tokens_of(llm.generate([[1, 2, 3]], GREEDY)) == expected([[1, 2, 3]])
    idle(llm)


@pytest.mark.parametrize(("pool", "page_size"), [("paged", 1), ("paged", 16), ("contiguous", 1)])
def test_preemption_does_not_change_a_token(pool, page_size):
    prompts = [[i + 1, *range(40, 60), i + 5] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm = tiny_llm(MODEL, pool=pool, page_size=page_size, num_kv_slots=208)
    starved = tokens_of(llm.generate(prompts, params))
    assert llm.engine.scheduler.num_preemptions > 0
    assert starved == tokens_of(tiny_llm(MODEL).generate(prompts, params))
    idle(llm)


@pytest.mark.parametrize(("pool", "page_size"), [("paged", 1), ("paged", 16), ("contiguous", 1)])
@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_branches_of_a_tree_wider_than_the_pool_take_turns(n, temperature, pool, page_size):
    """B07: a pool of one and a half times what one branch needs; the same tokens as with an ample one."""
    prompt = list(range(1, 40))
    params = SamplingParams(n=n, temperature=temperature, max_tokens=30, ignore_eos=True, seed=5)
    llm = tiny_llm(MODEL, pool=pool, page_size=page_size, num_kv_slots=112 + page_size)
    other = SamplingParams(temperature=0, max_tokens=5)
    starved = llm.generate([prompt, [4, 5, 6]], [params, other])
    assert llm.engine.scheduler.num_preemptions > 0
    ample = tiny_llm(MODEL).generate([prompt, [4, 5, 6]], [params, other])
    for some, all_ in zip(starved, ample, strict=True):
        assert [branch.token_ids for branch in some.outputs] == [branch.token_ids for branch in all_.outputs]
    idle(llm)


@pytest.mark.parametrize(
    ("pool", "page_size", "num_kv_slots", "beam_width"),
    [("paged", 1, 81, 6), ("paged", 16, 176, 16), ("paged", 16, 192, 16), ("contiguous", 1, 81, 6)],
)
def test_beams_wider_than_the_pool_take_turns(pool, page_size, num_kv_slots, beam_width):
    prompt, params = list(range(1, 40)), BeamSearchParams(beam_width, max_tokens=24)
    llm = tiny_llm(MODEL, pool=pool, page_size=page_size, num_kv_slots=num_kv_slots)
    [starved], [ample] = (some.beam_search([prompt], params) for some in (llm, tiny_llm(MODEL)))
    assert llm.engine.scheduler.num_preemptions > 0
    assert [beam.token_ids for beam in starved.outputs] == [beam.token_ids for beam in ample.outputs]
    idle(llm)


def test_a_path_that_outgrows_the_pool_fails_alone():
    llm = tiny_llm(MODEL, num_kv_slots=64)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (100, 5)]
    with pytest.raises(RequestsFailed, match=r"a path of 49 tokens, which takes 64 of 48 slots") as failure:
        llm.generate([[1, 2, 3], [4, 5, 6]], params)
    assert failure.value.outputs[1].outputs[0].token_ids == greedy(MODEL, [4, 5, 6], 5)
    idle(llm)


# ---------------------------------------------------------------------- sampling through the whole line


def test_seeds_depend_on_nothing_but_the_request():
    """B12: batch, slot, neighbours and their seeds do not matter; n siblings differ, yet repeat."""
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16, n=4, ignore_eos=True)
    [alone] = tiny_llm(MODEL).generate([[1, 2, 3]], seeded)
    answers = [completion.token_ids for completion in alone.outputs]
    assert len({tuple(answer) for answer in answers}) == 4
    llm = tiny_llm(MODEL)
    for neighbours in ([None], [7], [None, 3, 42]):
        others = [SamplingParams(seed=seed, temperature=1.0, max_tokens=9) for seed in neighbours]
        outputs = llm.generate([[9, 9]] * len(others) + [[1, 2, 3]], [*others, seeded])
        assert [completion.token_ids for completion in outputs[-1].outputs] == answers


def test_greedy_and_random_rows_in_one_batch():
    """X03: a greedy row with a banned token beside a random one; each as if alone."""
    banned = greedy(MODEL, [1, 2, 3], 1)[0]
    greedily = SamplingParams(temperature=0, max_tokens=8, logit_bias={banned: -100})
    randomly = SamplingParams(temperature=0.8, max_tokens=8, seed=3)
    together = tokens_of(tiny_llm(MODEL).generate([[1, 2, 3], [4, 5]], [greedily, randomly]))
    assert together == [
        tokens_of(tiny_llm(MODEL).generate([prompt], params))[0]
        for prompt, params in (([1, 2, 3], greedily), ([4, 5], randomly))
    ]
    assert together[0][0] != banned


def test_stream_joins_to_the_text_and_nothing_of_the_stop_leaks():
    """B16, B17: on a model of bytes every stop string spans tokens."""
    answer = "".join(map(chr, greedy(MODEL, [1, 2, 3], 30)))
    stop = answer[12:16]
    llm = tiny_llm(MODEL)
    for params in (
        SamplingParams(temperature=0, max_tokens=30, stop=[stop]),
        SamplingParams(temperature=0, max_tokens=30, stop=["never"]),
        SamplingParams(temperature=0, max_tokens=30, stop=[stop], include_stop_str_in_output=True),
    ):
        pieces = list(llm.stream([1, 2, 3], params))
        [output] = llm.generate([[1, 2, 3]], params)
        assert "".join(pieces) == output.outputs[0].text
    assert output.outputs[0].text == answer[: answer.index(stop) + 4]
    assert output.outputs[0].stop_reason == stop
    idle(llm)


def test_an_abandoned_stream_frees_everything():
    llm = tiny_llm(MODEL)
    stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    idle(llm)


def test_min_tokens_stop_ids_and_end_of_text():
    llm = tiny_llm(MODEL)
    free = greedy(MODEL, [1, 2, 3], 12)
    [stopped] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[free[4]]))
    first = free.index(free[4])
    assert stopped.outputs[0].token_ids == free[: first + 1] and stopped.outputs[0].stop_reason == free[4]
    [forced] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, logit_bias={EOS: 100.0}))
    assert forced.outputs[0].token_ids == [EOS] and forced.outputs[0].finish_reason == "stop"
    [later] = llm.generate(
        [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, min_tokens=5, logit_bias={EOS: 100.0})
    )
    assert later.outputs[0].token_ids.index(EOS) == 5
    idle(llm)


def test_beams_are_distinct_sorted_and_scored_as_decoded():
    """X17."""
    llm = tiny_llm(MODEL)
    [output] = llm.beam_search([[5, 6, 7]], BeamSearchParams(beam_width=5, max_tokens=8))
    texts = [tuple(completion.token_ids) for completion in output.outputs]
    assert len(set(texts)) == 5
    for completion in output.outputs:
        tokens = [5, 6, 7, *completion.token_ids]
        reference = dense_logits(MODEL, tokens).log_softmax(-1)
        total = sum(float(reference[i - 1, tokens[i]]) for i in range(3, len(tokens)))
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)
    idle(llm)


def test_bad_options_are_refused_by_name():
    for options, message in (
        ({"attention": "nope"}, "deft:flatten"),
        ({"pool": "heap"}, "pool"),
        ({"page_size": 5}, "page_size"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"max_num_rows": 0}, "max_num_rows"),
        ({"num_kv_slots": 1}, "num_kv_slots"),
        ({"device": "tpu"}, "device: 'tpu' is not one of auto, cpu, cuda"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_llm(MODEL, **options)
    with pytest.raises(ValueError, match="not a token id"):
        tiny_llm(MODEL).generate([[1, 999]], GREEDY)
    with pytest.raises(ValueError, match="stop_token_ids"):
        tiny_llm(MODEL).generate([[1]], SamplingParams(stop_token_ids=[999]))

    async def scores(root):
        await score([root], "?", "ab")

    with pytest.raises(ValueError, match="choices: give a list"):
        tiny_llm(MODEL).run(scores, [[1]])

    async def appends(root):
        root.append([999])

    with pytest.raises(ValueError, match="999 is not a token id"):
        tiny_llm(MODEL).run(appends, [[1]])


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_batched_greedy_on_a_gpu_is_each_sequence_alone(method, cuda_graphs):
    model = tiny_model().to("cuda")
    llm = tiny_llm(model, attention=method, device="cuda", max_num_rows=50, cuda_graphs=cuda_graphs)
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected()
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected(), "with a warm cache"
    idle(llm)


@pytest.mark.gpu
def test_trees_fork_and_are_pruned_between_replays_of_a_graph():
    async def grow(root):
        frontier = root.fork(3)
        for _ in range(4):
            await generate(frontier, SamplingParams(temperature=1.0, max_tokens=7, ignore_eos=True))
            frontier = [child for branch in frontier[:2] for child in branch.fork(2)]
        return [branch.token_ids for branch in frontier]

    model = tiny_model().to("cuda")
    options = [{"cuda_graphs": False}, {}, {"capture_rows": 16}]
    engines = [tiny_llm(model, device="cuda", **own) for own in options]
    before = engines[2].engine.runner.graphs.num_captures
    eager, captured, beforehand = (llm.run(grow, [list(range(1, 40)), [5] * 9], seed=1) for llm in engines)
    for outputs in (captured, beforehand):
        assert [output.value for output in outputs] == [output.value for output in eager]
    graphs, ready = (llm.engine.runner.graphs for llm in engines[1:])
    assert graphs.num_replays > 2 * graphs.num_captures > 0
    assert ready.num_replays > graphs.num_replays and ready.num_captures <= before + graphs.num_captures
    for llm in engines:
        idle(llm)


def test_graphs_need_a_gpu():
    with pytest.raises(ValueError, match="cuda_graphs: the model is on cpu; they need cuda"):
        tiny_llm(MODEL, cuda_graphs=True)
