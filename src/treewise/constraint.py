"""Which tokens a grammar lets come next: a matcher for each leaf, and the masks of many leaves in one call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewise.codec import Codec
from treewise.grammar import Grammar, library

_CACHED_GRAMMARS = 64


class GrammarError(ValueError):
    """A text under a grammar cannot go on as it was asked to."""


class Lexicon:
    """A model's tokens, as grammars see them. llguidance gets to know them when the first grammar comes.

    Parameters
    ----------
    codec : Codec
    vocab_size : int
        Logits of a row, which may be more than the tokenizer has tokens.
    eos_token_ids : collection of int
        What a grammar allows at the end of a text.
    """

    def __init__(self, codec: Codec, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.codec = codec
        self.vocab_size = vocab_size
        self.eos_token_ids = sorted(eos_token_ids)
        self._compiled: dict[Grammar, Any] = {}

    def start(self, grammar: Grammar, tokens: Sequence[int] = ()) -> Constraint:
        """Return the constraint of a text that has these `tokens` so far; reading one takes about a microsecond.

        Raises
        ------
        ValueError
            If the grammar is too complex.
        GrammarError
            If it does not let the tokens come.
        """
        if grammar not in self._compiled:
            matcher = library().LLMatcher(self._tokens, grammar.source)
            if matcher.is_error():
                raise ValueError(f"grammar: this {grammar.kind} cannot be used: {_first_line(matcher.get_error())}")
            if len(self._compiled) == _CACHED_GRAMMARS:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[grammar] = matcher
        constraint = Constraint(self, self._compiled[grammar].deep_copy())
        for token in tokens:
            constraint.accept(token)
        return constraint

    def masks(self, constraints: Sequence[Constraint], unwanted: Sequence[Collection[int]]) -> NDArray[np.uint8]:
        """Return the tokens that may come next, a bit each, for each of `constraints`: [rows, bytes].

        Tokens that are `unwanted` in a row are left out, unless they are all that may come there.
        """
        masks = np.zeros((len(constraints), -(-self._tokens.vocab_size // 32)), np.int32)
        places = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
        self._executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks))
        bits = masks.view(np.uint8)
        for row, (constraint, tokens) in enumerate(zip(constraints, unwanted, strict=True)):
            if constraint.stuck:
                bits[row] = 0
            elif tokens:
                wanted = bits[row].copy()
                for token in tokens:
                    wanted[token // 8] &= ~(1 << token % 8) & 0xFF
                if wanted.any():
                    bits[row] = wanted
        return bits

    @cached_property
    def _executor(self) -> Any:
        return library().LLExecutor()

    @cached_property
    def _tokens(self) -> Any:
        words = _Words(self)
        return library().LLTokenizer(library().TokenizerWrapper(words), eos_token=words.eos_token_ids)

    def write(self, text: str) -> list[int]:
        """Return the tokens in which the model would write `text`, where a grammar leaves no other."""
        data = text.encode()
        tokens = self.codec.encode(text, add_special_tokens=False)
        if b"".join(map(self.codec.token_bytes, tokens)) != data:  # the tokenizer has put a blank in front
            tokens = self._tokens.greedy_tokenize(text)
        return tokens


class _Words:
    """The tokens as `llguidance.TokenizerWrapper` wants them."""

    bos_token_id = None

    def __init__(self, lexicon: Lexicon) -> None:
        codec, size = lexicon.codec, lexicon.vocab_size
        words = [codec.token_bytes(token) if token < codec.vocab_size else b"" for token in range(size)]
        self.eos_token_ids = lexicon.eos_token_ids
        if not self.eos_token_ids:  # it wants one: this has no logit, so it never comes
            self.eos_token_ids = [size]
            words.append(b"")
        self.eos_token_id = self.eos_token_ids[0]
        self.special_token_ids = [token for token, word in enumerate(words) if not word]
        self.tokens = [word or b"\xff[%d]" % token for token, word in enumerate(words)]
        self._write = lexicon.write

    def __call__(self, text: str) -> list[int]:
        return self._write(text)


class Constraint:
    """How far the text of one leaf has come in its grammar.

    Attributes
    ----------
    lexicon : Lexicon
    matcher : llguidance.LLMatcher
    """

    __slots__ = ("lexicon", "matcher")

    def __init__(self, lexicon: Lexicon, matcher: Any) -> None:
        self.lexicon = lexicon
        self.matcher = matcher

    def fork(self) -> Constraint:
        """Return an independent copy; it takes microseconds."""
        return Constraint(self.lexicon, self.matcher.deep_copy())

    def accept(self, token: int) -> None:
        """Take the next token.

        Raises
        ------
        GrammarError
            If the grammar does not let it come here.
        """
        if self.matcher.try_consume_tokens([token]) != 1:
            raise self.error() if self.stuck else GrammarError(f"grammar: it does not let token {token} come next")

    @property
    def stuck(self) -> bool:
        """Whether no token can come next, which is known once there was a mask."""
        return bool(self.matcher.is_error())

    def error(self) -> GrammarError:
        """Return the error of a text that is stuck."""
        reason = _first_line(self.matcher.get_error())
        return GrammarError(f"grammar: no token of the model can continue the text ({reason})")

    @property
    def complete(self) -> bool:
        """Whether the text is all that the grammar wants, and nothing may follow."""
        return bool(self.matcher.is_stopped()) and not self.stuck

    def completes(self, token: int) -> bool:
        """Whether the text would be complete with `token`."""
        if self.matcher.try_consume_tokens([token]) != 1:
            return False
        complete = self.complete
        self.matcher.rollback(1)
        return complete


def grammar_bias(
    constraints: Sequence[Constraint], unwanted: Sequence[Collection[int]], device: torch.device
) -> Tensor:
    """Return what to add to the logits of leaves under grammars: 0 for a token that may come next, else ``-inf``.

    Parameters
    ----------
    constraints : sequence of Constraint, [rows]
        Of one lexicon, at least one.
    unwanted : sequence of collections of int, [rows]
        See `Lexicon.masks`.
    device : torch.device

    Returns
    -------
    Tensor [rows, vocab] float32
    """
    lexicon = constraints[0].lexicon
    bits = torch.from_numpy(lexicon.masks(constraints, unwanted))
    there = (bits.pin_memory() if device.type == "cuda" else bits).to(device, non_blocking=True)
    bias = torch.nn.functional.embedding(there.int(), _byte_bias(device))  # [rows, bytes, 8]
    return bias.flatten(1)[:, : lexicon.vocab_size]


@lru_cache(maxsize=8)
def _byte_bias(device: torch.device) -> Tensor:
    """Biases of the eight tokens that a byte of a mask speaks of, by its value: [256, 8]."""
    allowed = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.zeros(256, 8).masked_fill(allowed == 0, -torch.inf).to(device)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
