"""Runs an application under uvicorn: bounded headers, signals, drain and exit code.

SIGTERM   no more requests are taken, /health says so, what runs goes on for `shutdown_timeout`, exit code 0
again     everything ends at once, exit code 1
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cb_engine.serve.context import ServerContext
from cb_engine.serve.errors import APIError
from cb_engine.serve.host import State
from cb_engine.serve.settings import ServeSettings
from cb_engine.serve.sse import to_json

logger = logging.getLogger(__name__)

_POLL = 0.05
_CLOSING_S = 5  # for connections to end once nothing runs any more


class Server(uvicorn.Server):
    """A uvicorn server that ends as the module docstring says."""

    def __init__(self, config: uvicorn.Config, context: ServerContext) -> None:
        super().__init__(config)
        self._context = context
        self._ending: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own handlers would stop listening at once, and end with the signal's exit code."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals belong to the main thread
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; from here on a model that cannot be loaded ends the server."""
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                name, port = listener.getsockname()[:2]
                logger.info("listening at http://%s:%d, the model is being loaded", name, port)
        self._watch = asyncio.create_task(self._end_without_model())

    async def _end_without_model(self) -> None:
        while not self.should_exit:
            if self._context.host.load_error is not None:
                self.should_exit = True
            await asyncio.sleep(_POLL)

    def _on_signal(self, number: int) -> None:
        if self._ending is not None:
            logger.warning("told to end again: ending at once")
            os._exit(1)
        logger.info("%s: no more requests are taken", signal.Signals(number).name)
        self._ending = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        if self._context.host.state in (State.LOADING, State.RESTARTING):
            logger.info("ending before the engine is there")
            os._exit(0)  # nothing is under way, and the thread that loads cannot be ended
        self._context.host.begin_drain()
        deadline = asyncio.get_running_loop().time() + self._context.settings.shutdown_timeout
        while self._context.under_way and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL)
        if self._context.under_way:
            logger.warning("%d requests are cut off", len(self._context.under_way))
        await self._context.host.stop()  # what still runs gets its last output
        self.should_exit = True


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's fast parser keeps as many headers as come; this one does not. What is no HTTP gets an error object."""

    max_header_bytes = 64 << 10
    head_timeout = 60.0  # seconds for a head to come whole, from the connection's begin or the head's own
    _head_timer: asyncio.TimerHandle | None = None
    _num_pending_bytes = 0  # of a head that is not complete
    _num_header_bytes = 0
    _in_head = True

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._in_head:
            self._num_pending_bytes += len(data)
            self._begin_head()
        super().data_received(data)
        if self._in_head and self._num_pending_bytes > self.max_header_bytes and not self.transport.is_closing():
            self._refuse(431, "the headers are too large")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._end_head()
        super().connection_lost(exc)

    def _begin_head(self) -> None:
        """A connection that never says what it wants would be kept for ever."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout, self._head_expired)

    def _head_expired(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._begin_head()  # the beginning of a next one came while this one is answered
        else:
            self.transport.close()

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """A callback of the parser."""
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > self.max_header_bytes:
            raise ValueError("the headers are too large")  # ends the parser, which calls `send_400_response`
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A callback of the parser."""
        self._in_head = False
        self._end_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A callback of the parser."""
        super().on_message_complete()
        self._in_head, self._num_pending_bytes, self._num_header_bytes = True, 0, 0

    def send_400_response(self, msg: str) -> None:
        """What uvicorn does with a request that it cannot read."""
        if self._num_header_bytes > self.max_header_bytes:
            self._refuse(431, "the headers are too large")
        else:
            self._refuse(400, "this is no valid HTTP")

    def _refuse(self, status: int, message: str) -> None:
        body = to_json(APIError(status, message).body())
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


def make_server(app: FastAPI, *, host: str, port: int) -> Server:
    """A server for an application of `build_app`, ready to run.

    Args:
        port: 0 takes any that is free.
    """
    context: ServerContext = app.state.context
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=_protocol(context.settings),
        ws="none",
        lifespan="on",
        log_level="warning",  # what there is to say is said here, and by `guard.py`
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=_CLOSING_S,
        backlog=2048,
    )
    return Server(config, context)


def _protocol(settings: ServeSettings) -> Any:
    limits = {"max_header_bytes": settings.limits.max_header_bytes, "head_timeout": settings.body_timeout}
    return type("BoundedProtocol", (BoundedProtocol,), limits)


def run_server(app: FastAPI, *, host: str, port: int) -> int:
    """Serves until told to end.

    Returns:
        the exit code: 0 after a drain, 1 if the model could not be loaded or the port not be had.
    """
    server = make_server(app, host=host, port=port)
    try:
        server.run()
    except SystemExit:  # uvicorn's way to say that it could not listen
        return 1
    context: ServerContext = app.state.context
    return 1 if context.host.load_error is not None or not server.started else 0
