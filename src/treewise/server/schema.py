"""The bodies of requests and of errors, with the names of OpenAI's API and, beyond it, of vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
# NOTE: a list ends at its first wrong item; else a body of millions of them would make millions of errors.
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[NonNegative], Field(fail_fast=True)]
Name = Annotated[str, Field(max_length=256)]


class Body(BaseModel):
    """What all bodies have in common: types are not guessed, and unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = Field(False, description="End the stream with a chunk that has the usage.")
    include_obfuscation: bool = Field(False, description="Accepted; streams are never padded.")


class JsonSchema(Body):
    """A named JSON schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text must be, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """What the text must be, in vLLM's words; one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = Field(None, description="A context-free grammar in llguidance's variant of Lark's notation.")
    json_object: bool | None = None


class Sampling(Body):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="A name of `/v1/models`; the model that is served if left out.")
    n: Positive | None = Field(None, description="Completions of each prompt; 1 if left out.")
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: int | None = None
    max_tokens: NonNegative | None = None
    min_tokens: NonNegative | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="By token id, written as a string of digits."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    use_beam_search: bool | None = None
    beam_width: Positive | None = Field(None, description="Of beam search; `n` if left out.")
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_beam_groups: Positive | None = None
    diversity_penalty: Annotated[float, Field(ge=0, le=1000)] | None = None

    search: dict[str, Any] | None = Field(
        None, description="`strategy`, a name of `/strategies`; its parameters; `tree`, to get the whole tree."
    )
    speculate: bool | None = Field(None, description="Whether what follows may be guessed, where the server does.")
    kv_sparsity: Name | None = Field(None, description="Which keys of the prompt stay: a policy by name.")
    kv_budget: Annotated[float, Field(gt=0)] | Positive | None = Field(
        None, description="Tokens that a layer keeps under `kv_sparsity`, or a share of the prompt's, as 0.25."
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(0, description="The higher goes first.")
    namespace: Name | None = Field(None, description="Only requests of one namespace share cached prefixes.")
    cache_salt: Name | None = Field(None, description="Another name of `namespace`.")

    user: str | None = Field(None, description="Accepted, without effect; so are the fields below.")
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether there may be a grammar in it."""
        guides = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        return any(each is not None for each in (self.response_format, self.structured_outputs, self.search, *guides))


class CompletionRequest(Sampling):
    """The body of `/v1/completions`."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        description="A text or token ids, or a list of several."
    )
    parse_special: bool = Field(False, description="Read names of special tokens in texts as these tokens.")
    echo: bool | None = Field(None, description="Put the prompt before the completion.")
    logprobs: NonNegative | None = Field(None, description="How many of the likeliest tokens to report at each place.")
    best_of: Positive | None = Field(None, description="Completions drawn, of which the `n` likeliest a token stay.")
    suffix: str | None = Field(None, description="Refused: text is continued at its end only.")


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A turn of a conversation; what else it has is left to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[TextPart] | None = None


class ChatCompletionRequest(Sampling):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: NonNegative | None = Field(None, description="Another name of `max_tokens`.")
    logprobs: bool | None = None
    top_logprobs: NonNegative | None = None
    add_generation_prompt: bool = Field(True, description="End the prompt with the beginning of the model's turn.")
    tools: list[Any] | None = Field(None, description="Refused unless empty: this server calls no functions.")
    tool_choice: Any = Field(None, description="Accepted if `none` or `auto`.")
    parallel_tool_calls: bool | None = None


class TokenizeRequest(Body):
    """The body of `/tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    parse_special: bool = Field(True, description="Read names of special tokens in the text as these tokens.")
    add_generation_prompt: bool = True


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail
