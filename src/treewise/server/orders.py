"""What the bodies of requests ask for: prompts, parameters and programs, all of it checked."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treewise.branch import Branch
from treewise.codec import checked_tokens
from treewise.config import BeamSearchParams, SamplingParams
from treewise.engine import Program
from treewise.grammar import Grammar
from treewise.llm import LLM, sample, search_beams, sparsity_policy
from treewise.outputs import plain
from treewise.sampler import row_key
from treewise.search import STRATEGIES
from treewise.server.choices import Choices, Prompt
from treewise.server.driver import Part, Ticket
from treewise.server.errors import ApiError
from treewise.server.jobs import Job
from treewise.server.responses import ChatForm, CompletionForm, Form
from treewise.server.schema import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    Sampling,
    StructuredOutputs,
)
from treewise.server.searches import Search, parameters
from treewise.server.settings import ServerOptions

COMPLETION_TOKENS = 16
"""What `/v1/completions` decodes where `max_tokens` is left out, as OpenAI's does."""

SAMPLED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
"""Fields that say how tokens are drawn, which beam search does not."""

STOPPING = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output")
BEAM = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")


_GRAMMARS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "json_object": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}


@dataclass(frozen=True)
class Order:
    """A request that has been understood.

    Attributes
    ----------
    ticket : Ticket
    form : Form
        How its choices are written.
    num_choices : int
    stream, include_usage : bool
    """

    ticket: Ticket
    form: Form
    num_choices: int
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class _Task:
    """What is done with each prompt."""

    strategy: str
    program: Program
    watcher: Choices | Search
    num_choices: int = 1
    token_budget: int | None = None


