"""The verb `train-medusa`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from treewise.cli.options import ModelOptions, working
from treewise.config import check_integer

LESSONS = 0.7
"""Share of the time in which the model reads and talks; the rest is training."""


def train_medusa(
    *,
    out: Path,
    text: tuple[Path, ...] = (),
    heads: int = 3,
    layers: int = 1,
    minutes: float = 8.0,
    seed: int = 0,
    options: Annotated[ModelOptions | None, Parameter("*", group="Model and engine")] = None,
) -> None:
    """Train Medusa heads for a model, for `--speculate medusa:FOLDER`.

    The model reads the texts and talks with itself; the heads learn to say at once what it says some tokens later. The
    model stays as it is.

    Parameters
    ----------
    out
        The folder that the heads are written to.
    text
        A text file that the model reads; may be repeated. Without one it only talks with itself.
    heads
        How many tokens ahead are guessed.
    layers
        Residual blocks of a head.
    minutes
        How long all of it takes.
    seed
        Of the order in which the texts are read.
    """
    from treewise.training import lessons, train

    check_integer("heads", heads, 1)
    check_integer("layers", layers, 1)
    if not minutes > 0:
        raise ValueError(f"minutes: {minutes} is not above 0")
    texts = [path.read_text("utf-8") for path in text]
    options = options or ModelOptions()
    llm = options.load()
    seconds = 60 * minutes
    with working(f"{options.model} reads and talks"):
        taught = lessons(llm, texts, LESSONS * seconds, seed)
    if not any(len(lesson.states) > heads for lesson in taught):
        raise ValueError(f"minutes: {minutes} are too few, nothing was read to its end")
    seen: list[tuple[float, list[float]]] = []
    with working(f"Training {heads} heads"):
        trained = train(
            llm.engine.runner.model,
            taught,
            heads,
            layers,
            (1 - LESSONS) * seconds,
            lambda over, loss, right: seen.append((loss, [*right])),
        )
    trained.save(out, options.model)
    last = seen[-20:]
    right = [sum(each[head] for _, each in last) / len(last) for head in range(heads)]
    print(
        f"{sum(len(lesson.states) for lesson in taught)} tokens, {len(seen)} steps, "
        f"loss {sum(loss for loss, _ in last) / len(last):.2f}; of what it has learnt from, "
        f"the heads guess {', '.join(f'{share:.0%}' for share in right)}",
        file=sys.stderr,
    )
    print(f"{out}")
