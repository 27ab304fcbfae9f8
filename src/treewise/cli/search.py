"""The verb `search`."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from treewise.cli.options import GrammarOptions, ModelOptions, encode_chat, read_prompt, working
from treewise.config import SparsityOptions
from treewise.results import json_safe, shorten


def search(
    prompt: str | None = None,
    /,
    *,
    strategy: str = "tot",
    n: int | None = None,
    set_values: Annotated[tuple[str, ...], Parameter("--set")] = (),
    chat: bool | None = None,
    system: str | None = None,
    live: bool = False,
    text: bool = False,
    html: Path | None = None,
    json_file: Annotated[Path | None, Parameter("--json")] = None,
    dot: Path | None = None,
    seed: int | None = None,
    grammar: Annotated[GrammarOptions | None, Parameter("*", group="Grammar")] = None,
    options: Annotated[ModelOptions | None, Parameter("*", group="Model and engine")] = None,
    sparsity: Annotated[SparsityOptions | None, Parameter("*", group="KV sparsity")] = None,
) -> None:
    """Solve a prompt with a search strategy, and draw its tree.

    The best answer goes to standard output; of rollouts every trajectory, as a line of JSON. Without a file to draw
    to, the tree goes to standard error.

    Parameters
    ----------
    prompt
        The text; without one, standard input is read.
    strategy
        A ready-made program by name; `treewise strategies` lists them.
    n
        How many branches are drawn side by side: answers, beams, or the thoughts of a round or a place.
    set_values
        A parameter of the strategy as key=value, e.g. --set width=5; may be repeated. A grammar is kind:value, e.g.
        --set thought_grammar=regex:[a-z]+, its kind json_schema, regex, choice or lark.
    chat
        Put the prompt in the model's chat template, or, with --no-chat, do not; by default where the model has one.
    system
        System message of the chat.
    live
        Draw the tree on standard error while it grows, where that is a terminal.
    text
        Draw the tree as text on standard output, after the answer.
    html
        Write the tree as one self-contained page.
    json_file
        Write the tree as JSON.
    dot
        Write the tree for Graphviz.
    seed
        The same seed gives the same tree.
    """
    from treewise.live import LiveTree
    from treewise.search import STRATEGIES

    strategy = strategy.replace("-", "_")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: {strategy!r} is not one of {', '.join(STRATEGIES)}")
    if system is not None and chat is False:
        raise ValueError("system: it is a part of a chat; leave out --no-chat")
    entry, options = STRATEGIES[strategy], options or ModelOptions()
    values = parse_settings(set_values)
    given: dict[str, Any] = {}
    if n is not None:
        if entry.width is None:
            raise ValueError(f"n: one number does not say how {strategy} branches; see treewise strategies")
        given[entry.width] = n
    if grammar is not None and (made := grammar.grammar()) is not None:
        given["grammar"] = made
    for name in given.keys() & values.keys():
        raise ValueError(f"set: {name} is given by {'--n' if name == entry.width else 'a grammar'} already")
    for name in entry.grammars:
        if (word := values.get(name)) is not None:
            try:
                values[name] = GrammarOptions.read(word)
            except ValueError as error:
                raise ValueError(f"set: {name}: {error}") from None
    question = read_prompt(prompt)
    program = entry.build(**values, **given)
    llm = options.load(sparsity)
    if chat is None:
        chat = llm.tokenizer.has_chat_template or system is not None
    request = encode_chat(llm, question, system) if chat else question
    view = LiveTree() if live else None
    with nullcontext() if live else working(f"Searching with {strategy}"):
        [result] = llm.run(program, [request], seed=seed, live=view)
    tree = replace(result.tree, strategy=strategy, model=Path(options.model).name)
    if result.best is not None:
        print(result.best.text)
    else:
        for item in result.value:
            print(json.dumps(json_safe(item)))
    if text:
        print(tree.to_text())
    if html is not None:
        tree.to_html(html, title=f"{strategy}: {question}"[:100])
    if json_file is not None:
        json_file.write_text(tree.to_json(), encoding="utf-8")
    if dot is not None:
        dot.write_text(tree.to_dot(), encoding="utf-8")
    if not (text or html or json_file or dot):
        from rich.console import Console

        tree.print(Console(stderr=True))
    else:
        print(tree.usage.summary(), file=sys.stderr)


def strategies() -> None:
    """List the strategies of `search` and their parameters."""
    from treewise.search import STRATEGIES

    for name, entry in STRATEGIES.items():
        print(f"{name}: {entry.description}")
        for key, value in entry.defaults.items():
            print(f"  --set {key}={shorten(json.dumps(value, default=str), 70)}")


def parse_settings(settings: tuple[str, ...]) -> dict[str, Any]:
    """Read ``key=value`` words; a value is JSON where it can be, else text.

    Raises
    ------
    ValueError
        If a word has no ``=``.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"set: {setting!r} is not of the form key=value")
        try:
            values[key.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            values[key.replace("-", "_")] = value
    return values
