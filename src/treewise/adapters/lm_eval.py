"""A model for lm-eval: ``lm_eval.simple_evaluate(model="treewise", ...)`` once this module is imported."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from treewise.adapters.scoring import score_continuations
from treewise.config import SamplingParams
from treewise.llm import LLM

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
TAKEN = ("temperature", "top_p", "top_k", "min_p", "seed", *PENALTIES)
"""Generation settings that mean what they mean in `SamplingParams`."""


@register_model("treewise")
class TreewiseLM(TemplateLM):
    """Evaluates a `treewise.LLM`: the choices of a question are branches of its context.

    What questions have in common, such as worked examples, is computed once as long as the prefix cache has room.

    Parameters
    ----------
    model : str or LLM
        What `LLM` takes, or one that is there.
    batch_size, max_batch_size : optional
        Not needed: the engine fills its steps itself.
    device : str, optional
    **options
        Further keywords of `LLM`.

    Examples
    --------
    >>> import lm_eval, treewise.adapters.lm_eval                                        # doctest: +SKIP
    >>> lm_eval.simple_evaluate("treewise", "model=smollm2-135m", tasks=["arc_easy"])    # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | LLM = "smollm2-135m",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.llm = model if isinstance(model, LLM) else LLM(model, device=device or "auto", **options)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, the lowest of several."""
        return min(self.llm.tokenizer.eos_token_ids)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context: the token that begins texts, else the one that ends them."""
        bos = self.llm.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """The most tokens of a context and its continuation."""
        return self.llm.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """What cached requests are told apart by."""
        return self.llm.model_name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Write a conversation as the model was trained to see it."""
        return self.llm.tokenizer.render_chat(chat_history, add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids. Special tokens may be written in the text; a first one is not put before itself."""
        encode = self.llm.tokenizer.encode
        if add_special_tokens is None:
            bare = encode(string, add_special_tokens=False, parse_special=True)
            add_special_tokens = bare[:1] != [self.llm.tokenizer.bos_token_id]
        return encode(string, add_special_tokens=add_special_tokens, parse_special=True)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text; texts longer than the context are taken in windows."""
        windows: list[tuple[list[int], list[int]]] = []
        ends = [0]
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length - 1, context_len=1)
            windows += map(make_disjoint_window, rolling)
            ends.append(len(windows))
        scored = score_continuations(self.llm, windows)
        sums = [sum(one.logprob for one in scored[a:b]) for a, b in pairwise(ends)]
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context, greedily unless its settings say otherwise, up to one of its ``until`` strings.

        Raises
        ------
        ValueError
            If ``max_gen_toks`` leaves no room for a context.
        """
        prompts, params = [], []
        for request in requests:
            context, given = request.args
            settings = normalize_gen_kwargs(given)
            most = settings["max_gen_toks"]
            if most >= self.max_length:
                raise ValueError(f"max_gen_toks: {most} leaves no room for a context in {self.max_length} tokens")
            prompts.append((self.tok_encode(context) or [self.prefix_token_id])[-(self.max_length - most) :])
            taken = {name: settings[name] for name in TAKEN if settings.get(name) is not None}
            stop = [text for text in settings["until"] if text]
            params.append(SamplingParams(**{"temperature": 0.0, **taken, "max_tokens": most, "stop": stop}))
        texts = [output.outputs[0].text for output in self.llm.generate(prompts, params)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = []
        for _texts, context, continuation in requests:
            room = max(self.max_length - len(continuation), 1)
            pairs.append((context[-room:], continuation))  # what is too long loses its beginning
        results = [(one.logprob, one.greedy) for one in score_continuations(self.llm, pairs)]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], result)
        return results
