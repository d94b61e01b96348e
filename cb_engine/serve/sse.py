"""Server-sent events, and who waits for them.

Owns the rule that a client which goes away ends its work, streaming or not.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cb_engine.serve.errors import ClientGoneError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_LINE_ENDS = re.compile("[\x85\u2028\u2029]")  # JSON spells the others out anyway


def to_json(value: Any) -> bytes:
    """Compact JSON on one line, also for readers that end lines where Unicode does."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def event(value: Any, name: str | None = None) -> bytes:
    """One event; a name is what `/v1/responses` has."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away before.

    Raises:
        ClientGoneError: it did. Whatever the work raises.
    """
    task = asyncio.ensure_future(work)
    if not await _ends_connected(task, request.receive):
        raise ClientGoneError
    return task.result()


class EventStream(Response):
    """Sends events as they come. A client that goes away ends the generator, also while it waits for its next event.

    Args:
        on_end: called in the end, whatever it is.
        send_timeout: seconds that a client may take for a piece, before it is taken to be gone.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, on_end: Callable[[], None], send_timeout: float) -> None:
        self._events = events
        self._on_end = on_end
        self._send_timeout = send_timeout
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all of it; see the ASGI specification."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            task = asyncio.ensure_future(self._send_events(send))
            if not await _ends_connected(task, receive):
                raise ClientGoneError
            task.result()
        finally:
            self._on_end()

    async def _send_events(self, send: Send) -> None:
        try:
            async for data in self._events:
                try:
                    async with asyncio.timeout(self._send_timeout):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                except TimeoutError:
                    raise ClientGoneError from None
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


async def _ends_connected(task: asyncio.Future[Any], receive: Receive) -> bool:
    """Whether `task` has come to its end; it is cancelled if the client is gone before."""
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for other in (task, gone):
            if not other.done():
                other.cancel()
                with suppress(asyncio.CancelledError):
                    await other
    return not task.cancelled()  # one that was quicker than its cancellation has a result that somebody must close


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
