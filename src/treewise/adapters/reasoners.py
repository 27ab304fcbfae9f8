"""A language model for llm-reasoners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from reasoners import GenerateOutput, LanguageModel
from torch import Tensor

from treewise.adapters.scoring import score_continuations
from treewise.awaitables import decode
from treewise.branch import Branch
from treewise.config import SamplingParams
from treewise.controller import TreeView
from treewise.llm import LLM

POSTPROCESS = (None, "softmax", "log_softmax")


class TreewiseModel(LanguageModel):
    r"""Answers the searches of llm-reasoners out of a `treewise.LLM`.

    A search asks for continuations of texts that begin alike; the prefix cache computes each beginning once.

    Parameters
    ----------
    llm : LLM
    max_new_tokens : int, optional
        The most tokens of an answer where a call does not say; None: up to the end of the context.

    Examples
    --------
    >>> model = TreewiseModel(LLM("smollm2-135m"))
    >>> [text] = model.generate(["Q: 2 + 3 = ?\nA:"], max_new_tokens=8, eos_token_id="\n").text
    """

    def __init__(self, llm: LLM, max_new_tokens: int | None = None) -> None:
        self.llm = llm
        self.max_new_tokens = max_new_tokens

    def generate(
        self,
        inputs: list[str],
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
        num_return_sequences: int = 1,
        eos_token_id: str | int | Sequence[str | int] | None = None,
        hide_input: bool = True,
        output_log_probs: bool = False,
        stopping_criteria: Any = None,
        **kwargs: Any,
    ) -> GenerateOutput:
        """Continue each input `num_return_sequences` times; the parameters are those of llm-reasoners.

        A text among `eos_token_id` ends an answer wherever it appears, and stays in it as a token would.

        Returns
        -------
        GenerateOutput
            Texts, those of one input side by side, and with `output_log_probs` an array of the log-probability of each
            token.

        Raises
        ------
        ValueError
            If `stopping_criteria` or an unknown keyword is given, or a value is out of range.
        """
        if stopping_criteria is not None or kwargs:
            refused = ", ".join(["stopping_criteria"] * (stopping_criteria is not None) + list(kwargs))
            raise ValueError(f"{refused}: not supported; answers end at eos_token_id, max_new_tokens or max_length")
        ends = [eos_token_id] if isinstance(eos_token_id, str | int) else list(eos_token_id or ())
        prompts = [self.llm.tokenizer.encode(text) for text in inputs]
        most = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        params = [
            SamplingParams(
                n=num_return_sequences,
                temperature=temperature if do_sample else 0.0,
                top_k=top_k,
                top_p=top_p,
                max_tokens=max(max_length - len(prompt), 1) if most is None and max_length is not None else most,
                stop=[end for end in ends if isinstance(end, str)],
                stop_token_ids=[end for end in ends if isinstance(end, int)],
                include_stop_str_in_output=True,
                logprobs=0 if output_log_probs else None,
            )
            for prompt in prompts
        ]
        texts, logprobs = [], []
        for text, request in zip(inputs, self.llm.generate(prompts, params), strict=True):
            for output in request.outputs:
                texts.append(output.text if hide_input else text + output.text)
                chosen = zip(output.token_ids, output.logprobs or [], strict=False)
                logprobs.append(np.array([candidates[token].logprob for token, candidates in chosen]))
        return GenerateOutput(texts, logprobs if output_log_probs else None)

    def get_next_token_logits(
        self,
        prompt: str | list[str],
        candidates: list[str] | list[list[str]],
        postprocess: str | None = None,
        **kwargs: Any,
    ) -> list[npt.NDArray[Any]]:
        """Return the logits of single-token candidates after each prompt.

        Parameters
        ----------
        prompt : str or list of str
        candidates : list of str, or a list of them for each prompt
        postprocess : {None, "softmax", "log_softmax"}
            Taken over the candidates.

        Returns
        -------
        list of array [candidates], float32

        Raises
        ------
        ValueError
            If a candidate is not one token, or `postprocess` is another.
        """
        if postprocess not in POSTPROCESS:
            raise ValueError(f"postprocess is {postprocess!r}; choose one of {', '.join(map(str, POSTPROCESS))}")
        prompts = [prompt] if isinstance(prompt, str) else prompt
        each = [candidates] * len(prompts) if candidates and isinstance(candidates[0], str) else candidates
        if len(each) != len(prompts):
            raise ValueError(f"candidates: {len(each)} lists for {len(prompts)} prompts; give one, or one each")
        rows = [output.value for output in self.llm.run(_next_logits, prompts)]
        chosen = [row[[self._token(text) for text in texts]] for row, texts in zip(rows, each, strict=True)]
        if postprocess is not None:
            chosen = [getattr(row, postprocess)(-1) for row in chosen]
        return [row.numpy() for row in chosen]

    def get_loglikelihood(self, prefix: str, contents: list[str], **kwargs: Any) -> npt.NDArray[Any]:
        """Return the log-probability of what each of `contents` has beyond `prefix`, with which it begins.

        Raises
        ------
        ValueError
            If the tokens of one do not begin with those of the prefix.
        """
        given = self.llm.tokenizer.encode(prefix)
        pairs = []
        for text in contents:
            tokens = self.llm.tokenizer.encode(text)
            if tokens[: len(given)] != given:
                raise ValueError(f"contents: the tokens of {text!r} do not begin with those of the prefix {prefix!r}")
            pairs.append((given, tokens[len(given) :]))
        return np.array([one.logprob for one in score_continuations(self.llm, pairs)])

    def _token(self, text: str) -> int:
        tokens = self.llm.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) != 1:
            raise ValueError(f"candidates: {text!r} is {len(tokens)} tokens; give texts of one")
        return tokens[0]


class _Look:
    """Takes the logits of the next token and decodes nothing."""

    stopping: ClassVar[SamplingParams] = SamplingParams(max_tokens=1)
    logits: Tensor

    def step(self, tree: TreeView, logprobs: Tensor) -> None:
        self.logits = tree.logits[0].float().cpu().clone()


async def _next_logits(root: Branch) -> Tensor:
    look = _Look()
    await decode(root.fork(1), look)
    return look.logits
