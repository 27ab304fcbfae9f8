"""Transformers with treewise attention: the same tokens, and a shared prompt's keys read once."""

import pytest
import torch

from treewise import hf

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
WINDOW = {"sliding_window": 11, "query_pre_attn_scalar": 12}
ARCHITECTURES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, **WINDOW, attn_logit_softcapping=4.0)
    ),
}
PROMPT = [[5, 17, 9, 30, 2, 61, 44, 12, 8, 33, 71, 29, 54, 3, 90, 21]]
PADDED = ([[0, 0, 0, 5, 17, 9, 30], [40, 2, 61, 44, 12, 8, 33]], [[0, 0, 0, 1, 1, 1, 1], [1] * 7])
MODES = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 3},
    "sampled": {"do_sample": True, "num_return_sequences": 5},
    "sampled beams": {"do_sample": True, "num_beams": 3},
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    hf.register()
    torch.manual_seed(0)
    return ARCHITECTURES[request.param]().eval()


def run(model, attention, tokens, mask=None, method="deft:flatten", **options):
    """Return what is generated, and the reads."""
    model.set_attn_implementation(attention)
    tokens = torch.tensor(tokens)
    mask = torch.ones_like(tokens) if mask is None else torch.tensor(mask)
    with hf.shared_prefixes(model, method) as reads:
        torch.manual_seed(1)
        out = model.generate(tokens, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, **options)
    return out.tolist(), reads


@pytest.mark.parametrize("method", ["deft:flatten", "auto"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prompts", [(PROMPT,), PADDED], ids=["alone", "padded"])
def test_tokens_are_those_of_eager_attention(model, prompts, mode, method):
    expected, _ = run(model, "eager", *prompts, **MODES[mode])
    got, reads = run(model, "treewise", *prompts, method=method, **MODES[mode])
    assert got == expected
    assert (reads.kv_bytes_of_rows > 0) == (mode != "greedy")  # which has no two rows alike


def test_a_prompt_is_read_once_for_all_its_beams():
    hf.register()
    model = ARCHITECTURES["llama"]()
    _, reads = run(model, "treewise", PROMPT, num_beams=4, do_sample=False)
    # The first of the twelve tokens comes out of the prompt's own forward.
    own = [len(PROMPT[0]) + 4 * step for step in range(1, 12)]
    alone = [4 * (len(PROMPT[0]) + step) for step in range(1, 12)]
    a_token = 2 * SIZES["num_key_value_heads"] * SIZES["head_dim"] * 4 * SIZES["num_hidden_layers"]
    assert reads.kv_bytes_read == a_token * sum(own)
    assert reads.kv_bytes_of_rows == a_token * sum(alone)


def test_a_prompt_that_is_taken_in_chunks_is_shared_as_a_whole(model):
    options = {"num_beams": 3, "do_sample": False}
    expected, whole = run(model, "treewise", PROMPT, **options)
    got, chunked = run(model, "treewise", PROMPT, prefill_chunk_size=6, **options)
    assert got == expected
    assert chunked == whole


def test_neighbouring_prompts_share_their_common_beginning(model):
    prompts = [PROMPT[0][:9] + end for end in ([1, 2, 3], [1, 4, 5], [6, 7, 8])]
    got, reads = run(model, "treewise", prompts, do_sample=False)
    assert got == run(model, "sdpa" if model.config.model_type == "llama" else "eager", prompts, do_sample=False)[0]
    assert 0 < reads.kv_bytes_read < reads.kv_bytes_of_rows


def test_without_the_context_it_is_dense_attention(model):
    model.set_attn_implementation("treewise")
    tokens = torch.tensor(PROMPT)
    got = model.generate(tokens, max_new_tokens=8, do_sample=False, num_beams=2)
    model.set_attn_implementation("eager")
    assert torch.equal(got, model.generate(tokens, max_new_tokens=8, do_sample=False, num_beams=2))


@torch.no_grad()
def test_logits_of_a_cache_that_was_cut_back_and_filled_with_other_tokens(model):
    prompt = torch.tensor(PROMPT[0][:6]).expand(3, -1)
    ends = torch.tensor([[7, 8], [9, 10], [11, 12]])
    logits = {}
    for attention in ("eager", "treewise"):
        model.set_attn_implementation(attention)
        with hf.shared_prefixes(model) as reads:
            cache = transformers.DynamicCache(config=model.config)
            model(prompt, cache=cache, use_cache=True)
            cache.crop(-3)
            for column in ends.T:
                out = model(column[:, None], cache=cache, use_cache=True)
        logits[attention] = out.logits
    torch.testing.assert_close(logits["treewise"], logits["eager"], atol=1e-5, rtol=1e-4)
    assert 0 < reads.kv_bytes_read < reads.kv_bytes_of_rows


@torch.no_grad()
def test_equal_tokens_are_not_shared_where_something_else_differs(model):
    model.set_attn_implementation("treewise")
    tokens = torch.tensor(PROMPT).expand(2, -1)
    embedded = model.get_input_embeddings()(tokens)
    positions = torch.arange(tokens.shape[1]) + torch.tensor([[0], [5]])
    for given in ({"inputs_embeds": embedded}, {"input_ids": tokens, "position_ids": positions}):
        with hf.shared_prefixes(model) as reads:
            cache = transformers.DynamicCache(config=model.config)
            model(**given, cache=cache, use_cache=True)
            model(tokens[:, :1], cache=cache, use_cache=True)
        assert reads.kv_bytes_of_rows == 0


def test_a_static_cache_is_computed_densely(model):
    options = {"do_sample": False, "num_beams": 2, "cache_implementation": "static", "disable_compile": True}
    expected, _ = run(model, "eager", PROMPT, **options)
    got, reads = run(model, "treewise", PROMPT, **options)
    assert got == expected
    assert reads.kv_bytes_of_rows == 0


def test_errors_name_what_is_wrong(model):
    with (
        pytest.raises(ValueError, match=r"method is 'fast'; choose one of .*deft:flatten"),
        hf.shared_prefixes(model, "fast"),
    ):
        pass
    sinks = {"s_aux": torch.zeros(6)}
    q = torch.zeros(1, 6, 1, 8)
    with pytest.raises(ValueError, match="attention sinks"):
        transformers.AttentionInterface()["treewise"](model, q, q[:, :2], q[:, :2], None, **sinks)
