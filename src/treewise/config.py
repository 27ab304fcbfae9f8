"""Frozen dataclasses with docs; resolved once, never mutated."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from treewise.grammar import Grammar


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of a layer, whatever scaling rule it was made by.

    Attributes
    ----------
    inverse_frequencies : tuple of float
        Radians a position, one for each pair of dimensions (``head_dim // 2`` of them).
    scale : float
        Factor of the cosines and sines (1 except for YaRN).
    """

    inverse_frequencies: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """What a decoder-only model of the Llama family looks like, whatever file it came from.

    Attributes
    ----------
    architecture : str
        Transformers' class name, e.g. ``"LlamaForCausalLM"``.
    layer_windows : tuple of (int or None)
        Sliding window of each layer in tokens; ``None`` where a layer sees everything.
        A query at position ``p`` sees keys at positions ``> p - window``.
    layer_ropes : tuple of RopeConfig
        Rotary position embedding of each layer.
    attention_scale : float
        Factor of the attention scores (``head_dim ** -0.5`` unless the model says otherwise).
    attention_soft_cap, logit_soft_cap : float or None
        Scores, or logits, become ``cap * tanh(x / cap)``.
    max_positions : int
        The longest context in tokens that the model was made for.
    activation : str
        Of the gated MLP: ``"silu"`` or ``"gelu_pytorch_tanh"``.
    embedding_scale : float
        Factor of the token embeddings.
    qkv_bias, output_bias, mlp_bias : bool
        Whether the attention's input projections, its output projection and the MLP have biases.
    query_key_norm : bool
        Whether each head's query and key are normalised before the rotary embedding.
    norm_offset : bool
        Norms multiply by ``1 + weight`` in float32 instead of by ``weight`` in the model's type.
    sandwich_norms : bool
        Whether the outputs of attention and MLP are normalised too, before they join the residual.
    raw : dict
        The Transformers configuration that this was read from.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    layer_windows: tuple[int | None, ...]
    layer_ropes: tuple[RopeConfig, ...]
    attention_scale: float
    norm_eps: float
    tie_embeddings: bool
    activation: str = "silu"
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    norm_offset: bool = False
    sandwich_norms: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


GREEDY_TEMPERATURE = 1e-3
"""At or below this temperature sampling is greedy: the two differ only where logits all but tie."""

MAX_SEQUENCES = 8192
"""The most sequences (``n``) or beams (``beam_width``) one request may ask for."""


def check_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse what is not a finite real number in ``[low, high]`` (``(low, high]`` with `open_low`)."""
    # NOTE: NaN fails every comparison, so the test asks for what is accepted, not for what is wrong.
    if isinstance(value, Real) and not isinstance(value, bool):
        if low < float(value) <= high if open_low else low <= float(value) <= high:
            return
        kind = ""
    else:
        kind = f" of type {type(value).__name__}"
    raise ValueError(f"{name} must be a number in {'(' if open_low else '['}{low:g}, {high:g}], not {value!r}{kind}")


def check_integer(name: str, value: object, low: int | None = None, high: int | None = None, also: str = "") -> None:
    """Refuse what is not an integer in ``[low, high]``; `also` names further accepted values in the message."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        if (low is None or low <= int(value)) and (high is None or int(value) <= high):
            return
        kind = ""
    else:
        kind = f" of type {type(value).__name__}"
    if low is None:
        accepted = "an integer"
    else:
        accepted = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
    raise ValueError(f"{name} must be {accepted}{also}, not {value!r}{kind}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r} of type {type(value).__name__}")


def _items(name: str, value: object, what: str) -> tuple[Any, ...]:
    """`value` as a tuple: ``None`` is empty, and whatever cannot be listed is refused."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be {what}, not {value!r} of type {type(value).__name__}")
    return tuple(value)


