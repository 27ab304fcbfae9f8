"""Real GGUF models as we load them against Transformers' own reading of the same files."""

import pytest
import torch
from model_files import REAL_MODELS, DenseAttention, run_dense

from treewise.models import load_model
from treewise.models.load import locate
from treewise.models.weights import Checkpoint
from treewise.ops import rotate

pytestmark = pytest.mark.slow
TEXT = "The quick brown fox jumps over the lazy dog, and 12,345 others — 你好 👍 — look on.\n\n"


@pytest.mark.parametrize("name", REAL_MODELS)
def test_converted_weights_equal_transformers_reading_of_the_file(name, model_path, oracle):
    theirs = oracle(name).state_dict()
    ours = Checkpoint(locate(model_path(name)))
    assert theirs.keys() - set(ours.names) <= {"lm_head.weight"}
    for tensor in ours.names:
        assert torch.equal(ours.read(tensor), theirs[tensor]), tensor


@pytest.mark.parametrize("name", REAL_MODELS)
def test_logits_equal_transformers_on_a_text_longer_than_the_window(name, model_path, oracle):
    model, tokenizer = load_model(model_path(name))
    tokens = tokenizer.encode(TEXT * 30)[:700]
    assert len(tokens) == 700
    with torch.inference_mode():
        expected = oracle(name)(torch.tensor([tokens])).logits[0]
    logits = run_dense(model, tokens)
    assert logits.dtype == torch.float32
    scale = expected.abs().max()
    torch.testing.assert_close(logits / scale, expected / scale, rtol=0, atol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_first_layer_of_a_grouped_query_llama_from_gguf_equals_transformers(model_path, oracle):
    """Query and key rows are stored permuted, 9 and 3 heads of them; every other tensor would hide a mistake."""
    theirs = oracle("smollm2")
    model, tokenizer = load_model(model_path("smollm2"))
    tokens = tokenizer.encode(TEXT)
    seen = {}

    class Recording(DenseAttention):
        def __call__(self, layer, heads):
            if layer == 0:
                seen.update(zip("qkv", rotate(heads, model.config.num_kv_heads), strict=True))
            return super().__call__(layer, heads)

    run_dense(model, tokens, attention=Recording(model.config))
    layer = theirs.model.layers[0]
    with torch.inference_mode():
        x = layer.input_layernorm(theirs.model.embed_tokens(torch.tensor([tokens])))
        angles = theirs.model.rotary_emb(x, torch.arange(len(tokens))[None])
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        q = layer.self_attn.q_proj(x).unflatten(-1, (9, 64)).transpose(1, 2)
        k = layer.self_attn.k_proj(x).unflatten(-1, (3, 64)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *angles)
    torch.testing.assert_close(seen["q"], q[0].transpose(0, 1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen["k"], k[0].transpose(0, 1), rtol=1e-4, atol=1e-4)


def test_chunks_and_single_rows_give_the_logits_of_one_pass(model_path):
    model, tokenizer = load_model(model_path("smollm2"))
    tokens = tokenizer.encode(TEXT)
    attention = DenseAttention(model.config)
    pieces = [
        run_dense(model, tokens[start:end], torch.arange(start, end), attention)
        for start, end in ((0, 5), (5, 6), (6, len(tokens)))
    ]
    torch.testing.assert_close(torch.cat(pieces), run_dense(model, tokens), rtol=1e-4, atol=1e-4)


def test_the_built_in_model_answers(model_path):
    model, tokenizer = load_model("smollm2-135m")
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    answer = []
    for _ in range(12):
        answer.append(int(run_dense(model, tokens + answer)[-1].argmax()))
        if answer[-1] in tokenizer.eos_token_ids:
            break
    assert tokenizer.decode(answer) == "The capital of France is Paris."
