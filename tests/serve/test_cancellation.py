"""A client that leaves at the very moment in which something is done for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from starlette.requests import Request

from cb_engine.serve.errors import ClientGoneError
from cb_engine.serve.sse import while_connected
from cb_engine.serve.text_workers import TextWorkers


def http_request(*messages: str) -> Request:
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return {"type": left.pop(0)}

    return Request({"type": "http"}, receive)


def test_work_is_cancelled_when_the_client_leaves():
    async def run() -> None:
        with pytest.raises(ClientGoneError):
            await while_connected(http_request("http.request", "http.disconnect"), asyncio.sleep(30))

    asyncio.run(run())


def test_a_result_that_comes_in_spite_of_the_cancellation_is_not_lost():
    """It may be a stream that only its reader would close."""

    async def stubborn() -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        return "stream"

    assert asyncio.run(while_connected(http_request("http.disconnect"), stubborn())) == "stream"


def test_a_text_that_is_ready_when_its_client_leaves_does_not_undo_the_cancellation(monkeypatch: pytest.MonkeyPatch):
    async def run() -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[str] = loop.create_future()
        monkeypatch.setattr(loop, "run_in_executor", lambda *args: ready)
        task = asyncio.ensure_future(TextWorkers(30).run(str))
        await asyncio.sleep(0)
        ready.set_result("text")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
