"""Errors as clients see them: OpenAI's error objects. Owns which exception becomes which status.

What a client reads never holds a path, a traceback or the text of an exception that is not our own: those go to the
log, with an id that the client gets.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from cb_engine.errors import EngineError, EngineStoppedError, QueueFullError

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class APIError(Exception):
    """An answer that is an error.

    Args:
        status: the HTTP status.
        param: the field of the request that is wrong.
        code: for programs, `model_not_found` for one.
        retry_after: seconds after which trying again may help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that belong to it."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.code == "request_failed":  # it would fail again; OpenAI's clients go by this
            headers["x-should-retry"] = "false"
        if self.status == 401:  # browsers ask for a password where one will do
            headers["www-authenticate"] = "Bearer" if self.code == "invalid_admin_key" else 'Basic realm="cb-engine"'
        return headers

    def response(self) -> Response:
        """It as an answer."""
        return JSONResponse(self.body(), self.status, dict(self.headers))

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def bad_request(message: str, param: str | None = None) -> APIError:
    """A request that is not valid."""
    return APIError(400, message, param=param, code="invalid_value")


def engine_failed(retry_after: int | None) -> APIError:
    """The engine failed under a request."""
    message = "the engine failed while it computed this request; nothing is wrong with the request"
    return APIError(503, message, code="engine_failed", retry_after=retry_after)


def refusal(error: ValueError | TypeError, body: BaseModel) -> APIError:
    """What a client is told of an error at the door, where our own messages name what is wrong."""
    message = str(error)
    form_field: str | None = getattr(body, "form_field", None)
    if form_field is not None and message.startswith("structured"):  # the engine's word for it
        return bad_request(f"{form_field}: {message.removeprefix('structured.')}", form_field)
    return bad_request(message, named_field(message, type(body)))


def named_field(message: str, kind: type[BaseModel]) -> str | None:
    """The field of a body that a message begins with, as our own do."""
    found = re.match(r"(\w+)(\.\w+|\[\d+\])*", message)
    if found is None:
        return None
    known = kind.model_fields.keys() | getattr(kind, "refused", {}).keys()
    return found[0] if found[1] in known else None


def as_api_error(error: Exception, *, retry_after: int) -> APIError:
    """What a client is told of an exception; of one that is not our own, that there was one."""
    match error:
        case APIError():
            return error
        case QueueFullError():
            return APIError(429, str(error), code="queue_full", retry_after=retry_after)
        case EngineStoppedError():
            return APIError(503, "the engine takes no requests now", code="engine_stopped", retry_after=retry_after)
        case EngineError():
            return engine_failed(retry_after)
        case ImportError():
            logger.error("%s", error)
            return APIError(501, "this server has not all that the request needs installed", code="not_installed")
    return unexpected(error)


def unexpected(error: BaseException) -> APIError:
    """A fault of the server's own: the log gets all of it, the client an id to find it by."""
    error_id = uuid.uuid4().hex[:12]
    logger.error("internal error %s", error_id, exc_info=error)
    return APIError(500, f"internal error {error_id}; the server's log has more", code="internal_error")
