"""treewise attention for Transformers: `generate` reads the keys of a prompt once for all rows that go on from it.

>>> from treewise import hf
>>> hf.register()
>>> model.set_attn_implementation("treewise")
>>> with hf.shared_prefixes(model) as reads:
...     beams = model.generate(**inputs, num_beams=8, max_new_tokens=64)
>>> reads.kv_bytes_read < reads.kv_bytes_of_rows
True
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Module

from treewise.attention import METHODS
from treewise.hf.attention import attend
from treewise.hf.trees import Reads, Step, common_columns

__all__ = ["NAME", "Reads", "register", "shared_prefixes"]

NAME = "treewise"
"""What the attention is called in Transformers."""

COMPARED = ("input_ids", "attention_mask", "position_ids", "cache_position")
"""What a forward may be given by itself if rows are to be shared. Images, for one, hide behind equal token ids."""


def register() -> None:
    """Make ``attn_implementation="treewise"`` known to Transformers; calling it again changes nothing.

    Alone it computes what ``"sdpa"`` does, and logit soft caps too. Within `shared_prefixes` it reads shared keys once.

    Raises
    ------
    ImportError
        If the package transformers is not installed, or has no registry of masks yet.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def shared_prefixes(model: Any, method: str = "deft:flatten") -> Iterator[Reads]:
    """Within, `model` reads keys that rows of a batch have in common once, where its attention is ``"treewise"``.

    The prompt's own forward, or its several chunks, tell what is common: the columns from the first on in which a row
    has the token, mask and position of the row before it. `generate` puts the copies of a prompt side by side, so all
    beams or sequences of a prompt become one tree; so do neighbouring prompts with a common beginning. Steps of one
    token a row then attend over trees. Everything else (the prompt's own forward, static and quantised caches, further
    inputs such as images) is computed as by ``"sdpa"``.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder; its attention is made ``"treewise"`` before or within.
    method : str
        One of `treewise.attention.METHODS`, or ``"auto"``, which may find reading twice faster for a small layer.

    Yields
    ------
    Reads

    Raises
    ------
    ValueError
        If there is no such method, or the model is an encoder-decoder or hands nothing down to its attention.

    Notes
    -----
    A cache belongs to the rows that filled it. `generate` lets rows change places only among copies of one prompt;
    code of your own that reorders a cache across prompts must do so outside of this context.
    """
    if method not in (*METHODS, "auto"):
        raise ValueError(f"method is {method!r}; choose one of {', '.join((*METHODS, 'auto'))}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: {type(model).__name__} is an encoder-decoder, whose attention is no tree")
    parameters = inspect.signature(model.forward).parameters.values()
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(f"model: {type(model).__name__}.forward takes no further keywords for its attention")
    reads = Reads()
    known: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()

    def before(_: Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        cache = given.get("cache", given.get("past_key_values"))
        tokens = given.get("input_ids", args[0] if args else None)
        if cache is None or tokens is None:
            return None
        past, count = int(cache.get_seq_length()), tokens.shape[1]
        if past == 0:
            known[cache] = [0] * len(tokens) if _grows(cache) else []
        common = known.get(cache, [])
        if len(common) != len(tokens):
            return None
        # NOTE: a cache may be cut back and filled with other tokens; what was cut is not common any more.
        common[:] = (min(shared, past) for shared in common)
        if count == 1 and model.config.get_text_config()._attn_implementation != NAME:
            return None
        if count == 1:
            return args, {**given, "treewise_step": Step(common, past + 1, method, reads)}
        others = [name for name, value in given.items() if isinstance(value, Tensor) and name not in COMPARED]
        if len(args) <= 1 and not others:
            mask = given.get("attention_mask")
            mask = mask[:, -count:] if mask is not None and mask.ndim == 2 else mask
            more = common_columns(tokens, mask, given.get("position_ids"))
            common[:] = (past + new if shared == past else shared for shared, new in zip(common, more, strict=True))
        return None

    hook = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield reads
    finally:
        hook.remove()


def _grows(cache: Any) -> bool:
    """Whether the cache appends to what it has, so that its columns stand in the order of the tokens."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    appends = (DynamicLayer, DynamicSlidingWindowLayer)
    return isinstance(cache, DynamicCache) and all(type(layer) in appends for layer in cache.layers)
