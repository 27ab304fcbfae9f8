"""The paper's workloads as schedules, and the steps of them at which attention is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treewise.attention import TreeSpec
from treewise.bench.subject import Subject
from treewise.replay import Recordings, Schedule, Span, Speculation
from treewise.reproduce.deft.published import COLUMNS

Work = Schedule | Speculation
PROMPT = 4000
"""Tokens of a few-shot prompt."""
STEPS = 400
"""Decode steps of few-shot prompts, as many as the paper's bytes are of; its times are of one less."""
TOTAL = 6000
"""Tokens at which speculation ends."""
WIDTHS = (20, 30, 50)
TASKS = ("sorting", "document", "keyword", "set")
SIZES = (32, 64, 128, 256)
METHODS = ("flash_decoding", "medusa", "specinfer", "radix", "deft:node", "deft:node_chunk", "deft:flatten")
TITLES = COLUMNS | {f"real-{size}": f"speculation, real topology, t = {size}" for size in SIZES}
"""All workloads of the tables: the paper's, and drafted trees in the shape that was recorded."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes
    ----------
    samples : int
        Steps of a workload at which attention is timed.
    repeats : int
        Timings at each.
    tree_samples : int
        Recorded trees of a task that attention is timed on, the first ones.
    trees : int
        Recorded trees of a task that are run as a whole.
    max_steps : int or None
        Runs end after so many decode steps; None: never.
    prompt : int or None
        Runs have prompts of at most so many tokens; None: whatever they have.
    others : bool
        Whether every method runs every workload; otherwise all run the first of each kind, and two of them the rest.
    points : int
        Steps of a line in a figure.
    answer : int
        Tokens that are compared with Transformers.
    share : int
        Other models' layers are measured as one of so many devices has them that share a model out.
    """

    samples: int = 10
    repeats: int = 9
    tree_samples: int = 10
    trees: int = 10
    max_steps: int | None = None
    prompt: int | None = None
    others: bool = True
    points: int = 60
    answer: int = 400
    share: int = 1


QUICK = Scale(
    samples=1, repeats=3, tree_samples=1, trees=1, max_steps=4, prompt=128, others=False, points=8, answer=32, share=4
)


@dataclass(frozen=True)
class Setup:
    """Where, with what and how much is measured.

    Attributes
    ----------
    subject : Subject
        Model and device.
    scale : Scale
    recordings : Recordings
    """

    subject: Subject
    scale: Scale
    recordings: Recordings

    def works(self, workload: str) -> list[Work]:
        """Return the schedules of a workload of `TITLES`: one, or a task's recorded trees."""
        kind, _, size = workload.partition("-")
        match kind:
            case "few":
                return [Schedule.few_shot(PROMPT, int(workload.rpartition("-")[2]), STEPS)]
            case "star" | "real":
                return [self.drafted(kind, int(size))]
        return list(self.recordings.reasoning[workload])

    def drafted(self, topology: str, size: int, prompt: int | None = None, total: int = TOTAL) -> Speculation:
        """Return speculation with trees of so many tokens, right behind the prompt or in the recorded shape."""
        parent = [-1] * size
        if topology == "real":  # the first is the root, the last token that was chosen
            parent = [-1, *(node + 1 for node in self.recordings.topologies[size])]
        return self.recordings.speculation(parent, total, prompt)


def tree_at(work: Work, step: int) -> TreeSpec:
    """Return the tree of a decode step, 1 to ``work.num_steps``."""
    if isinstance(work, Schedule):
        return work.at(step)
    return work.tree(work.prompt_tokens + sum(work.accepted[: step - 1]))


def with_prompt(work: Schedule, tokens: int) -> Schedule:
    """Return a schedule whose prompt has so many tokens."""
    first = work.spans[0]
    return Schedule([Span(1 - tokens, 0, first.children), *work.spans[1:]])


def evenly(num_steps: int, count: int) -> list[int]:
    """Return the steps in the middle of so many equal parts of a run, numbered from 1.

    Examples
    --------
    >>> evenly(100, 4)
    [13, 38, 63, 88]
    """
    count = min(count, num_steps)
    return [int((part + 0.5) * num_steps / count) + 1 for part in range(count)]


def samples(works: Sequence[Work], count: int) -> list[tuple[TreeSpec, float]]:
    """Return trees of steps that stand for whole runs, and how many steps of a mean run each stands for.

    A run's time is the integral of its steps' times, taken by the midpoint rule.
    """
    each = max(1, count // len(works))
    chosen = []
    for work in works:
        steps = evenly(work.num_steps, each)
        chosen += [(tree_at(work, step), work.num_steps / len(steps) / len(works)) for step in steps]
    return chosen


def mean_steps(works: Sequence[Work]) -> float:
    """Return the decode steps of a run, in the mean."""
    return sum(work.num_steps for work in works) / len(works)
