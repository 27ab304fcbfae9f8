"""The architectures that can be loaded, and how each one's Transformers configuration is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from treewise.config import ModelConfig, RopeConfig
from treewise.models.rope import make_rope
from treewise.ops import ACTIVATIONS

Raw = Mapping[str, Any]


def _no_windows(raw: Raw) -> list[bool]:
    return [False] * raw["num_hidden_layers"]


def _all_windows(raw: Raw) -> list[bool]:
    return [True] * raw["num_hidden_layers"]


def _upper_windows(raw: Raw) -> list[bool]:
    """Qwen: off unless asked for, and then on from ``max_window_layers`` upwards."""
    if not raw["use_sliding_window"]:
        return _no_windows(raw)
    return [layer >= raw["max_window_layers"] for layer in range(raw["num_hidden_layers"])]


def _alternate_windows(raw: Raw) -> list[bool]:
    """Gemma 2: every second layer, the first among them, has a window."""
    return [layer % 2 == 0 for layer in range(raw["num_hidden_layers"])]


def _pattern_windows(raw: Raw) -> list[bool]:
    """Gemma 3: every ``sliding_window_pattern``-th layer sees everything."""
    return [(layer + 1) % raw["sliding_window_pattern"] != 0 for layer in range(raw["num_hidden_layers"])]


def _one_rope(raw: Raw) -> dict[bool, Raw]:
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", raw["rope_theta"])
    return {False: parameters, True: parameters}


def _local_and_global_rope(raw: Raw) -> dict[bool, Raw]:
    """Gemma 3: window layers have a rotary embedding of their own, which no scaling touches."""
    parameters = raw.get("rope_parameters") or {}
    return {
        False: {
            "rope_theta": raw["rope_theta"],
            **(raw.get("rope_scaling") or {}),
            **(parameters.get("full_attention") or {}),
        },
        True: {"rope_theta": raw["rope_local_base_freq"], **(parameters.get("sliding_attention") or {})},
    }


@dataclass(frozen=True)
class Architecture:
    """What an architecture's name implies.

    Attributes
    ----------
    defaults : mapping
        Values of Transformers' configuration class for keys that a ``config.json`` may leave out.
    windows : callable
        From the configuration to one flag a layer: does a sliding window bound what it sees?
    ropes : callable
        From the configuration to the parameters of the rotary embedding of layers without and with a window.
    scaled_embeddings : bool
        Whether token embeddings are multiplied by the square root of the hidden size.
    fixed : mapping
        Fields of :class:`~treewise.config.ModelConfig` that follow from the name alone.
    """

    defaults: Raw
    windows: Callable[[Raw], list[bool]] = _no_windows
    ropes: Callable[[Raw], Mapping[bool, Raw]] = _one_rope
    scaled_embeddings: bool = False
    fixed: Raw = field(default_factory=dict)


_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN = {**_COMMON, "max_position_embeddings": 32_768, "use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {
    **_COMMON,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2 = Architecture(
    defaults={
        **_GEMMA,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    windows=_alternate_windows,
    scaled_embeddings=True,
    fixed={"norm_offset": True, "sandwich_norms": True},
)
_GEMMA3 = Architecture(
    defaults={
        **_GEMMA,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    windows=_pattern_windows,
    ropes=_local_and_global_rope,
    scaled_embeddings=True,
    fixed={"query_key_norm": True, "norm_offset": True, "sandwich_norms": True},
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture({**_COMMON, "max_position_embeddings": 2048}),
    "MistralForCausalLM": Architecture(
        {**_COMMON, "max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}, _all_windows
    ),
    "Qwen2ForCausalLM": Architecture(_QWEN, _upper_windows, fixed={"qkv_bias": True, "output_bias": False}),
    "Qwen3ForCausalLM": Architecture({**_QWEN, "head_dim": 128}, _upper_windows, fixed={"query_key_norm": True}),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}

# Settings that would change the results and that the decoder does not have: each is refused unless absent or false.
UNSUPPORTED = {
    "quantization_config": "the weights are quantised",
    "use_bidirectional_attention": "attention is not causal",
    "num_experts": "layers are mixtures of experts",
    "num_local_experts": "layers are mixtures of experts",
}

# Settings that a null switches off; elsewhere a null means the default.
NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


def read_config(config: Raw) -> ModelConfig:
    """Read a Transformers ``config.json``.

    Parameters
    ----------
    config : mapping
        The whole configuration. Of a model with a vision part, the text part is read.

    Returns
    -------
    ModelConfig
        Every choice spelled out; nothing downstream asks for the architecture's name.

    Raises
    ------
    ValueError
        The architecture is unknown, a required key is missing, or the model needs something that is not supported.
    """
    name = (config.get("architectures") or ["(none given)"])[0]
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture {name!r} is not supported; the known ones are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    text_config = config.get("text_config") or config
    given = {key: value for key, value in text_config.items() if value is not None or key in NULLABLE}
    raw = {**architecture.defaults, **given}
    for key, reason in UNSUPPORTED.items():
        if raw.get(key):
            raise ValueError(f"{name} with {key}={raw[key]!r} is not supported: {reason}")
    try:
        return _translate(name, architecture, raw)
    except KeyError as missing:
        raise ValueError(f"config.json of {name} lacks the key {missing}") from None


def _translate(name: str, architecture: Architecture, raw: Raw) -> ModelConfig:
    num_heads = raw["num_attention_heads"]
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    head_dim = raw.get("head_dim") or raw["hidden_size"] // num_heads
    activation = raw.get("hidden_activation") or raw["hidden_act"]
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not supported; choose from {', '.join(ACTIVATIONS)}")

    bounded = _bounded_layers(architecture, raw)
    window = raw.get("sliding_window")
    ropes: dict[bool, RopeConfig] = {
        kind: make_rope(parameters, head_dim, raw["max_position_embeddings"])
        for kind, parameters in architecture.ropes(raw).items()
    }
    fields: dict[str, Any] = {
        "qkv_bias": raw["attention_bias"],
        "output_bias": raw["attention_bias"],
        "mlp_bias": raw["mlp_bias"],
        "embedding_scale": raw["hidden_size"] ** 0.5 if architecture.scaled_embeddings else 1.0,
        **architecture.fixed,
    }
    return ModelConfig(
        architecture=name,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=raw["max_position_embeddings"],
        layer_windows=tuple(window if is_bounded else None for is_bounded in bounded),
        layer_ropes=tuple(ropes[is_bounded] for is_bounded in bounded),
        attention_scale=raw.get("query_pre_attn_scalar", head_dim) ** -0.5,
        norm_eps=raw["rms_norm_eps"],
        tie_embeddings=raw["tie_word_embeddings"],
        activation=activation,
        attention_soft_cap=raw.get("attn_logit_softcapping"),
        logit_soft_cap=raw.get("final_logit_softcapping"),
        raw=dict(raw),
        **fields,
    )


def _bounded_layers(architecture: Architecture, raw: Raw) -> list[bool]:
    """Tell for each layer whether it has a sliding window: as ``layer_types`` says, else as the architecture does."""
    types = raw.get("layer_types")
    if types is None:
        return architecture.windows(raw)
    known = {"full_attention": False, "sliding_attention": True}
    unknown = set(types) - known.keys()
    if unknown:
        raise ValueError(f"layer_types {sorted(unknown)} are not supported; choose from {', '.join(known)}")
    if len(types) != raw["num_hidden_layers"]:
        raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers is {raw['num_hidden_layers']}")
    return [known[kind] for kind in types]
