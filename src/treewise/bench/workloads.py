"""Requests whose work is known beforehand: sampled branches, recorded trees, drafted tokens, wide beams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treewise.awaitables import decode, generate
from treewise.bench.case import Case
from treewise.bench.drafted import speculation
from treewise.branch import Branch
from treewise.config import BeamSearchParams, SamplingParams, check_integer
from treewise.controller import Replay
from treewise.replay import Recordings, Schedule, Span, load_recordings
from treewise.search.beams import beams

RECORDED = ("sorting", "document", "keyword", "set")
DEFAULTS: dict[str, dict[str, Any]] = {
    "samples": {"prompt_tokens": 1000, "branches": 20, "new_tokens": 32},
    "few-shot": {"prompt_tokens": 4000, "branches": 50, "new_tokens": 400, "max_steps": None},
    **{task: {"trees": None, "max_steps": None} for task in RECORDED},
    "speculation": {
        **{"prompt_tokens": 1016, "new_tokens": 4984, "tree_size": 64, "topology": "star"},
        "max_steps": None,
    },
    "beam": {"prompt_tokens": 1000, "beam_width": 5000, "new_tokens": 3},
}
"""The settings of each workload."""

PUBLISHED_TB = {
    ("few-shot", 20): (1.68, 17.6),
    ("few-shot", 30): (2.10, 26.4),
    ("few-shot", 50): (2.94, 44.1),
    ("sorting", None): (12.40, 59.94),
    ("document", None): (10.57, 39.73),
    ("keyword", None): (0.58, 4.68),
    ("set", None): (1.04, 7.01),
    ("speculation", 32): (2.954, 93.735),
    ("speculation", 64): (2.979, 187.471),
    ("speculation", 128): (3.030, 374.942),
    ("speculation", 256): (3.131, 749.884),
}
"""Terabytes of keys and values that the DeFT paper counts over a whole run with the settings above: each once, and by
each query. The second key is the number of branches or of drafted tokens."""
PAPER_TOKEN_BYTES = 2 * 2 * 32 * 128 * 32
"""What it counts a token as: keys and values of 2 bytes, 32 query heads of 128, 32 layers."""


def find_cases(workload: str, data: Path, **given: Any) -> tuple[list[Case], dict[str, Any]]:
    """Return the requests of a workload, and its settings.

    Parameters
    ----------
    workload : str
        A key of `DEFAULTS`.
    data : Path
        The folder of the recorded trees, or their file.
    **given
        Settings; ``None`` is the default.

    Raises
    ------
    ValueError
        If there is no such workload or setting, a setting is out of range, or the recorded trees are not there.
    """
    if workload not in DEFAULTS:
        raise ValueError(f"workload: {workload!r} is not one of {', '.join(DEFAULTS)}")
    settings = dict(DEFAULTS[workload])
    for name, value in given.items():
        if value is None:
            continue
        if name not in settings:
            raise ValueError(f"{name}: workload {workload} has no such setting; it has {', '.join(settings)}")
        if name != "topology":
            check_integer(name, value, 2 if name == "new_tokens" else 1)
        settings[name] = value
    sizes = {name: value for name, value in settings.items() if name not in ("trees", "max_steps")}
    steps = settings.get("max_steps")
    match workload:
        case "samples":
            return [samples(**sizes)], settings
        case "few-shot":
            schedule = Schedule.few_shot(sizes["prompt_tokens"], sizes["branches"], sizes["new_tokens"])
            return [replayed(workload, schedule, steps)], settings
        case "beam":
            return [_beam(**sizes)], settings
        case "speculation":
            return [speculation(find_recordings(data), steps, **sizes)], settings
    recorded = find_recordings(data).reasoning[workload]
    check_integer("trees", settings["trees"] or len(recorded), 1, len(recorded))
    chosen = recorded[: settings["trees"]]
    return [replayed(f"{workload} {number}", schedule, steps) for number, schedule in enumerate(chosen)], settings


def published_tb(workload: str, settings: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the terabytes of `PUBLISHED_TB` if the settings are the ones that they were published for."""
    free = {"branches": "few-shot", "tree_size": "speculation"}
    size = next((settings[name] for name, owner in free.items() if owner == workload), None)
    if any(value != DEFAULTS[workload][name] for name, value in settings.items() if name not in free):
        return None
    return PUBLISHED_TB.get((workload, size))


def find_recordings(data: Path) -> Recordings:
    """Read the recorded trees in a folder, or of a file.

    Raises
    ------
    ValueError
        If they are not there.
    """
    file = data / "deft_trees.json.gz" if data.is_dir() else data
    if not file.is_file():
        raise ValueError(
            f"data: {data} does not hold the recorded trees, deft_trees.json.gz; name their folder "
            "(benchmarks/record_trees.py makes the file)"
        )
    return load_recordings(file)


def samples(prompt_tokens: int, branches: int, new_tokens: int) -> Case:
    """Return the request that continues a prompt by sampled branches."""
    params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True)

    async def program(root: Branch) -> list[Branch]:
        return await generate(root.fork(branches), params)

    # The first token of each branch follows from the prompt's own step.
    case = replayed("samples", Schedule.few_shot(prompt_tokens, branches, new_tokens - 1), None)
    return replace(case, program=program, longest=prompt_tokens + new_tokens, decoded=branches * new_tokens)


def replayed(name: str, schedule: Schedule, max_steps: int | None) -> Case:
    """Return the request that branches and prunes as a schedule says, and ends after so many decode steps if told."""
    schedule = clip(schedule, max_steps or schedule.num_steps)
    phases = list(schedule.phases())
    widths = [len(schedule.live(last)) for _, last in phases]
    largest = [schedule.at(last) for _, last in phases]

    async def program(root: Branch) -> list[Branch]:
        return await decode([root], Replay(schedule))

    return Case(
        name,
        program,
        prompt_tokens=schedule.prompt_tokens,
        longest=schedule.prompt_tokens + schedule.num_steps,
        widest=max(widths),
        decoded=sum((last - first + 1) * width for (first, last), width in zip(phases, widths, strict=True)),
        peak_tokens=max(tree.num_tokens for tree in largest),
        peak_nodes=max(tree.num_nodes for tree in largest),
        work=schedule,
    )


def clip(schedule: Schedule, steps: int) -> Schedule:
    """Return the first steps of a schedule, as a schedule that ends there.

    Examples
    --------
    >>> tree = Schedule([Span(-2, 0, (1, 2)), Span(1, 1), Span(1, 2, (3, 4)), Span(3, 4), Span(3, 3)])
    >>> clip(tree, 2).spans[2]
    Span(start=1, end=2, children=())
    """
    kept = [index for index, span in enumerate(schedule.spans) if span.start <= steps]
    place = {index: number for number, index in enumerate(kept)}
    spans = [schedule.spans[index] for index in kept]
    return Schedule(
        [
            Span(span.start, min(span.end, steps), tuple(place[child] for child in span.children if child in place))
            for span in spans
        ]
    )


def _beam(prompt_tokens: int, beam_width: int, new_tokens: int) -> Case:
    params = BeamSearchParams(beam_width, new_tokens, ignore_eos=True)

    async def program(root: Branch) -> list[Branch]:
        return await beams(root, params)

    tokens = beam_width * new_tokens
    return Case(
        f"beam of {beam_width}",
        program,
        prompt_tokens,
        longest=prompt_tokens + new_tokens,
        widest=beam_width,
        decoded=tokens,
        peak_tokens=prompt_tokens + tokens,
        peak_nodes=tokens + 1,
    )
