"""Search strategies as the API has them: their parameters, and their trees while they grow."""

from __future__ import annotations

import codecs
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from treewise.branch import Branch
from treewise.engine import Request
from treewise.grammar import Grammar
from treewise.llm import LLM
from treewise.operations import Gain
from treewise.outputs import completions
from treewise.results import Tree, json_safe
from treewise.search import ALLOTMENTS, EVALUATORS, EXTRACTORS, STRATEGIES, ThoughtParams, Trajectory
from treewise.search.samples import RANKINGS
from treewise.server.choices import Delta
from treewise.server.errors import ApiError
from treewise.server.jobs import Outcome
from treewise.server.schema import StructuredOutputs

NAMED: dict[str, list[str]] = {
    "by": [*RANKINGS, "self_certainty"],
    "evaluate": [*EVALUATORS],
    "extract": [*EXTRACTORS],
    "allot": [*ALLOTMENTS],
}
"""Parameters that name a function, and what there is to choose from."""

NOT_WIDE = ("depth", "iterations", "budget", "number", "at")
"""Numbers that say how long a search goes on, not how many branches it has side by side."""

JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", NoneType: "null"}

MAX_LIST = 1024
"""The most items of a list among the parameters."""

MAX_TEXT = 8192
"""The most characters of a text among them: it may be read anew for each branch."""

PER_SECOND = 10
"""The most updates a second about a growing tree."""

SHARE = 10
"""Looking at growing trees takes at most one part in so many of the time."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a strategy, as far as JSON can say it.

    Attributes
    ----------
    name : str
    type : str
        In JSON's words, with ``|`` between several.
    adapter : TypeAdapter
        Checks its values.
    default : Any
    choices : list or None
        All values there are, where they can be listed.
    help : str
    """

    name: str
    type: str
    adapter: TypeAdapter[Any]
    default: Any
    choices: list[Any] | None
    help: str

    @property
    def is_grammar(self) -> bool:
        """Whether it takes a grammar, given as `StructuredOutputs`."""
        return self.type.startswith("object")

    @property
    def described(self) -> dict[str, Any]:
        """What clients are told of it."""
        facts = {name: getattr(self, name) for name in ("name", "type", "default", "choices", "help")}
        return {name: json_safe(value) for name, value in facts.items()}

    def check(self, value: Any, most: int) -> None:
        """Refuse a value of a wrong type, or one that asks for more than `most` branches.

        Raises
        ------
        ApiError
        """
        try:
            self.adapter.validate_json(json.dumps(value))
        except ValidationError as error:
            raise self._wrong(f"{value!r:.200} is not of type {self.type}: {error.errors()[0]['msg']}") from None
        if self.choices is not None and value not in self.choices:
            raise self._wrong(f"{value!r:.200} is not one of {', '.join(map(str, self.choices))}")
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_LIST:
            raise self._wrong(f"{len(items)} items are more than {MAX_LIST}")
        if any(isinstance(item, str) and len(item) > MAX_TEXT for item in items):
            raise self._wrong(f"a text has more than {MAX_TEXT} characters")
        if self.name in NOT_WIDE or self.name.endswith("tokens"):
            return
        wide = 1
        for number in items:
            wide *= number if isinstance(number, int) else 1
        if wide > most:
            raise self._wrong(f"{wide} is more than this server allows, {most}")

    def _wrong(self, message: str) -> ApiError:
        return ApiError(f"search.{self.name}: {message}", param="search")


@cache
def parameters(strategy: str) -> dict[str, Parameter]:
    """Return the parameters of a strategy by name, but for those that only a program can give."""
    entry = STRATEGIES[strategy]
    hints = get_type_hints(ThoughtParams) | get_type_hints(entry.program)
    helps = _helps(ThoughtParams) | _helps(entry.program)
    found = {}
    for name, default in entry.defaults.items():
        kinds = _kinds(hints[name])
        if kinds == [NoneType]:
            continue
        literals = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        choices = [True, False, *literals] if literals else NAMED.get(name)
        names = dict.fromkeys(_json_type(kind) for kind in kinds)
        accepted: Any = Union[tuple(kinds)]  # noqa: UP007  (as many as there are)
        adapter: TypeAdapter[Any] = TypeAdapter(
            accepted,
            config=ConfigDict(strict=True, allow_inf_nan=False) if kinds != [StructuredOutputs] else None,
        )
        found[name] = Parameter(name, " | ".join(names), adapter, default, choices, helps.get(name, ""))
    return found


def described() -> list[dict[str, Any]]:
    """Return all strategies with their parameters, as `/strategies` lists them."""
    return [
        {
            "name": name,
            "help": entry.description,
            "parameters": [parameter.described for parameter in parameters(name).values()],
        }
        for name, entry in STRATEGIES.items()
    ]


def _kinds(hint: Any) -> list[Any]:
    """Return the alternatives of a type that JSON can give."""
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds: list[Any] = []
    for kind in alternatives:
        origin = get_origin(kind)
        if kind is Grammar:
            kinds.append(StructuredOutputs)
        elif origin in (list, Sequence):
            kinds.append(list[get_args(kind)[0]])  # type: ignore[misc]
        elif kind in JSON_TYPES or origin is Literal:
            kinds.append(kind)
    if list[Any] in kinds:  # beside it, a text would be the name of a file
        kinds.remove(str)
    return kinds


def _json_type(kind: Any) -> str:
    if kind is StructuredOutputs:
        return "object"
    if get_origin(kind) is Literal:
        return "string"
    return JSON_TYPES[get_origin(kind) or kind]


