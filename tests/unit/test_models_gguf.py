"""GGUF files: written here, read and converted by us, compared with the model they were written from."""

import json
import os
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from model_files import run_dense

from treewise.models import load_model
from treewise.models.convert import GEMMA_LAYER_PARTS, LAYER_PARTS, OUTER_PARTS
from treewise.models.gguf_file import GGUFFile, GGUFTensor
from treewise.models.load import load_config, peek_config
from treewise.models.rope import make_rope

TOKENS = [3, 70, 12, 5, 5, 90, 41, 8, 2, 64, 33, 11]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
F32, F16, BF16, Q8_0 = (getattr(GGMLQuantizationType, name) for name in ("F32", "F16", "BF16", "Q8_0"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_model(kind="Llama", **changes):
    options = {**SIZES, "tie_word_embeddings": True, **changes}
    torch.manual_seed(0)
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config"))(**options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


def interleave(rows, heads):
    """What llama.cpp's converter does to the rows of query and key projections."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(model, path, kind=F32, metadata=(), tensors=(), skip=()):
    """Write a model as llama.cpp would; returns the model, rounded to what the file holds."""
    config = model.config
    name = {"gemma3_text": "gemma3", "mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(33 + i) for i in range(94)] + ["<|end|>", "<|other|>"])
    writer.add_token_types([1] * 94 + [3, 3])
    writer.add_eos_token_id(95)
    for add, *arguments in metadata:
        getattr(writer, add)(*arguments)
    is_gemma = name in ("gemma2", "gemma3")
    parts = GEMMA_LAYER_PARTS if is_gemma else LAYER_PARTS
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for full_name, parameter in model.named_parameters():
        module, suffix = full_name.removeprefix("model.").rsplit(".", 1)
        if module.startswith("layers."):
            _, number, part = module.split(".", 2)
            own_name = f"blk.{number}.{parts[part]}.{suffix}"
        else:
            own_name = f"{OUTER_PARTS[module]}.{suffix}"
        if own_name in skip:
            continue
        values = parameter.detach().numpy()
        stored_kind = kind if values.ndim > 1 else F32
        rounded = dequantize(quantize(values, stored_kind), stored_kind)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(rounded))
        values = parameter.detach().numpy()
        if name == "llama" and part_is(module, "q_proj"):
            values = interleave(values, config.num_attention_heads)
        if name == "llama" and part_is(module, "k_proj"):
            values = interleave(values, config.num_key_value_heads)
        if is_gemma and values.ndim == 1:
            values = values + np.float32(1)
        writer.add_tensor(own_name, quantize(np.ascontiguousarray(values), stored_kind), raw_dtype=stored_kind)
    for own_name, values in tensors:
        writer.add_tensor(own_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def part_is(module, part):
    return module.rsplit(".", 1)[-1] == part


def assert_same(path, model):
    ours, _ = load_model(path)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(run_dense(ours, TOKENS), expected, rtol=1e-4, atol=1e-4)
    return ours


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0], ids=lambda kind: kind.name)
def test_a_llama_of_each_kind_of_tensor(kind, tmp_path):
    model = write(make_model(), tmp_path / "m.gguf", kind)
    assert assert_same(tmp_path / "m.gguf", model).config.tie_embeddings


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Llama", {"tie_word_embeddings": False}),
        ("Llama", {"attention_bias": True}),
        ("Mistral", {"sliding_window": 4}),
        ("Qwen2", {}),
        ("Qwen3", {}),
        ("Gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 4, "attn_logit_softcapping": 2.0}),
        ("Gemma3", {"query_pre_attn_scalar": 16, "sliding_window": 4, "num_hidden_layers": 6}),
    ],
)
def test_each_architecture(architecture, changes, tmp_path):
    model = write(make_model(architecture, **changes), tmp_path / "m.gguf")
    extra = {name for name, _ in model.named_parameters() if name.endswith("o_proj.bias")}
    assert bool(extra) == ("attention_bias" in changes)
    assert_same(tmp_path / "m.gguf", model)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_a_configuration_is_read_without_converting_anything(kind, tmp_path, own_cache):
    path = tmp_path / "model.gguf"
    write(make_model(kind), path)
    found = peek_config(path)
    assert not own_cache.exists() or not any(own_cache.rglob("config.json"))
    assert replace(found, raw={}) == replace(load_config(path), raw={})


def test_llama3_scaling_is_recovered_from_the_frequency_factors(tmp_path):
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, scaled = (
        np.array(make_rope({**parameters, "rope_type": kind}, 16, 256).inverse_frequencies)
        for kind in ("default", "llama3")
    )
    factors = (plain / scaled).astype(np.float32)
    model = make_model(rope_parameters=parameters)
    write(model, tmp_path / "m.gguf", tensors=[("rope_freqs.weight", factors)])
    assert_same(tmp_path / "m.gguf", model)
    write(model, tmp_path / "odd.gguf", tensors=[("rope_freqs.weight", factors[::-1].copy())])
    with pytest.raises(ValueError, match="follows another rule"):
        load_model(tmp_path / "odd.gguf")


def test_linear_and_unknown_rope_scaling(tmp_path):
    model = make_model(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    linear = [("add_rope_scaling_type", gguf.RopeScalingType.LINEAR), ("add_rope_scaling_factor", 4.0)]
    write(model, tmp_path / "m.gguf", metadata=linear)
    assert_same(tmp_path / "m.gguf", model)
    write(model, tmp_path / "old.gguf", metadata=[("add_float32", "llama.rope.scale_linear", 4.0)])
    assert_same(tmp_path / "old.gguf", model)
    longrope = [("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE), ("add_rope_scaling_factor", 4.0)]
    write(model, tmp_path / "long.gguf", metadata=longrope)
    with pytest.raises(ValueError, match="rope_type 'longrope' is not supported"):
        load_model(tmp_path / "long.gguf")


def test_a_file_is_converted_once_by_its_content(tmp_path, own_cache, monkeypatch):
    path = tmp_path / "m.gguf"
    write(make_model(), path)
    load_model(path)
    [folder] = (own_cache / "converted").iterdir()
    made = (folder / "model.safetensors").stat().st_mtime_ns
    path.rename(tmp_path / "renamed.gguf")
    load_model(tmp_path / "renamed.gguf")
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    # Another model under the same name, of the same size and age, is another model.
    other = make_model()
    with torch.no_grad():
        other.model.norm.weight.add_(1)
    age = (tmp_path / "renamed.gguf").stat()
    write(other, tmp_path / "renamed.gguf")
    os.utime(tmp_path / "renamed.gguf", ns=(age.st_atime_ns, age.st_mtime_ns))
    assert_same(tmp_path / "renamed.gguf", other)
    assert len(list((own_cache / "converted").iterdir())) == 2


def test_what_ends_a_text_is_told_to_transformers_too(tmp_path, own_cache):
    write(make_model(), tmp_path / "m.gguf")
    _, tokenizer = load_model(tmp_path / "m.gguf")
    assert tokenizer.eos_token_ids == {94, 95}  # the file's eos, and a control token known to end turns
    [folder] = (own_cache / "converted").iterdir()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [95, 94]
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == [95, 94]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": ["blk.1.attn_k.weight"]}, r"the tensor blk\.1\.attn_k\.weight is missing"),
        ({"skip": ["token_embd.weight"]}, r"the tensor token_embd\.weight is missing"),
        ({"tensors": [("blk.0.attn_sinks.weight", np.ones(6, np.float32))]}, r"no place for blk\.0\.attn_sinks"),
        ({"metadata": [("add_expert_count", 8)]}, "mixture of experts"),
        ({"metadata": [("add_rope_dimension_count", 8)]}, "another size than a head"),
        ({"metadata": [("add_value_length", 8)]}, "another size than a head"),
        ({"metadata": [("add_uint16", "split.count", 3)]}, "one of 3 parts"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(options, message, tmp_path, own_cache):
    write(make_model(), tmp_path / "m.gguf", **options)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "m.gguf")
    assert list((own_cache / "converted").iterdir()) == []


def test_a_wrong_shape_is_named(tmp_path):
    write(
        make_model(),
        tmp_path / "m.gguf",
        skip=["output_norm.weight"],
        tensors=[("output_norm.weight", np.ones(7, np.float32))],
    )
    with pytest.raises(ValueError, match=r"output_norm\.weight has shape \(7,\), the metadata imply \(96,\)"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([("add_tokenizer_pre", "gargoyle")], "tokenizer.ggml.pre 'gargoyle' is not supported; choose from default"),
        ([("add_tokenizer_model", "rwkv")], "tokenizer.ggml.model 'rwkv' is not supported; choose from gpt2, llama"),
    ],
)
def test_an_unknown_tokenizer_is_refused(metadata, message, tmp_path, monkeypatch):
    for add, _ in metadata:
        monkeypatch.setattr(gguf.GGUFWriter, add, lambda self, value, key=add: None)
    key = {"add_tokenizer_pre": "tokenizer.ggml.pre", "add_tokenizer_model": "tokenizer.ggml.model"}
    write(make_model(), tmp_path / "m.gguf", metadata=[("add_string", key[add], value) for add, value in metadata])
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "m.gguf")


def test_an_unknown_architecture_lists_the_known_ones(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ValueError, match="'mamba' is not supported; the known ones are llama, qwen2, qwen3, gemma2, gemma3"
    ):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("contents", [b"", b"GG", b"PK\x03\x04 a zip file", b"GGML" + bytes(100)])
def test_a_file_with_another_magic_is_refused(contents, tmp_path):
    (tmp_path / "m.gguf").write_bytes(contents)
    with pytest.raises(ValueError, match="is not a GGUF file"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("version", [b"\x01\0\0\0", b"\0\0\0\x03"], ids=["old", "big-endian"])
def test_other_versions_are_refused(version, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + version + bytes(100))
    with pytest.raises(ValueError, match="versions 2 and 3 can be read"):
        load_model(tmp_path / "m.gguf")


def test_a_file_cut_anywhere_is_truncated(tmp_path, own_cache):
    path = tmp_path / "whole.gguf"
    write(make_model(), path)
    contents = path.read_bytes()
    for length in [4, 8, 20, 24, 100, 1_000, 3_000, len(contents) // 2, len(contents) - 40]:
        (tmp_path / "cut.gguf").write_bytes(contents[:length])
        with pytest.raises(ValueError, match="is truncated"):
            load_model(tmp_path / "cut.gguf")
    assert list((own_cache / "converted").iterdir()) == []


DEQUANTISABLE = [
    kind
    for kind in GGMLQuantizationType
    if kind.name.startswith(("Q", "IQ", "TQ")) and kind.name not in ("Q1_0", "Q8_1", "Q8_K")
]


@pytest.mark.parametrize("kind", DEQUANTISABLE, ids=lambda kind: kind.name)
def test_every_quantised_type_keeps_its_rows(kind):
    block, size = GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 60, 6 * size, dtype=np.uint8)
    values = GGUFTensor("t", (3, 2 * block), kind, stored).read()
    assert values.shape == (3, 2 * block) and values.dtype == np.float32
    for row in range(3):
        expected = dequantize(stored.reshape(3, -1)[row], kind)
        np.testing.assert_array_equal(values[row], expected)


def test_a_type_that_nobody_can_dequantise_is_named():
    with pytest.raises(ValueError, match="the tensor t has type Q8_K"):
        GGUFTensor("t", (1, 256), GGMLQuantizationType.Q8_K, np.zeros(292, np.uint8)).read()


def test_metadata_of_every_kind_of_value(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a", 200)
    writer.add_int64("b", -(2**40))
    writer.add_float64("c", 0.1)
    writer.add_bool("d", True)
    writer.add_array("e", [1.5, 2.5])
    writer.add_array("f", ["", "é"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile(tmp_path / "m.gguf").metadata
    assert [metadata[key] for key in "abcdef"] == [200, -(2**40), 0.1, True, [1.5, 2.5], ["", "é"]]
