"""What keys and values are said to take is what the pool counts, and what dense ones would take is counted too."""

import pytest
from tiny import idle, tiny_llm, tiny_model

from treewise import KVSparsity, SamplingParams, generate
from treewise.kv import KVUsage
from treewise.sparsity.scorers import KVzip

MODEL = tiny_model(windows=(None, 11, None, None), max_positions=160)
PROMPT = list(range(1, 60))
POLICY = KVSparsity.named("novita", budget=16, window=4, sinks=0, first_full=1, every=None)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def watched(llm):
    """Return a list that grows by what `llm` says of its keys and the pool's own counter, a pair a step."""
    engine, told, step = llm.engine, [], llm.engine.step

    def stepping():
        gains = step()
        told.append((llm.kv_usage, engine.kv.num_slots - engine.kv.pool.num_free))
        return gains

    engine.step = stepping
    return told


@pytest.mark.parametrize("pool", ["paged", "contiguous"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_bytes_are_those_of_the_pools_counter(pool, page_size):
    llm = tiny_llm(MODEL, pool=pool, page_size=page_size)
    told = watched(llm)
    llm.generate([PROMPT, PROMPT[:30], PROMPT[::-1]], GREEDY, kv_sparsity=POLICY if pool == "paged" else None)
    token = llm.describe()["kv_bytes_per_token"]
    assert token == llm.engine.runner.k[:, 0].nbytes * 2
    for usage, slots in told:
        assert usage.slots == slots and usage.bytes_held == slots * token and usage.bytes_per_slot == token
        assert usage.live_slots <= slots
    assert max(usage.live_slots for usage, _ in told) > 0
    rest = llm.kv_usage
    assert rest.live_slots == rest.live_tokens == 0 and rest.ratio == 1, "only cached prefixes"
    assert rest.slots > 0
    idle(llm)
    assert llm.kv_usage == KVUsage(0, 0, 0, token, rest.bytes_beside)


def test_dense_tokens_are_all_that_have_keys():
    llm = tiny_llm(MODEL, page_size=1)
    told = watched(llm)
    llm.generate([PROMPT, PROMPT[:30]], GREEDY)
    for usage, _ in told[:-1]:
        assert usage.live_tokens == usage.live_slots and usage.ratio == 1


def test_what_is_given_up_counts_as_dense():
    llm = tiny_llm(MODEL, page_size=1, kv_sparsity=POLICY, enable_prefix_caching=False)
    told = []

    async def program(root):
        await generate([root], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        first, second = root.fork(2)
        await generate([first, second], GREEDY)
        told.append((llm.kv_usage, llm.engine.kv.num_slots - llm.engine.kv.pool.num_free))

    [output] = llm.run(program, [PROMPT])
    [(usage, slots)] = told
    kept = -(-(59 + 59 + 16 + 16) // 4)  # the second layer has a window of its own
    # Of the last token of each branch there are no keys yet.
    assert usage.slots == usage.live_slots == slots == kept + 3 + 2 * (6 - 1)
    assert llm.engine.kv.peak_slots == 59, "all of the prompt is there before some of it is given up"
    assert usage.live_tokens == 59 + 3 + 2 * (6 - 1)
    assert usage.dense_bytes == usage.live_tokens * usage.bytes_per_slot
    assert usage.ratio == (slots * usage.bytes_per_slot + usage.bytes_beside) / usage.dense_bytes < 0.8
    assert output.tree.usage.kv_bytes_held == slots * usage.bytes_per_slot
    idle(llm)


def test_what_dense_requests_would_share_counts_once():
    llm = tiny_llm(MODEL, page_size=1, kv_sparsity=POLICY)
    prompts = [[*PROMPT[:40], *range(60 + i, 80 + i)] for i in range(3)]
    told = watched(llm)
    llm.generate(prompts, GREEDY)
    assert max(usage.live_tokens for usage, _ in told) == 40 + 3 * (20 + 6 - 1)
    [usage] = [usage for usage, _ in told if usage.live_tokens == 40 + 3 * (20 + 6 - 1)][:1]
    assert usage.live_slots == 3 * (-(-(60 + 60 + 16 + 16) // 4) + 6 - 1), "each has its own"


def test_what_a_fork_inside_the_prompt_shares_counts_once():
    llm = tiny_llm(MODEL, page_size=1, kv_sparsity=POLICY, enable_prefix_caching=False)
    told = []

    async def program(root):
        [early] = root.fork(1, at=20)
        early.append([3, 4])
        await generate([root.fork(1)[0], early], GREEDY)
        told.append(llm.kv_usage)

    llm.run(program, [PROMPT])
    [usage] = told
    decoded = 6 - 1
    assert usage.live_slots == usage.slots == -(-(59 + 59 + 16 + 16) // 4) + decoded + 20 + 2 + decoded
    assert usage.live_tokens == 59 + decoded + 2 + decoded


def test_queries_that_wait_are_counted():
    llm = tiny_llm(MODEL, kv_sparsity=KVSparsity.named("snapkv", budget=16, window=4), max_num_rows=16)
    told = watched(llm)
    llm.generate([PROMPT], GREEDY)
    config, waiting = MODEL.config, max(usage.bytes_beside for usage, _ in told)
    queries = config.num_layers * 4 * config.num_heads * (config.head_dim + 1) * 4  # and the LSE of each
    assert queries <= waiting <= queries + config.hidden_size * 4
    assert llm.kv_usage.bytes_beside <= config.hidden_size * 4


@pytest.mark.parametrize("settings", [{"every": 8}, {"trigger": "pressure"}], ids=str)
def test_what_was_decoded_is_not_read_twice(settings):
    for scorer in ("kvzip", KVzip()):
        with pytest.raises(ValueError, match=rf"kv_sparsity: {next(iter(settings))}: KVzip\(\) reads a prompt twice"):
            tiny_llm(MODEL, kv_sparsity=KVSparsity(scorer, budget=64, **settings))
