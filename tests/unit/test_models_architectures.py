"""Small random models of every architecture, saved by Transformers and loaded by us: the same logits in float32."""

import json

import pytest
import torch
import transformers
from model_files import GEMMA, SIZES, DenseAttention, run_dense
from safetensors.torch import load_file, save_file
from tiny import tiny_llm

from treewise import SamplingParams
from treewise.models import CausalLM, read_config, weights
from treewise.models.rope import make_rope
from treewise.models.weights import load_weights

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# name: Transformers' name for the architecture and its configuration.
MODELS = {
    "llama": ("Llama", {**SIZES, "tie_word_embeddings": False}),
    "llama-2-heads-alike": ("Llama", {**SIZES, "num_key_value_heads": 6}),
    "llama-one-kv-head": ("Llama", {**SIZES, "num_key_value_heads": 1}),
    "llama-head-dim-biases": ("Llama", {**SIZES, "head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {**SIZES, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}}),
    "llama-3.1": ("Llama", {**SIZES, "tie_word_embeddings": True, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "mistral-window": ("Mistral", {**SIZES, "sliding_window": 5}),
    "mistral-without-window": ("Mistral", {**SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen2-upper-windows": (
        "Qwen2",
        {**SIZES, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16}),
    "qwen3-biases": ("Qwen3", {**SIZES, "head_dim": 16, "attention_bias": True}),
    "gemma2": ("Gemma2", {**SIZES, **GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma2-defaults": ("Gemma2", {**SIZES, **GEMMA}),
    "gemma2-no-caps": ("Gemma2", {**SIZES, **GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3Text", {**SIZES, **GEMMA}),
    "gemma3-global-scaling": (
        "Gemma3Text",
        {
            **SIZES,
            **GEMMA,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}
TOKENS = torch.randint(96, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def make_theirs(name, **changes):
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**options, **changes)
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))(config).eval()
    with torch.no_grad():  # fresh norms and biases are ones and zeros, which would hide mistakes
        for parameter in model.parameters():
            parameter.normal_(0, 0.2).add_(0.5 if parameter.ndim == 1 else 0)
    return model


def load(folder, dtype=torch.float32, device="cpu") -> CausalLM:
    config = read_config(json.loads((folder / "config.json").read_text()))
    return load_weights(config, folder, dtype, torch.device(device))


def their_logits(model, tokens=TOKENS, positions=None):
    with torch.inference_mode():
        positions = None if positions is None else positions[None]
        return model(torch.tensor([tokens]), position_ids=positions).logits[0]


def assert_close(ours, theirs):
    scale = theirs.abs().max()
    torch.testing.assert_close(ours / scale, theirs / scale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name, tmp_path):
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert_close(run_dense(ours, TOKENS), their_logits(theirs))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3"])
def test_the_engine_decodes_the_tokens_of_transformers(name, tmp_path):
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path)
    ids = torch.tensor([TOKENS])
    options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(ids, max_new_tokens=24, do_sample=False, **options)[0, len(TOKENS) :]
    [request] = tiny_llm(load(tmp_path)).generate(TOKENS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert request.outputs[0].token_ids == expected.tolist()


@pytest.mark.parametrize("cap", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_soft_caps_change_the_logits(cap, tmp_path):
    """Otherwise the comparison above would say nothing about them."""
    theirs = make_theirs("gemma2")
    theirs.save_pretrained(tmp_path)
    edit_config(tmp_path, {cap: None})
    assert (run_dense(load(tmp_path), TOKENS) - their_logits(theirs)).abs().max() > 0.01


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-upper-windows", "gemma2", "gemma3"])
def test_windows_change_the_logits(name, tmp_path):
    """Otherwise the comparison above would say nothing about windows."""
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    attention = DenseAttention(read_config({**ours.config.raw, "sliding_window": 1000}))
    assert (run_dense(ours, TOKENS, attention=attention) - their_logits(theirs))[20:].abs().max() > 0.01


@pytest.mark.parametrize("position", [1, 1_000, 8_000, 20_000])
def test_llama3_rope_far_along(position, tmp_path):
    theirs = make_theirs("llama-3.1")
    theirs.save_pretrained(tmp_path)
    positions = torch.arange(40) * 3 + position
    assert_close(run_dense(load(tmp_path), TOKENS, positions), their_logits(theirs, positions=positions))


def test_only_the_wanted_rows_get_logits(tmp_path):
    theirs = make_theirs("qwen3")
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    attention = DenseAttention(ours.config)
    attention.positions = torch.arange(40)
    with torch.inference_mode():
        logits = ours.logits(ours(torch.tensor(TOKENS), attention.positions, attention, torch.tensor([39, 3])))
    assert_close(logits, their_logits(theirs)[[39, 3]])


def test_half_precision_weights_give_logits_of_their_type_close_to_the_truth(tmp_path):
    theirs = make_theirs("gemma3")
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path, torch.bfloat16)
    logits = run_dense(ours, TOKENS)
    assert ours.dtype == logits.dtype == torch.bfloat16
    expected = their_logits(theirs.to(torch.bfloat16)).float()
    assert (logits - expected).abs().max() / expected.abs().max() < 0.05


def test_shards_are_joined(tmp_path):
    theirs = make_theirs("llama")
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_close(run_dense(load(tmp_path), TOKENS), their_logits(theirs))
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(FileNotFoundError, match="model-00002"):
        load(tmp_path)


def edit(folder, change):
    """Rewrite a folder's tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def edit_config(folder, changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_copied_piece_by_piece(dtype, tmp_path, monkeypatch):
    make_theirs("llama-head-dim-biases").save_pretrained(tmp_path)
    whole = dict(load(tmp_path).named_parameters())
    monkeypatch.setattr(weights, "PIECE", 1000)
    for name, parameter in load(tmp_path, dtype).named_parameters():
        assert torch.equal(parameter, whole[name].to(dtype)), name


@pytest.mark.parametrize(
    ("stored", "device", "expected"),
    [
        (torch.float16, "cpu", torch.float32),
        (torch.float16, "meta", torch.float16),
        (torch.bfloat16, "meta", torch.bfloat16),
        (torch.float32, "meta", torch.bfloat16),
    ],
)
def test_the_type_is_that_of_the_file_where_it_has_16_bits_and_the_device_is_no_cpu(stored, device, expected, tmp_path):
    make_theirs("llama").to(stored).save_pretrained(tmp_path)
    ours = load(tmp_path, None, device)
    assert ours.dtype == expected and ours.device.type == device


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_weights_on_a_gpu_are_those_of_the_file(name, tmp_path, monkeypatch):
    make_theirs(name).to(torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(weights, "PIECE", 1000)
    expected = dict(load(tmp_path, torch.bfloat16).named_parameters())
    for name, parameter in load(tmp_path, None, "cuda").named_parameters():
        assert parameter.is_cuda and torch.equal(parameter.cpu(), expected[name]), name


def test_a_tied_head_is_the_embedding(tmp_path):
    make_theirs("qwen2").save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert ours.config.tie_embeddings and not hasattr(ours, "head")


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_that_ships_a_head_too(same, tmp_path):
    """The duplicate is tolerated; if it is another matrix, that one is the head, as in Transformers."""
    make_theirs("qwen2").save_pretrained(tmp_path)

    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * (1 if same else 2)

    edit(tmp_path, add_head)
    ours = load(tmp_path)
    assert ours.config.tie_embeddings == same
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_close(run_dense(ours, TOKENS), their_logits(theirs))


@pytest.mark.parametrize(
    "missing",
    ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"],
)
def test_a_missing_tensor_is_named(missing, tmp_path):
    make_theirs("llama").save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(missing))
    with pytest.raises(ValueError, match=f"the tensor {missing} is missing"):
        load(tmp_path)


def test_a_wrong_shape_is_named(tmp_path):
    make_theirs("llama").save_pretrained(tmp_path)

    def shorten(tensors):
        tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"][:-1]

    edit(tmp_path, shorten)
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.up_proj\.weight has shape \(79, 48\).*\(80, 48\)"):
        load(tmp_path)


def test_a_tensor_without_a_place_is_refused_and_old_rotary_buffers_are_not(tmp_path):
    make_theirs("llama").save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}))
    with pytest.raises(ValueError, match=r"has no model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path)


@pytest.mark.parametrize("length", [0, 5, 2_000])
def test_a_truncated_safetensors_file_is_an_error(length, tmp_path):
    make_theirs("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors file"):
        load(tmp_path)


def test_the_text_part_of_a_model_that_sees(tmp_path):
    make_theirs("gemma3").save_pretrained(tmp_path)

    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("model.", "language_model.model.", 1)] = tensors.pop(name)
        tensors["vision_tower.patch.weight"] = torch.ones(2)

    before = run_dense(load(tmp_path), TOKENS)
    edit(tmp_path, rename)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert torch.equal(run_dense(load(tmp_path), TOKENS), before)


CONFIG = {**SIZES, "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; the known ones are Llama"),
        ({"architectures": None}, "none given"),
        ({"hidden_size": None}, "lacks the key 'hidden_size'"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 is not a multiple of num_key_value_heads 2"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; choose from silu"),
        ({"num_local_experts": 8}, "mixtures of experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantised"),
        ({"layer_types": ["full_attention"] * 2}, "names 2 layers"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported; choose from default"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "needs the parameter 'low_freq_factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_reason(changes, message):
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        read_config(config)


def test_a_missing_window_means_the_default_and_null_means_none():
    mistral = {**SIZES, "architectures": ["MistralForCausalLM"]}
    assert read_config(mistral).layer_windows == (4096,) * 3
    assert read_config({**mistral, "sliding_window": None}).layer_windows == (None,) * 3


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
        {**LLAMA3, "factor": 32.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 20, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 64},
    ],
)
def test_frequencies_equal_transformers(parameters):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 500_000.0, **parameters}
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**SIZES, head_dim=64, rope_parameters=dict(parameters)))
    ours = make_rope(parameters, 64, SIZES["max_position_embeddings"])
    assert torch.equal(torch.tensor(ours.inverse_frequencies), theirs.inv_freq)
    assert ours.scale == pytest.approx(theirs.attention_scaling, rel=1e-12)
