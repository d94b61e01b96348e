"""The client of the serving benchmark: chats that stream, sent at given times. The same for all servers.

Owns what is asked. All servers get the same messages and limits, each in its own words where it must be: there is no
field for "go on after EOS" that all of them know.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from bench.http_client import Address, Exchange, fetch, request_bytes
from bench.serve_figures import Figures, Served, figures_of, read_served

CHAT = "/v1/chat/completions"

_WARM_TOKENS = 16


@dataclass(frozen=True)
class Load:
    """What was sent and what came back.

    Attributes:
        client_cpu: seconds of processor time of this process meanwhile.
    """

    exchanges: list[Exchange]
    client_cpu: float

    @property
    def seconds(self) -> float:
        """From the first request to the last end."""
        return max(e.ended for e in self.exchanges) - min(e.sent for e in self.exchanges)


def chat_body(engine: str, model: str, question: str, max_tokens: int, *, stream: bool = True) -> dict[str, Any]:
    """A greedy chat of exactly `max_tokens` tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
    if engine == "transformers":  # it has no ignore_eos, but takes a whole generation config as text
        config = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": max_tokens}
        return body | {"stream": stream, "generation_config": json.dumps(config)}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    return body | {"stream": stream, "temperature": 0, "ignore_eos": True, **options}


async def send(address: Address, bodies: Sequence[Any], arrivals: Sequence[float], timeout: float, name: str) -> Load:
    """Sends every body at its time, and waits for all answers.

    Args:
        arrivals: seconds from now.
        timeout: seconds for each request.
        name: of the progress bar.
    """
    requests = [request_bytes("POST", CHAT, body, address=address) for body in bodies]
    before = _cpu_seconds()
    with tqdm(total=len(requests), desc=name, unit="answer", leave=False, mininterval=1.0) as bar:

        async def one(request: bytes, delay: float) -> Exchange:
            await asyncio.sleep(delay)
            exchange = await fetch(address, request, timeout=timeout)
            bar.update()
            return exchange

        exchanges = await asyncio.gather(*map(one, requests, arrivals))
    return Load(exchanges, _cpu_seconds() - before)


async def warm_up(engine: str, address: Address, model: str, questions: Sequence[str], timeout: float) -> None:
    """The same for every server: one short answer, then all of `questions` at once.

    Raises:
        ValueError: it does not even answer those.
    """
    for some in (questions[:1], questions):
        bodies = [chat_body(engine, model, question, _WARM_TOKENS) for question in some]
        load = await send(address, bodies, [0.0] * len(bodies), timeout, f"{engine}: warming up")
        for exchange in load.exchanges:
            read_served(exchange, len)


def figures_of_load(load: Load, count_tokens: Callable[[str], int]) -> tuple[Figures, list[str]]:
    """Figures, and why requests have failed."""
    served: list[Served] = []
    failures: list[str] = []
    for exchange in load.exchanges:
        try:
            served.append(read_served(exchange, count_tokens))
        except ValueError as error:
            failures.append(str(error))
    return figures_of(served, len(failures), load.client_cpu), failures


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
