"""Times many requests that decode side by side: tokens a second, and how long each request waits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from treewise.bench.loads import Demand, about, compare_engines, publish
from treewise.bench.subject import Subject, read_methods
from treewise.config import check_integer


def throughput(
    *,
    shared_prefix_tokens: int = 0,
    attention: str = "auto",
    json_file: Annotated[Path | None, Parameter("--json")] = None,
    demand: Annotated[Demand | None, Parameter("*", group="Requests")] = None,
    subject: Annotated[Subject | None, Parameter("*", group="Model and engine")] = None,
) -> None:
    """Time requests of equal lengths, so many of them at a time, with several methods of attention.

    Every request decodes one sampled sequence of random tokens, whatever ends the text. The prefix cache is on, and
    empty at the start of each run.

    Parameters
    ----------
    shared_prefix_tokens
        Tokens that all prompts begin with; behind them no two are alike.
    attention
        The methods that are measured, with commas between.
    json_file
        Write the result here too.
    """
    demand, subject = demand or Demand(), subject or Subject()
    methods = read_methods(attention)
    demand.check(subject)
    check_integer("shared_prefix_tokens", shared_prefix_tokens, 0, demand.input_tokens - 1)
    loaded = subject.load()
    options = {method: {"attention": method} for method in methods}
    rows = compare_engines(demand, subject, loaded, options, shared_prefix_tokens)
    facts = {"bench": "throughput", "shared_prefix_tokens": shared_prefix_tokens, "results": rows}
    facts |= about(subject, loaded)
    publish(demand, facts, f"{subject.model}, {facts['dtype']}, {subject.device}", json_file)
