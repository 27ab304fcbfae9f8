"""What several verbs share: the model's flags, the prompt, the progress line."""

from __future__ import annotations

import atexit
import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter
from rich.console import Console

from treewise.config import BeamSearchParams, SamplingParams, SparsityOptions, Speculation
from treewise.grammar import Grammar

if TYPE_CHECKING:
    from treewise.llm import LLM


Parameter(parse=False)(Grammar)  # `SamplingParams.grammar` is made of `GrammarOptions`, not of flags of its own


@dataclass(frozen=True)
class GrammarOptions:
    """What the text must be.

    Parameters
    ----------
    json_schema : str
        JSON of this schema, or of the schema in this file.
    regex : str
        A match of this regular expression.
    choice : str
        One of these texts, with commas between them.
    lark : str
        Text that this context-free grammar derives from its rule `start`, or the grammar in this file.
    """

    json_schema: str | None = None
    regex: str | None = None
    choice: str | None = None
    lark: str | None = None

    def grammar(self) -> Grammar | None:
        """Make the grammar that was asked for, if any.

        Raises
        ------
        ValueError
            If more than one was asked for, or it cannot be used.
        OSError
            If the file of a schema or a grammar cannot be read.
        """
        given = [name for name, value in asdict(self).items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: cannot be used beside {given[0]}; give one of them")
        if self.json_schema is not None:
            return Grammar.json_schema(_inline(self.json_schema, r"\s*\{"))
        if self.lark is not None:
            return Grammar.lark(_inline(self.lark, r"(?s).*\bstart\b[^\n]*:"))
        if self.regex is not None:
            return Grammar.regex(self.regex)
        return None if self.choice is None else Grammar.choice(self.choice.split(","))

    @classmethod
    def read(cls, word: Any) -> Grammar | None:
        """Make the grammar that ``kind:value`` names, the kind being a field of this class.

        Raises
        ------
        ValueError
            If the kind is unknown, or the grammar cannot be used.
        OSError
            If the file of a schema or a grammar cannot be read.
        """
        kind, colon, value = str(word).partition(":")
        kinds = [item.name for item in fields(cls)]
        if not colon or kind.replace("-", "_") not in kinds:
            raise ValueError(f"{word!r} is not of the form kind:value, the kind one of {', '.join(kinds)}")
        return cls(**{kind.replace("-", "_"): value}).grammar()


@dataclass(frozen=True)
class BeamOptions:
    """Beam search instead of sampling.

    Parameters
    ----------
    beam_width : int
        Search with so many beams.
    length_penalty : float
        A text scores its log-prob divided by its token count to this power; 1 if left out.
    early_stopping : str
        When to stop: true, once there are as many texts as beams; false, once no beam would make a better one if it
        ended now; never, once none can at any length. false if left out.
    num_return_sequences : int
        Texts to print, the best first; as many as beams if left out.
    num_beam_groups : int
        Groups of beams that keep away from each other's tokens; 1 if left out.
    diversity_penalty : float
        What a token costs for every beam of an earlier group that goes on with it; 0 if left out.
    """

    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: Literal["true", "false", "never"] | None = None
    num_return_sequences: int | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None

    def params(self, sampling: SamplingParams) -> BeamSearchParams | None:
        """Return how to search, with what `sampling` says of the text; None where no beams were asked for.

        Raises
        ------
        ValueError
            If a value is out of range, an option of beam search is given without `beam_width`, or one of sampling with
            it.
        """
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.beam_width is None:
            for name in given:
                raise ValueError(f"{name}: it is an option of beam search; give beam_width too")
            return None
        common = {item.name for item in fields(BeamSearchParams)}
        for item in fields(SamplingParams):
            value = getattr(sampling, item.name)
            if item.name in common:
                given[item.name] = value
            elif value != getattr(SamplingParams(), item.name):
                raise ValueError(f"{item.name}: beam search does not sample; give it without beam_width")
        if self.early_stopping is not None:
            given["early_stopping"] = {"true": True, "false": False}.get(self.early_stopping, "never")
        return BeamSearchParams(**given)


@dataclass(frozen=True)
class ModelOptions:
    """The fields of `LLM`, a flag each.

    Parameters
    ----------
    model : str
        A folder in Transformers' layout, a GGUF file, a hub id, or a built-in name (`treewise models`).
    attention : str
        The attention method; auto picks by tree and device.
    dtype : str
        auto, float32, float16 or bfloat16.
    kv_cache_dtype : str
        Type of keys and values: auto, that of the weights, or fp8_e4m3, half of 16 bits.
    device : str
        auto, cpu or cuda.
    pool : str
        How keys and values are stored: paged or contiguous.
    page_size : int
        Tokens a page of the paged pool.
    max_model_len : int
        The longest context in tokens; the model's own limit if left out.
    max_num_rows : int
        The most rows of one step.
    num_kv_slots : int
        Tokens that the pool holds; sized by the memory there is if left out.
    gpu_memory_utilization : float
        Share of a GPU's memory that weights, the largest step and the pool may take together.
    enable_prefix_caching : bool
        Keep the keys and values of prompts that may come again.
    cuda_graphs : bool
        Replay steps of decoding as CUDA graphs; what a GPU does if left out.
    capture_rows : int
        Common steps of up to so many rows are captured before the first request, others when they come the second time.
    engine_seed : int
        Root of the random streams of requests that have no seed of their own.
    speculate : str
        Who guesses what follows, so that a step may verify several tokens: ngram, ngram:shared, draft:MODEL,
        self:POLICY, medusa:FOLDER or eagle:FOLDER; nobody if left out.
    tree_size : int
        The most guesses for one branch and step.
    tensor_parallel_size : int
        Devices, with a process each, that share the model out: GPUs, or on a CPU just processes.
    """

    model: str = "smollm2-135m"
    attention: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    pool: str = "paged"
    page_size: int = 16
    max_model_len: int | None = None
    max_num_rows: int = 1024
    num_kv_slots: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    cuda_graphs: bool | None = None
    capture_rows: int = 256
    engine_seed: int = 0
    speculate: str | None = None
    tree_size: int = 64
    tensor_parallel_size: int = 1

    def parameters(self, sparsity: SparsityOptions | None = None) -> dict[str, Any]:
        """Return the parameters of `LLM`."""
        from treewise.sparsity.policy import KVSparsity

        fields = asdict(self)
        sparsity = sparsity or SparsityOptions()
        settings = sparsity.settings()
        if sparsity.kv_sparsity is not None:
            fields["kv_sparsity"] = KVSparsity.named(sparsity.kv_sparsity, **settings)
        tree_size = fields.pop("tree_size")
        if self.speculate is not None:
            fields["speculate"] = Speculation(self.speculate, tree_size)
        return {"seed": fields.pop("engine_seed"), **fields}

    def load(self, sparsity: SparsityOptions | None = None) -> LLM:
        """Load the model, saying so on a terminal."""
        from treewise.llm import LLM

        parameters = self.parameters(sparsity)
        with working(f"Loading {self.model}"):
            llm = LLM(**parameters)
        # What lives as long as the process need not be searched for garbage: a third of a step's bookkeeping otherwise.
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)
        return llm


def read_prompt(prompt: str | None) -> str:
    """Return the prompt, or standard input where none was given.

    Raises
    ------
    ValueError
        If none was given and standard input is a terminal.
    """
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        raise ValueError("prompt: give a text, or send one to standard input")
    return sys.stdin.read()


def encode_chat(llm: LLM, prompt: str, system: str | None = None) -> list[int]:
    """Put the prompt in the model's chat template.

    Raises
    ------
    ValueError
        If the model has none.
    """
    if not llm.tokenizer.has_chat_template:
        raise ValueError("chat: this model has no chat template; leave out --chat")
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt}])


def _inline(value: str, beginning: str) -> str:
    """Return `value` where it begins as the pattern says, else the text of the file of that name."""
    return value if re.match(beginning, value) else Path(value).read_text("utf-8")


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something long is going on: a spinner on standard error, and nothing where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"{what} …"):
        yield
