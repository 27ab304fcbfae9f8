"""Recorded decoding trees: their schedules step by step, as tree specifications, without a model.

A recording is JSON: a list of nodes ``[start, end, children]``. A node is decoded in steps ``start`` to ``end``, one
token a step; ``children`` are indices into the list, and a child starts at the step after its parent's end. Node 0 is
the prompt: it ends at step 0, so its start is 1 minus its tokens. A node that ends without children is pruned, with
the ancestors that then have no live leaf below them.

A file of recordings is JSON, optionally gzipped: ``{"reasoning": {task: [recording, ...]}, "speculative":
{"topologies": {size: [path of child ranks, ...]}, "accepted_lengths": [...], "prompt_tokens": int}}``.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from treewise.plan import IO, TreeSpec, plan_tree


@dataclass(frozen=True)
class Span:
    """A recorded node: decoded in steps ``start`` to ``end``, then branching into ``children`` or pruned."""

    start: int
    end: int
    children: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """When a recorded tree grows, branches and prunes.

    Parameters
    ----------
    spans : sequence of Span
        The nodes; the first is the prompt.

    Raises
    ------
    ValueError
        If the spans do not form one tree whose children start where their parents end.

    Examples
    --------
    A prompt of three tokens with two branches; the first is pruned after step 1, the second branches after step 2.

    >>> tree = Schedule([Span(-2, 0, (1, 2)), Span(1, 1), Span(1, 2, (3, 4)), Span(3, 4), Span(3, 3)])
    >>> tree.prompt_tokens, tree.num_steps, tree.branches(2), tree.live(3)
    (3, 4, {2: (3, 4)}, [3, 4])
    >>> tree.at(3).length.tolist()
    [3, 2, 1, 1]
    """

    spans: Sequence[Span]
    parent: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parent = [-1] * len(self.spans)
        if not self.spans:
            raise ValueError("a recording needs a first node, the prompt")
        if self.spans[0].end != 0 or self.spans[0].start > 0:
            raise ValueError(
                f"node 0 is the prompt: it must end at step 0 and start at 0 or before, not {self.spans[0]}"
            )
        for index, span in enumerate(self.spans):
            if span.end < span.start and (span.children or span.end < span.start - 1):
                raise ValueError(f"node {index} must end at its start, {span.start}, or later; it ends at {span.end}")
            for child in span.children:
                if not 0 < child < len(self.spans):
                    raise ValueError(f"node {index} names child {child}; nodes are 0 to {len(self.spans) - 1}")
                if child <= index or parent[child] >= 0:
                    raise ValueError(
                        f"node {child} must come after its one parent; nodes {parent[child]} and {index} name it"
                    )
                if self.spans[child].start != span.end + 1:
                    raise ValueError(
                        f"node {child} must start at {span.end + 1}, after its parent, not {self.spans[child].start}"
                    )
                parent[child] = index
        if -1 in parent[1:]:
            raise ValueError(f"node {parent.index(-1, 1)} is no node's child")
        object.__setattr__(self, "parent", tuple(parent))

    @classmethod
    def from_json(cls, nodes: Any) -> Schedule:
        """Read one recording, a list of ``[start, end, children]``."""
        if not isinstance(nodes, list):
            raise ValueError(f"a recording must be a list of [start, end, children], not {type(nodes).__name__}")
        spans = []
        for index, node in enumerate(nodes):
            match node:
                case [int() as start, int() as end, list() as children] if all(
                    type(child) is int for child in children
                ):
                    spans.append(Span(start, end, tuple(children)))
                case _:
                    raise ValueError(f"node {index} must be [start, end, children] in whole numbers, not {node!r:.80}")
        return cls(spans)

    @classmethod
    def few_shot(cls, prompt_tokens: int, width: int, steps: int = 400) -> Schedule:
        """Make a prompt that branches once, at step 0, into ``width`` leaves that then decode ``steps`` tokens."""
        leaves = [Span(1, steps)] * width
        return cls([Span(1 - prompt_tokens, 0, tuple(range(1, width + 1))), *leaves])

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return 1 - self.spans[0].start

    @property
    def num_steps(self) -> int:
        """Steps until the last leaf has ended."""
        return max(span.end for span in self.spans)

    def branches(self, step: int) -> dict[int, tuple[int, ...]]:
        """Nodes that branch at the end of a step, with their children."""
        return {index: span.children for index, span in enumerate(self.spans) if span.end == step and span.children}

    def pruned(self, step: int) -> list[int]:
        """Leaves that are pruned at the end of a step."""
        return [index for index, span in enumerate(self.spans) if span.end == step and not span.children]

    def live(self, step: int) -> list[int]:
        """Leaves that decode a token in a step, 1 to `num_steps`."""
        return [index for index, span in enumerate(self.spans) if index and span.start <= step <= span.end]

    def at(self, step: int) -> TreeSpec:
        """Return the tree of a step: the live leaves, each a query at the token it decodes, and their ancestors."""
        live = self.live(step)
        if not live:
            raise ValueError(f"step is {step}; leaves are live in steps 1 to {self.num_steps}")
        held: set[int] = set()
        for node in live:
            while node >= 0 and node not in held:
                held.add(node)
                node = self.parent[node]
        nodes = sorted(held)  # parents come before children in a recording
        place = {node: index for index, node in enumerate(nodes)}
        return TreeSpec(
            parent=[place.get(self.parent[node], -1) for node in nodes],
            length=[min(step, self.spans[node].end) - self.spans[node].start + 1 for node in nodes],
            query_node=[place[node] for node in live],
        )

    def phases(self) -> Iterator[tuple[int, int]]:
        """First and last step of each stretch in which no leaf starts or ends: there, only leaf lengths grow."""
        changes = {span.start for span in self.spans[1:]} | {span.end + 1 for span in self.spans}
        for first, after in pairwise(sorted(changes)):
            yield first, after - 1


@dataclass(frozen=True)
class Speculation:
    """A drafted token tree that is verified on a growing prompt.

    Parameters
    ----------
    parent : sequence of int
        Parent of each drafted token, -1 for the prompt. A flat star, ``[-1] * width``, is what the paper's code ran.
    prompt_tokens : int
        Tokens of the prompt at the first step.
    accepted : sequence of int
        Tokens that each step but the last adds to the prompt.
    """

    parent: Sequence[int]
    prompt_tokens: int
    accepted: Sequence[int]

    @property
    def num_steps(self) -> int:
        """Steps of verification."""
        return len(self.accepted) + 1

    def tree(self, prompt_tokens: int) -> TreeSpec:
        """Return the tree of a step whose prompt has grown to so many tokens: a query at each drafted token."""
        drafted = len(self.parent)
        parent = [-1, *(node + 1 for node in self.parent)]
        return TreeSpec(parent, [prompt_tokens] + [1] * drafted, range(1, drafted + 1))

    def __iter__(self) -> Iterator[TreeSpec]:
        """Yield the tree of each step."""
        prompt = self.prompt_tokens
        for accepted in (*self.accepted, 0):
            yield self.tree(prompt)
            prompt += accepted


@dataclass(frozen=True)
class Recordings:
    """What a file of recordings holds.

    Attributes
    ----------
    reasoning : dict of str to list of Schedule
        Recorded trees by task.
    topologies : dict of int to list of int
        Parents of the drafted tokens, by tree size with the root, -1 for the root.
    accepted : list of int
        Recorded accepted lengths. The first belongs to the step that made the tree, before any was verified.
    prompt_tokens : int
        Prompt length of the recorded speculation.
    """

    reasoning: dict[str, list[Schedule]]
    topologies: dict[int, list[int]]
    accepted: list[int]
    prompt_tokens: int

    def speculation(
        self, parent: Sequence[int], total_tokens: int = 6000, prompt_tokens: int | None = None
    ) -> Speculation:
        """Verify drafted trees until the prompt has grown to ``total_tokens``.

        Recorded accepted lengths come first, then uniform ones from 1 to 5 with seed 0, as the paper's code draws.
        """
        prompt = self.prompt_tokens if prompt_tokens is None else prompt_tokens
        generator = random.Random(0)
        accepted: list[int] = []
        missing = total_tokens - prompt
        while missing > 0:
            length = self.accepted[len(accepted)] if len(accepted) < len(self.accepted) else generator.randint(1, 5)
            accepted.append(min(length, missing))
            missing -= accepted[-1]
        return Speculation(parent, prompt, accepted[1:])


def load_recordings(path: str | Path) -> Recordings:
    """Read a file of recordings, JSON or gzipped JSON.

    Raises
    ------
    ValueError
        If the file is not of the form that the module describes; the message names the place.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read recordings from {path}: {error}") from error
    match data:
        case {
            "reasoning": dict() as reasoning,
            "speculative": {
                "topologies": dict() as topologies,
                "accepted_lengths": list() as accepted,
                "prompt_tokens": int() as prompt_tokens,
            },
        }:
            pass
        case _:
            raise ValueError(f"{path} must hold 'reasoning' and 'speculative' recordings")
    schedules: dict[str, list[Schedule]] = {}
    for task, trees in reasoning.items():
        schedules[task] = []
        for number, nodes in enumerate(trees):
            try:
                schedules[task].append(Schedule.from_json(nodes))
            except ValueError as error:
                raise ValueError(f"{path}: tree {number} of {task}: {error}") from error
    sizes = {int(size): drafted_parents(paths) for size, paths in topologies.items()}
    return Recordings(schedules, sizes, accepted, prompt_tokens)


