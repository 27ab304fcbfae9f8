"""What a server may be told: where it listens, who may ask, and how much."""

from __future__ import annotations

from dataclasses import dataclass

from treewise.config import check_integer, check_number


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, who may use it, and the limits of requests.

    Parameters
    ----------
    host : str
        Address to listen at; the default can be reached from this machine only.
    port : int
        Port to listen at; 0 takes a free one.
    api_key : tuple of str
        Keys, one of which every request must bring as `Authorization: Bearer KEY`; may be repeated. Those in the
        environment variable TREEWISE_API_KEY, with commas between, count too. None: anybody may ask.
    allowed_origin : tuple of str
        Origins of web pages that browsers let ask, such as https://example.org, or *; may be repeated. None but the
        server's own pages by default.
    served_model_name : str
        What requests call the model; the last part of its name if left out.
    max_running : int
        Requests that are worked on side by side; the others wait.
    max_waiting : int
        Requests that may wait; more are turned away with status 429.
    max_body_bytes : int
        The largest body of a request.
    max_n : int
        The most completions of a prompt, beams, or branches that a parameter of a search may ask for.
    max_prompts : int
        The most prompts of a request.
    max_prompt_tokens : int
        The longest prompt in tokens; what the context holds if left out.
    max_stop : int
        The most stop strings of a request.
    max_stop_length : int
        The longest stop string in characters.
    max_logprobs : int
        The most likely tokens that can be asked for at each place.
    max_search_tokens : int
        Tokens that a search may decode, over all its branches.
    time_limit : float
        Seconds that a request may take, waiting included.
    drain_timeout : float
        Seconds that running requests get to finish after SIGTERM.

    Raises
    ------
    ValueError
        A value is out of range; the message names the field and what it accepts.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    allowed_origin: tuple[str, ...] = ()
    served_model_name: str | None = None
    max_running: int = 256
    max_waiting: int = 1024
    max_body_bytes: int = 4 << 20
    max_n: int = 128
    max_prompts: int = 256
    max_prompt_tokens: int | None = None
    max_stop: int = 128
    max_stop_length: int = 1024
    max_logprobs: int = 20
    max_search_tokens: int = 65536
    time_limit: float = 600.0
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        check_integer("port", self.port, 0, 65535)
        for name in ("max_running", "max_body_bytes", "max_n", "max_prompts", "max_search_tokens"):
            check_integer(name, getattr(self, name), 1)
        for name in ("max_waiting", "max_stop", "max_stop_length", "max_logprobs"):
            check_integer(name, getattr(self, name), 0)
        if self.max_prompt_tokens is not None:
            check_integer("max_prompt_tokens", self.max_prompt_tokens, 1)
        check_number("time_limit", self.time_limit, 0, 1e9, open_low=True)
        check_number("drain_timeout", self.drain_timeout, 0, 1e9)
        if "" in self.api_key:
            raise ValueError("api_key: an empty key lets nobody in; leave it out to let everybody in")


@dataclass(frozen=True)
class Telemetry:
    """What a server tells of itself beside its metrics, a flag each.

    Parameters
    ----------
    log_json : bool
        Write the log as lines of JSON to standard error, one for each request among them, without its text.
    log_prompts : bool
        Have the text of prompts in these lines.
    traces_endpoint : str
        Send OpenTelemetry's traces to this URL, such as http://localhost:4318.

    Raises
    ------
    ValueError
        If there is no log for prompts.
    """

    log_json: bool = False
    log_prompts: bool = False
    traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.log_prompts and not self.log_json:
            raise ValueError("log_prompts: there are no lines to have them in; give log_json too")