class Orders:
    """Reads requests on behalf of one server.

    Parameters
    ----------
    llm : LLM
    options : ServerOptions
    model : str
        What requests call the model.
    """

    def __init__(self, llm: LLM, options: ServerOptions, model: str) -> None:
        self.llm = llm
        self.options = options
        self.model = model
        engine = llm.engine
        room = min(llm.max_model_len, engine.kv.num_slots - 1)
        self.max_prompt_tokens = min(options.max_prompt_tokens or room, room)

    # ------------------------------------------------------------------ endpoints

    def completion(
        self, body: CompletionRequest, arrived: float, trace: Mapping[str, str], seed: int | None = None
    ) -> Order:
        """Read the body of `/v1/completions`.

        Raises
        ------
        ApiError, ValueError
            If it asks for what cannot be done, or more than is allowed.
        """
        self.check_model(body.model)
        if body.suffix:
            raise ApiError("suffix: text is continued at its end only; leave it out", param="suffix")
        texts = self._texts(body.prompt)
        if body.search is not None and len(texts) > 1:
            raise ApiError(f"search: it takes one prompt, not {len(texts)}", param="search")
        prompts = [self._encoded(text, body.parse_special) for text in texts]
        top = body.logprobs
        if top is not None and top > self.options.max_logprobs:
            raise self._too_many("logprobs", top, self.options.max_logprobs)
        echo: list[Prompt] = []
        if body.echo:
            each = zip(texts, prompts, strict=True)
            echo = [Prompt.of(self.llm.tokenizer, *pair) for pair in each]
        max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        task = self._task(body, max_tokens, top, echo, body.best_of)
        form = CompletionForm(self.llm.tokenizer, top)
        return self._order("completion", body, task, prompts, form, arrived, trace, seed)

    def chat(
        self, body: ChatCompletionRequest, arrived: float, trace: Mapping[str, str], seed: int | None = None
    ) -> Order:
        """Read the body of `/v1/chat/completions`.

        Raises
        ------
        ApiError, ValueError
            If it asks for what cannot be done, or more than is allowed.
        """
        self.check_model(body.model)
        if body.tools or body.tool_choice not in (None, "none", "auto"):
            raise ApiError("tools: this server calls no functions; leave them out", param="tools")
        prompt = self.conversation(body.messages, body.add_generation_prompt)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("top_logprobs: it needs logprobs to be true", param="top_logprobs")
        top = (body.top_logprobs or 0) if body.logprobs else None
        if top is not None and top > self.options.max_logprobs:
            raise self._too_many("top_logprobs", top, self.options.max_logprobs)
        if None not in (body.max_tokens, body.max_completion_tokens):
            raise ApiError("max_completion_tokens: give it or max_tokens, not both", param="max_completion_tokens")
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        task = self._task(body, max_tokens, top, (), None)
        return self._order("chat", body, task, [prompt], ChatForm(self.llm.tokenizer, top), arrived, trace, seed)

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model; without a name this server's is meant.

        Raises
        ------
        ApiError
        """
        if name is not None and name != self.model:
            raise ApiError(
                f"model: {name!r:.200} is not here; this server has {self.model!r}", 404, "model", "model_not_found"
            )

    def conversation(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> list[int]:
        """Return the tokens of a conversation, in the model's chat template.

        Raises
        ------
        ApiError
            If the model has none, or it refuses the messages.
        """
        if not self.llm.tokenizer.has_chat_template:
            raise ApiError("messages: this model has no chat template; use /v1/completions", param="messages")
        turns = []
        for place, message in enumerate(messages):
            turn = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
            if turn.get("tool_calls") or turn.get("function_call"):
                raise ApiError(f"messages[{place}]: this server calls no functions", param="messages")
            content = message.content
            text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
            turns.append({**turn, "role": message.role, "content": text})
        try:
            tokens = self.llm.tokenizer.apply_chat_template(turns, add_generation_prompt)
        except ValueError as error:
            raise ApiError(f"messages: {error}", param="messages") from None
        return self._fitting(tokens, "messages")

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out.

        Raises
        ------
        ValueError
            If one of them is not in the vocabulary.
        """
        tokenizer = self.llm.tokenizer
        return plain(checked_tokens("tokens", tokens, tokenizer.vocab_size), tokenizer)

    # ------------------------------------------------------------------ prompts

    def _texts(self, prompt: Any) -> list[Any]:
        """Return one prompt or several as a list."""
        several = prompt if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], str | list)) else [prompt]
        if not several:
            raise ApiError("prompt: there is none", param="prompt")
        if len(several) > self.options.max_prompts:
            raise self._too_many("prompt", len(several), self.options.max_prompts)
        return several

    def _encoded(self, prompt: str | list[int], parse_special: bool) -> list[int]:
        tokenizer = self.llm.tokenizer
        if isinstance(prompt, str):
            return self._fitting(tokenizer.encode(prompt, parse_special=parse_special), "prompt")
        return self._fitting(checked_tokens("prompt", prompt, tokenizer.vocab_size), "prompt")

    def _fitting(self, tokens: list[int], field: str) -> list[int]:
        if not tokens:
            raise ApiError(f"{field}: it has no tokens, and this model puts none in front by itself", param=field)
        if len(tokens) > self.max_prompt_tokens:
            message = f"{field}: {len(tokens)} tokens are more than this server takes, {self.max_prompt_tokens}"
            raise ApiError(message, param=field, code="context_length_exceeded")
        return tokens

    # ------------------------------------------------------------------ what is done with them

    def _order(
        self,
        kind: str,
        body: Sampling,
        task: _Task,
        prompts: Sequence[list[int]],
        form: Form,
        arrived: float,
        trace: Mapping[str, str],
        seed: int | None,
    ) -> Order:
        if body.namespace is not None and body.cache_salt is not None:
            raise ApiError("cache_salt: it is another name of namespace; give one of them", param="cache_salt")
        if body.kv_budget is not None and body.kv_sparsity is None:
            raise ApiError("kv_budget: it is a setting of a policy; give kv_sparsity too", param="kv_budget")
        if body.stream_options is not None and not body.stream:
            raise ApiError("stream_options: they need stream to be true", param="stream_options")
        sparsity = self.llm.kv_sparsity
        if body.kv_sparsity is not None:
            budget = self.llm.kv_budget if body.kv_budget is None else body.kv_budget
            try:
                sparsity = sparsity_policy(body.kv_sparsity, budget)
                if sparsity is not None:
                    self.llm.engine.thinner.check(sparsity)
            except ValueError as error:
                raise ApiError(f"kv_sparsity: {error}", param="kv_sparsity") from None
        num_choices = len(prompts) * task.num_choices
        if num_choices > max(self.options.max_n, self.options.max_prompts):
            raise self._too_many("n", num_choices, max(self.options.max_n, self.options.max_prompts))
        job = Job(
            id=f"{form.id_prefix}-{uuid.uuid4().hex}",
            kind="search" if isinstance(task.watcher, Search) else kind,
            strategy=task.strategy,
            prompt_tokens=sum(map(len, prompts)),
            arrived=arrived,
            trace=trace,
            prompts=prompts,
        )
        seeds = [
            body.seed if seed is None or body.seed is not None else row_key(seed, (i,)) for i in range(len(prompts))
        ]
        ticket = Ticket(
            job,
            [Part(task.program, tokens, own, task.token_budget) for tokens, own in zip(prompts, seeds, strict=True)],
            task.watcher,
            body.priority,
            body.namespace or body.cache_salt or "",
            sparsity,
        )
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        return Order(ticket, form, num_choices, bool(body.stream), include_usage)

    def _task(
        self, body: Sampling, max_tokens: int | None, top: int | None, echo: Sequence[Prompt], best_of: int | None
    ) -> _Task:
        if max_tokens is not None and max_tokens > self.llm.max_model_len:
            raise self._too_many("max_tokens", max_tokens, self.llm.max_model_len)
        for name, value in (("n", body.n), ("best_of", best_of), ("beam_width", body.beam_width)):
            if value is not None and value > self.options.max_n:
                raise self._too_many(name, value, self.options.max_n)
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if len(stop) > self.options.max_stop:
            raise self._too_many("stop", len(stop), self.options.max_stop)
        if (longest := max(map(len, stop), default=0)) > self.options.max_stop_length:
            raise self._too_many("stop: characters", longest, self.options.max_stop_length)
        if body.search is not None:
            return self._search(body, top, echo, best_of)
        given: dict[str, Any] = {name: getattr(body, name) for name in STOPPING if getattr(body, name) is not None}
        given |= {"max_tokens": max_tokens, "logprobs": top, "grammar": self._grammar(body)}
        if body.use_beam_search:
            return self._beams(body, given, top, echo, best_of)
        for name in ("beam_width", *BEAM):
            if getattr(body, name) is not None:
                raise ApiError(f"{name}: it is an option of beam search; give use_beam_search too", param=name)
        given |= {name: getattr(body, name) for name in SAMPLED if getattr(body, name) is not None}
        if body.logit_bias is not None:
            given["logit_bias"] = {self._token(token): bias for token, bias in body.logit_bias.items()}
        n = body.n or 1
        if best_of is not None and best_of < n:
            raise ApiError(f"best_of: {best_of} completions are not enough for n={n}", param="best_of")
        if best_of is not None and best_of > n and body.stream:
            raise ApiError("best_of: which are the best is known at the end only; leave out stream", param="best_of")
        params = SamplingParams(n=best_of or n, **given, prompt_logprobs=top if echo else None)
        params.check_vocabulary(self.llm.engine.limits.vocab_size)
        in_step = self._in_step(body.speculate)

        async def generate(root: Branch) -> Any:
            return await sample(root, params, in_step=in_step)

        choices = Choices(
            self.llm.tokenizer,
            n,
            stream=bool(body.stream),
            logprobs=top is not None,
            echo=echo,
            select=best_of is not None,
        )
        return _Task("generate", generate, choices, n)

    def _beams(
        self, body: Sampling, given: dict[str, Any], top: int | None, echo: Sequence[Prompt], best_of: int | None
    ) -> _Task:
        for name in (*SAMPLED, "seed"):
            if getattr(body, name) is not None and not (name == "temperature" and body.temperature == 0):
                raise ApiError(f"{name}: beam search does not sample; leave it out", param=name)
        if echo and top is not None:
            raise ApiError("logprobs: of a prompt they are not to be had with beam search", param="logprobs")
        given |= {name: getattr(body, name) for name in BEAM if getattr(body, name) is not None}
        n = body.n or 1
        width = body.beam_width or best_of or n
        if n > width:
            raise ApiError(f"beam_width: {width} beams are not enough for n={n}", param="beam_width")
        params = BeamSearchParams(width, num_return_sequences=n, **given)
        params.stopping.check_vocabulary(self.llm.engine.limits.vocab_size)

        async def beam(root: Branch) -> Any:
            return await search_beams(root, params)

        return _Task("beam", beam, Choices(self.llm.tokenizer, n, logprobs=top is not None, echo=echo), n)

    def _search(self, body: Sampling, top: int | None, echo: Sequence[Prompt], best_of: int | None) -> _Task:
        """Read the field `search`; other fields of the body are parameters of the strategy, if it has them."""
        settings = dict(body.search or {})
        name, tree = settings.pop("strategy", None), settings.pop("tree", False)
        name = name.replace("-", "_") if isinstance(name, str) else name
        if not isinstance(name, str) or name not in STRATEGIES:
            raise ApiError(f"search.strategy: {name!r:.200} is not one of {', '.join(STRATEGIES)}", param="search")
        if not isinstance(tree, bool):
            raise ApiError(f"search.tree: {tree!r:.200} is neither true nor false", param="search")
        known = parameters(name)
        for field, value in settings.items():
            if field not in known:
                message = f"search.{field!s:.100}: {name} has no such parameter; it has {', '.join(known)}"
                raise ApiError(message, param="search")
            known[field].check(value, self.options.max_n)
        refused = {"n": body.n not in (None, 1), "best_of": best_of is not None, "echo": bool(echo)}
        refused |= {"logprobs": top is not None, "use_beam_search": bool(body.use_beam_search)}
        refused |= {"speculate": body.speculate is not None, "logit_bias": body.logit_bias is not None}
        outside = (*SAMPLED, *STOPPING, *BEAM, "beam_width", "max_completion_tokens")
        asked = {field: value for field in outside if (value := getattr(body, field, None)) is not None}
        for field in ("max_tokens", "max_completion_tokens"):
            if field in asked:
                asked["answer_tokens" if "answer_tokens" in known else "max_tokens"] = asked.pop(field)
        if (grammar := self._grammar(body)) is not None:
            asked["grammar"] = grammar
        for field in (*(field for field, wrong in refused.items() if wrong), *(asked.keys() - known.keys())):
            raise ApiError(f"{field}: it cannot be used beside search with the strategy {name}", param=field)
        for field in known.keys() & settings.keys():
            if known[field].is_grammar and settings[field] is not None:
                wanted = StructuredOutputs.model_validate_json(json.dumps(settings[field]))
                settings[field] = self._structured(f"search.{field}", wanted)
        settings = asked | settings
        stop = settings.get("stop", STRATEGIES[name].defaults.get("stop", ()))
        watcher = Search(self.llm, name, [stop] if isinstance(stop, str) else stop, stream=bool(body.stream), tree=tree)
        return _Task(name, STRATEGIES[name].build(**settings), watcher, 1, self.options.max_search_tokens)

    def _in_step(self, speculate: bool | None) -> bool:
        if speculate and self.llm.engine.speculator is None:
            raise ApiError(
                "speculate: this server guesses nothing; it was started without a drafter", param="speculate"
            )
        return speculate is False

    def _token(self, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ApiError(f"logit_bias: {text!r:.100} is not a token id", param="logit_bias")
        return int(text)

    def _grammar(self, body: Sampling) -> Grammar | None:
        """Return what the text must be, in whatever words it is said."""
        asked: dict[str, StructuredOutputs] = {}
        if (wanted := body.response_format) is not None and wanted.type != "text":
            schema = {"type": "object"} if wanted.type == "json_object" else None
            if wanted.type == "json_schema" and wanted.json_schema is not None:
                schema = wanted.json_schema.schema_
            asked["response_format"] = StructuredOutputs.model_validate({"json": schema})
        if body.structured_outputs is not None:
            asked["structured_outputs"] = body.structured_outputs
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(body, f"guided_{kind}")) is not None:
                asked[f"guided_{kind}"] = StructuredOutputs.model_validate({kind: value})
        if len(asked) > 1:
            first, second, *_ = asked
            raise ApiError(f"{second}: it cannot be used beside {first}; give one of them", param=second)
        for field, wanted_text in asked.items():
            return self._structured(field, wanted_text)
        return None

    def _structured(self, field: str, wanted: StructuredOutputs) -> Grammar:
        """Return the grammar of a field."""
        made = {
            "json": wanted.json_,
            "regex": wanted.regex,
            "choice": wanted.choice,
            "grammar": wanted.grammar,
            "json_object": {"type": "object"} if wanted.json_object else None,
        }
        given = {kind: value for kind, value in made.items() if value is not None}
        param = field.partition(".")[0]
        if len(given) != 1:
            raise ApiError(f"{field}: give one of {', '.join(made)}, not {len(given)}", param=param)
        [(kind, value)] = given.items()
        try:
            return _GRAMMARS[kind](value)
        except ValueError as error:
            raise ApiError(f"{field}: {str(error).removeprefix('grammar: ')}", param=param) from None

    def _too_many(self, field: str, count: int, most: int) -> ApiError:
        return ApiError(f"{field}: {count} is more than this server allows, {most}", param=field.partition(":")[0])
