"""Requests to a server that speaks OpenAI's API, so many at a time or by chance, and how long they take."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from treewise.bench.loads import Demand, Load, rates
from treewise.bench.runs import Facts
from treewise.bench.steps import percentiles
from treewise.bench.texts import PROMPTS
from treewise.config import check_integer

if TYPE_CHECKING:
    from aiohttp import ClientSession

KEY = "OPENAI_API_KEY"
LONGEST_LINE = 1 << 22
"""Bytes of an event, of a tree for example."""


@dataclass(frozen=True)
class Remote:
    """A server to ask instead of an engine, and what it is sent, a flag each.

    Parameters
    ----------
    url : str
        Of a server that speaks OpenAI's API, such as http://localhost:8000: it is asked instead of an engine in this
        process. The key in OPENAI_API_KEY is sent along if there is one.
    api : str
        completions or chat.
    prompts : str
        tokens: ids by chance; text: words by chance, of about a token each. What is left out is tokens for completions
        and text for chat, which has no other.
    vocab_size : int
        Ids by chance are below this.
    dataset_jsonl : Path
        Prompts instead of those by chance: a file with a line of JSON each that has prompt (text or ids) or messages.
        Where they do not suffice, they come again.
    shared_prefix_tokens : int
        Tokens that all prompts begin with; behind them no two are alike.
    extra_body : str
        JSON of what else each request has, as {"ignore_eos": true}, without which answers may end early; {} for servers
        that refuse what OpenAI does not know.
    request_timeout : float
        Seconds after which a request counts as failed.
    """

    url: str | None = None
    api: Literal["completions", "chat"] = "completions"
    prompts: Literal["tokens", "text"] | None = None
    vocab_size: int = 30_000
    dataset_jsonl: Path | None = None
    shared_prefix_tokens: int = 0
    extra_body: str = '{"ignore_eos": true}'
    request_timeout: float = 600.0

    def check(self, demand: Demand) -> None:
        """Refuse what cannot be asked.

        Raises
        ------
        ValueError
            It names the field.
        """
        parts = urlsplit(self.base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: {self.url!r} is not a URL such as http://localhost:8000")
        if self.api == "chat" and self.prompts == "tokens":
            raise ValueError("prompts: chat takes no token ids; choose text")
        check_integer("vocab_size", self.vocab_size, 1)
        check_integer("shared_prefix_tokens", self.shared_prefix_tokens, 0, demand.input_tokens - 1)
        if self.dataset_jsonl is not None and self.shared_prefix_tokens:
            raise ValueError("shared_prefix_tokens: the prompts of dataset_jsonl are what they are")
        if not self.request_timeout > 0:
            raise ValueError(f"request_timeout must be positive, not {self.request_timeout!r}")
        self.extra()
        if importlib.util.find_spec("aiohttp") is None:
            raise ValueError("url: needs aiohttp; pip install 'treewise[bench]'")

    @property
    def base(self) -> str:
        """The URL that ``/completions`` and others come behind."""
        url = (self.url or "").rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"

    def extra(self) -> dict[str, Any]:
        """Read what else each request has."""
        try:
            extra = json.loads(self.extra_body)
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise ValueError(f"extra_body: {self.extra_body!r} is not a JSON object")
        return extra

    def loads(self, demand: Demand) -> list[Load]:
        """Make the loads that `demand` asks for."""
        made = []
        for name, most, rate in demand.levels():
            count = demand.num_prompts or (4 * most if rate is None else most)
            made.append(Load(name, most, self.prompts_of(demand, count, first=1000), demand.output_tokens, rate))
        return made

    def prompts_of(self, demand: Demand, count: int, first: int) -> Sequence[Any]:
        """Draw prompts, of which others have other numbers from `first` on, or read them."""
        if self.dataset_jsonl is not None:
            return list(islice(cycle(read_prompts(self.dataset_jsonl, self.api)), count))
        if self.prompts == "text" or self.api == "chat":
            shared = random_words(self.shared_prefix_tokens, -1)
            own = demand.input_tokens - self.shared_prefix_tokens
            return [" ".join([*shared, *random_words(own, first + i)]) for i in range(count)]
        return demand.prompts(count, self.vocab_size, self.shared_prefix_tokens, first)

    def run(self, load: Load, seed: int, model: str | None = None) -> Facts:
        """Put a load on the server.

        Parameters
        ----------
        load : Load
        seed : int
            Of arrivals and of what the server draws.
        model : str, optional
            As the server calls it; the first that it lists if left out.

        Returns
        -------
        dict
            What it took, and ``errors``: how many requests failed, by how.

        Raises
        ------
        ValueError
            If no request succeeded.
        """
        answers, seconds = asyncio.run(self._run(load, seed, model))
        good = [answer for answer in answers if answer.error is None]
        errors = Counter(answer.error for answer in answers if answer.error is not None)
        if not good:
            raise ValueError(f"url: every request to {self.base} failed; {errors.most_common(1)[0][0]}")
        given = [answer.prompt_tokens for answer in good if answer.prompt_tokens is not None]
        return {
            **rates(len(good), sum(answer.num_tokens for answer in good), seconds),
            "errors": dict(errors),
            "prompt_tokens": sum(given) / len(given) if given else None,
            "ttft_s": percentiles([answer.times[0] - answer.asked for answer in good if answer.times]),
            "tpot_ms": percentiles([answer.pace * 1e3 for answer in good if answer.pace is not None]),
            "itl_ms": percentiles([gap * 1e3 for answer in good for gap in answer.gaps()]),
            "e2e_s": percentiles([answer.ended - answer.asked for answer in good]),
        }

    async def _run(self, load: Load, seed: int, model: str | None) -> tuple[list[Answer], float]:
        """Ask for everything; the answers, and the seconds from the first question to the last answer."""
        import aiohttp

        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=self.request_timeout)
        options: dict[str, Any] = {"timeout": timeout, "headers": headers, "read_bufsize": LONGEST_LINE}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), **options) as session:
            name = model or await self._first_model(session)
            arrivals, turn = load.arrivals(seed), asyncio.Semaphore(load.concurrency)
            start = perf_counter()

            async def client(i: int) -> Answer:
                if load.rate is not None:
                    await asyncio.sleep(max(0.0, start + arrivals[i] - perf_counter()))
                async with turn:
                    answer = Answer(perf_counter() if load.rate is None else start + arrivals[i])
                    body = {**self._question(load.prompts[i]), "model": name, "max_tokens": load.new_tokens}
                    body |= {"temperature": 1.0, "seed": seed + i, "stream": True, **self.extra()}
                    await self._ask(session, body | {"stream_options": {"include_usage": True}}, answer)
                    return answer

            answers = await asyncio.gather(*map(client, range(len(load.prompts))))
        return answers, max(answer.ended for answer in answers) - start

    async def _first_model(self, session: ClientSession) -> str:
        import aiohttp

        try:
            async with session.get(f"{self.base}/models") as response:
                said = await response.json(content_type=None)
                return str(said["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"url: {self.base}/models lists no model ({what}); is a server there?") from error

    def _question(self, prompt: Any) -> dict[str, Any]:
        if self.api == "completions":
            return {"prompt": prompt}
        return {"messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}

    async def _ask(self, session: ClientSession, body: dict[str, Any], answer: Answer) -> None:
        """Ask one question, and note when what came."""
        import aiohttp

        path = "chat/completions" if self.api == "chat" else "completions"
        try:
            async with session.post(f"{self.base}/{path}", json=body) as response:
                if response.status != 200:
                    answer.fail(f"{response.status}: {await response.text()}")
                    return
                async for line in response.content:
                    if line.startswith(b"data:"):
                        answer.take(line[5:].strip())
            if not answer.done:
                answer.fail("the stream ended before [DONE]")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            answer.fail(f"{type(error).__name__}: {error}")
        finally:
            answer.ended = perf_counter()


@dataclass
class Answer:
    """What came of one request; times are readings of `perf_counter`.

    Attributes
    ----------
    times : list of float
        When each piece of text came.
    prompt_tokens, completion_tokens : int or None
        As the server counts them, if it does.
    """

    asked: float
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    done: bool = False
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer; pieces of text, if the server does not count."""
        return len(self.times) if self.completion_tokens is None else self.completion_tokens

    @property
    def pace(self) -> float | None:
        """Seconds a token behind the first; None where there are none."""
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1) if self.times and self.num_tokens > 1 else None

    def gaps(self) -> list[float]:
        """Return the seconds between pieces."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    def fail(self, reason: str) -> None:
        """Note the first thing that went wrong, in a line."""
        self.error = self.error or " ".join(reason.split())[:200]

    def take(self, data: bytes) -> None:
        """Take what one event of the stream holds."""
        if data == b"[DONE]":
            self.done = True
            return
        now = perf_counter()
        chunk = json.loads(data)
        if error := chunk.get("error"):
            self.fail(str(error.get("message", error) if isinstance(error, dict) else error))
        if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in chunk.get("choices", ())):
            self.times.append(now)
        if usage := chunk.get("usage"):
            self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def random_words(count: int, seed: int) -> list[str]:
    """Draw words of English texts; a token each, but for the rarer ones."""
    words = sorted({word for texts in PROMPTS.values() for text in texts for word in text.split() if word.isalpha()})
    return random.Random(seed).choices(words, k=count)


def read_prompts(file: Path, api: str) -> list[Any]:
    """Read the prompts of a file with a line of JSON each, as the API takes them.

    Raises
    ------
    ValueError
        If a line has none.
    """
    prompts: list[Any] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            messages, prompt = entry.get("messages"), entry.get("prompt")
        except (ValueError, AttributeError):
            messages = prompt = None
        found = messages or prompt if api == "chat" else prompt
        if not found:
            wanted = "messages or prompt" if api == "chat" else "prompt"
            raise ValueError(f"dataset_jsonl: line {number} of {file} is no JSON object with {wanted}")
        prompts.append(found)
    if not prompts:
        raise ValueError(f"dataset_jsonl: {file} has no prompts")
    return prompts
