"""Times greedy decoding of prompts of several classes, with guesses and without."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated
from zlib import crc32

from cyclopts import Parameter

from treewise.awaitables import generate
from treewise.bench.compare import measure, notes
from treewise.bench.measure import describe_machine, peak_memory, report
from treewise.bench.runs import Facts, Run
from treewise.bench.subject import Subject
from treewise.bench.texts import PROMPTS
from treewise.branch import Branch
from treewise.config import SamplingParams, Speculation, check_integer
from treewise.llm import LLM
from treewise.models.shapes import NumberTokenizer
from treewise.results import json_safe

PLAIN = "nothing"


@dataclass(frozen=True)
class Question:
    """A prompt of some class."""

    kind: str
    number: int
    tokens: Sequence[int]

    @property
    def name(self) -> str:
        """What it is called in results."""
        return f"{self.kind} {self.number}"


def speculate(
    *,
    drafters: str = "ngram",
    tree_size: int = 64,
    prompts: str = "summarise,edit,code,chat",
    output_tokens: int = 160,
    temperature: float = 0.0,
    adaptive: bool = True,
    repeats: int = 1,
    json_file: Annotated[Path | None, Parameter("--json")] = None,
    subject: Annotated[Subject | None, Parameter("*", group="Model and engine")] = None,
) -> None:
    """Time decoding of one request at a time with guesses, beside decoding without.

    Every request decodes the same tokens with and without, which is checked. Tokens a second count the time from the
    end of the prompt's step to the last token.

    Parameters
    ----------
    drafters
        Who guesses, as in `treewise generate --speculate`, with commas between.
    tree_size
        The most guesses in a step.
    prompts
        Classes of prompts, with commas between.
    output_tokens
        Tokens decoded for each, whatever ends the text.
    temperature
        0 is greedy.
    adaptive
        Take as many guesses as pay; otherwise as many as there are.
    repeats
        Timed runs of each, turn by turn; the median run is reported.
    json_file
        Write the result here too.
    """
    subject = subject or Subject()
    place = subject.place
    check_integer("output_tokens", output_tokens, 2)
    check_integer("repeats", repeats, 1)
    kinds = prompts.split(",")
    for kind in kinds:
        if kind not in PROMPTS:
            raise ValueError(f"prompts: {kind!r} is not one of {', '.join(PROMPTS)}")
    named = {name: Speculation(name, tree_size, adaptive) for name in drafters.split(",")}
    loaded = subject.load()
    engines = {
        name: subject.engine(loaded, "auto", num_kv_slots=8192, enable_prefix_caching=False, speculate=how)
        for name, how in ({PLAIN: None} | named).items()
    }
    questions = [
        Question(kind, number, _encoded(engines[PLAIN], text))
        for kind in kinds
        for number, text in enumerate(PROMPTS[kind], 1)
    ]
    params = SamplingParams(temperature=temperature, max_tokens=output_tokens, ignore_eos=True)
    answers: dict[tuple[str, int], list[int]] = {}
    runs: dict[str, Run] = {name: partial(answer, llm, params, answers) for name, llm in engines.items()}
    for run in runs.values():
        run(questions[0], repeats)
    rows = measure(questions, runs, repeats)
    classes = _classes(rows)
    result: Facts = {
        "bench": "speculate",
        "drafters": drafters,
        "tree_size": tree_size,
        "adaptive": adaptive,
        "output_tokens": output_tokens,
        "temperature": temperature,
        **asdict(subject),
        "dtype": str(loaded[0].dtype).removeprefix("torch."),
        "repeats": repeats,
        "machine": describe_machine(place),
        "results": rows,
        "classes": classes,
        "peak_memory_gb": peak_memory(place) / 1e9,
    }
    if json_file is not None:
        json_file.write_text(json.dumps(json_safe(result), indent=1) + "\n", encoding="utf-8")
    print(*notes(rows), sep="\n", file=sys.stderr)
    title = f"{output_tokens} tokens, {subject.model}, {result['dtype']}, {subject.device}, up to {tree_size} guesses"
    report(title, classes, result)


def answer(
    llm: LLM, params: SamplingParams, answers: dict[tuple[str, int], list[int]], question: Question, seed: int
) -> Facts:
    """Decode an answer, which must be the same for all engines."""
    engine = llm.engine

    async def program(root: Branch) -> list[Branch]:
        return await generate([root], params)

    request = engine.add(program, question.tokens, seed)
    start = perf_counter()
    while not request.done and not request.tree.num_decoded:
        engine.step()
    first, begun = perf_counter(), request.tree.num_decoded
    while not request.done:
        engine.step()
    seconds = perf_counter() - first
    if request.error is not None:
        raise request.error
    tokens = request.tree.root.token_ids
    if answers.setdefault((question.name, seed), tokens) != tokens:
        raise RuntimeError("other tokens than without guesses")
    usage = request.usage()
    return {
        "prompt_tokens": len(question.tokens),
        "whole_s": perf_counter() - start,
        "tokens_per_s": (len(tokens) - begun) / seconds,
        "tokens_per_step": (len(tokens) - begun) / max(1, usage.steps - 1),
        "accepted_length": usage.accepted_length,
        "drafts": usage.drafts,
        "drafted_tokens": usage.drafted_tokens,
        "accepted_tokens": usage.accepted_tokens,
    }


def _encoded(llm: LLM, text: str) -> list[int]:
    """Return a prompt's tokens, in the chat template of a model that has one; a token a word where there is no text."""
    tokenizer = llm.tokenizer
    if isinstance(tokenizer, NumberTokenizer):
        return [crc32(word.encode()) % tokenizer.vocab_size for word in text.split()]
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(text)


def _classes(rows: Sequence[Facts]) -> list[Facts]:
    """Sum up the prompts of each class for each drafter, and all classes; against decoding without guesses."""
    groups: dict[tuple[str, str], list[Facts]] = {}
    for row in rows:
        if row["note"] is None:
            for kind in (row["case"].split()[0], "all"):
                groups.setdefault((kind, row["engine"]), []).append(row)
    kinds = dict.fromkeys(kind for kind, _ in groups if kind != "all")
    lines = []
    for kind in (*kinds, "all"):
        for engine in dict.fromkeys(engine for each, engine in groups if each == kind):
            own, plain = groups[kind, engine], groups.get((kind, PLAIN), [])
            rates, plain_rates = ([row["tokens_per_s"] for row in part] for part in (own, plain))
            rate = statistics.harmonic_mean(rates)
            drafts, drafted = sum(row["drafts"] for row in own), sum(row["drafted_tokens"] for row in own)
            lines.append(
                {
                    "prompts": kind,
                    "guesses": engine,
                    "tokens/s": rate,
                    "times plain": rate / statistics.harmonic_mean(plain_rates) if plain else None,
                    "tokens/step": statistics.harmonic_mean([row["tokens_per_step"] for row in own]),
                    "accepted": 1 + sum(row["accepted_tokens"] for row in own) / drafts if drafts else None,
                    "guesses/step": drafted / drafts if drafts else None,
                }
            )
    return lines