def _helps(documented: Any) -> dict[str, str]:
    """Return what a docstring says of each parameter."""
    helps: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(documented.__doc__ or "").splitlines():
        if match := re.fullmatch(r"(\w+(?:, \w+)*)(?: : .*)?", line):
            names = match[1].split(", ")
        elif line.startswith("    "):
            for name in names:
                helps[name] = f"{helps.get(name, '')} {line.strip()}".strip()
    return helps


@dataclass(frozen=True)
class Grown:
    """What is new in a growing tree: nodes as the API writes them."""

    nodes: list[dict[str, Any]]


@dataclass(frozen=True)
class Searched:
    """The end of a search.

    Attributes
    ----------
    delta : Delta
        The answer.
    tree : Tree or None
        The whole tree, drawn already, if it was asked for.
    chosen : int or None
        Which of the nodes that were told of has the answer.
    """

    delta: Delta
    tree: Tree | None
    chosen: int | None


@dataclass
class _Node:
    """What has been told of a branch, which is a node of the stream."""

    id: int
    parent: int | None
    path: list[int] | None = None
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    num_tokens: int = 0
    text: str = ""
    sent: int = 0
    facts: tuple[Any, ...] = ()


class Growth:
    """Tells what is new in the tree of a search since it was last asked.

    A node is a branch: what it has decoded since it forked off; node 0 is the prompt.

    Parameters
    ----------
    stop : sequence of str
        Strings that may end a branch: of what may be the beginning of one, nothing is told.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._held_back = max(map(len, stop), default=1) - 1
        self._nodes: dict[Branch | None, _Node] = {None: _Node(0, None)}
        self._due = 0.0

    def news(self, request: Request, final: bool = False) -> list[Grown]:
        """Return what is new, unless it was looked at a moment ago and this is not the end."""
        began = perf_counter()
        if began < self._due and not final:
            return []
        nodes = []
        if not self._nodes[None].facts:
            nodes.append(self._told(self._nodes[None], "", len(request.tree.prompt_tokens), None, None, "ended"))
        for branch in request.tree.branches():
            if (told := self._look(branch, final)) is not None:
                nodes.append(told)
        now = perf_counter()
        self._due = now + max(1 / PER_SECOND, SHARE * (now - began))
        return [Grown(nodes)] if nodes else []

    def node(self, branch: Branch | None) -> int | None:
        """Return the id of a branch; None for none."""
        return None if branch is None or branch not in self._nodes else self._nodes[branch].id

    def _look(self, branch: Branch, final: bool) -> dict[str, Any] | None:
        given = len(branch.tree.prompt_tokens) if branch.parent is None else 0
        tokens = branch.tokens[given:]
        if branch.parent is None and not tokens:
            return None
        if branch not in self._nodes:
            above = self._nodes.get(branch.parent) or self._nodes[None]
            self._nodes[branch] = _Node(len(self._nodes), above.id, list(branch.path))
        node = self._nodes[branch]
        over = final or branch.finished or not branch.alive
        new = b"".join(map(branch.tree.codec.token_bytes, tokens[node.num_tokens :]))
        node.num_tokens = len(tokens)
        node.text += node.decoder.decode(new, over)
        settled = len(node.text) - (branch.hidden_tail if over else self._held_back)
        text = node.text[node.sent : settled]
        growing = branch.alive and not branch.finished and not branch.num_children and not final
        state = "pruned" if branch.pruned else "live" if growing else "ended"
        facts = (len(tokens), branch.logprob, branch.score, state)
        if not text and facts == node.facts:
            return None
        node.sent += len(text)
        return self._told(node, text, *facts)

    def _told(
        self, node: _Node, text: str, tokens: int, logprob: float | None, score: float | None, state: str
    ) -> dict[str, Any]:
        node.facts = (tokens, logprob, score, state)
        return {
            "id": node.id,
            "parent": node.parent,
            "path": node.path,
            "text": text,
            "tokens": tokens,
            "logprob": json_safe(logprob),
            "score": json_safe(score),
            "state": state,
        }


class Search:
    """Watches a search, see `Watcher`: its one choice is the answer that it chose.

    Parameters
    ----------
    llm : LLM
    strategy : str
    stop : sequence of str
        What may end a branch.
    stream : bool
        Tell of the tree while it grows.
    tree : bool
        Tell of the whole tree at the end.
    """

    def __init__(self, llm: LLM, strategy: str, stop: Sequence[str], stream: bool, tree: bool) -> None:
        self.llm = llm
        self.strategy = strategy
        self.growth = Growth(stop) if stream else None
        self.tree = tree
        self._outcome: Outcome = "stop"

    def gained(self, part: int, request: Request, gain: Gain) -> list[Grown]:
        """See `Watcher.gained`."""
        return [] if self.growth is None else self.growth.news(request)

    def ended(self, part: int, request: Request) -> list[Grown | Searched]:
        """See `Watcher.ended`."""
        updates = [] if self.growth is None else self.growth.news(request, final=True)
        best = request.result[0] if isinstance(request.result, list) else request.result
        if isinstance(best, Trajectory):
            best = max(request.result, key=lambda each: each.reward)
            delta = Delta(0, best.text, [], best.finish_reason)
        else:
            [output] = completions([best])
            delta = Delta(0, output.text, [], output.finish_reason or "stop", output.stop_reason)
        self._outcome = "length" if delta.finish_reason == "length" else "stop"
        branch = best if isinstance(best, Branch) else None
        tree = self.llm.tree(request, branch, self.strategy) if self.tree else None
        _ = tree and tree.nodes  # drawn now, while nobody changes anything
        return [*updates, Searched(delta, tree, None if self.growth is None else self.growth.node(branch))]

    @property
    def outcome(self) -> Outcome:
        """See `Watcher.outcome`."""
        return self._outcome
