"""What has to hold of a server under load and faults: each a check with a verdict and its reasons."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.http_client import Exchange
from bench.load_requests import Answer, Plan, error_fault, error_object_fault, read_answer
from bench.load_round import Client, Poll, Round

Verdict = Literal["passed", "failed", "skipped"]

_MAX_REASONS = 8
# /health may lag behind the engine's own word by so much: time for a log line, and for the loop to look again.
_LAG_S = 0.25
_LOG_MARKS = (
    "internal error",
    "never retrieved",
    "Exception in ASGI",
    "was destroyed but it is pending",
    "are cut off",
)


@dataclass
class Check:
    """A verdict. `note` says what was seen, `faults` what was wrong with it."""

    name: str
    note: str = ""
    faults: list[str] = field(default_factory=list)
    is_skipped: bool = False

    @property
    def verdict(self) -> Verdict:
        """In a word."""
        return "failed" if self.faults else "skipped" if self.is_skipped else "passed"

    def lines(self) -> list[str]:
        """For people."""
        more = len(self.faults) - _MAX_REASONS
        reasons = [f"    {fault}" for fault in self.faults[:_MAX_REASONS]]
        return [f"{self.verdict:8}{self.name}: {self.note}", *reasons, *([f"    and {more} more"] if more > 0 else [])]


@dataclass(frozen=True)
class Outage:
    """From when until when there was no engine, by `time.monotonic()`."""

    down: float
    up: float

    def overlaps(self, exchange: Exchange) -> bool:
        """Whether a request was under way in it, or came right after."""
        return exchange.sent <= self.up + _LAG_S and exchange.ended >= self.down

    def covers(self, exchange: Exchange) -> bool:
        """Whether a request came and went within it."""
        return exchange.sent >= self.down + _LAG_S and exchange.ended <= self.up


def read_outages(events: Path) -> list[Outage]:
    """The outages that a server of `cb_server.py` has kept book of. One without an end lasts for ever."""
    outages: list[Outage] = []
    down: float | None = None
    for line in events.read_text(encoding="utf-8").splitlines() if events.exists() else ():
        event = json.loads(line)
        if event["event"] == "down":
            down = event["at"]
        elif down is not None:
            outages.append(Outage(down, event["at"]))
            down = None
    return outages if down is None else [*outages, Outage(down, float("inf"))]


def check_answers(rounds: Sequence[Round], right: Mapping[Plan, Answer], outages: Sequence[Outage]) -> Check:
    """Everybody who stayed got the right answer, or while the engine was away a clear error."""
    check = Check("answers")
    counts: Counter[str] = Counter()
    for round_ in rounds:
        for client, exchange in round_.clients:
            if exchange.left:
                counts["left early"] += 1
                continue
            excused = any(outage.overlaps(exchange) for outage in outages)
            kind, fault = _judge(client, exchange, right[client.plan], excused)
            counts[kind] += 1
            if fault is not None:
                how = "streamed" if client.stream else "whole"
                check.faults.append(f"round {round_.number}, {client.plan.name}, {how}: {fault}")
    check.note = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    return check


def _judge(client: Client, exchange: Exchange, right: Answer, excused: bool) -> tuple[str, str | None]:
    """What kind of answer it is, and what is wrong with it."""
    if not exchange.is_complete:
        return "broken off", exchange.failure or f"the answer is not complete (status {exchange.status})"
    if exchange.status != 200:
        if exchange.status != 503 or not excused:
            return "refused", f"status {exchange.status}: {exchange.body[:200]!r}"
        return "told that the engine failed", error_fault(exchange)
    try:
        answer = read_answer(exchange, client.plan)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return "of a wrong form", f"{type(error).__name__}: {error}"
    if answer.error is None:
        return "right", answer.difference(right)
    if not excused:
        return "streams with an error", f"an error though the engine lived: {answer.error}"
    cut = None if answer.begins(right) else f"what came before the error is wrong: {answer.choices}"
    return "told in the stream that the engine failed", error_object_fault(answer.error) or cut


def check_refusals(rounds: Sequence[Round], outages: Sequence[Outage]) -> Check:
    """Bad requests are refused with the status that fits, and an error object."""
    check = Check("bad requests")
    counts: Counter[int] = Counter()
    for round_ in rounds:
        for bad, exchange in round_.bad:
            counts[exchange.status or 0] += 1
            away = exchange.status == 503 and any(outage.overlaps(exchange) for outage in outages)
            if exchange.status != bad.expected and not away:
                seen = exchange.failure or f"status {exchange.status}: {exchange.body[:200]!r}"
                check.faults.append(f"{bad.name}: {bad.expected} was due, got {seen}")
            elif not bad.is_http and (fault := error_fault(exchange)) is not None:
                check.faults.append(f"{bad.name}: {fault}")
    check.note = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
    return check


def check_drained(rounds: Sequence[Round], timeout: float) -> Check:
    """After every round the engine holds no blocks and no requests."""
    check = Check("nothing is left in the engine")
    times = [round_.drained for round_ in rounds if round_.drained is not None]
    check.note = f"empty {max(times, default=0.0):.2f} s after the last answer at most"
    for round_ in rounds:
        if round_.drained is None:
            check.faults.append(f"round {round_.number}: after {timeout:g} s there is {round_.gauges or 'no /metrics'}")
    return check


def check_memory(rounds: Sequence[Round], tolerance_mb: float) -> Check:
    """The server does not grow after its first round."""
    sizes = [round_.rss / 1e6 for round_ in rounds if round_.rss is not None]
    if len(sizes) < 2:
        return Check("memory", "needs two rounds and a server that this script started", is_skipped=True)
    growth = [size - sizes[0] for size in sizes[1:]]
    check = Check("memory", f"{' -> '.join(f'{size:.0f}' for size in sizes)} MB, {tolerance_mb:g} MB more are allowed")
    if max(growth) > tolerance_mb:
        check.faults.append(f"{max(growth):.0f} MB more than after the first round")
    return check


def check_outage(outages: Sequence[Outage], *, failed_on_purpose: bool) -> Check:
    """The engine failed once, as it was told to, and came back."""
    if not failed_on_purpose:
        return Check("the engine comes back", "needs a server that this script started", is_skipped=True)
    check = Check("the engine comes back", ", ".join(f"after {o.up - o.down:.1f} s" for o in outages))
    if len(outages) != 1:
        check.faults.append(f"it failed {len(outages)} times instead of once")
    check.faults += ["it stayed away" for outage in outages if math.isinf(outage.up)]
    return check


def check_health_truth(polls: Sequence[Poll], outages: Sequence[Outage], *, failed_on_purpose: bool) -> Check:
    """/health says 503 while there is no engine, and 200 while there is."""
    check = Check("/health tells the truth")
    looks = [poll.exchange for poll in polls if poll.path == "/health"]
    counts = Counter(look.status or 0 for look in looks)
    check.note = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
    for look in looks:
        if any(outage.covers(look) for outage in outages):
            if look.status != 503:
                check.faults.append(f"status {look.status} while there was no engine")
        elif not any(outage.overlaps(look) for outage in outages) and look.status != 200:
            check.faults.append(f"status {look.status} ({look.failure}, {look.body!r}) while the engine lived")
    if failed_on_purpose and not any(look.status == 503 for look in looks):
        check.faults.append("nobody saw that the engine was away")
    return check


def check_promptness(polls: Sequence[Poll], path: str, limit_s: float) -> Check:
    """A route answers in bounded time, whatever else goes on."""
    times = sorted(poll.seconds for poll in polls if poll.path == path)
    if not times:
        return Check(f"{path} is prompt", faults=["it was never asked"])
    p50, p99, worst = statistics.median(times), times[int(0.99 * (len(times) - 1))], times[-1]
    figures = f"p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, max {worst * 1e3:.0f} ms of {len(times)}"
    check = Check(f"{path} is prompt", f"{figures}; the limit is {limit_s * 1e3:.0f} ms")
    if worst > limit_s:
        check.faults.append("an answer took longer")
    return check


def check_log(log: str) -> Check:
    """The server's log has no fault of its own making."""
    lines = [line for line in log.splitlines() if any(mark in line for mark in _LOG_MARKS)]
    return Check("the server's log", f"{len(log.splitlines())} lines", faults=lines)
