"""What a decoded text must be: JSON, a match of a regular expression, one of several texts, or more."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

JSON_WHITESPACE = r" |\n {0,16}"
"""Between the tokens of JSON: a blank, or a line break and an indentation. Without an end, weak models stay there."""


@dataclass(frozen=True)
class Grammar:
    r"""What the text that an operation decodes must be.

    Make one with `json_schema`, `regex`, `choice` or `lark`; it is checked then. What each of them may say is up to
    `llguidance <https://github.com/guidance-ai/llguidance>`_.

    Attributes
    ----------
    kind : {"json_schema", "regex", "choice", "lark"}
    text : str
        The schema, the regular expression, a JSON list of the choices, or the grammar.

    Raises
    ------
    ValueError
        If llguidance cannot use it, or is not installed; the message says what is wrong.

    Examples
    --------
    >>> Grammar.regex(r"\d{4}-\d{2}")
    Grammar(kind='regex', text='\\d{4}-\\d{2}')
    """

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str

    def __post_init__(self) -> None:
        if self.kind not in _SOURCES:
            raise ValueError(f"grammar: kind must be one of {', '.join(_SOURCES)}, not {self.kind!r}")
        if not isinstance(self.text, str):
            raise ValueError(f"grammar: {self.kind} must be text, not {self.text!r} of type {type(self.text).__name__}")
        wrong, messages = library().LLMatcher.validate_grammar_with_warnings(self.source)
        if wrong:
            raise ValueError(f"grammar: this {self.kind} cannot be used: {' '.join(messages[0].split())}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema describes.

        Parameters
        ----------
        schema : mapping or str
            A JSON schema or its text. Its key ``"x-guidance"`` may set options of llguidance's, such as
            ``{"whitespace_pattern": ""}``; by default `JSON_WHITESPACE` may stand between tokens.
        """
        return cls("json_schema", schema if isinstance(schema, str) else _to_json("json_schema", schema))

    @classmethod
    def regex(cls, expression: str) -> Grammar:
        """Text that a regular expression matches as a whole; the syntax is that of Rust's ``regex``."""
        return cls("regex", expression)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of several texts, none of them empty."""
        return cls("choice", _to_json("choice", choices))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Text of a context-free grammar in llguidance's variant of Lark's notation; it begins with ``start``."""
        return cls("lark", grammar)

    @property
    def source(self) -> str:
        """The grammar as llguidance takes it."""
        return _SOURCES[self.kind](self.text)


def library() -> Any:
    """Import llguidance.

    Raises
    ------
    ValueError
        If it is not installed; the message says how to.
    """
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise ValueError(f"grammar: needs llguidance; pip install 'treewise[grammar]' ({error})") from None


def _to_json(kind: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"grammar: this {kind} cannot be written as JSON: {error}") from None


def _from_json(kind: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"grammar: this {kind} is not JSON: {error}") from None


def _json_schema(text: str) -> str:
    schema = _from_json("json_schema", text)
    if not isinstance(schema, dict):
        raise ValueError(f"grammar: json_schema must be a JSON object, not {text}")
    source: str = library().LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": JSON_WHITESPACE})
    return source


def _regex(text: str) -> str:
    source: str = library().LLMatcher.grammar_from_regex(text)
    return source


def _choice(text: str) -> str:
    choices = _from_json("choice", text)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise ValueError(f"grammar: choice must be a list of texts, at least one and none of them empty, not {text}")
    return "start: " + " | ".join(map(json.dumps, choices))


_SOURCES: dict[str, Callable[[str], str]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "lark": str,
}
