"""How exact attention is: table 15, against double precision and against Transformers, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch

from treewise.awaitables import generate
from treewise.bench.attention import DTYPES, Method, random_inputs, reference
from treewise.bench.attention import measure as measure_attention
from treewise.bench.contender import Contender
from treewise.bench.engines import Room, Transformers
from treewise.bench.peers import PEERS
from treewise.bench.subject import Subject
from treewise.branch import Branch
from treewise.config import SamplingParams
from treewise.replay import Schedule
from treewise.reproduce.deft import published, texts
from treewise.reproduce.deft.tables import NAMES
from treewise.reproduce.deft.workloads import PROMPT, STEPS, Setup
from treewise.reproduce.report import Cell, Compared, Section, Table, slug
from treewise.reproduce.study import Measurement, Result, Results

HEADS = {"MHA": (32, 32), "GQA": (32, 8)}
METHODS = ("radix", "deft:node", "deft:node_chunk", "deft:flatten")
TEXT = """\
The river rises in the hills above the town, where three springs meet below a row of old beeches. In summer it is so
narrow that children jump across it, but in March, when the snow melts, it carries branches and sometimes a whole tree
down to the mill. The miller keeps a long pole with an iron hook beside the door. His grandmother taught him how to use
it. She also taught him that the river has four moods, and that"""
BRANCHES = (" in the first", " whoever wants", " nobody in town", " the old mill")
"""The text, and how it goes on in each branch."""


def accuracy(setup: Setup, text_model: str | None) -> Iterator[Measurement]:
    """Measure errors, and, with the name of a model that has weights, compare texts with Transformers."""
    subject, scale = setup.subject, setup.scale
    dtype = "float16" if subject.device == "cuda" else "float32"
    settings = {"device": subject.device, "dtype": dtype, "prompt": scale.prompt}
    yield Measurement("errors", "errors of attention", 15.0, partial(_errors, setup, dtype), settings)
    if text_model is not None:
        read = Subject(text_model, "float32", device=subject.device)
        yield Measurement(
            f"text-{slug(text_model)}",
            f"{text_model} beside Transformers",
            scale.answer * (0.1 if subject.device == "cuda" else 1.0),
            partial(_texts, read, scale.answer),
            {"model": text_model, "device": subject.device, "dtype": "float32", "tokens": scale.answer},
        )


def _errors(setup: Setup, dtype: str) -> Result:
    device = setup.subject.place
    prompt = setup.scale.prompt or PROMPT
    trees = {
        f"20 branches below {prompt:,} tokens": Schedule.few_shot(prompt, 20, STEPS).at(STEPS // 2),
        f"star of 64 below {prompt:,} tokens": setup.drafted("star", 64).tree(prompt),
    }
    contenders: list[Contender] = [*(Method(method) for method in METHODS), PEERS["sdpa"]]
    found: Result = {"dtype": dtype, "errors": {}}
    for heads, (num_heads, num_kv_heads) in HEADS.items():
        for name, tree in trees.items():
            inputs = random_inputs(tree, num_heads, num_kv_heads, 128, DTYPES[dtype], 1, device)
            exact = reference(tree, *inputs)
            for contender in contenders:
                row = measure_attention(contender, tree, inputs, exact, 1)
                kept = {key: row[key] for key in ("error", "note")}
                found["errors"].setdefault(contender.name, {}).setdefault(heads, {})[name] = kept
    return found


def _texts(subject: Subject, tokens: int) -> Result:
    loaded = subject.load()
    tokenizer = loaded[1]
    prompt = tokenizer.encode(TEXT)
    beginnings = [tokenizer.encode(text, add_special_tokens=False) for text in BRANCHES]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    async def program(root: Branch) -> list[tuple[list[int], float]]:
        branches = root.fork(len(beginnings))
        for branch, beginning in zip(branches, beginnings, strict=True):
            branch.append(beginning)
        await generate(branches, params)
        return [
            (branch.tokens[len(beginning) :], branch.logprob)
            for branch, beginning in zip(branches, beginnings, strict=True)
        ]

    theirs = [_completed(subject, [*prompt, *beginning], tokens) for beginning in beginnings]
    found: Result = {"device": subject.device, "branches": len(beginnings), "tokens": tokens, "methods": {}}
    found["perplexity"] = math.exp(-fmean(logprob / tokens for _, logprob in theirs))
    for method in METHODS:
        llm = subject.engine(loaded, method, len(beginnings), num_kv_slots=len(prompt) + 4 * (tokens + 64) + 64)
        [result] = llm.run(program, [prompt], seed=0)
        equal = [
            next((place for place, (one, other) in enumerate(zip(ids, own, strict=True)) if one != other), tokens)
            for (ids, _), (own, _) in zip(result.value, theirs, strict=True)
        ]
        found["methods"][method] = {
            "equal": sum(equal) / tokens / len(equal),
            "perplexity": math.exp(-fmean(logprob / tokens for _, logprob in result.value)),
        }
    return found


def _completed(subject: Subject, prompt: Sequence[int], tokens: int) -> tuple[list[int], float]:
    """Return the likeliest continuation by Transformers and the sum of its log-probabilities."""
    model: Any = Transformers(subject, torch.float32, Room(1, len(prompt) + tokens)).model
    ids = torch.tensor([list(prompt)], device=subject.place)
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    chosen = output.sequences[0, len(prompt) :]
    logprobs = torch.stack(output.logits)[:, 0].log_softmax(-1)
    return chosen.tolist(), float(logprobs.gather(1, chosen[:, None]).double().sum())


def sections(results: Results) -> list[Section]:
    """Report table 15."""
    parts: list[Table] = []
    if "errors" in (found := results.get("errors", {})):
        rows: list[Sequence[Cell]] = []
        for name, by_heads in found["errors"].items():
            for heads, by_tree in by_heads.items():
                for tree, one in by_tree.items():
                    said = published.ATTENTION_ERROR.get(name, {}).get(heads)
                    shown = Compared(one["error"], said) if one["error"] is not None else one["note"]
                    rows.append([NAMES.get(name, f"PyTorch ({name})"), heads, tree, shown])
        parts.append(
            Table("Table 15: relative error of attention", ["method", "heads", "tree", "relative error"], rows)
        )
    for key, found in results.items():
        if not key.startswith("text-") or "methods" not in found:
            continue
        rows = [["Transformers", "", found["perplexity"], ""]]
        rows += [
            [NAMES[method], f"{one['equal']:.1%}", one["perplexity"], f"{one['perplexity'] - found['perplexity']:+.1e}"]
            for method, one in found["methods"].items()
        ]
        title = f"Table 15: {found['branches']} branches of {found['tokens']} tokens"
        title += f", {key.removeprefix('text-')} on {found['device']}"
        columns = ["method", "tokens before the first difference", "perplexity", "difference"]
        parts.append(Table(title, columns, rows, digits=7))
    if not parts:
        return []
    return [Section("Accuracy (table 15)", texts.ACCURACY, parts)]
