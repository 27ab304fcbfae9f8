"""The OpenAPI description of the server."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from treewise import __version__
from treewise.server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorBody,
    TokenizeRequest,
)

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
RESULTS: dict[str, tuple[str, ...]] = {
    "/v1/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/chat/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/tokenize": ("count", "max_model_len", "tokens"),
    "/detokenize": ("prompt",),
    "/tokenizer_info": ("bos_token", "eos_token", "pad_token", "chat_template", "vocab_size"),
    "/v1/models": ("object", "data"),
    "/v1/models/{model}": ("id", "object", "created", "owned_by", "max_model_len"),
    "/health": ("status",),
    "/ready": ("status",),
    "/version": ("version",),
    "/strategies": ("strategies",),
    "/state": ("model", "device", "health", "uptime_s", "running", "waiting", "requests_total", "kv_slots"),
}
"""What every successful response has."""

ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "No key, or a wrong one.",
    404: "There is no such model.",
    408: "The body has not come in time.",
    413: "The body is too large.",
    415: "The body is not `application/json`.",
    429: "Too many requests are waiting.",
    500: "The engine has failed.",
    503: "The server takes no requests.",
    504: "The request has taken longer than it may.",
}
OF_READING = (400, 404, 408, 413, 415)
OF_WORK = (*OF_READING, 429, 500, 503, 504)
STREAMED = ("/v1/completions", "/v1/chat/completions")


def describe(app: FastAPI, has_keys: bool) -> dict[str, Any]:
    """Return the description of `app`, whose clients need keys if `has_keys`."""
    description = get_openapi(title="treewise", version=__version__, routes=app.routes)
    models = [(model, "validation") for model in (*BODIES.values(), ErrorBody)]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"key": []}]
    description["components"] = components
    for path, operations in description["paths"].items():
        for operation in operations.values():
            _complete(path, operation, has_keys)
    return description


def _complete(path: str, operation: dict[str, Any], has_keys: bool) -> None:
    """Say what an operation takes and gives."""
    errors = [401] if has_keys else []
    if path in STREAMED:
        errors += OF_WORK
    elif path in BODIES:
        errors += OF_READING
    elif path == "/v1/models/{model}":
        errors.append(404)
    elif path in ("/health", "/ready"):
        errors.append(503)
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if (fields := RESULTS.get(path)) is not None:
        content = _json({"type": "object", "required": list(fields)})
    if path in STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if path in BODIES:
        reference = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
        operation["requestBody"] = {"required": True, "content": _json(reference)}
    operation["responses"] = {"200": {"description": "It is done.", "content": content}} | {
        str(status): {
            "description": ERRORS[status],
            "content": _json({"$ref": "#/components/schemas/ErrorBody"}),
        }
        for status in errors
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
