"""The verb `generate`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from treewise.cli.options import BeamOptions, GrammarOptions, ModelOptions, encode_chat, read_prompt, working
from treewise.config import SamplingParams, SparsityOptions
from treewise.results import json_safe


def generate(
    prompt: str | None = None,
    /,
    *,
    chat: bool = False,
    system: str | None = None,
    json_lines: Annotated[bool, Parameter("--json")] = False,
    sampling: Annotated[SamplingParams | None, Parameter("*", group="Sampling")] = None,
    grammar: Annotated[GrammarOptions | None, Parameter("*", group="Grammar")] = None,
    beams: Annotated[BeamOptions | None, Parameter("*", group="Beam search")] = None,
    options: Annotated[ModelOptions | None, Parameter("*", group="Model and engine")] = None,
    sparsity: Annotated[SparsityOptions | None, Parameter("*", group="KV sparsity")] = None,
) -> None:
    """Continue a prompt, or answer it with --chat.

    Parameters
    ----------
    prompt
        The text; without one, standard input is read.
    chat
        Put the prompt in the model's chat template.
    system
        System message of the chat.
    json_lines
        Print one line of JSON with texts, tokens, log-probabilities and usage instead of the text.
    """
    sampling, options = sampling or SamplingParams(), options or ModelOptions()
    if system is not None and not chat:
        raise ValueError("system: needs --chat")
    if grammar is not None:
        sampling = replace(sampling, grammar=grammar.grammar())
    searching = None if beams is None else beams.params(sampling)
    text = read_prompt(prompt)
    llm = options.load(sparsity)
    request = encode_chat(llm, text, system) if chat else text
    if searching is None and sampling.n == 1 and not json_lines:
        for piece in llm.stream(request, sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
        return
    if searching is None:
        with working(f"Decoding {sampling.n} branches"):
            [result] = llm.generate([request], sampling)
    else:
        with working(f"Searching with {searching.beam_width} beams"):
            [result] = llm.beam_search([request], searching)
    if json_lines:
        answer: dict[str, object] = {
            "prompt": text,
            "prompt_token_ids": result.prompt_token_ids,
            "prompt_logprobs": result.prompt_logprobs,
            "outputs": result.outputs,
            "usage": result.tree.usage,
        }
        print(json.dumps(json_safe(answer), allow_nan=False))
        return
    for output in result.outputs:
        score = "" if output.score is None else f"score {output.score:.3f}, "
        print(f"--- {output.index}: {score}log-prob {output.cumulative_logprob:.2f}, {output.finish_reason}")
        print(output.text)
    print(result.tree.usage.summary(), file=sys.stderr)
