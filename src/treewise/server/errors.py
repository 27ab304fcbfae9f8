"""Errors as clients see them: a status, and a body of OpenAI's form."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from treewise.budgets import Cancelled
from treewise.scheduler import KeysGivenUp, PoolTooSmall
from treewise.server.driver import EngineFailed, Refused, TimeUp

logger = logging.getLogger("treewise.server")

FIELD = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)(?:\[[^\]]*\])*(?:: | must )")
"""How the message of a `ValueError` begins: with the field."""

TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
CODES = {"queue_full": 429, "draining": 503, "failed": 503}
RETRY = {"retry-after": "1"}
GIVEN_UP = {"x-should-retry": "false"}
"""Asks clients that try again by themselves not to."""


class ApiError(Exception):
    """What is wrong with a request, or with the server.

    Parameters
    ----------
    message : str
    status : int
        Of HTTP.
    param : str, optional
        The field of the request that is meant.
    code : str, optional
        For programs to tell errors apart.
    headers : mapping, optional
        Of the response.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers = dict(headers or {})

    @property
    def reason(self) -> str:
        """One word of those that `Observer.refused` knows."""
        words = {401: "unauthorized", 413: "too_large", 429: "queue_full"}
        return words.get(self.status) or (self.code or "failed" if self.status == 503 else "bad_request")

    @property
    def body(self) -> dict[str, Any]:
        """What the client is sent."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error(error: BaseException) -> ApiError:
    """Return what a client is told of an error, of whatever kind it is."""
    match error:
        case ApiError():
            return error
        case Refused():
            return ApiError(str(error), CODES[error.reason], code=error.reason, headers=RETRY)
        case EngineFailed():
            return ApiError(f"the engine has failed: {error}", 500, code="engine_failed")
        case TimeUp():
            return ApiError(str(error), 504, code="time_limit", headers=GIVEN_UP)
        case ValueError() | Cancelled() | PoolTooSmall() | KeysGivenUp():
            message = str(error)
            field = FIELD.match(message)
            return ApiError(message, param=field[1] if field else None)
        case _:
            logger.error("a request has failed", exc_info=error)
            return ApiError(f"the request has failed: {type(error).__name__}", 500, code="internal_error")


def invalid_body(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return what is wrong with a body, of what pydantic says."""
    first = errors[0]
    place = [part for part in first["loc"] if isinstance(part, int) or re.fullmatch(r"[A-Za-z_]\w*", str(part))]
    if not place:
        return ApiError(f"the body is not a JSON object: {first['msg']}", code="invalid_json")
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    return ApiError(f"{name}: {first['msg']}", param=str(place[0]))