def _stop_strings(value: object) -> tuple[str, ...]:
    what = "a string or a list of non-empty strings"
    strings = (value,) if isinstance(value, str) else _items("stop", value, what)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must be {what}; it holds {string!r}")
    return strings


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens of a branch are chosen and when it ends; names and meanings follow vLLM.

    Every field is checked when the object is made.

    Attributes
    ----------
    n : int
        Branches that continue each prompt, from 1 to 8192.
    temperature : float
        Divides the logits, in [0, 1000]. At or below 0.001 the most likely token is taken and
        `top_k`, `top_p`, `min_p` and `seed` have no effect.
    top_k : int
        Keeps the `top_k` most likely tokens; 0 or -1 keeps all.
    top_p : float
        Keeps the most likely tokens that together reach this probability, in (0, 1].
    min_p : float
        Keeps tokens at least `min_p` times as likely as the most likely one, in [0, 1].
    presence_penalty : float
        Taken off the logit of every token in the output so far; in [-2, 2].
    frequency_penalty : float
        Taken off that logit for each time the token has come so far; in [-2, 2].
    repetition_penalty : float
        Divides the positive logits, and multiplies the negative ones, of tokens in the prompt or the output so far;
        in [0.01, 100].
    seed : int or None
        Root of the random streams; seeds that agree modulo 2**64 are the same. ``None``: the engine draws one.
    max_tokens : int or None
        The most tokens that are decoded; 0 only scores the prompt. ``None``: until end of text or of the context.
    min_tokens : int
        Tokens to decode before end of text, `stop_token_ids` or `stop` may end the branch.
    stop : str or sequence of str
        Strings that end the branch. A string in the prompt does not count.
    stop_token_ids : sequence of int
        Token ids that end the branch besides the model's own end-of-text ids.
    ignore_eos : bool
        Decode past the model's end-of-text ids.
    include_stop_str_in_output : bool
        Leave the stop string that ended the branch at the end of its text.
    logprobs : int or None
        How many of the most likely tokens to report with each output token, at least 0: the log-prob of the token
        itself is always reported. ``None``: none.
    prompt_logprobs : int or None
        The same for each prompt token.
    logit_bias : mapping of int to float
        Added to the logits of these token ids, each in [-100, 100].
    grammar : Grammar or None
        What the decoded text must be. The branch ends when it is complete; `stop`, `stop_token_ids` and `max_tokens`
        may end it before. `min_tokens` and `ignore_eos` count as long as something else than an end may come.

    Raises
    ------
    ValueError
        A value is out of range or of a wrong type; the message names the field and what it accepts.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        check_integer("n", self.n, 1, MAX_SEQUENCES)
        check_number("temperature", self.temperature, 0, 1000)
        check_integer("top_k", self.top_k, -1, also=" (0 or -1: off)")
        check_number("top_p", self.top_p, 0, 1, open_low=True)
        check_number("min_p", self.min_p, 0, 1)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        if self.seed is not None:
            check_integer("seed", self.seed, also=" or None")
        for name in ("max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, also=" or None")
        check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}")
        _check_flag("ignore_eos", self.ignore_eos)
        _check_flag("include_stop_str_in_output", self.include_stop_str_in_output)
        stop_token_ids = _items("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for token in stop_token_ids:
            check_integer("stop_token_ids", token, 0)
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, not {bias!r} of type {type(bias).__name__}")
        for token, value in bias.items():
            check_integer("logit_bias: a token id", token, 0)
            check_number(f"logit_bias[{token}]", value, -100, 100)
        if not isinstance(self.grammar, Grammar | None):
            raise ValueError(f"grammar must be a Grammar or None, not {self.grammar!r}")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "logit_bias", dict(bias))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without drawing."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def end_token_ids(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """All token ids that end a branch, given the model's own end-of-text ids."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_token_ids)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids and counts that a vocabulary of `vocab_size` tokens does not have.

        Raises
        ------
        ValueError
            `stop_token_ids`, `logit_bias`, `logprobs` or `prompt_logprobs` asks for more than there is.
        """
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, 0, vocab_size - 1)
        for token in self.logit_bias:
            check_integer("logit_bias: a token id", token, 0, vocab_size - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, vocab_size, also=" or None")


@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search as Transformers does it; names follow vLLM and Transformers.

    Attributes
    ----------
    beam_width : int
        Beams kept alive, and the most hypotheses returned, from 1 to `MAX_SEQUENCES`.
    max_tokens : int or None
        The most tokens of a hypothesis. ``None``: until end of text or of the context.
    length_penalty : float
        A hypothesis scores its log-prob divided by its token count to this power; above 0 favours long ones.
        In [-10, 10].
    early_stopping : bool or "never"
        ``True`` stops once `beam_width` hypotheses are finished; ``False`` when the best live beam, were it to end
        now, would not score better than the worst of them; ``"never"`` when it cannot at any length.
    stop, stop_token_ids, ignore_eos, include_stop_str_in_output, min_tokens, grammar
        When a hypothesis is finished, and what it must be, as in `SamplingParams`.
    num_beam_groups : int
        Groups of equally many beams that search one after the other at each token, each away from what those before it
        chose; a divisor of `beam_width`. 1: plain beam search.
    diversity_penalty : float
        Taken off a token's log-prob for every beam of an earlier group that goes on with it at the same place, in
        [0, 1000].
    num_return_sequences : int or None
        Hypotheses returned, the best of all groups, at most `beam_width`. ``None``: `beam_width`.
    logprobs : int or None
        How many of the most likely tokens to report with each token of a hypothesis, as in `SamplingParams`.

    Raises
    ------
    ValueError
        A value is out of range or of a wrong type; the message names the field and what it accepts.
    """

    beam_width: int
    max_tokens: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    num_return_sequences: int | None = None
    logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, MAX_SEQUENCES)
        check_integer("num_beam_groups", self.num_beam_groups, 1, self.beam_width)
        if self.beam_width % self.num_beam_groups:
            raise ValueError(f"num_beam_groups must divide beam_width ({self.beam_width}), not {self.num_beam_groups}")
        check_number("diversity_penalty", self.diversity_penalty, 0, 1000)
        if self.diversity_penalty > 0 and self.num_beam_groups == 1:
            raise ValueError(f"diversity_penalty must be 0 with one beam group, not {self.diversity_penalty}")
        if self.num_return_sequences is not None:
            check_integer("num_return_sequences", self.num_return_sequences, 1, self.beam_width, also=" or None")
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, also=" or None")
        check_number("length_penalty", self.length_penalty, -10, 10)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping must be True, False or 'never', not {self.early_stopping!r}")
        stopping = self.stopping
        object.__setattr__(self, "stop", stopping.stop)
        object.__setattr__(self, "stop_token_ids", stopping.stop_token_ids)

    @property
    def stopping(self) -> SamplingParams:
        """What ends a hypothesis, in the form that every controller states it."""
        common = {item.name for item in fields(self)} & {item.name for item in fields(SamplingParams)}
        return SamplingParams(temperature=0.0, **{name: getattr(self, name) for name in common})


