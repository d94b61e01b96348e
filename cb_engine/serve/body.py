"""Bodies of requests: read within limits, parsed into models, and what is said of wrong ones."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from cb_engine.serve.errors import APIError, ClientGoneError
from cb_engine.serve.settings import ServeSettings
from cb_engine.serve.text_workers import TextWorkers

M = TypeVar("M", bound=BaseModel)

_ALTERNATIVES = frozenset({"str", "int", "float", "bool", "text", "texts", "ids"})
_SMALL = 64 << 10  # bytes that are parsed in less time than a thread takes to start on them


async def read_body(request: Request, kind: type[M], settings: ServeSettings, workers: TextWorkers) -> M:
    """The body of a request.

    Raises:
        APIError: it is too large, too slow, no JSON, or not what `kind` says.
        ClientGoneError: the client went away before it was there.
    """
    body = await _read(request, settings)
    if len(body) <= _SMALL:
        return _parse(body, kind)
    return await workers.run(_parse, body, kind)


async def _read(request: Request, settings: ServeSettings) -> bytes:
    limit = settings.limits.max_body_bytes
    too_large = APIError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise too_large
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(settings.body_timeout):
            async for piece in request.stream():
                num_bytes += len(piece)
                if num_bytes > limit:
                    raise too_large
                pieces.append(piece)
    except TimeoutError:
        raise APIError(408, f"the body did not come within {settings.body_timeout:g} s", code="timeout") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(pieces)


def _parse(body: bytes, kind: type[M]) -> M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_context=False, include_input=False)) from None


def _explain(errors: list[ErrorDetails]) -> APIError:
    """OpenAI's error object has room for one: the one that went deepest, since of a union's alternatives it is the one
    that was meant."""
    first = max(errors, key=lambda error: len(error["loc"]))
    path = ".".join(str(part) for part in first["loc"] if not _is_alternative(part)) or None
    if first["type"] == "extra_forbidden":
        return APIError(400, f"unknown field {path!r}; leave it out", param=path, code="unknown_field")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is no JSON: {message}", code="invalid_json")
    named = path if path is None or first["type"] != "value_error" else None
    return APIError(400, message if named is None else f"{named}: {message}", param=path, code="invalid_value")


def _is_alternative(part: int | str) -> bool:
    """Whether a part of an error's place is pydantic's name for one alternative of a union, and no field."""
    return (isinstance(part, str) and not part.isidentifier()) or part in _ALTERNATIVES or str(part)[:1].isupper()
