"""What a server knows of a request's work in the engine, and who is told about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from treewise.engine import Engine
from treewise.results import Usage

Outcome = Literal["stop", "length", "abort", "error"]
"""How a job ended: of itself, at a limit of tokens, because its client went or its time was up, or by an error."""


@dataclass(eq=False)
class Job:
    """One HTTP request's work in the engine; n choices, several prompts or a search are one job.

    Times are seconds of `time.perf_counter`, None until what they tell of has happened.

    Attributes
    ----------
    id : str
        ``"cmpl-…"`` or ``"chatcmpl-…"``, as the client sees it.
    kind : str
        ``"completion"``, ``"chat"``, ``"search"``, or ``"program"`` where a replica runs one.
    strategy : str
        ``"generate"``, ``"beam"`` or another strategy's name.
    prompt_tokens : int
    arrived : float
        When the request was read.
    scheduled : float or None
        When the step began in which its first row was computed.
    first, last : float or None
        When its first, and its latest, tokens were decoded.
    ended : float or None
    outcome : str or None
    tokens : int
        Decoded so far, over all branches.
    usage : Usage or None
        What it cost, once it has ended and was begun.
    trace : mapping of str to str
        The trace headers of the HTTP request by W3C Trace Context: ``traceparent``, ``tracestate``.
    prompts : sequence of list of int
        The tokens of each prompt.
    """

    id: str
    kind: str
    strategy: str
    prompt_tokens: int
    arrived: float
    scheduled: float | None = None
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    outcome: Outcome | None = None
    tokens: int = 0
    usage: Usage | None = None
    trace: Mapping[str, str] = field(default_factory=dict)
    prompts: Sequence[Sequence[int]] = ()


class Observer(Protocol):
    """Who is told what becomes of jobs.

    It is told in the engine's thread, between two steps, unless a method says otherwise: methods must be quick, and
    must not raise.
    """

    def received(self, job: Job) -> None:
        """Take notice of a job that waits for the engine."""

    def gained(self, job: Job, tokens: int, gap: float | None) -> None:
        """Take notice of the tokens that a step decoded for `job`; at most once a step and job.

        Parameters
        ----------
        job : Job
        tokens : int
            Over all of its branches.
        gap : float or None
            Seconds since its last gain; None for its first.
        """

    def ended(self, job: Job) -> None:
        """Take notice of a job that has ended, however it did."""

    def stepped(self, engine: Engine, rows: int, seconds: float) -> None:
        """Take notice of a step of `engine`, of `rows` rows, that took so many seconds."""

    def refused(self, reason: str) -> None:
        """Take notice of a request that did not become a job; called in any thread.

        Reasons are ``"bad_request"``, ``"unauthorized"``, ``"too_large"``, ``"queue_full"``, ``"draining"`` and
        ``"failed"``.
        """