def drafted_parents(paths: Sequence[Sequence[int]]) -> list[int]:
    """Turn paths of child ranks, such as ``[[0], [1], [0, 0]]``, into parents: ``[-1, -1, 0]``.

    Raises
    ------
    ValueError
        If a path comes before the path it extends, or is missing it.
    """
    place: dict[tuple[int, ...], int] = {(): -1}
    parents = []
    for path in paths:
        if not path or tuple(path[:-1]) not in place:
            raise ValueError(f"path {list(path)} must come after the path that it extends by one rank")
        parents.append(place[tuple(path[:-1])])
        place[tuple(path)] = len(parents) - 1
    return parents


def total_io(schedule: Schedule | Speculation, method: str, **plan_options: Any) -> IO:
    """Sum `Plan.io` over all steps, with the options of `plan_tree`.

    While only leaf lengths or the prompt grow, the bytes of keys and values are linear in them, so that the two ends of
    such a stretch are planned and the steps between them follow. What depends on where blocks are cut is an estimate.
    """
    ends: list[tuple[float, TreeSpec]] = []  # how many steps each planned tree stands for
    if isinstance(schedule, Speculation):
        prompts = [schedule.prompt_tokens + total for total in accumulate(schedule.accepted, initial=0)]
        grown = prompts[-1] - prompts[0]
        like_last = sum(prompt - prompts[0] for prompt in prompts) / grown if grown else 0.0
        trees = [schedule.tree(prompts[0]), schedule.tree(prompts[-1])]
        ends = list(zip((schedule.num_steps - like_last, like_last), trees, strict=True))
    else:
        for first, last in schedule.phases():
            ends += [((last - first + 1) / 2, schedule.at(step)) for step in (first, last)]
    counted = [(weight, plan_tree(tree, method, **plan_options).io()) for weight, tree in ends]
    return IO(**{name: round(sum(weight * getattr(io, name) for weight, io in counted)) for name in IO.__annotations__})
