"""Figures of a served load, with the definitions of `vllm bench serve`. Knows no server and sends nothing.

TTFT   from sending a request to its first text
ITL    between one piece of text and the next, of all requests together
TPOT   from the first text to the last, for each token but the first: one figure for each request
E2EL   from sending a request to its last text

One thing is different: a chunk without text is no token. Some servers send the role alone before anything is computed.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

from bench.http_client import Exchange

DONE = "[DONE]"


@dataclass(frozen=True)
class Served:
    """One streamed answer. Times in seconds, by the same clock.

    Attributes:
        times: when each piece of text came.
        tokens: that were generated.
    """

    sent: float
    times: tuple[float, ...]
    tokens: int
    prompt_tokens: int | None = None

    @property
    def ttft(self) -> float:
        """See the module docstring, also for the next three."""
        return self.times[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.times[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True)
class Figures:
    """Of one server, rate and round; or medians over the rounds. Times in milliseconds."""

    completed: int
    failed: int
    seconds: float
    output_tokens: int
    requests_per_s: float
    tokens_per_s: float
    ttft_median: float
    ttft_p99: float
    tpot_median: float
    tpot_p99: float
    itl_median: float
    itl_p99: float
    e2el_median: float
    client_cpu: float  # of one core


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which requests are sent: a Poisson process; all at once if `rate` is infinite."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def read_served(exchange: Exchange, count_tokens: Callable[[str], int]) -> Served:
    """Takes a streamed chat apart.

    Args:
        count_tokens: of a text, for a server that does not say how many there were.

    Raises:
        ValueError: there is no answer, or not all of it.
    """
    if exchange.status != 200 or exchange.failure is not None:
        raise ValueError(exchange.failure or f"status {exchange.status}: {exchange.body[:200]!r}")
    times: list[float] = []
    text = ""
    tokens = prompt_tokens = None
    has_ended = False
    for when, data in exchange.events():
        if data == DONE:
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ValueError(f"the stream ended with {chunk['error']}")
        for choice in chunk.get("choices", ()):
            piece = choice["delta"].get("content") or choice["delta"].get("reasoning_content") or ""
            if piece:
                times.append(when)
            text += piece
            has_ended |= choice.get("finish_reason") is not None
        if chunk.get("usage"):
            tokens, prompt_tokens = chunk["usage"]["completion_tokens"], chunk["usage"]["prompt_tokens"]
    if not has_ended or not times:
        raise ValueError("the stream broke off" if times else "the stream has no text")
    return Served(exchange.sent, tuple(times), count_tokens(text) if tokens is None else tokens, prompt_tokens)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures_of(served: Sequence[Served], failed: int, client_cpu: float) -> Figures:
    """All figures of a load.

    Args:
        failed: requests that have no answer.
        client_cpu: seconds of processor time that the client has used.
    """
    seconds = max(s.times[-1] for s in served) - min(s.sent for s in served) if served else 0.0
    tokens = sum(s.tokens for s in served)
    ttft, e2el = [s.ttft for s in served], [s.e2el for s in served]
    tpot = [s.tpot for s in served if s.tpot is not None]
    itl = [gap for s in served for gap in s.itl]
    return Figures(
        completed=len(served),
        failed=failed,
        seconds=seconds,
        output_tokens=tokens,
        requests_per_s=len(served) / seconds if seconds else 0.0,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        ttft_median=1e3 * percentile(ttft, 50),
        ttft_p99=1e3 * percentile(ttft, 99),
        tpot_median=1e3 * percentile(tpot, 50),
        tpot_p99=1e3 * percentile(tpot, 99),
        itl_median=1e3 * percentile(itl, 50),
        itl_p99=1e3 * percentile(itl, 99),
        e2el_median=1e3 * percentile(e2el, 50),
        client_cpu=client_cpu / seconds if seconds else 0.0,
    )


def median_figures(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over the rounds; failures are added up."""
    medians = {f.name: statistics.median(getattr(figures, f.name) for figures in rounds) for f in fields(Figures)}
    medians |= {"completed": int(medians["completed"]), "output_tokens": int(medians["output_tokens"])}
    return Figures(**{**medians, "failed": sum(figures.failed for figures in rounds)})


# ---- tables ------------------------------------------------------------------------------------------------------

# Column -> (figure, whether less is better). Ratios say how many times as good the first engine is.
_COLUMNS = {
    "req/s": ("requests_per_s", False),
    "tok/s": ("tokens_per_s", False),
    "TTFT": ("ttft_median", True),
    "p99": ("ttft_p99", True),
    "TPOT": ("tpot_median", True),
    "p99 ": ("tpot_p99", True),
    "ITL": ("itl_median", True),
    "p99  ": ("itl_p99", True),
}


def format_rate(title: str, by_engine: dict[str, Figures | str]) -> str:
    """A table of one rate: a line for each engine, then how many times as good the first one is as each other.

    Args:
        by_engine: figures, or why there are none.
    """
    cells = [["", *(name.strip() for name in _COLUMNS), "failed", "client CPU"]]
    for name, figures in by_engine.items():
        if isinstance(figures, str):
            continue
        values = [getattr(figures, attribute) for attribute, _ in _COLUMNS.values()]
        numbers = [f"{value:.2f}" if value < 100 else f"{value:.0f}" for value in values]
        cells.append([name, *numbers, str(figures.failed), f"{figures.client_cpu:.0%}"])
    first, *others = by_engine.items()
    for name, figures in others:
        if not isinstance(figures, str) and not isinstance(first[1], str):
            cells.append([f"x {name}", *_ratios(first[1], figures), "", ""])
    failures = [f"{name}: {reason}" for name, reason in by_engine.items() if isinstance(reason, str)]
    return "\n".join([title, *_aligned(cells), *failures])


def _ratios(mine: Figures, theirs: Figures) -> list[str]:
    ratios = []
    for attribute, less_is_better in _COLUMNS.values():
        a, b = getattr(mine, attribute), getattr(theirs, attribute)
        good, base = (b, a) if less_is_better else (a, b)
        ratios.append(f"{good / base:.2f}" if base else "-")
    return ratios


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in cells]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def as_dict(figures: Figures) -> dict[str, float]:
    """For a file."""
    return {name: round(value, 4) for name, value in asdict(figures).items()}
