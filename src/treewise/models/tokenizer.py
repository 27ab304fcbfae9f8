"""Text to tokens and back, exact to the byte, and chat templates."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from treewise.codec import TokenTexts

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _byte_alphabet() -> dict[str, int]:
    """Bytes by the characters that GPT-2's byte-level vocabularies write them with."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


class Tokenizer:
    """Turns text into the tokens of one model and back.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
        Byte-level BPE, or BPE with SentencePiece's spelling and byte fallback.
    settings : mapping
        Contents of ``tokenizer_config.json``.
    eos_token_ids : iterable of int
        Tokens that end a text, besides the ``eos_token`` of the settings.

    Attributes
    ----------
    eos_token_ids : frozenset of int
        Tokens that end a text.
    bos_token_id : int or None
        Token that begins a text, if the model has one.
    vocab_size : int
        Number of ids that stand for something; a model's logits may have more columns.

    Notes
    -----
    A lone surrogate in a text (half of a UTF-16 pair, which no UTF-8 text can hold) is read as U+FFFD; two that make
    a pair are read as the character they stand for.

    Examples
    --------
    >>> from treewise.models import load_tokenizer
    >>> tokenizer = load_tokenizer("smollm2-135m")  # doctest: +SKIP
    >>> tokenizer.encode("a  0")  # doctest: +SKIP
    [81, 256, 32]
    """

    def __init__(
        self, backend: Backend, settings: Mapping[str, Any] | None = None, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        settings = settings or {}
        self._specials = {name: _content(settings[name]) for name in SPECIAL_NAMES if settings.get(name)}
        self._template_source = _default_template(settings.get("chat_template"))
        self._template: jinja2.Template | None = None
        self._add_bos, self._add_eos = settings.get("add_bos_token"), settings.get("add_eos_token")
        added = backend.get_added_tokens_decoder().items()
        self._texts = TokenTexts(
            lambda token: self._bytes_of(backend.id_to_token(token)),
            {number: b"" if token.special else token.content.encode() for number, token in added},
        )
        steps = backend.decoder.__getstate__() if backend.decoder else b""
        if b'"ByteLevel"' not in steps and b'"ByteFallback"' not in steps and b'"Metaspace"' not in steps:
            raise ValueError("the tokenizer is neither byte-level nor SentencePiece-like: its bytes cannot be told")
        self._byte_level = b'"ByteLevel"' in steps
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._special_id("bos_token")
        eos = self._special_id("eos_token")
        self.eos_token_ids = frozenset(eos_token_ids) | frozenset(() if eos is None else (eos,))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a Transformers folder.

        Raises
        ------
        FileNotFoundError
            The folder holds no tokenizer.
        ValueError
            Its files are damaged, or of an unsupported kind.
        """
        settings = read_json(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        if template.exists():
            settings["chat_template"] = template.read_text("utf-8")
        ends: list[int] = []
        for name in ("generation_config.json", "config.json"):
            declared = read_json(folder / name).get("eos_token_id")
            ends.extend(declared if isinstance(declared, list) else [] if declared is None else [declared])
        return cls(_load_backend(folder), settings, ends)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of special tokens by what they are for, such as ``"eos_token"``."""
        return dict(self._specials)

    @property
    def chat_template(self) -> str | None:
        """The template in Jinja's notation, if there is one."""
        return self._template_source

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`apply_chat_template` can be used."""
        return self._template_source is not None

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Turn text into token ids.

        Parameters
        ----------
        text : str
            Any string; lone surrogates are read as U+FFFD.
        add_special_tokens : bool
            Add the tokens that the model wants around a text (such as bos).
        parse_special : bool
            Read ``<|im_end|>`` and its like in the text as the special tokens they name. Off, they are plain text, so
            that nobody can end a turn by writing so.
        """
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        framed_by_settings = self._add_bos is not None
        with self._lock:  # the backend keeps this choice as a state of its own
            self._backend.encode_special_tokens = not parse_special
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens and not framed_by_settings)
        ids: list[int] = encoding.ids
        if add_special_tokens and framed_by_settings:
            bos = [self.bos_token_id] if self._add_bos and self.bos_token_id is not None else []
            eos = self._special_id("eos_token") if self._add_eos else None
            ids = [*bos, *ids, *([] if eos is None else [eos])]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turn token ids into text; bytes that are no UTF-8 become U+FFFD, ids outside of the vocabulary nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @property
    def token_bytes(self) -> Callable[[int], bytes]:
        """Gives the exact bytes that a token stands for.

        Special tokens, and ids that stand for nothing, give ``b""``. A text's tokens give its UTF-8 bytes when joined,
        except that vocabularies with a prefix space (Llama 2) begin with one space more.
        """
        return self._texts.__getitem__

    def _bytes_of(self, token: str | None) -> bytes:
        if token is None:
            return b""
        if self._byte_level:
            return (
                bytes(map(BYTE_ALPHABET.__getitem__, token)) if BYTE_ALPHABET.keys() >= set(token) else token.encode()
            )
        if byte := BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Write a conversation as the model was trained to see it.

        Parameters
        ----------
        messages : sequence of mappings
            Each with ``role`` and ``content``.
        add_generation_prompt : bool
            End with the beginning of the model's turn.

        Raises
        ------
        ValueError
            The model has no chat template, or the template refuses the messages.
        """
        text = self.render_chat(messages, add_generation_prompt)
        return self.encode(text, add_special_tokens=False, parse_special=True)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Write a conversation as text; see :meth:`apply_chat_template`."""
        if self._template_source is None:
            raise ValueError("this model has no chat template: give it a plain prompt, or load its chat variant")
        for place, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f"messages[{place}] is {message!r}; each must have 'role' and 'content'")
        try:
            if self._template is None:
                self._template = _environment().from_string(self._template_source)
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._specials,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    def _special_id(self, name: str) -> int | None:
        token = self._specials.get(name)
        number: int | None = None if token is None else self._backend.token_to_id(token)
        return number


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file is an empty one.

    Raises
    ------
    ValueError
        The file is not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        contents = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds {type(contents).__name__}, not a JSON object")
    return contents


def _load_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise ValueError(f"{path} cannot be read: {error}") from None
    if not any((folder / name).exists() for name in ("tokenizer.model", "vocab.json")):
        raise FileNotFoundError(f"{folder} holds no tokenizer: neither tokenizer.json, tokenizer.model nor vocab.json")
    from transformers import AutoTokenizer  # slow to import, and only needed to convert older files

    backend: Backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    return backend


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _default_template(templates: str | list[Mapping[str, str]] | None) -> str | None:
    """Pick a template where a model has several by name."""
    if isinstance(templates, list):
        return next((item["template"] for item in templates if item["name"] == "default"), None)
    return templates


class _GenerationBlock(jinja2.ext.Extension):
    """Lets templates mark with ``{% generation %}`` what the model writes, a mark that only training needs."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Make the environment that Transformers renders chat templates in, so that they render the same."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # the filter of jinja2 escapes HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
