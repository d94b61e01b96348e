"""One HTTP request's work in the engine: its prompts, n samples of each, its time limits and its end.

Owns the stream of outputs and the timer. After `close` nothing of it is in the engine, whatever the end was: an answer,
an error, or a client that has gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from cb_engine.api.async_engine import AsyncEngine, OutputStream
from cb_engine.errors import EngineError, EngineStoppedError, QueueFullError
from cb_engine.outputs import GenerationOutput, join_deltas
from cb_engine.request import Request
from cb_engine.scheduler.output import NOTHING_LEFT
from cb_engine.serve.errors import APIError, engine_failed
from cb_engine.serve.metrics import ServerMetrics, TokenTimes
from cb_engine.serve.settings import ServeSettings


class Sample(NamedTuple):
    """An output and the number of its choice: prompt by prompt, the samples of each in order."""

    choice: int
    output: GenerationOutput


class Usage:
    """Tokens of one HTTP request."""

    def __init__(self, groups: Sequence[Sequence[Request]]) -> None:
        self.prompt_tokens = sum(group[0].num_prompt_tokens for group in groups)
        self.completion_tokens = 0
        self.reasoning_tokens = 0  # told by whoever reads the text
        self._groups = groups

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the cache. Samples that take a prompt over from another one of theirs have
        all of it from there, so the one that found least tells."""
        return sum(min(request.num_cached_tokens for request in group) for group in self._groups)

    def as_openai(self) -> dict[str, object]:
        """The `usage` object of chats and completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class Generation:
    """See the module docstring.

    Args:
        groups: the requests of each prompt, in the order of their samples.
        under_way: holds this from `submit` to `close`.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        groups: Sequence[Sequence[Request]],
        settings: ServeSettings,
        metrics: ServerMetrics,
        under_way: set[Generation],
    ) -> None:
        self._under_way = under_way
        self._engine = engine
        self._requests = [request for group in groups for request in group]
        self._choices = {request.request_id: choice for choice, request in enumerate(self._requests)}
        self._settings = settings
        self._metrics = metrics
        self._times = [TokenTimes() for _ in self._requests]
        self._unfinished = set(range(len(self._requests)))
        self._stream: OutputStream | None = None
        self._limit = _TimeLimit(self._requests, settings, metrics)
        self.usage = Usage(groups)

    def submit(self) -> None:
        """Hands everything to the engine. From here on `close` has to be called, whatever happens.

        Raises:
            QueueFullError, EngineStoppedError, EngineError: nothing was submitted.
        """
        try:
            self._stream = self._engine.submit(self._requests)
        except QueueFullError:
            self._metrics.rejected("queue_full")
            raise
        self._under_way.add(self)
        for request in self._requests:
            if request.request_id == request.family:
                self._metrics.admitted(request.max_tokens, request.sampling_params.n)
        self._limit.start(self._stream)

    def close(self) -> None:
        """Ends what is unfinished."""
        self._limit.stop()
        self._under_way.discard(self)
        if self._stream is None:
            return
        self._stream.close()
        self._metrics.left_alone(len(self._unfinished))  # their last outputs come to nobody
        self._unfinished.clear()

    async def next_batch(self) -> list[Sample]:
        """What has come since the last batch, as one output for each sample; empty once every sample has ended.

        Raises:
            APIError: a sample has failed, or ran out of time.
        """
        if self._stream is None:
            raise RuntimeError("next_batch() before submit()")
        outputs: list[GenerationOutput] = await anext(self._stream, [])
        samples = [self._take_in(output) for output in outputs]  # all, before one of them may raise
        for sample in samples:
            self._raise_failure(sample.output)
        return _one_each(samples)

    async def batches(self) -> AsyncGenerator[list[Sample], None]:
        """All batches that are still to come.

        Raises:
            APIError: see `next_batch`.
        """
        while batch := await self.next_batch():
            yield batch

    async def all(self) -> list[GenerationOutput]:
        """The terminal outputs of all samples, in the order of their choices.

        Raises:
            APIError: see `next_batch`.
        """
        ended: dict[int, GenerationOutput] = {}
        async for batch in self.batches():
            ended |= {sample.choice: sample.output for sample in batch if sample.output.is_finished()}
        return [ended[choice] for choice in range(len(self._requests))]

    def _take_in(self, output: GenerationOutput) -> Sample:
        choice = self._choices[output.request_id]
        times = self._times[choice]
        self.usage.completion_tokens += len(output.generated_tokens)
        self._metrics.tokens(output.created_time, times, output.timestamps or [])
        if output.is_finished():
            self._unfinished.discard(choice)
            self._metrics.ended(output, self._requests[choice].num_prompt_tokens, times)
        return Sample(choice, output)

    def _raise_failure(self, output: GenerationOutput) -> None:
        if output.finish_reason == "error":
            raise self._failure(output)
        if output.finish_reason == "abort":
            raise self._limit.error() or APIError(
                503, "the request was aborted by the server", code="aborted", retry_after=self._settings.retry_after
            )

    def _failure(self, output: GenerationOutput) -> APIError:
        try:
            self._engine.check_health()
        except (EngineError, EngineStoppedError):
            return engine_failed(self._settings.retry_after)
        request = self._requests[self._choices[output.request_id]]
        if request.grammar is not None and request.grammar.error is not None:  # the work that it takes has a limit
            error = request.grammar.error
            return APIError(400, f"the form cannot be kept to: {error}; simplify it", code="form_failed")
        if output.error == NOTHING_LEFT:
            return APIError(400, f"the request failed: {output.error}", code="request_failed")
        self._metrics.corrupted()
        return APIError(500, f"the request failed: {output.error}", code="request_failed")


