"""The published description of the interface. `body.py` reads the bodies, within limits, so FastAPI is told of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REASONS = {
    400: "The request is not valid.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; try later.",
    500: "The request failed.",
    503: "The server takes no requests now; try later.",
    504: "The request ran for too long.",
}

Endpoint = Callable[[Request], Awaitable[Response]]


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Answers that are errors, all of one shape."""
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": _REASONS[status], "content": content} for status in statuses}


def json_route(
    router: APIRouter, path: str, body: type[BaseModel], summary: str, *, streams: bool = False
) -> Callable[[Endpoint], Endpoint]:
    """Declares a POST route whose endpoint reads a `body` by itself.

    Args:
        streams: whether the answer may be a stream of events.
    """
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    reference = {"$ref": _REF.format(model=body.__name__)}
    return router.post(
        path,
        summary=summary,
        response_class=Response,
        responses={200: {"description": "The answer.", "content": content}, **error_responses(*_REASONS)},
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}},
    )


def publish(app: FastAPI, bodies: Iterable[type[BaseModel]]) -> None:
    """Lets /openapi.json hold the schemas of all bodies."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas |= definitions.get("$defs", {})
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
