"""/metrics, under vLLM's names, so that dashboards and autoscalers made for it work unchanged.

Owns a registry for each server. What the engine counts is read from its stats when somebody asks; what only the server
sees, the times and ends of requests, is recorded as it happens, from the engine's own time stamps.

Beyond vLLM's names there are `cb_engine:*`: its one gauge of the KV cache cannot tell cached blocks from live ones, and
a full prefix cache looks like a leak then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from cb_engine.metrics import STEP_TOKENS_BOUNDS, EngineStats
from cb_engine.outputs import GenerationOutput
from cb_engine.serve.host import EngineHost, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABELS = ("model_name", "engine")
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_LONG_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SAMPLES = (1, 2, 5, 10, 20, 50, 100)


class ServerMetrics:
    """All metrics of one server."""

    def __init__(self, host: EngineHost, model_name: str) -> None:
        self._registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": "0"}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, _LABELS, buckets=buckets, registry=self._registry).labels(**labels)

        self._first_token = histogram("vllm:time_to_first_token_seconds", "Time to the first token.", _SECONDS)
        self._inter_token = histogram("vllm:inter_token_latency_seconds", "Time between tokens.", _SECONDS)
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between a request's tokens.", _SECONDS
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Time from submission to end.", _LONG_SECONDS)
        self._queue = histogram("vllm:request_queue_time_seconds", "Time until it was scheduled.", _LONG_SECONDS)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From then to the first token.", _LONG_SECONDS)
        self._decode = histogram("vllm:request_decode_time_seconds", "From then to the last token.", _LONG_SECONDS)
        self._prompt_tokens = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._generated = histogram("vllm:request_generation_tokens", "Tokens that were generated.", _TOKENS)
        self._max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens of a request.", _TOKENS)
        self._n = histogram("vllm:request_params_n", "n of a request.", _SAMPLES)
        self._ended = Counter(
            "vllm:request_success", "Ended requests.", (*_LABELS, "finished_reason"), registry=self._registry
        )
        self._rejected = Counter(
            "vllm:admission_rejections", "Refused requests.", (*_LABELS, "reason"), registry=self._registry
        )
        self._corrupted = Counter(
            "vllm:corrupted_requests",
            "Requests that failed alone, by NaN logits for one.",
            _LABELS,
            registry=self._registry,
        ).labels(**labels)
        self._gone = Counter(
            "cb_engine:clients_gone", "Clients that left early.", _LABELS, registry=self._registry
        ).labels(**labels)
        self._responses = Counter(
            "cb_engine:http_responses", "Answers by status.", (*_LABELS, "status"), registry=self._registry
        )
        Gauge("cb_engine:start_time_seconds", "When the server started.", registry=self._registry).set(host.started_at)
        self._labels = labels
        for reason in ("stop", "length", "abort", "error"):
            self._ended.labels(**labels, finished_reason=reason)
        self._registry.register(_EngineCollector(host, tuple(labels.values())))

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def admitted(self, max_tokens: int, num_samples: int) -> None:
        """A prompt was taken."""
        self._max_tokens.observe(max_tokens)
        self._n.observe(num_samples)

    def rejected(self, reason: str) -> None:
        """A request was turned away."""
        self._rejected.labels(**self._labels, reason=reason).inc()

    def corrupted(self) -> None:
        """A request has failed alone."""
        self._corrupted.inc()

    def left_alone(self, count: int) -> None:
        """So many samples were given up before they had ended."""
        self._ended.labels(**self._labels, finished_reason="abort").inc(count)

    def client_gone(self) -> None:
        """A client left before its answer was complete."""
        self._gone.inc()

    def answered(self, status: int) -> None:
        """An HTTP answer has begun."""
        self._responses.labels(**self._labels, status=str(status)).inc()

    def ended(self, output: GenerationOutput, num_prompt_tokens: int, times: TokenTimes) -> None:
        """A sample has had its terminal output."""
        self._ended.labels(**self._labels, finished_reason=output.finish_reason or "abort").inc()
        scheduled, end = output.lifespan
        self._e2e.observe(end - output.created_time)
        self._prompt_tokens.observe(num_prompt_tokens)
        self._generated.observe(times.count)
        if scheduled < 0:
            return  # it ended while it waited
        self._queue.observe(scheduled - output.created_time)
        if times.count:
            self._prefill.observe(times.first - scheduled)
            self._decode.observe(times.last - times.first)
        if times.count > 1:
            self._per_token.observe((times.last - times.first) / (times.count - 1))

    def tokens(self, created: float, times: TokenTimes, stamps: list[float]) -> None:
        """More tokens of a sample, with their time stamps."""
        for stamp in stamps:
            if times.count:
                self._inter_token.observe(stamp - times.last)
            else:
                self._first_token.observe(stamp - created)
                times.first = stamp
            times.last = stamp
            times.count += 1


class TokenTimes:
    """When the tokens of a sample came."""

    __slots__ = ("count", "first", "last")

    def __init__(self) -> None:
        self.count = 0
        self.first = self.last = 0.0


class _EngineCollector(Collector):
    """Reads the engine when it is asked."""

    def __init__(self, host: EngineHost, labels: tuple[str, ...]) -> None:
        self._host = host
        self._labels = labels
        self._before = dict.fromkeys((name for name, *_ in _COUNTERS), 0.0)  # of engines that have failed
        self._last: tuple[Any, EngineStats] | None = None

    def collect(self) -> Iterator[Any]:
        """See `prometheus_client.registry.Collector`."""
        health = self._host.health()
        yield self._gauge("cb_engine:healthy", "1 if requests are taken and answered.", float(health.is_ok))
        yield self._counter("cb_engine:engine_restarts", "Failed engines that were made anew.", self._host.num_restarts)
        manager = self._host.manager
        if manager is None or self._host.state is State.STOPPED:
            return
        stats = manager.stats()
        self._take_over(manager, stats)
        for name, text, value in _gauges(stats):
            yield self._gauge(name, text, value)
        for name, text, read in _COUNTERS:
            yield self._counter(name, text, self._before[name] + read(stats))
        yield from self._of_positions(stats)
        yield self._iteration_tokens(stats)

    def _take_over(self, manager: Any, stats: EngineStats) -> None:
        """A new engine counts from 0; counters may not."""
        if self._last is not None and self._last[0] is not manager:
            for name, _, read in _COUNTERS:
                self._before[name] += read(self._last[1])
        self._last = (manager, stats)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _of_positions(self, stats: EngineStats) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts.", labels=(*_LABELS, "position")
        )
        for position, count in enumerate(stats.accepted_per_position):
            family.add_metric((*self._labels, str(position)), count)
        yield family

    def _iteration_tokens(self, stats: EngineStats) -> HistogramMetricFamily:
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=_LABELS)
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip(STEP_TOKENS_BOUNDS, stats.steps_by_tokens, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else f"{float(bound)}", total))
        family.add_metric(self._labels, buckets, stats.step_tokens)
        return family


def _gauges(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    blocks = stats.live_blocks + stats.cached_blocks + stats.free_blocks
    yield "vllm:num_requests_running", "Requests that hold blocks.", stats.num_running
    yield "vllm:num_requests_waiting", "Requests that wait.", stats.num_waiting
    yield "vllm:kv_cache_usage_perc", "Share of the blocks that requests hold.", stats.live_blocks / max(1, blocks)
    yield "cb_engine:waiting_prompt_tokens", "Prompt tokens of requests that wait.", stats.num_waiting_tokens
    yield "cb_engine:kv_blocks_live", "Blocks that requests hold.", stats.live_blocks
    yield "cb_engine:kv_blocks_cached", "Blocks that only the prefix cache holds.", stats.cached_blocks
    yield "cb_engine:kv_blocks_free", "Blocks that nobody holds.", stats.free_blocks
    yield "cb_engine:step_time_ms", "Mean time of the latest steps.", stats.step_time_ms
    yield "cb_engine:weight_version", "Goes up with every change of the weights.", stats.weight_version


_COUNTERS: tuple[tuple[str, str, Any], ...] = (
    ("vllm:num_preemptions", "Requests that lost their blocks.", lambda s: s.num_preemptions),
    ("vllm:prompt_tokens", "Prompt tokens.", lambda s: s.prompt_tokens),
    ("vllm:generation_tokens", "Generated tokens.", lambda s: s.generated_tokens),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.prefix_query_tokens),
    ("vllm:prefix_cache_hits", "Prompt tokens found.", lambda s: s.prefix_hit_tokens),
    ("vllm:spec_decode_num_drafts", "Times that drafts were verified.", lambda s: s.num_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Verified draft tokens.", lambda s: s.num_draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", lambda s: s.num_accepted_tokens),
    ("cb_engine:steps", "Steps.", lambda s: s.num_steps),
    ("cb_engine:missed_shapes", "Padded steps of a shape that was not warmed up.", lambda s: s.num_missed_shapes),
)