def _one_each(samples: Sequence[Sample]) -> list[Sample]:
    """Joins the outputs of a sample: a reader who is behind gets several deltas as one."""
    by_choice: dict[int, list[GenerationOutput]] = {}
    for sample in samples:
        by_choice.setdefault(sample.choice, []).append(sample.output)
    return [Sample(choice, join_deltas(outputs)) for choice, outputs in by_choice.items()]


class _TimeLimit:
    """Ends requests that wait, or run, for too long."""

    def __init__(self, requests: Sequence[Request], settings: ServeSettings, metrics: ServerMetrics) -> None:
        self._requests = requests
        self._metrics = metrics
        self._max_waiting, self._max_running = settings.max_waiting_time, settings.max_running_time
        self._retry_after = settings.retry_after
        self._stream: OutputStream | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._error: APIError | None = None

    def start(self, stream: OutputStream) -> None:
        """Begins to count."""
        self._stream = stream
        if self._max_waiting is not None:
            self._later(self._max_waiting, self._check_waiting)
        if self._max_running is not None:
            self._later(self._max_running, self._check_running)

    def stop(self) -> None:
        """Counts no more."""
        for timer in self._timers:
            timer.cancel()

    def error(self) -> APIError | None:
        """Why the requests were ended, if they were."""
        return self._error

    def _later(self, seconds: float, check: object) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, check))  # type: ignore[arg-type]

    def _first_scheduled(self) -> float | None:
        times = [r.first_scheduled_time for r in self._requests if r.first_scheduled_time >= 0]
        return min(times) if times else None

    def _check_waiting(self) -> None:
        if self._first_scheduled() is None:
            self._metrics.rejected("waiting_timeout")
            message = f"the request waited for more than {self._max_waiting:g} s; the server is busy, try later"
            self._end(APIError(503, message, code="waiting_timeout", retry_after=self._retry_after))

    def _check_running(self) -> None:
        scheduled = self._first_scheduled()
        limit = self._max_running or 0.0
        left = limit if scheduled is None else scheduled + limit - time.perf_counter()
        if left > 0:
            self._later(left, self._check_running)
        else:
            message = f"the request ran for more than {limit:g} s, this server's limit; ask for fewer tokens"
            self._end(APIError(504, message, code="running_timeout"))

    def _end(self, error: APIError) -> None:
        self._error = error
        if self._stream is not None:
            self._stream.abort()
