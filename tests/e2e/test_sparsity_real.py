"""KV sparsity of real models: what the engine decodes is what plain attention to the tokens that stay says."""

import pytest

from treewise import LLM, SamplingParams
from treewise.evaluate.cache import OfflineCache
from treewise.sparsity.policy import KVSparsity

TEXT = (
    "A lighthouse keeper wrote down every ship that passed. On Monday it was the Albatross, with grain for the north. "
    "On Tuesday two came, the Heron and the Curlew, both in ballast. The storm of Wednesday kept all of them away. "
    "On Thursday the Albatross came back with timber, and the keeper waved, as he always did when he knew a captain. "
) * 2 + "Question: which ship came back with timber? Answer: the"
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_tokens_are_those_of_a_cache_that_holds_what_stays(model_path, name):
    llm = LLM(str(model_path(name)), dtype="float32", device="cpu", num_kv_slots=2048, max_num_rows=100)
    first = 3 if name == "smollm2" else 1  # of Gemma's layers without a window of their own, of which there are few
    policies = [
        KVSparsity.named("novita", budget=48, window=8, first_full=first),
        KVSparsity.named("pyramidkv", budget=48, window=8),
        KVSparsity.named("adakv", budget=48, window=8),
        KVSparsity.named("keydiff", budget=48, window=8),
        KVSparsity.named("expected_attention", budget=48, window=8),
        KVSparsity.named("calibrated" if name == "smollm2" else "induction", budget=48, window=8),
    ]
    outputs = llm.generate([TEXT] * (1 + len(policies)), GREEDY, kv_sparsity=["full", *policies])
    whole, *told = [output.outputs[0].token_ids for output in outputs]
    cache = OfflineCache(llm.engine.runner.model)
    cache.read(outputs[0].prompt_token_ids)
    assert whole == cache.greedy(GREEDY.max_tokens)
    for policy, tokens in zip(policies, told, strict=True):
        assert tokens == cache.compress(policy).greedy(GREEDY.max_tokens), policy
    assert any(tokens != whole for tokens in told), "nothing is lost: no test"
    llm.engine.check_integrity()
