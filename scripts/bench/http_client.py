"""A client for measurements: HTTP/1.1 over a raw socket, one connection for each request.

Owns the order of things: while an answer arrives, nothing is done but to note when each piece came. It is taken apart
afterwards, so that a client with many streams takes little of a machine that the server needs too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Pieces = list[tuple[float, bytes]]  # when each came, by `time.monotonic()`, and what it was


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int


@dataclass(frozen=True)
class Leave:
    """When a client goes away without waiting for the end: after so many pieces, or so many seconds."""

    pieces: int | None = None
    seconds: float | None = None


@dataclass
class Exchange:
    """A request and all that came back.

    Attributes:
        sent: when the request was on its way; `ended`: when the connection was closed. Both by `time.monotonic()`.
        left: the client went away on purpose.
        failure: why there is no answer, or not all of it.
    """

    sent: float
    ended: float = 0.0
    pieces: Pieces = field(default_factory=list)
    left: bool = False
    failure: str | None = None

    @property
    def status(self) -> int | None:
        """The HTTP status; None if none came."""
        line = self._head.split(b"\r\n", 1)[0].split(b" ")
        return int(line[1]) if len(line) > 1 and line[1].isdigit() else None

    @property
    def headers(self) -> dict[str, str]:
        """Names in lower case."""
        lines = [line.partition(b":") for line in self._head.split(b"\r\n")[1:]]
        return {name.decode("latin-1").lower(): value.decode("latin-1").strip() for name, _, value in lines}

    @property
    def body(self) -> bytes:
        """What came after the headers."""
        return b"".join(data for _, data in self.body_pieces())

    @property
    def is_complete(self) -> bool:
        """Whether the answer came to its end."""
        if self.status is None or self.failure is not None:
            return False
        if self._is_chunked:
            return b"".join(data for _, data in self.pieces).endswith(b"\r\n0\r\n\r\n")
        return len(self.body) == int(self.headers.get("content-length", "0"))

    def json(self) -> Any:
        """The body.

        Raises:
            ValueError: it is no JSON.
        """
        return json.loads(self.body)

    def events(self) -> list[tuple[float, str]]:
        """The data of server-sent events, each with the time when it was complete."""
        return list(parse_events(self.body_pieces()))

    def body_pieces(self) -> Pieces:
        """The body as it came."""
        skipped = len(self._head) + len(b"\r\n\r\n")
        rest: Pieces = []
        for when, data in self.pieces:
            if data[skipped:]:
                rest.append((when, data[skipped:]))
            skipped = max(0, skipped - len(data))
        return list(unchunk(rest)) if self._is_chunked else rest

    @property
    def _head(self) -> bytes:
        return b"".join(data for _, data in self.pieces).partition(b"\r\n\r\n")[0]

    @property
    def _is_chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower() == "chunked"


def unchunk(pieces: Pieces) -> Iterator[tuple[float, bytes]]:
    """Takes HTTP's chunks apart; what they hold comes with the time of its last byte."""
    buffer = b""
    for when, data in pieces:
        buffer += data
        while (end := buffer.find(b"\r\n")) >= 0:
            size = int(buffer[:end].partition(b";")[0] or b"0", 16)
            if len(buffer) < end + 2 + size + 2:
                break
            if size:
                yield when, buffer[end + 2 : end + 2 + size]
            buffer = buffer[end + 2 + size + 2 :]


def parse_events(pieces: Pieces) -> Iterator[tuple[float, str]]:
    """The `data` of server-sent events; comments and other fields are passed over."""
    buffer = b""
    for when, data in pieces:
        buffer = (buffer + data).replace(b"\r\n", b"\n")
        *whole, buffer = buffer.split(b"\n\n")
        for event in whole:
            lines = [line.removeprefix(b"data:").strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield when, b"\n".join(lines).decode()


def request_bytes(
    method: str, path: str, body: Any = None, *, address: Address, headers: Mapping[str, str] | None = None
) -> bytes:
    """A request as it goes over the wire; the connection ends with its answer.

    Args:
        body: bytes as they are, None for none, anything else as JSON.
    """
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = {"host": f"{address.host}:{address.port}", "connection": "close"}
    if data:
        lines |= {"content-type": "application/json", "content-length": str(len(data))}
    lines |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data


class _Recorder(asyncio.Protocol):
    """Notes what arrives and when."""

    def __init__(self, exchange: Exchange, request: bytes, leave: Leave | None) -> None:
        self._exchange = exchange
        self._request = request
        self._leave = leave
        self._transport: asyncio.Transport | None = None
        self.first_piece = asyncio.get_running_loop().create_future()
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`, also for the two below."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._exchange.sent = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        pieces = self._exchange.pieces
        pieces.append((time.monotonic(), data))
        if len(pieces) == 1:
            self.first_piece.set_result(None)
        if self._leave is not None and self._leave.pieces is not None and len(pieces) >= self._leave.pieces:
            self.go()

    def connection_lost(self, error: Exception | None) -> None:
        self._exchange.ended = time.monotonic()
        if error is not None and not self._exchange.left:
            self._exchange.failure = f"{type(error).__name__}: {error}"
        for future in (self.first_piece, self.closed):
            if not future.done():
                future.set_result(None)

    def go(self) -> None:
        """Leaves."""
        self._exchange.left = True
        self._drop()

    def give_up(self, reason: str) -> None:
        """Waits no longer."""
        self._exchange.failure = reason
        self._drop()

    def _drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Call:
    """A request under way: its first piece and its end can be waited for."""

    def __init__(self, exchange: Exchange, recorder: _Recorder) -> None:
        self.exchange = exchange
        self._recorder = recorder

    async def begun(self, timeout: float) -> None:
        """Returns with the first piece of the answer, or the end of the connection.

        Raises:
            TimeoutError: neither came.
        """
        await asyncio.wait_for(asyncio.shield(self._recorder.first_piece), timeout)

    async def ended(self, timeout: float) -> Exchange:
        """All of it; after the timeout what there is, with a failure."""
        try:
            await asyncio.wait_for(asyncio.shield(self._recorder.closed), timeout)
        except TimeoutError:
            self._recorder.give_up(f"no end after {timeout:g} s")
            await self._recorder.closed
        return self.exchange

    def leave(self) -> None:
        """The client goes away."""
        self._recorder.go()


async def start_call(address: Address, request: bytes, leave: Leave | None = None) -> Call:
    """Sends a request.

    Raises:
        OSError: nobody listens.
    """
    exchange = Exchange(time.monotonic())
    loop = asyncio.get_running_loop()
    _, recorder = await loop.create_connection(lambda: _Recorder(exchange, request, leave), address.host, address.port)
    if leave is not None and leave.seconds is not None:
        loop.call_later(leave.seconds, recorder.go)
    return Call(exchange, recorder)


async def fetch(address: Address, request: bytes, *, timeout: float, leave: Leave | None = None) -> Exchange:
    """Sends a request and waits for the end of its answer; what goes wrong is the exchange's `failure`."""
    began = time.monotonic()
    try:
        call = await start_call(address, request, leave)
    except OSError as error:
        return Exchange(began, time.monotonic(), failure=f"{type(error).__name__}: {error}")
    return await call.ended(timeout)
