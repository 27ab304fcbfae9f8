"""Llama-family modules, weight loading (safetensors, GGUF), architecture registry."""

from treewise.models.builtin import BUILTIN_MODELS, Builtin
from treewise.models.decoder import CausalLM
from treewise.models.load import load_decoder, load_model, load_tokenizer, locate
from treewise.models.registry import ARCHITECTURES, read_config
from treewise.models.tokenizer import Tokenizer

__all__ = [
    "ARCHITECTURES",
    "BUILTIN_MODELS",
    "Builtin",
    "CausalLM",
    "Tokenizer",
    "load_decoder",
    "load_model",
    "load_tokenizer",
    "locate",
    "read_config",
]
