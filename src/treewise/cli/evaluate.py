"""The verb `eval kv`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from rich.console import Console

from treewise.bench.measure import describe_machine, make_table, progress
from treewise.charts import check_matplotlib
from treewise.cli.options import working
from treewise.evaluate.curves import draw
from treewise.evaluate.study import QUICK, Study
from treewise.evaluate.trial import MODES
from treewise.models import load_model
from treewise.results import json_safe

LINES = 10
"""How often it is said how far everything is, where no bar can be shown."""


def kv(
    *,
    policy: str | None = None,
    budget: str | None = None,
    task: str | None = None,
    mode: str | None = None,
    tokens: int | None = None,
    seeds: int | None = None,
    selection_seeds: int | None = None,
    new_tokens: int | None = None,
    branches: int | None = None,
    branch_policy: str | None = None,
    quick: bool = False,
    model: str = "smollm2-135m",
    json_file: Annotated[Path | None, Parameter("--json")] = None,
    png: Path | None = None,
) -> None:
    """Compare policies of KV sparsity with the same model's dense cache, on a CPU in float32.

    Texts are made up, with something hidden in them that is asked for. The policies full, random, streaming and oracle,
    which keeps what the answer looks at, are always there. The table goes to standard output.

    Parameters
    ----------
    policy
        Presets with commas between (snapkv, pyramidkv, novita, adakv, h2o, tova, keydiff, knorm, expected_attention,
        …), kvzip, or a scorer and an allocator, as keydiff+ada. snapkv:window=8:kernel_size=31 changes numbers of the
        policy and of its scorer. snapkv,pyramidkv,novita if left out.
    budget
        Tokens that a layer keeps, or shares of the text such as 0.25, with commas between: 160,320; 96 if quick.
    task
        passkey, niah_single, niah_multikey, vt, fwe, and text, a check of sanity, with commas between; all if left
        out, three if quick.
    mode
        aware: the question stands in the prompt that is compressed; agnostic: it is asked after; next: a second
        question comes after a cache that was compressed with the first.
    tokens
        Length of the texts: 640; 384 if quick.
    seeds
        Texts of each task: 4; 2 if quick.
    selection_seeds
        Other texts of each task, which tell whether the model can solve it at all: 2.
    new_tokens
        Length of the continuations that are compared, at least: 16.
    branches
        Branches of one prompt that share what they keep, at most 8: 6; 3 if quick; 0 for none.
    branch_policy
        What these keep: snapkv:window=8 if left out.
    quick
        Shorter and fewer texts.
    model
        A folder in Transformers' layout, a GGUF file, a hub id, or a built-in name.
    json_file
        Write everything that was found out to this file.
    png
        Draw curves over the bytes held.
    """
    if png is not None:
        check_matplotlib()
    given = {
        "policies": _words(policy),
        "budgets": None if budget is None else tuple(map(_budget, budget.split(","))),
        "tasks": _words(task),
        "modes": _words(mode),
        "tokens": tokens,
        "seeds": seeds,
        "selection_seeds": selection_seeds,
        "new_tokens": new_tokens,
        "branches": branches,
        "branch_policy": branch_policy,
    }
    named = {field: value for field, value in given.items() if value is not None}
    study = Study(**((QUICK if quick else {}) | named))
    with working(f"Loading {model}"):
        loaded, tokenizer = load_model(model, dtype="float32", device="cpu")
        loaded.pack()
    start = perf_counter()
    with _bar(study.total_tokens) as done:
        found = study.run(loaded, tokenizer, done)
    result = {
        "eval": "kv",
        "model": model,
        **asdict(study),
        "machine": describe_machine(torch.device("cpu")),
        "seconds": perf_counter() - start,
        **found,
    }
    if json_file is not None:
        json_file.write_text(json.dumps(json_safe(_rounded(result))) + "\n", encoding="utf-8")
    if png is not None:
        draw(result, png)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for name in study.modes:
        if lines := list(_lines(found["results"], name)):
            console.print(make_table(f"{name}: {MODES[name]}", lines))
    solved = ", ".join(f"{name} {share:.0%}" for name, share in found["solved_on_selection_seeds"].items())
    console.print(f"Solved with a dense cache, on other texts: {solved}; recall counts those of at least half.")
    if found["branches"]:
        console.print(make_table("The last branch over what the others keep", list(map(_shared, found["branches"]))))


def _rounded(value: Any) -> Any:
    """Round all numbers in a result to four digits: the file is read by people too."""
    match value:
        case float():
            return float(f"{value:.4g}")
        case Mapping():
            return {key: _rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [_rounded(item) for item in value]
        case _:
            return value


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(dict.fromkeys(text.split(",")))


def _budget(word: str) -> int | float:
    try:
        return float(word) if "." in word else int(word)
    except ValueError:
        raise ValueError(f"budget: {word!r} is neither a number of tokens nor a share such as 0.25") from None


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """Show a bar, and on what is no terminal a line now and then, with how long it will take."""
    start, whole, said = perf_counter(), 0, 0
    with progress() as bar:
        line = bar.add_task("", total=total)

        def done(what: str, part: int) -> None:
            nonlocal whole, said
            whole += part
            bar.update(line, completed=whole, description=what)
            if bar.disable and (whole * LINES // total > said or whole == part):
                said = whole * LINES // total
                left = (perf_counter() - start) * (total - whole) / whole
                print(f"{whole / total:.0%} done, {left / 60:.0f} minutes to go", file=sys.stderr, flush=True)

        yield done


def _interval(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.2f}–{ends[1]:.2f}"


def _lines(cells: Sequence[Mapping[str, Any]], mode: str) -> Iterator[Mapping[str, Any]]:
    for cell in cells:
        if cell["mode"] == mode and cell["task"] == "all":
            recall = cell.get("recall")
            yield {
                "policy": cell["policy"],
                "budget": cell["budget"],
                "held": cell["held"],
                "KL": cell["kl"],
                "top-1": cell["top1"],
                "95 %": _interval(cell["top1_interval"]),
                "NLL +": cell["nll_increase"],
                "recall": None if recall is None else f"{recall:.2f} of {cell['n']}",
                "95 % ": _interval(cell.get("recall_interval")),
                "needle kept": cell.get("kept"),
                "of oracle": cell.get("kept_of_oracle"),
                "worst task (top-1)": f"{cell['worst_task']} ({cell['worst_top1']:.2f})",
            }


def _shared(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "branches": facts["kind"],
        "budget": facts["budget"],
        "overlap (Jaccard)": facts["jaccard"],
        "union, tokens": facts["union_tokens"][-2],
        **{f"KL {name}": value for name, value in facts["kl"].items()},
        **{f"top-1 {name}": facts["top1"][name] for name in ("own", "union", "random")},
    }
