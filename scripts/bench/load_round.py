"""One round of load: many clients at once, some of whom leave, bad requests among them, and somebody who keeps asking
/health and /metrics. Owns what is sent and when; what it means is for `load_checks.py`.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bench.http_client import Address, Exchange, Leave, fetch, request_bytes
from bench.load_requests import BadRequest, Plan

_POLL_S = 0.05
_METRICS_EVERY = 10  # looks at /health
_BAD_WITHIN_S = 3.0
_DRAIN_POLL_S = 0.1
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "cb_engine:kv_blocks_live")


@dataclass(frozen=True)
class Client:
    """Who asks what, how, and until when."""

    plan: Plan
    stream: bool
    leave: Leave | None


@dataclass(frozen=True)
class Poll:
    """A look at /health or /metrics, with the times when it began and ended."""

    path: str
    exchange: Exchange

    @property
    def seconds(self) -> float:
        """How long the answer took."""
        return self.exchange.ended - self.exchange.sent


@dataclass
class Round:
    """What happened.

    Attributes:
        drained: seconds from the last answer until the engine was empty; None if it never was.
        gauges: what was left then.
        rss: resident bytes of the server at the end; None if it is not ours.
    """

    number: int
    seconds: float = 0.0
    clients: list[tuple[Client, Exchange]] = field(default_factory=list)
    bad: list[tuple[BadRequest, Exchange]] = field(default_factory=list)
    drained: float | None = None
    gauges: dict[str, float] = field(default_factory=dict)
    rss: int | None = None


def make_clients(plans: Sequence[Plan], concurrency: int, seed: int) -> list[Client]:
    """The clients of a round: half of them stream, a quarter leave early."""
    rng = random.Random(seed)
    leavers = set(rng.sample(range(concurrency), concurrency // 4))
    clients = []
    for index in range(concurrency):
        stream = rng.random() < 0.5
        clients.append(Client(rng.choice(plans), stream, _leave(rng, stream) if index in leavers else None))
    return clients


def _leave(rng: random.Random, stream: bool) -> Leave:
    """Right after sending, while it waits for its first token, or in the middle of the stream."""
    phase = rng.randrange(3)
    if phase == 0:
        return Leave(seconds=0.0)
    if phase == 1 or not stream:
        return Leave(seconds=rng.uniform(0.01, 1.0))
    return Leave(pieces=rng.randrange(2, 8))


async def run_round(
    address: Address,
    number: int,
    clients: Sequence[Client],
    bad: Sequence[BadRequest],
    *,
    seed: int,
    timeout: float,
    on_end: Callable[[int], None],
) -> Round:
    """Sends everything and waits for the end of all of it, and for the engine to be empty.

    Args:
        timeout: seconds for each request.
        on_end: called whenever a client has its answer, with their number so far.
    """
    rng = random.Random(seed)
    result = Round(number)
    began = time.monotonic()

    async def run_client(client: Client) -> None:
        request = client.plan.request(address, stream=client.stream)
        exchange = await fetch(address, request, timeout=timeout, leave=client.leave)
        result.clients.append((client, exchange))
        on_end(len(result.clients))

    async def run_bad(request: BadRequest, delay: float) -> None:
        await asyncio.sleep(delay)
        result.bad.append((request, await fetch(address, request.data, timeout=timeout)))

    await asyncio.gather(
        *(run_client(client) for client in clients),
        *(run_bad(request, rng.uniform(0, _BAD_WITHIN_S)) for request in bad),
    )
    result.seconds = time.monotonic() - began
    return result


async def wait_healthy(address: Address, timeout: float) -> bool:
    """Waits until /health says 200, and returns whether it has."""
    began = time.monotonic()
    while time.monotonic() - began < timeout:
        look = await fetch(address, request_bytes("GET", "/health", address=address), timeout=timeout)
        if look.status == 200:
            return True
        await asyncio.sleep(_DRAIN_POLL_S)
    return False


async def wait_drained(address: Address, result: Round, timeout: float) -> None:
    """Waits until the engine holds nothing any more, and notes it."""
    began = time.monotonic()
    while time.monotonic() - began < timeout:
        page = await fetch(address, request_bytes("GET", "/metrics", address=address), timeout=timeout)
        result.gauges = read_gauges(page.body.decode())
        if result.gauges and not any(result.gauges.values()):
            result.drained = time.monotonic() - began
            return
        await asyncio.sleep(_DRAIN_POLL_S)


def read_gauges(page: str) -> dict[str, float]:
    """What the engine holds, from the text of /metrics."""
    found = (re.search(rf"^{name}(?:{{.*?}})? (\S+)$", page, re.MULTILINE) for name in _GAUGES)
    return {name: float(match[1]) for name, match in zip(_GAUGES, found, strict=True) if match}


@asynccontextmanager
async def watching(address: Address) -> AsyncIterator[list[Poll]]:
    """Asks /health every 50 ms, and /metrics now and then, until the block ends."""
    polls: list[Poll] = []
    under_way: set[asyncio.Task[None]] = set()

    async def poll(path: str) -> None:
        polls.append(Poll(path, await fetch(address, request_bytes("GET", path, address=address), timeout=60)))

    async def watch() -> None:
        count = 0
        while True:
            for path in ("/health", "/metrics") if count % _METRICS_EVERY == 0 else ("/health",):
                task = asyncio.create_task(poll(path))  # a slow answer holds the next question not up
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            count += 1
            await asyncio.sleep(_POLL_S)

    watcher = asyncio.create_task(watch())
    try:
        yield polls
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, *under_way, return_exceptions=True)
