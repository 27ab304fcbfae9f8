"""What each rank has of a model, and that all of them together are the model."""

from __future__ import annotations

import pytest
import torch
from model_files import GEMMA, DenseAttention
from ranks_here import SIZES, on_ranks, save_model

from treewise.models import CausalLM, load_decoder, read_config
from treewise.models.shapes import find_shape
from treewise.parallel import ParallelLM
from treewise.parallel.follower import load_share
from treewise.parallel.model import check_size

BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {**BIASES, "head_dim": 20},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        **{**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    },
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], **GEMMA},
}
HEADS = {2: (6, 2), 3: (9, 3), 4: (8, 2)}
"""By ranks: those of 4 have each KV head twice."""
TOKENS = torch.randint(131, (20,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def logits(model: CausalLM) -> torch.Tensor:
    attention = DenseAttention(model.config)
    attention.positions = torch.arange(len(TOKENS))
    return model.logits(model(TOKENS, attention.positions, attention))


@pytest.mark.parametrize("size", HEADS)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_compute_what_the_whole_model_does(name, size, tmp_path):
    heads, kv_heads = HEADS[size]
    folder = save_model(tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads, **MODELS[name])
    whole = logits(load_decoder(folder))

    def work(group):
        return logits(load_share(str(folder), "float32", torch.device("cpu"), group))

    first, *_ = on_ranks(size, work)
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("size", HEADS)
@pytest.mark.parametrize("tied", [False, True])
def test_each_rank_holds_its_part_of_the_weights(size, tied, tmp_path):
    heads, kv_heads = HEADS[size]
    folder = save_model(tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    whole = {name: weight.numel() for name, weight in load_decoder(folder).named_parameters()}

    def work(group):
        model = load_share(str(folder), "float32", torch.device("cpu"), group)
        return {name: weight.numel() for name, weight in model.named_parameters()}

    for own in on_ranks(size, work):
        assert own.keys() == whole.keys()
        for name, count in own.items():
            if name.endswith("norm.weight"):
                assert count == whole[name]
            elif "qkv" in name and kv_heads < size:
                assert count == 48 * (heads // size + 2) * 8
            elif name in ("embedding.weight", "head.weight"):
                assert count == -(-131 // size) * 48
            else:
                assert count * size == whole[name]


def test_a_rank_reads_no_other_weights_where_they_stay_in_the_file(tmp_path):
    """Rows of a tensor that needs no conversion are a view of the memory-mapped file."""
    folder = save_model(tmp_path)

    def work(group):
        model = load_share(str(folder), "float32", torch.device("cpu"), group)
        return {
            "rows": model.embedding.weight.untyped_storage().nbytes(),
            "columns": model.layers[0].mlp.down.weight.is_contiguous(),
        }

    first, _ = on_ranks(2, work)
    assert first == {"rows": 131 * 48 * 4, "columns": True}  # the whole tensor is mapped, not copied


@pytest.mark.parametrize("size", [2, 4])
def test_random_models_have_the_same_weights_for_any_number_of_ranks(size):
    whole = load_decoder("shape:tiny")
    shares = on_ranks(size, lambda group: load_share("shape:tiny", "float32", torch.device("cpu"), group))
    mine = torch.cat([share.embedding.weight for share in shares])
    assert torch.equal(mine[: len(whole.embedding.weight)], whole.embedding.weight)
    columns = torch.cat([share.layers[1].mlp.down.weight for share in shares], dim=1)
    assert torch.equal(columns, whole.layers[1].mlp.down.weight)
    queries = torch.cat([share.layers[0].attention.qkv.weight[: 64 // size] for share in shares])
    assert torch.equal(queries, whole.layers[0].attention.qkv.weight[:64])
    gates = torch.cat([share.layers[0].mlp.gate_up.weight[: 128 // size] for share in shares])
    assert torch.equal(gates, whole.layers[0].mlp.gate_up.weight[:128])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "choices"),
    [(6, 2, 3, "1, 2, 6"), (9, 3, 2, "1, 3"), (14, 2, 4, "1, 2"), (8, 2, 16, "1, 2, 4, 8"), (12, 3, 4, "1, 3, 6, 12")],
)
def test_other_numbers_of_ranks_are_refused(heads, kv_heads, size, choices):
    raw = {**SIZES, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    config = read_config({**raw, "intermediate_size": 4864 if heads == 14 else 96})
    with pytest.raises(ValueError, match=rf"tensor_parallel_size is {size};.*shared out over {choices} ranks"):
        check_size(config, size)


@pytest.mark.parametrize("size", [0, -2, 1.5, "2", True])
def test_a_number_of_ranks_is_a_whole_number(size):
    with pytest.raises(ValueError, match="tensor_parallel_size must be an integer of at least 1"):
        check_size(read_config(find_shape("tiny")), size)


def test_a_share_tells_its_own_sizes(tmp_path):
    folder = save_model(tmp_path)

    def work(group):
        model = load_share(str(folder), "float32", torch.device("cpu"), group)
        assert isinstance(model, ParallelLM)
        return model.config.num_heads, model.config.num_kv_heads, model.config.vocab_size, model.whole.num_heads

    assert on_ranks(2, work) == [(3, 1, 131, 6)] * 2
