"""Rebuilds a tokenizer from the vocabulary and settings that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

Metadata = Mapping[str, Any]

# Kinds of token in tokenizer.ggml.token_type.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5

# Control tokens that end a turn or a text: files name one of them as eos, chat models may write any.
END_TOKENS = (
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS_AND_REST = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before byte-pair merging.

    Attributes
    ----------
    splits : tuple of str
        Regular expressions, each applied within the pieces of the one before; matches become pieces of their own.
    ignore_merges : bool
        A piece that is a token as a whole is taken whole.
    add_bos : bool
        Whether texts begin with the bos token where the file does not say.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_DIGITS_APART = PreTokenizer((r"\p{N}", GPT2))
_LLAMA3 = PreTokenizer((_CONTRACTIONS + _WORDS_AND_REST % r"\p{N}{1,3}",), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_CONTRACTIONS + _WORDS_AND_REST % r"\p{N}",))
_TEKKEN = PreTokenizer(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ignore_merges=True,
    add_bos=True,
)
# By the value of tokenizer.ggml.pre; the meanings are llama.cpp's.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2,)),
    "olmo": PreTokenizer((GPT2,)),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "command-r": _DIGITS_APART,
    "codeshell": _DIGITS_APART,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": PreTokenizer(_LLAMA3.splits),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "tekken": _TEKKEN,
}


def build_tokenizer(metadata: Metadata) -> tuple[Tokenizer, dict[str, Any], list[int]]:
    """Rebuild the tokenizer of a GGUF file.

    Parameters
    ----------
    metadata : mapping
        Of the file: its ``tokenizer.*`` keys and ``general.architecture``.

    Returns
    -------
    tokenizer : tokenizers.Tokenizer
    settings : dict
        What belongs in ``tokenizer_config.json``: special tokens, ``add_bos_token``, ``chat_template``.
    end_ids : list of int
        Tokens that end a text.

    Raises
    ------
    ValueError
        The kind of tokenizer, or of text splitting, is unknown; or the vocabulary is missing.
    """
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in builders:
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported; choose from {', '.join(builders)}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError("tokenizer.ggml.tokens is missing: the file has no vocabulary")
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    tokenizer, add_bos_by_default = builders[kind](metadata, tokens, kinds)
    _add_whole_tokens(tokenizer, tokens, kinds)

    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            settings[f"{name}_token"] = tokens[number]
    settings["add_bos_token"] = metadata.get("tokenizer.ggml.add_bos_token", add_bos_by_default)
    settings["add_eos_token"] = metadata.get("tokenizer.ggml.add_eos_token", False)
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    _frame(tokenizer, settings)

    declared = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    known = [number for number, token in enumerate(tokens) if kinds[number] == CONTROL and token in END_TOKENS]
    return tokenizer, settings, list(dict.fromkeys([*(i for i in declared if i is not None), *known]))


def _byte_level(metadata: Metadata, tokens: Sequence[str], kinds: Sequence[int]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre {name!r} is not supported; choose from {', '.join(PRE_TOKENIZERS)}")
    pre = PRE_TOKENIZERS[name]
    vocabulary = {token: number for number, token in enumerate(tokens) if kinds[number] != UNUSED}
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(metadata: Metadata, tokens: Sequence[str], kinds: Sequence[int]) -> tuple[Tokenizer, bool]:
    gemma = metadata["general.architecture"].startswith("gemma")
    # Gemma files spell runs of spaces as spaces, where its tokenizer looks for them as "▁" like all others.
    spelled = [token.replace(" ", "▁") if not token.strip(" ") else token for token in tokens]
    vocabulary = {token: number for number, token in enumerate(spelled) if kinds[number] != UNUSED}
    if "tokenizer.ggml.merges" in metadata:
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        # Gemma's scores do not follow the order of its merges; the order of its tokens does.
        order = range(len(spelled)) if gemma else [-score for score in metadata["tokenizer.ggml.scores"]]
        merges = _merges(vocabulary, order)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = BPE(vocabulary, merges, unk_token=spelled[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", not gemma)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefixed else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _merges(vocabulary: Mapping[str, int], order: Sequence[float]) -> list[tuple[str, str]]:
    """Recover the merges that a vocabulary implies: each token from any two others, earliest in ``order`` first."""
    found: list[tuple[float, str, str]] = []
    for token, number in vocabulary.items():
        pairs = [
            (vocabulary[token[:cut]], vocabulary[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        found.extend((order[number], token[:cut], token[cut:]) for _, _, cut in sorted(pairs))
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])))
    return [(left, right) for _, left, right in found]


def _add_whole_tokens(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Mark the tokens that are found in the text before it is cut: control tokens, and those that users added."""
    # Runs of spaces are respelled above and then found by merging.
    whole = {
        kind: [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, own_kind in zip(tokens, kinds, strict=True)
            if own_kind == kind and tokenizer.token_to_id(token) is not None
        ]
        for kind in (CONTROL, USER_DEFINED)
    }
    tokenizer.add_special_tokens(whole[CONTROL])
    tokenizer.add_tokens(whole[USER_DEFINED])


def _frame(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Have the tokens put around a text that the settings ask for."""
    bos = [settings["bos_token"]] if settings["add_bos_token"] and "bos_token" in settings else []
    eos = [settings["eos_token"]] if settings["add_eos_token"] and "eos_token" in settings else []
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*bos, *eos}],
        )
