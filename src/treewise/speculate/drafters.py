"""Drafters by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from treewise.models import CausalLM, Tokenizer, load_model
from treewise.runner import Runner
from treewise.sizing import bytes_per_token
from treewise.sparsity.policy import KVSparsity
from treewise.speculate.drafter import Drafter
from treewise.speculate.eagle import EagleDrafter
from treewise.speculate.eagle_heads import load_eagle
from treewise.speculate.medusa import MedusaDrafter, load_heads
from treewise.speculate.model import ModelDrafter
from treewise.speculate.ngram import NgramDrafter
from treewise.speculate.sparse import SparseDrafter

BUDGET = 512
"""Tokens of a path that the model sees when it guesses for itself."""


class Prepared(NamedTuple):
    """A drafter whose weights are loaded, before there is an engine.

    Attributes
    ----------
    bytes_per_token : int
        What it keeps under each slot.
    make : callable
        Returns the drafter for an engine, given its runner and the most rows of a step.
    """

    bytes_per_token: int
    make: Callable[[Runner, int], Drafter]


def prepare(name: str, model: CausalLM, tokenizer: Tokenizer) -> Prepared:
    """Load the drafter of a name such as ``ngram`` or ``draft:smollm2-135m`` for a model.

    Raises
    ------
    ValueError
        If there is no such drafter, or it does not fit the model.
    """
    kind, _, what = name.partition(":")
    if kind not in DRAFTERS:
        raise ValueError(f"speculate: {name!r} is not one of {', '.join(usage for usage, _ in DRAFTERS.values())}")
    return DRAFTERS[kind][1](what, model, tokenizer)


def _ngram(what: str, model: CausalLM, tokenizer: Tokenizer) -> Prepared:
    if what not in ("", "shared"):
        raise ValueError(f"speculate: 'ngram' looks in the request's tree, 'ngram:shared' in all, and none in {what!r}")
    return Prepared(0, lambda runner, max_num_rows: NgramDrafter(shared=what == "shared"))


def _draft(what: str, model: CausalLM, tokenizer: Tokenizer) -> Prepared:
    if not what:
        raise ValueError("speculate: 'draft' needs a model behind it, such as draft:smollm2-135m")
    smaller, theirs = load_model(what, dtype=str(model.dtype).removeprefix("torch."), device=model.device)
    check_same_tokens(tokenizer, theirs, what)
    return Prepared(
        bytes_per_token(smaller, smaller.dtype),
        lambda runner, max_num_rows: ModelDrafter(smaller, runner, max_num_rows),
    )


def _self(what: str, model: CausalLM, tokenizer: Tokenizer) -> Prepared:
    name, _, budget = what.partition(":")
    try:
        policy = KVSparsity.named(name or "snapkv", budget=int(budget or BUDGET))
    except ValueError as error:
        raise ValueError(
            f"speculate: 'self' is followed by a policy and its budget, as self:snapkv:512; {error}"
        ) from None
    return Prepared(0, lambda runner, max_num_rows: SparseDrafter(policy, runner, max_num_rows))


def _medusa(what: str, model: CausalLM, tokenizer: Tokenizer) -> Prepared:
    drafter = MedusaDrafter(load_heads(_folder("medusa", what), model), model.config.vocab_size)
    return Prepared(0, lambda runner, max_num_rows: drafter)


def _eagle(what: str, model: CausalLM, tokenizer: Tokenizer) -> Prepared:
    head = load_eagle(_folder("eagle", what), model)
    config = head.config
    numbers = config.hidden_size + 2 * config.num_kv_heads * config.head_dim
    return Prepared(
        numbers * model.dtype.itemsize, lambda runner, max_num_rows: EagleDrafter(head, runner, max_num_rows)
    )


def _folder(kind: str, what: str) -> Path:
    if not Path(what).is_dir() or not what:
        raise ValueError(f"speculate: {kind!r} needs a folder behind it, such as {kind}:heads, and {what!r} is none")
    return Path(what)


def check_same_tokens(ours: Tokenizer, theirs: Tokenizer, name: str) -> None:
    """Refuse a model whose tokens mean something else.

    Raises
    ------
    ValueError
        If a token stands for other bytes.
    """
    shared = range(min(ours.vocab_size, theirs.vocab_size))
    other = next((token for token in shared if ours.token_bytes(token) != theirs.token_bytes(token)), None)
    if other is not None:
        raise ValueError(
            f"speculate: the tokens of {name} are not those of the model: {other} is "
            f"{theirs.token_bytes(other)!r}, not {ours.token_bytes(other)!r}"
        )


DRAFTERS: dict[str, tuple[str, Callable[[str, CausalLM, Tokenizer], Prepared]]] = {
    "ngram": ("ngram", _ngram),
    "draft": ("draft:MODEL", _draft),
    "self": ("self:POLICY", _self),
    "medusa": ("medusa:FOLDER", _medusa),
    "eagle": ("eagle:FOLDER", _eagle),
}
"""How each kind is written, and what loads one, given what stands behind the kind's colon, for a model."""
