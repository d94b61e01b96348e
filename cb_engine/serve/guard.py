"""What every request passes first: who may ask, from where, in which form; and the last word on errors.

Owns the rule "no unless listed": a route is open only if it stands in `_OPEN`, so a new one cannot be forgotten. Routes
for the operator want a key of their own, which is asked for where they are (`require_admin`): paths can be written in
more ways than one.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import re
import time
import uuid
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cb_engine.serve.errors import APIError, ClientGoneError, as_api_error
from cb_engine.serve.metrics import ServerMetrics
from cb_engine.serve.settings import ServeSettings

logger = logging.getLogger(__name__)

_OPEN = frozenset({"/health", "/metrics"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LOGGED_PATH = 200  # characters


class Guard:
    """ASGI middleware; see the module docstring."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: ServerMetrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        exchange = _Exchange(scope, send, self._metrics)
        try:
            self._check(scope, exchange.headers)
            await self._app(scope, receive, exchange.send)
        except ClientGoneError:
            self._metrics.client_gone()
            exchange.status = exchange.status or 499
        except Exception as error:
            refusal = as_api_error(error, retry_after=self._settings.retry_after)
            if exchange.status is None:
                await refusal.response()(scope, receive, exchange.send)
        finally:
            exchange.log()

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        if _CONTROL.search(scope["path"]):  # a line break at its end would still match a route
            raise APIError(400, "the path holds control characters")
        self._check_host(headers)
        self._check_key(scope["path"], headers)
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and has_body and kind != b"application/json":
            # Anything else could be sent by a page of another site without asking first.
            raise APIError(415, "the body must have the content type application/json", code="unsupported_media_type")

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        if not self._settings.allowed_hosts:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
        if name.lower() not in self._settings.allowed_hosts:
            raise APIError(403, f"the host {name!r} is not served here; see --allowed-host", code="host_not_allowed")

    def _check_key(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        settings = self._settings
        if settings.api_key is not None and path not in _OPEN:
            given = _bearer(headers) or _basic(headers)
            # Both are compared, whatever the first comparison says.
            known = _is_key(given, settings.api_key) | _is_key(given, settings.admin_key)
            if not known:
                raise APIError(401, "the API key is missing or wrong", code="invalid_api_key")


def require_admin(headers: Mapping[bytes, bytes], settings: ServeSettings) -> None:
    """Lets an operator through; what a browser sends by itself is not enough.

    Raises:
        APIError: there is no admin key, or it was not given.
    """
    if settings.admin_key is None:
        raise APIError(404, "admin routes are off; start the server with --admin-key", code="admin_off")
    if not _is_key(_bearer(headers), settings.admin_key):
        raise APIError(401, "the admin key is missing or wrong", code="invalid_admin_key")


class _Exchange:
    """One request and its answer, as far as the log and the metrics care."""

    def __init__(self, scope: Scope, send: Send, metrics: ServerMetrics) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.status: int | None = None
        self._scope = scope
        self._send = send
        self._metrics = metrics
        self._began = time.perf_counter()
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self._id = given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4())

    async def send(self, message: Message) -> None:
        """Passes the answer on, with the request's id on it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._metrics.answered(message["status"])
            message = {**message, "headers": [*message["headers"], (b"x-request-id", self._id.encode())]}
        await self._send(message)

    def log(self) -> None:
        """One line for the request."""
        seconds = time.perf_counter() - self._began
        path = self._scope["raw_path"][:_LOGGED_PATH].decode("latin-1")  # as it came, so without line breaks
        logger.info("%s %s %s %s %.3fs", self._id, self._scope["method"], path, self.status or 500, seconds)


def _bearer(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _basic(headers: Mapping[bytes, bytes]) -> bytes:
    """The password that a browser has asked for."""
    scheme, _, coded = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(coded, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _is_key(given: bytes, key: str | None) -> bool:
    return key is not None and hmac.compare_digest(given, key.encode())
