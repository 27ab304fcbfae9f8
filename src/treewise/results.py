"""What comes back, and how a tree is drawn (text, DOT, JSON, one self-contained HTML page)."""

from __future__ import annotations

import html
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

NodeState = Literal["prompt", "live", "kept", "finished", "pruned"]
"""What became of a node: given by the user, still decoding, an inner node on a surviving path, a surviving
leaf that is done, or dropped."""

JSON_FORMAT = "treewise.tree"
JSON_VERSION = 1

MARKS: dict[NodeState, str] = {"prompt": "▸", "live": "…", "kept": "•", "finished": "✓", "pruned": "✗"}
BEST_MARK = "★"


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one candidate at one place.

    Attributes
    ----------
    logprob : float
        Natural logarithm of the probability the model gave it.
    rank : int
        1 for the likeliest token of the vocabulary.
    decoded_token : str
        The candidate's text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class Usage:
    """What a request cost.

    Attributes
    ----------
    prompt_tokens, completion_tokens : int
        Tokens given, and tokens decoded over all branches (a shared token counts once).
    steps : int
        Forward passes that had rows of this request.
    rows : int
        Rows computed in them: prompt tokens not found in the cache, and decoded or appended tokens.
    kv_bytes_read : int
        Bytes of keys and values that attention read over all steps and layers.
    kv_bytes_per_sequence : int
        What attention over every branch on its own would have read in the same steps.
    seconds : float
        From the request's first step to its last, in seconds.
    cached_tokens : int
        Prompt tokens whose keys and values were already there.
    drafts, drafted_tokens, accepted_tokens : int
        Token trees that were guessed and verified, the guesses in them, and those that were right.
    kv_bytes_held : int
        Bytes of the pages that its branches held when it ended, what others shared included.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    rows: int = 0
    kv_bytes_read: int = 0
    kv_bytes_per_sequence: int = 0
    seconds: float = 0.0
    cached_tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    kv_bytes_held: int = 0

    @property
    def accepted_length(self) -> float:
        """Tokens that a branch gained in a step with guesses, the one that was no guess included; 1 without any."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens a second over the whole request; 0 where no time was taken."""
        return self.completion_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def kv_ratio(self) -> float:
        """How many times more KV bytes per-sequence attention would have read; 1 where nothing was read."""
        return self.kv_bytes_per_sequence / self.kv_bytes_read if self.kv_bytes_read else 1.0

    def summary(self) -> str:
        """Say it in one line, for people."""
        parts = [
            f"{self.completion_tokens:,} tokens in {self.seconds:.2f} s ({self.tokens_per_second:.1f} tokens/s)",
            f"prompt {self.prompt_tokens:,} tokens" + (f", {self.cached_tokens:,} cached" * bool(self.cached_tokens)),
        ]
        if self.kv_bytes_read:
            parts.append(
                f"KV read {format_bytes(self.kv_bytes_read)}; one sequence at a time "
                f"{format_bytes(self.kv_bytes_per_sequence)} ({self.kv_ratio:.1f}x)"
            )
        if self.drafts:
            parts.append(
                f"{self.accepted_tokens:,} of {self.drafted_tokens:,} guesses right, "
                f"{self.accepted_length:.2f} tokens a step with guesses"
            )
        return "; ".join(parts)


@dataclass(frozen=True)
class TreeNode:
    """One node of a finished tree: tokens with no branching between them.

    Attributes
    ----------
    id : int
        Unique in its tree.
    parent : int or None
        Id of the parent; ``None`` for a root.
    text : str
        The node's own text.
    token_ids : list of int
        Its own tokens.
    logprobs : list of (float or None)
        The log-probability of each token when it was sampled; ``None`` for tokens that were given.
    logprob : float
        Sum over all sampled tokens from the root down to this node's last one.
    state : {"prompt", "live", "kept", "finished", "pruned"}
        What became of it.
    finish_reason : str or None
        ``"stop"`` or ``"length"`` where a branch ended here.
    score : float or None
        What the program thought of it.
    token_texts : list of str
        The text of each token, for drawings; may be left empty.
    visits : int or None
        How often a search came by, where it counted.
    """

    id: int
    parent: int | None
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    logprob: float = 0.0
    state: NodeState = "kept"
    finish_reason: str | None = None
    score: float | None = None
    token_texts: list[str] = field(default_factory=list)
    visits: int | None = None


