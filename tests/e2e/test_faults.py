"""Faults that engines of this kind have had, on the real model; `docs/faults.md` lists them all."""

import pytest

from treewise import LLM, RequestsFailed, Rows, SamplingParams, decode, generate, score

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m", dtype="float32", device="cpu", num_kv_slots=8192)


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    """After each case the pool is at its baseline and a plain request answers as before."""
    [before] = llm.generate(["The capital of France is"], GREEDY)
    yield
    [after] = llm.generate(["The capital of France is"], GREEDY)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    llm.engine.check_integrity()
    llm.engine.kv.clear_cache()
    assert llm.engine.kv.pool.num_free == llm.engine.kv.num_slots


def test_b01_a_warm_up_that_ended_on_a_stop_string_changes_nothing(llm):
    few_shot = "Q: What is 1 + 1?\nA: 2\nQ: What is 2 + 1?\nA: 3\n"
    targets = [few_shot + "Q: What is 3 + 1?\nA:", few_shot + "Q: What is 4 + 4?\nA:"]
    llm.engine.kv.clear_cache()
    cold = [output.outputs[0].token_ids for output in llm.generate(targets, GREEDY)]
    llm.engine.kv.clear_cache()
    llm.generate([few_shot + "Q: What is 5 + 1?\nA:"] * 2, SamplingParams(temperature=0, max_tokens=12, stop="\nQ:"))
    for n in (1, 4):
        outputs = llm.generate(targets, SamplingParams(temperature=0, max_tokens=8, n=n))
        assert [[c.token_ids for c in output.outputs] for output in outputs] == [[tokens] * n for tokens in cold]
        assert all(output.tree.usage.cached_tokens > 0 for output in outputs)


@pytest.mark.parametrize("n", [3, 6])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_b07_branches_that_do_not_fit_together_take_turns(llm, n, temperature):
    small = LLM("smollm2-135m", dtype="float32", device="cpu", num_kv_slots=80)  # one branch needs 40 tokens or so
    params = SamplingParams(n=n, temperature=temperature, max_tokens=24, ignore_eos=True, seed=7)
    prompt = "Once upon a time there was a small engine that decoded trees."
    [ample], [starved] = (some.generate([prompt], params) for some in (llm, small))
    assert [branch.token_ids for branch in starved.outputs] == [branch.token_ids for branch in ample.outputs]
    small.engine.kv.clear_cache()
    small.engine.check_integrity()
    assert small.engine.kv.pool.num_free == small.engine.kv.num_slots


@pytest.mark.parametrize(("context", "continuation"), [("Ans", "wer"), ("hello wor", "ld")])
def test_b11_scoring_across_a_token_join(llm, context, continuation):
    """The continuation is tokenised on its own, so it always has tokens and a finite score."""

    async def program(root):
        return await score([root], "", [continuation])

    [output] = llm.run(program, [context])
    assert -100 < output.value[0][0] < 0


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-5, 1e-4, 1e-3])
def test_b14_tiny_temperatures_are_greedy(llm, temperature):
    [greedy] = llm.generate(["San Francisco is a"], SamplingParams(temperature=0, max_tokens=7))
    params = [
        SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=7, seed=1)
        for top_p in (1e-4, 1.0)
        for top_k in (1, 0)
    ]
    for output in llm.generate(["San Francisco is a"] * 4, params):
        assert output.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_b16_a_stop_string_over_several_tokens_never_leaks(llm):
    prompt = "Here is the English alphabet: ABC"
    [free] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12))
    for params in (
        SamplingParams(temperature=0, max_tokens=12, stop="DEFGHIJ"),
        SamplingParams(temperature=0, max_tokens=12, stop="DEFGHIX"),
        SamplingParams(temperature=0, max_tokens=12, stop=free.outputs[0].text[3:9]),
    ):
        pieces = list(llm.stream(prompt, params))
        [output] = llm.generate([prompt], params)
        assert "".join(pieces) == output.outputs[0].text
        assert not any(stop in "".join(pieces) for stop in params.stop)
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("text", ["👍", "你好", "ď"])
@pytest.mark.parametrize("cut", [None, 1, 2])
def test_b17_characters_split_over_tokens(llm, text, cut):
    """Pieces of a stream are whole characters and join to the decoded text, a cut tail included."""
    tokens = llm.tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) > 1
    tokens = (tokens + llm.tokenizer.encode("!", add_special_tokens=False))[:cut]

    class Forced:
        stopping = SamplingParams(max_tokens=len(tokens), stop="!")

        def step(self, tree, logprobs):
            return Rows([0], [tokens[tree.depth]])

    async def program(root):
        return await decode([root], Forced())

    request = llm.engine.add(program, llm.tokenizer.encode("Say:"))
    pieces = []
    while not request.done:
        pieces += [event.text for gain in llm.engine.step() for event in gain.events()]
    [leaf] = request.result
    assert "".join(pieces) == leaf.text
    if cut is None:
        assert leaf.text == text and leaf.stop_reason == "!"
        assert "\ufffd" not in "".join(pieces)
    else:
        assert leaf.text == b"".join(map(llm.tokenizer.token_bytes, tokens)).decode("utf-8", "replace")


def test_b18_an_empty_prompt_is_its_own_error(llm):
    with pytest.raises(RequestsFailed, match=r"prompts\[1\].*no tokens") as failure:
        llm.generate(["One", "", "Two"], GREEDY)
    assert [output is None for output in failure.value.outputs] == [False, True, False]


def test_b19_prompts_at_the_context_limit(llm):
    small = LLM(llm.engine.runner.model, tokenizer=llm.tokenizer, device="cpu", max_model_len=48, num_kv_slots=512)
    tokens = llm.tokenizer.encode("word " * 60)
    for length, expected in ((47, 1), (48, 0)):
        [output] = small.generate([tokens[:length]], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == expected and output.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="max_model_len=48"):
        small.generate([tokens[:49]], GREEDY)
    assert small.generate(["Fine:"], GREEDY)[0].outputs[0].token_ids
    small.engine.check_integrity()


def test_b23_a_root_with_129_branches(llm):
    async def program(root):
        return await generate(root.fork(129), SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True))

    [output] = llm.run(program, ["Name a number:"], seed=3)
    assert len(output.value) == 129 and len({tuple(branch.token_ids) for branch in output.value}) > 10
