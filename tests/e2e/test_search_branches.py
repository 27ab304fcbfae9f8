"""Tree = independent sequences: every branch of a search on a real model equals the same path decoded alone."""

from __future__ import annotations

import pytest

from treewise import LLM, SamplingParams, generate
from treewise.search import STRATEGIES

pytestmark = pytest.mark.slow

QUESTION = "What is 15 + 27?"
THOUGHTS = {"depth": 2, "thought_tokens": 6, "answer_tokens": 4, "stop": (), "temperature": 1.0}
SETTINGS = {
    "best_of_n": {"n": 4, "max_tokens": 8, "temperature": 1.0, "top_p": 0.95},
    "beam": {"beam_width": 3, "max_tokens": 6},
    "tot": {"width": 3, "beam": 2, **THOUGHTS},
    "tot_dfs": {"width": 2, "threshold": -9.0, "solutions": 3, "evaluate": "logprob", **THOUGHTS},
    "mcts": {"width": 2, "iterations": 4, "parallel": 2, **THOUGHTS},
    "step_beam": {"width": 4, "beam": 2, "allot": "dvts", **THOUGHTS},
    "replay": {"recording": [[0, 0, [1, 2, 3]], [1, 2, []], [1, 3, [4, 5]], [1, 6, []], [4, 6, []], [4, 6, []]]},
}


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m", device="cpu", num_kv_slots=4096)


@pytest.fixture(scope="module")
def sequential():
    """Attention of every query on its own, in double precision, and no cache that anything could be shared by."""
    return LLM("smollm2-135m", device="cpu", num_kv_slots=4096, attention="reference", enable_prefix_caching=False)


def search(llm, name):
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
    [result] = llm.run(STRATEGIES[name].build(**SETTINGS[name]), [prompt], seed=11)
    llm.engine.check_integrity()
    best = result.value[0] if isinstance(result.value, list) else result.value
    return prompt, list(best.tree.branches())


@pytest.mark.parametrize("name", SETTINGS)
def test_every_branch_has_the_logprobs_of_its_path_alone(llm, sequential, name):
    _, branches = search(llm, name)
    leaves = [branch for branch in branches if not branch.all_children]
    assert len(leaves) > 3
    for leaf in leaves:
        [alone] = sequential.generate([leaf.path_tokens], SamplingParams(max_tokens=0, prompt_logprobs=0))
        for branch in leaf.lineage():
            for place, (token, logprob) in enumerate(zip(branch.tokens, branch.logprobs, strict=True), branch.start):
                if logprob is not None:
                    assert logprob == pytest.approx(alone.prompt_logprobs[place][token].logprob, abs=1e-4)


@pytest.mark.parametrize("name", ["best_of_n", "tot"])
def test_every_branch_draws_the_tokens_that_it_draws_alone(llm, sequential, name):
    prompt, branches = search(llm, name)
    settings = SETTINGS[name]
    limit = settings.get("max_tokens", settings.get("thought_tokens"))
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=limit)
    drawn = [branch for branch in branches[1:] if branch.logprobs[0] is not None]
    for branch in drawn:

        async def alone(root, path=branch.path):
            for ordinal in path:
                root = root.fork(ordinal + 1)[ordinal]
                await generate([root], params)
            return root

        [result] = sequential.run(alone, [prompt], seed=11)
        assert result.best.token_ids == branch.token_ids
