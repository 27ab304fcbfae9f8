"""Turns a GGUF file into a Transformers folder, once, so that everything is loaded in one way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treewise.config import cache_folder
from treewise.models.cache import check_space, make_once, progress
from treewise.models.decoder import CausalLM
from treewise.models.gguf_file import GGUFFile, GGUFTensor
from treewise.models.gguf_tokenizer import build_tokenizer
from treewise.models.registry import read_config
from treewise.models.rope import make_rope

# Part of every converted folder's name: raise it when what is written below changes.
FORMAT = 1

# Names of a layer's tensors in Transformers and in GGUF files.
LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_LAYER_PARTS = {
    **LAYER_PARTS,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Only the largest models scale their scores by the hidden size over the heads, which files do not say.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
OUTER_PARTS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GGUFArchitecture:
    """How an architecture of GGUF files maps to one of Transformers.

    Attributes
    ----------
    interleaved : bool
        Rows of the query and key projections are stored with the two halves of each head interleaved.
    norm_offset : float
        What the file has added to the weights of norms.
    """

    name: str
    layer_parts: Mapping[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0


GGUF_ARCHITECTURES = {
    "llama": GGUFArchitecture("LlamaForCausalLM", LAYER_PARTS, interleaved=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", LAYER_PARTS),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", LAYER_PARTS),
    "gemma2": GGUFArchitecture("Gemma2ForCausalLM", GEMMA_LAYER_PARTS, norm_offset=1.0),
    "gemma3": GGUFArchitecture("Gemma3ForCausalLM", GEMMA_LAYER_PARTS, norm_offset=1.0),
}


def convert_once(digest: str, find: Callable[[], Path]) -> Path:
    """Give the Transformers folder of a GGUF file, made in the cache the first time.

    Parameters
    ----------
    digest : str
        The sha256 of the file's contents, by which the folder is found.
    find : callable
        Gives the file, if it has to be converted.

    Raises
    ------
    ValueError
        The file is not a whole GGUF file, or of an unsupported architecture, tokenizer or type of tensor.
    OSError
        The cache has no room.
    """
    return make_once(cache_folder() / "converted" / f"{digest[:16]}-{FORMAT}", lambda folder: convert(find(), folder))


def convert(path: Path, folder: Path) -> None:
    """Write ``config.json``, ``generation_config.json``, the tokenizer and ``model.safetensors`` of a GGUF file.

    Quantised tensors become float32, in which they are exact; others keep their type.
    """
    file = GGUFFile(path)
    architecture = _architecture(file)
    config = _config(architecture, file)
    tokenizer, settings, end_ids = build_tokenizer(file.metadata)
    config["bos_token_id"] = file.metadata.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = end_ids[0] if end_ids else None
    tensors = _match_tensors(architecture, file, config)

    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": end_ids}
    for file_name, contents in (
        ("config.json", config),
        ("tokenizer_config.json", settings),
        ("generation_config.json", ends),
    ):
        (folder / file_name).write_text(json.dumps(contents, indent=2, ensure_ascii=False), "utf-8")
    _write_tensors(tensors, architecture, config, folder / "model.safetensors")


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Return what ``config.json`` would say of a GGUF file, of which only the metadata are read.

    Raises
    ------
    ValueError
        The file is no GGUF file, or of an unsupported architecture.
    """
    file = GGUFFile(path)
    return _config(_architecture(file), file)


def _architecture(file: GGUFFile) -> GGUFArchitecture:
    name = file.metadata.get("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise ValueError(
            f"{file.path}: architecture {name!r} is not supported; the known ones are {', '.join(GGUF_ARCHITECTURES)}"
        )
    return GGUF_ARCHITECTURES[name]