MAX_TREE_SIZE = 256
"""The most guesses of a token tree."""


@dataclass(frozen=True)
class Speculation:
    """How an engine guesses what follows, to verify several tokens in a step; what is decoded stays the same.

    Attributes
    ----------
    drafter : str
        Who guesses: ``"ngram"`` looks for what followed the same words before, in the request's own tree;
        ``"ngram:shared"`` in all requests of a namespace; ``"draft:MODEL"``, a smaller model with the same tokens;
        ``"self:POLICY"``, the model itself over a part of its keys, as a policy of KV sparsity chooses them;
        ``"medusa:FOLDER"`` and ``"eagle:FOLDER"``, heads that read the model's own states.
    tree_size : int
        The most guesses for one branch and step, at most 256.
    adaptive : bool
        Take as many guesses as pay, by the measured times of steps; else as many as there are.

    Raises
    ------
    ValueError
        If `tree_size` is out of range.
    """

    drafter: str = "ngram"
    tree_size: int = 64
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_integer("tree_size", self.tree_size, 1, MAX_TREE_SIZE)


@dataclass(frozen=True)
class SparsityOptions:
    """KV sparsity, a flag each; what is left out is as the policy has it.

    Parameters
    ----------
    kv_sparsity : str
        Which keys and values each layer keeps of a prompt: a policy by name, as pyramidkv; all of them if left out.
    kv_budget : str
        Tokens that a layer keeps, or their share, as 0.25.
    kv_window : int
        The last tokens, which always stay.
    kv_sinks : int
        The first tokens, which always stay.
    kv_first_full : int
        So many of the first layers keep everything.
    kv_every : int
        Decoded tokens after which a branch is brought back to its budget.
    kv_joint : bool
        Let all branches that a program begins with look at the prompt first.
    kv_trigger : str
        prompt: when the prompt has been computed; pressure: only where the pool is short.
    kv_action : str
        evict, or hide: what is not kept is read no more, and its memory not freed.
    """

    kv_sparsity: str | None = None
    kv_budget: str | None = None
    kv_window: int | None = None
    kv_sinks: int | None = None
    kv_first_full: int | None = None
    kv_every: int | None = None
    kv_joint: bool | None = None
    kv_trigger: str | None = None
    kv_action: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return what was given of the fields of `KVSparsity`.

        Raises
        ------
        ValueError
            If something was given without a policy, or `kv_budget` is no number.
        """
        given = {name: value for name, value in asdict(self).items() if value is not None and name != "kv_sparsity"}
        if self.kv_sparsity is None:
            for name in given:
                raise ValueError(f"{name}: it is a setting of KV sparsity; give kv_sparsity too")
        if self.kv_budget is not None:
            try:
                given["kv_budget"] = (int if self.kv_budget.isdecimal() else float)(self.kv_budget)
            except ValueError:
                raise ValueError(f"kv_budget: {self.kv_budget!r} is neither a number nor a share, as 0.25") from None
        return {name.removeprefix("kv_"): value for name, value in given.items()}


def cache_folder() -> Path:
    """Tell where files are kept: ``$TREEWISE_CACHE``, else ``treewise`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("TREEWISE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "treewise"
