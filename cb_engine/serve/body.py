"""Bodies of requests: read within limits, parsed into models, and what is said of wrong ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from cb_engine.serve.errors import APIError, ClientGoneError, named_field
from cb_engine.serve.settings import ServeSettings
from cb_engine.serve.text_workers import TextWorkers

M = TypeVar("M", bound=BaseModel)

_SMALL = 64 << 10  # bytes that are parsed in less time than a thread takes to start on them


async def read_body(request: Request, kind: type[M], settings: ServeSettings, workers: TextWorkers) -> M:
    """The body of a request.

    Raises:
        APIError: it is too large, too slow, compressed, no JSON, or not what `kind` says.
        ClientGoneError: the client went away before it was there.
    """
    body = await _read(request, settings)
    if len(body) <= _SMALL:
        return _parse(body, kind)
    return await workers.run(_parse, body, kind)


async def _read(request: Request, settings: ServeSettings) -> bytes:
    encoding = request.headers.get("content-encoding", "")
    if {part.strip().lower() for part in encoding.split(",")} - {"", "identity"}:
        raise APIError(415, f"content-encoding {encoding!r:.40} is not taken; send the body as it is", code="encoded")
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
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    raise _explain(errors, body, kind)


def _explain(errors: list[ErrorDetails], body: bytes, kind: type[BaseModel]) -> APIError:
    """OpenAI's error object has room for one: the one that went deepest, since of a union's alternatives it is the one
    that was meant, and of those rather one that took the value's type."""
    first = max(errors, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is no JSON: {message}", code="invalid_json")
    path = ".".join(map(str, _fields(first["loc"], from_json(body), first["type"] == "missing"))) or None
    if first["type"] == "extra_forbidden":
        return APIError(400, f"unknown field {path!r}; leave it out", param=path, code="unknown_field")
    if first["type"] == "value_error":  # our own words, which begin with the field's name where there is one
        return APIError(400, message, param=path or named_field(message, kind), code="invalid_value")
    return APIError(400, message if path is None else f"{path}: {message}", param=path, code="invalid_value")


def _fields(place: Sequence[int | str], value: Any, is_missing: bool) -> list[int | str]:
    """The parts of an error's place that a client knows; pydantic puts names of a union's alternatives among them."""
    found: list[int | str] = []
    for part in place:
        inside = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
        if part in inside:
            value = value[part]
            found.append(part)
    return [*found, place[-1]] if is_missing else found