def _config(architecture: GGUFArchitecture, file: GGUFFile) -> dict[str, Any]:
    """Say in the words of a Transformers ``config.json`` what the metadata says."""
    prefix = file.metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{prefix}.{key}", default)

    def need(key: str) -> Any:
        if get(key) is None:
            raise ValueError(f"{file.path}: the key {prefix}.{key} is missing")
        return get(key)

    if get("expert_count"):
        raise ValueError(f"{file.path}: a mixture of experts ({prefix}.expert_count) is not supported")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: the tensor token_embd.weight is missing")
    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = get("attention.key_length", hidden // heads)
    if get("rope.dimension_count", head_dim) != head_dim or get("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{file.path}: rotary embeddings or values of another size than a head are not supported")
    window = get("attention.sliding_window")
    config = {
        "architectures": [architecture.name],
        "model_type": {"gemma3": "gemma3_text"}.get(prefix, prefix),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if scaling := _rope_scaling(get, file, config):
        config["rope_scaling"] = scaling
    if prefix in GEMMA_27B_LAYERS:
        is_27b = config["num_hidden_layers"] == GEMMA_27B_LAYERS[prefix]
        config["query_pre_attn_scalar"] = hidden // heads if is_27b else head_dim
        # Where an older file lacks a key, its default holds.
        given = {"sliding_window": window}
        given |= {key: get(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
        config |= {key: value for key, value in given.items() if value is not None}
    elif prefix == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
        if window:
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config


def _rope_scaling(get: Callable[..., Any], file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file.tensors[ROPE_FACTORS].read(), config)
    kind = get("rope.scaling.type", "linear")
    factor = get("rope.scaling.factor") or get("rope.scale_linear", 1.0)  # the second is how old files say it
    if kind == "none" or factor == 1.0:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if (context := get("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = context
    return scaling


def _llama3_scaling(factors: NDArray[np.float32], config: Mapping[str, Any]) -> dict[str, Any]:
    """Recover Llama 3.1's parameters from the divisors of each frequency, which are all that a file holds of them."""
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }

    def frequencies(parameters: Mapping[str, Any]) -> NDArray[np.float64]:
        parameters = {"rope_theta": config["rope_theta"], **parameters}
        rope = make_rope(parameters, config["head_dim"], config["max_position_embeddings"])
        return np.array(rope.inverse_frequencies)

    if not np.allclose(frequencies({}) / factors, frequencies(scaling), rtol=1e-3):
        raise ValueError(f"{ROPE_FACTORS} follows another rule than Llama 3.1's, which is not supported")
    return scaling


def _match_tensors(architecture: GGUFArchitecture, file: GGUFFile, config: Mapping[str, Any]) -> dict[str, GGUFTensor]:
    """Find the tensor of the file for each one that the decoder needs, by the names of Transformers."""
    model_config = read_config(config)
    with torch.device("meta"):
        decoder = CausalLM(model_config)
    matched = {}
    for name, shape in (pair for _, sources in decoder.checkpoint_tensors() for pair in sources.items()):
        own_name = _own_name(architecture, name)
        tensor = file.tensors.get(own_name)
        if tensor is None:
            raise ValueError(f"{file.path}: the tensor {own_name} is missing")
        if tensor.shape != shape:
            raise ValueError(f"{file.path}: the tensor {own_name} has shape {tensor.shape}, the metadata imply {shape}")
        matched[name if name.startswith("lm_head.") else f"model.{name}"] = tensor
    strays = file.tensors.keys() - {tensor.name for tensor in matched.values()} - {ROPE_FACTORS}
    if strays:
        raise ValueError(f"{file.path}: {architecture.name} has no place for {', '.join(sorted(strays)[:5])}")
    return matched


def _own_name(architecture: GGUFArchitecture, name: str) -> str:
    """Name a tensor as GGUF files do."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{OUTER_PARTS[module]}.{kind}"
    _, number, part = module.split(".", 2)
    return f"blk.{number}.{architecture.layer_parts[part]}.{kind}"


def _write_tensors(
    tensors: Mapping[str, GGUFTensor], architecture: GGUFArchitecture, config: Mapping[str, Any], path: Path
) -> None:
    """Write a safetensors file one tensor at a time, so that a model need not fit in memory."""
    header: dict[str, Any] = {}
    place = 0
    for name, tensor in tensors.items():
        size = prod(tensor.shape) * (2 if tensor.dtype.endswith("16") else 4)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [place, place + size]}
        place += size
    check_space(path.parent, place, "the converted model")
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of 8 bytes
    with open(path, "wb") as file, progress("Converting the model, once", place) as advance:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in tensors.items():
            advance(file.write(_values(name, tensor, architecture, config).data))


def _values(name: str, tensor: GGUFTensor, architecture: GGUFArchitecture, config: Mapping[str, Any]) -> NDArray[Any]:
    """Read a tensor as Transformers stores it."""
    values = tensor.read()
    part = name.rpartition(".")[0]
    heads_key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(part.rpartition(".")[2])
    if architecture.interleaved and heads_key:
        # Stored: row 0 of the first half, row 0 of the second, row 1 of the first...; wanted: one half, the other.
        pairs = values.reshape(config[heads_key], -1, 2, *values.shape[1:])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    if architecture.norm_offset and part.endswith("norm"):
        values = values - architecture.norm_offset
    return np.ascontiguousarray(values)
