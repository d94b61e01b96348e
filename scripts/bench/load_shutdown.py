"""How a server ends: after one SIGTERM when its last stream is complete, after two at once."""

from __future__ import annotations

import asyncio
import signal
import time

from bench.http_client import Address, Exchange, fetch, request_bytes, start_call
from bench.load_checks import Check
from bench.load_requests import Answer, Plan, error_fault, read_answer
from bench.server_process import ServerProcess

_AFTER_S = 15.0  # for a server whose last stream is complete
_TWICE_S = 5.0  # for a server that was told to end at once


async def check_drain(server: ServerProcess, plan: Plan, right: Answer, timeout: float) -> Check:
    """SIGTERM while a stream is open: it completes, nothing new is taken, the exit code is 0."""
    check = Check("SIGTERM drains")
    call = await start_call(server.address, plan.request(server.address, stream=True))
    await call.begun(timeout)
    server.signal(signal.SIGTERM)
    told = time.monotonic()
    health = await _until_refused(server.address, told + timeout)
    late = await fetch(server.address, plan.request(server.address, stream=False), timeout=timeout)
    stream = await call.ended(timeout)
    if health.status != 503:
        check.faults.append(f"/health never said 503 ({health.status}, {health.failure})")
    if late.status != 503 or error_fault(late) is not None:
        check.faults.append(f"a new request got {late.status} ({late.failure}, {late.body[:200]!r}) instead of 503")
    if (fault := _fault_of(stream, plan, right)) is not None:
        check.faults.append(f"the open stream: {fault}")
    code = await asyncio.to_thread(server.wait, _AFTER_S)
    check.note = f"the stream ended {stream.ended - told:.2f} s later, the server {time.monotonic() - told:.2f} s"
    if code != 0:
        late_by = f"it still runs {_AFTER_S:g} s after the end of the stream"
        check.faults.append(f"the exit code is {code}" if code is not None else late_by)
    return check


async def check_second_sigterm(server: ServerProcess, plan: Plan, timeout: float) -> Check:
    """A second SIGTERM ends the server although a stream is open; the exit code is 1."""
    check = Check("a second SIGTERM ends at once")
    call = await start_call(server.address, plan.request(server.address, stream=True))
    await call.begun(timeout)
    server.signal(signal.SIGTERM)
    await _until_refused(server.address, time.monotonic() + timeout)
    server.signal(signal.SIGTERM)
    told = time.monotonic()
    code = await asyncio.to_thread(server.wait, _TWICE_S)
    check.note = f"it took {time.monotonic() - told:.2f} s, the exit code is {code}"
    if code != 1:
        check.faults.append("the exit code should be 1" if code is not None else f"it runs {_TWICE_S:g} s later")
    if (await call.ended(timeout)).is_complete:
        check.faults.append("the stream was complete before; nothing was cut off")
    return check


async def _until_refused(address: Address, deadline: float) -> Exchange:
    """The first look at /health that is not 200."""
    while True:
        look = await fetch(address, request_bytes("GET", "/health", address=address), timeout=10)
        if look.status != 200 or time.monotonic() > deadline:
            return look
        await asyncio.sleep(0.01)


def _fault_of(stream: Exchange, plan: Plan, right: Answer) -> str | None:
    if stream.status != 200 or not stream.is_complete:
        return stream.failure or f"not complete, status {stream.status}"
    try:
        answer = read_answer(stream, plan)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return f"it ended with {answer.error}" if answer.error else answer.difference(right)