@dataclass(frozen=True)
class Tree:
    """A finished tree of tokens, and its drawings.

    Attributes
    ----------
    nodes : list of TreeNode
        Parents come before their children, siblings in the order they were branched.
    usage : Usage
        What it cost.
    best : int or None
        Id of the leaf that the program chose, if it chose one.
    strategy, model : str
        What made the tree, for drawings.

    Raises
    ------
    ValueError
        If ids repeat, a parent does not come before its child, or ``best`` is no node.

    Examples
    --------
    >>> tree = Tree([TreeNode(0, None, "2 + 2 =", state="prompt"), TreeNode(1, 0, " 4", [604], [-0.25], -0.25)])
    >>> print(tree.to_text())
    ▸ 2 + 2 =  (0 tokens)
    ↓ •  4  (1 token, logp -0.25)
    """

    nodes: list[TreeNode]
    usage: Usage = field(default_factory=Usage)
    best: int | None = field(default_factory=lambda: None)
    strategy: str = ""
    model: str = ""

    @classmethod
    def drawn_by(cls, draw: Callable[[], tuple[list[TreeNode], int | None]], **facts: Any) -> Tree:
        """Return a tree whose nodes, and which of them is the best, are found out when somebody asks for them.

        A wide search leaves a hundred thousand nodes, and nobody may look.
        """
        tree = cls([], **facts)
        for name in ("nodes", "best"):
            del vars(tree)[name]
        vars(tree)["_draw"] = draw
        return tree

    def __getattr__(self, name: str) -> Any:
        if name not in ("nodes", "best") or "_draw" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        vars(self)["nodes"], vars(self)["best"] = vars(self).pop("_draw")()
        self.__post_init__()
        return getattr(self, name)

    def __getstate__(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def __post_init__(self) -> None:
        """Check what every drawing relies on."""
        seen: set[int] = set()
        for node in self.nodes:
            if node.id in seen:
                raise ValueError(f"nodes: id {node.id} appears twice")
            if node.parent is not None and node.parent not in seen:
                raise ValueError(f"nodes: node {node.id} comes before its parent {node.parent}")
            if node.state not in get_args(NodeState):
                raise ValueError(f"nodes: state {node.state!r} is not one of {', '.join(get_args(NodeState))}")
            seen.add(node.id)
        if self.best is not None and self.best not in seen:
            raise ValueError(f"best: there is no node {self.best}")

    def children(self) -> dict[int | None, list[TreeNode]]:
        """List the children of each node by its id, the roots under ``None``."""
        result: dict[int | None, list[TreeNode]] = {None: []} | {node.id: [] for node in self.nodes}
        for node in self.nodes:
            result[node.parent].append(node)
        return result

    def best_path(self) -> list[TreeNode]:
        """List the nodes from the root to the chosen leaf; empty where none was chosen."""
        by_id = {node.id: node for node in self.nodes}
        path = []
        identity = self.best
        while identity is not None:
            path.append(by_id[identity])
            identity = by_id[identity].parent
        return path[::-1]

    def print(self, console: Console | None = None) -> None:
        """Draw the tree on the terminal.

        Parameters
        ----------
        console : rich.console.Console, optional
            Where to draw; standard output if left out.
        """
        from rich.console import Console
        from rich.text import Text

        console = console or Console()
        for _, line in self.lines(console.width):
            console.print(line, overflow="ellipsis", no_wrap=True)
        if self.usage.steps:
            console.print(Text(self.usage.summary(), style="dim"))

    def lines(self, width: int) -> Iterator[tuple[TreeNode, Text]]:
        """Yield each node with its line in a terminal of `width` characters."""
        from rich.text import Text

        on_best_path = {node.id for node in self.best_path()}
        styles = {"prompt": "bold", "live": "italic", "kept": "", "finished": "green", "pruned": "dim strike"}
        for prefix, node in self._walk():
            best = node.id in on_best_path and node.state != "prompt"
            facts = "  " + _facts(node)
            line = Text(prefix, style="dim", no_wrap=True, overflow="ellipsis")
            line.append(_mark(node, best) + " ", style="bold yellow" if best else "")
            room = max(16, width - len(prefix) - len(facts) - 2)
            line.append(shorten(node.text, room), style="bold" if best else styles[node.state])
            line.append(facts, style="dim")
            yield node, line

    def to_text(self, width: int = 72) -> str:
        """Draw the tree as plain text, the same for the same tree.

        Parameters
        ----------
        width : int
            Characters kept of each node's text.
        """
        on_best_path = {node.id for node in self.best_path()}
        return "\n".join(
            f"{prefix}{_mark(node, node.id in on_best_path)} {shorten(node.text, width)}  {_facts(node)}"
            for prefix, node in self._walk()
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what :meth:`to_json` writes, in dicts and lists."""
        content = {"format": JSON_FORMAT, "version": JSON_VERSION, **json_safe(self)}
        content["usage"] |= {"tokens_per_second": self.usage.tokens_per_second, "kv_ratio": self.usage.kv_ratio}
        safe: dict[str, Any] = json_safe(content)
        return safe

    def to_json(self, indent: int | None = None) -> str:
        """Write the tree as JSON, which :meth:`from_json` reads back.

        The object has ``format`` (``"treewise.tree"``), ``version`` (1), ``strategy``, ``model``, ``best``, ``usage``
        and ``nodes``; the last two have the fields of `Usage` and `TreeNode`. Numbers that JSON has no word
        for are the strings ``"-Infinity"``, ``"Infinity"`` and ``"NaN"``. A reader should refuse other versions.
        """
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Tree:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        ValueError
            If the text is no such tree, or of another version.
        """
        content = json.loads(text)
        found = (content.get("format"), content.get("version")) if isinstance(content, dict) else (None, None)
        if found != (JSON_FORMAT, JSON_VERSION):
            raise ValueError(f"format: expected {JSON_FORMAT} version {JSON_VERSION}, found {found[0]} {found[1]}")
        try:
            nodes = [
                TreeNode(
                    **node
                    | {
                        "logprobs": [None if value is None else float(value) for value in node["logprobs"]],
                        "logprob": float(node["logprob"]),
                        "score": None if node["score"] is None else float(node["score"]),
                    }
                )
                for node in content["nodes"]
            ]
            usage = Usage(**{name: content["usage"][name] for name in Usage.__dataclass_fields__})
            return cls(nodes, usage, content["best"], content["strategy"], content["model"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"nodes: not a tree of version {JSON_VERSION}: {error}") from error

    def to_dot(self) -> str:
        """Write the tree for Graphviz: the best path thick, pruned nodes dashed."""
        on_best_path = {node.id for node in self.best_path()}
        place = {node.id: index for index, node in enumerate(self.nodes)}
        lines = [
            "digraph treewise {",
            '  rankdir=LR; bgcolor="transparent"; edge [arrowhead=none, color="#7c8a84"];',
            '  node [shape=box, style=rounded, fontname="sans-serif", fontsize=10, color="#7c8a84"];',
        ]
        for node in self.nodes:
            best = node.id in on_best_path
            rows = textwrap.wrap(shorten(node.text, 120), 40, drop_whitespace=False) or [""]
            label = "".join(_dot_escape(row) + "\\l" for row in [*rows, f"{_mark(node, best)} {_facts(node)}"])
            style = ', penwidth=2.5, color="#0b7a6a"' if best else ""
            if node.state == "pruned":
                style = ', style="rounded,dashed", fontcolor="#6b7671"'
            lines.append(f'  n{place[node.id]} [label="{label}"{style}];')
            if node.parent is not None:
                edge = ' [penwidth=2.5, color="#0b7a6a"]' if best else " [style=dashed]" * (node.state == "pruned")
                lines.append(f"  n{place[node.parent]} -> n{place[node.id]}{edge};")
        return "\n".join([*lines, "}"]) + "\n"

    def to_html(self, path: str | PathLike[str] | None = None, title: str | None = None) -> str:
        """Draw the tree as one HTML page that needs no network and no other file.

        Parameters
        ----------
        path : path, optional
            Where to write the page too.
        title : str, optional
            The page's heading; the strategy's name if left out.

        Returns
        -------
        str
            The page.
        """
        template = resources.files("treewise").joinpath("results.html").read_text(encoding="utf-8")
        values = {
            "title": html.escape(title or (f"treewise: {self.strategy}" if self.strategy else "treewise")),
            "text": html.escape(self.to_text()),
            # The JSON is ASCII; without these three no text in it can end the script element or open a comment.
            "tree": self.to_json().replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
        }
        page = re.sub(r"@@(title|text|tree)@@", lambda match: values[match[1]], template)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _walk(self) -> Iterator[tuple[str, TreeNode]]:
        """Walk the tree depth-first with the strokes that stand before each node.

        An only child stands under its parent without indentation, so that long chains stay readable.
        """
        children = self.children()
        stack = [("", "", node) for node in reversed(children[None])]
        while stack:
            stem, joint, node = stack.pop()
            yield stem + joint, node
            below = stem + {"": "", "↓ ": "", "├─ ": "│  ", "└─ ": "   "}[joint]
            family = children[node.id]
            if len(family) == 1:
                stack.append((below, "↓ ", family[0]))
            else:
                joints = ["├─ "] * (len(family) - 1) + ["└─ "]
                stack.extend((below, *child) for child in reversed(list(zip(joints, family, strict=False))))


@dataclass(frozen=True)
class CompletionOutput:
    """One answer: the path of one branch below its prompt.

    Attributes
    ----------
    index : int
        Its place among the request's outputs.
    text : str
        The decoded text, without the stop string unless that was asked for.
    token_ids : list of int
        The decoded tokens.
    cumulative_logprob : float
        Sum of the sampled tokens' log-probabilities.
    logprobs : list of dict of int to Logprob, or None
        For each token the likeliest candidates and the sampled token, by token id; ``None`` unless asked for.
    finish_reason : {"stop", "length"} or None
        Why it ended; ``None`` if it has not.
    stop_reason : str, int or None
        The stop string or stop token that ended it; ``None`` for end of text.
    score : float or None
        What the program thought of it; of beam search, the length-penalised log-probability.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    score: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """All that came of one prompt.

    Attributes
    ----------
    request_id : int
        Counts up in one engine.
    prompt : str or None
        The prompt's text; ``None`` if tokens were given.
    prompt_token_ids : list of int
        Its tokens.
    prompt_logprobs : list of (dict of int to Logprob, or None), or None
        As `CompletionOutput.logprobs` for each token of the prompt, the first ``None``; ``None`` unless asked for.
    outputs : list of CompletionOutput
        The answers.
    tree : Tree
        The whole tree, dropped branches included.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    tree: Tree


@dataclass(frozen=True)
class ProgramOutput:
    """All that came of one run of a program.

    Attributes
    ----------
    value : object
        What the program returned.
    best : CompletionOutput or None
        The branch it returned, if it returned one or a list of them (the first).
    outputs : list of CompletionOutput
        Every branch that was not pruned.
    tree : Tree
        The whole tree, dropped branches included.
    error : BaseException or None
        What the program raised instead of returning, where that was asked for.
    """

    value: Any
    best: CompletionOutput | None
    outputs: list[CompletionOutput]
    tree: Tree
    error: BaseException | None = None


def format_bytes(count: float) -> str:
    """Write a number of bytes in decimal units, e.g. ``1.2 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def shorten(text: str, width: int) -> str:
    """Fit text in one line of at most `width` characters, keeping its start and its end.

    Line breaks become ``⏎``; whatever else a terminal could act on is written as an escape.
    """
    if len(text) > width:
        tail = width // 3
        text = text[: width - tail - 1] + "…" + text[len(text) - tail :]
    visible = "".join(map(_visible, text))
    return visible if len(visible) <= width or visible == text else visible[: width - 1] + "…"


def _visible(character: str) -> str:
    if character == "\n":
        return "⏎"
    if character.isspace():
        return " "
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _mark(node: TreeNode, best: bool) -> str:
    return BEST_MARK if best and node.state != "prompt" else MARKS[node.state]


def _facts(node: TreeNode) -> str:
    count = len(node.token_ids)
    facts = [f"{count:,} token{'s' * (count != 1)}"]
    if node.state != "prompt":
        facts.append(f"logp {node.logprob:.2f}")
    if node.score is not None:
        facts.append(f"score {node.score:.3g}")
    if node.visits is not None:
        facts.append(f"{node.visits:,} visit{'s' * (node.visits != 1)}")
    if node.finish_reason is not None:
        facts.append(node.finish_reason)
    return f"({', '.join(facts)})"


def _dot_escape(text: str) -> str:
    """Escape what Graphviz reads in a quoted label: backslashes, quotes, and entities."""
    return text.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')


def json_safe(value: Any) -> Any:
    """Turn dataclasses into dicts, and floats that JSON cannot hold into their names.

    Python's ``float`` and JavaScript's ``Number`` both read the names back.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: json_safe(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
