"""What a server costs: the same work through it, and through `generate_batch` in a plain process.

The server's time is that of its client, from the first request to the last answer, with both processes on this
machine, as a user has it. The plain process is the one of `peer_worker.py`. All are fresh, and
warmed up, in each round.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.peers import Case, Results, run_engine
from bench.serve_client import Load, chat_body, send, warm_up
from bench.serve_figures import read_served
from bench.server_process import ServerFailedError, ServerProcess, cb_engine_command

_PLAIN, _STREAMED, _WHOLE = WAYS = ("generate_batch", "server, streamed", "server, whole")
_READY_S = 600.0


@dataclass
class Overhead:
    """Seconds of every round, by way."""

    tokens: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    client_cpu: list[float] = field(default_factory=list)

    def extra(self, way: str) -> float:
        """How much longer a way takes than the plain one: the median over the rounds of their ratios, less one."""
        pairs = zip(self.seconds[way], self.seconds[_PLAIN], strict=True)
        return statistics.median(mine / plain for mine, plain in pairs) - 1

    def lines(self) -> list[str]:
        """For people."""
        lines = []
        for way, seconds in self.seconds.items():
            median = statistics.median(seconds)
            more = "" if way == _PLAIN else f"  {self.extra(way):+.1%}"
            lines.append(f"{way:18}{median:8.2f} s  {self.tokens / median:8.1f} tok/s{more}")
        return [*lines, f"the client took {statistics.median(self.client_cpu):.1%} of a core"]


def measure_overhead(
    model: str,
    questions: Sequence[str],
    prompts: Sequence[list[int]],
    warm_questions: Sequence[str],
    max_tokens: int,
    rounds: int,
    timeout: float,
    progress: Callable[[str], None],
) -> Overhead:
    """Runs every way in turn, so many times; who goes first changes from round to round.

    Args:
        questions: sent as chats; `prompts` are the same as token ids.

    Raises:
        ServerFailedError: a way did not do all of its work.
    """
    overhead = Overhead(len(prompts) * max_tokens)
    for number in range(rounds):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            progress(f"round {number + 1} of {rounds}: {way}")
            if way == _PLAIN:
                seconds = _run_plain(model, prompts, max_tokens)
            else:
                load = _run_server(model, questions, warm_questions, max_tokens, way, timeout)
                _check_work(load, prompts, max_tokens, way)
                seconds = load.seconds
                overhead.client_cpu.append(load.client_cpu / seconds)
            overhead.seconds[way].append(seconds)
            progress(f"  {seconds:.2f} s")
    return overhead


def _run_plain(model: str, prompts: Sequence[list[int]], max_tokens: int) -> float:
    results: Results = {}
    case = Case("plain", list(prompts), max_tokens)
    run_engine("cb_engine", sys.executable, model, [case], results, lambda line: None)
    measured = results["plain", "cb_engine"]
    if measured.failures:
        raise ServerFailedError(f"generate_batch: {measured.failures[0]}")
    return measured.seconds[0]


def _run_server(
    model: str, questions: Sequence[str], warm_questions: Sequence[str], max_tokens: int, way: str, timeout: float
) -> Load:
    bodies = [chat_body("cb_engine", model, q, max_tokens, stream=way == _STREAMED) for q in questions]
    with ServerProcess(cb_engine_command(model)) as server:
        server.wait_ready(_READY_S)
        asyncio.run(warm_up("cb_engine", server.address, model, warm_questions, timeout))
        return asyncio.run(send(server.address, bodies, [0.0] * len(bodies), timeout, way))


def _check_work(load: Load, prompts: Sequence[list[int]], max_tokens: int, way: str) -> None:
    """Both sides must have had the same work, or the figure means nothing."""
    for exchange, prompt in zip(load.exchanges, prompts, strict=True):
        try:
            if way == _STREAMED:
                served = read_served(exchange, len)
                seen = (served.prompt_tokens, served.tokens)
            else:
                usage = exchange.json()["usage"]
                seen = (usage["prompt_tokens"], usage["completion_tokens"])
        except (ValueError, KeyError) as error:
            raise ServerFailedError(f"{way}: {exchange.failure or error!r}") from error
        if seen != (len(prompt), max_tokens):
            raise ServerFailedError(f"{way}: {seen} prompt and new tokens instead of {(len(prompt), max_tokens)}")
