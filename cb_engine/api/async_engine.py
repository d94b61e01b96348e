"""The engine for asyncio: requests as async iterators. What a server stands on.

Owns nothing but the bridge between the engine thread and event loops; a dropped iterator aborts its requests.

    engine thread   deliver: put put put ... (one step)
                             |  one wake-up of the loop, however many outputs
    event loop      hand out -> the iterators that wait, each gets all that has come for it since it last looked
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from cb_engine.api.manager import ContinuousBatchingManager
from cb_engine.device import release_idle_workers
from cb_engine.errors import EngineStoppedError
from cb_engine.intake import RequestOptions
from cb_engine.metrics import EngineStats
from cb_engine.outputs import GenerationOutput
from cb_engine.request import Request
from cb_engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class _Receiver:
    """Outputs for one iterator. Belongs to its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outputs: list[GenerationOutput] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: GenerationOutput) -> None:
        """Adds an output and wakes the reader."""
        self._outputs.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[GenerationOutput]:
        """All that has come since the last call, at least one."""
        if not self._outputs:
            self._waiter = self._loop.create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return outputs


class _Bridge:
    """Carries outputs from the engine thread into one event loop, with one wake-up for all that come together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # the engine keeps a bridge for as long as its loop lives
        self._pending: deque[tuple[_Receiver, GenerationOutput]] = deque()
        self._is_woken = False

    def put(self, receiver: _Receiver, output: GenerationOutput) -> None:
        """Called on any thread."""
        self._pending.append((receiver, output))
        if self._is_woken:
            return
        self._is_woken = True
        loop = self._loop()
        try:
            if loop is None:
                raise RuntimeError("the loop is gone")
            loop.call_soon_threadsafe(self._hand_out)
        except RuntimeError:  # or closed: nobody waits any more
            logger.debug("the event loop of request %s is closed", output.request_id)
            self._is_woken = False
            self._pending.clear()

    def _hand_out(self) -> None:
        self._is_woken = False  # before the queue is read: what comes from here on wakes the loop again
        while self._pending:
            receiver, output = self._pending.popleft()
            receiver.put(output)


class OutputStream:
    """What comes of submitted requests, in batches of all that has come since the last; ends once each has ended.

    A context manager: whatever has not ended by then is aborted.
    """

    def __init__(self, manager: ContinuousBatchingManager, requests: Sequence[Request], receiver: _Receiver) -> None:
        self._manager = manager
        self._receiver = receiver
        self._left = {request.request_id for request in requests}

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[GenerationOutput]:
        if not self._left:
            raise StopAsyncIteration
        outputs = await self._receiver.take()
        self._left.difference_update(output.request_id for output in outputs if output.is_finished())
        return outputs

    def abort(self) -> None:
        """Ends what is unfinished; its terminal outputs are still to come."""
        self._manager.cancel_requests(self._left)

    def close(self) -> None:
        """The reader goes away."""
        left, self._left = self._left, set()
        self._manager.cancel_requests(left)


class AsyncEngine:
    """Runs a manager; use it as an async context manager, or call `start` and `stop`.

    Args:
        manager: from `model.init_continuous_batching(...)`.
    """

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self.manager = manager
        self._bridges: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Bridge] = weakref.WeakKeyDictionary()

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop(hard_stop=error[0] is not None)

    async def start(self) -> None:
        """Warms up and starts the engine thread, off the event loop."""
        await asyncio.to_thread(self._warm_up)
        self.manager.start()

    def _warm_up(self) -> None:
        self.manager.warmup()
        release_idle_workers()  # this thread's; the engine's own is another

    async def stop(self, *, hard_stop: bool = False) -> None:
        """Ends the engine thread once accepted work is done, or aborts that work; off the event loop."""
        await asyncio.to_thread(self.manager.stop, hard_stop=hard_stop)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, *, streaming: bool = True, **options: Any
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Yields the outputs of all samples of one prompt, until each has had its terminal one.

        Args:
            prompt: token ids, or text if a tokenizer is attached; tokenised off the event loop.
            streaming: yield a snapshot after every token, not only the terminal outputs.
            **options: see `RequestOptions`.

        Raises:
            ValueError, TypeError: the request is not valid. EngineStoppedError, EngineError: nothing runs any more.
            QueueFullError: no room came up in the queue.
        """
        asked = RequestOptions(streaming=streaming, **options)
        requests = await asyncio.to_thread(self.make_requests, prompt, sampling_params or SamplingParams(), asked)
        with await self._submit_patiently(requests) as stream:
            async for outputs in stream:
                for output in outputs:
                    yield output

    def make_requests(self, prompt: Any, params: SamplingParams, options: RequestOptions) -> list[Request]:
        """The samples of one prompt, checked and ready for `submit`. May take a while: not for the event loop.

        Raises:
            ValueError, TypeError: the request is not valid.
        """
        return self.manager.engine.intake.make(prompt, params, options)

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Hands requests over without waiting for anything; the stream that it returns has to be closed.

        Raises:
            QueueFullError: there is no room. EngineStoppedError, EngineError: nothing is taken any more.
        """
        stream, sink = self._open(requests)
        self.manager.submit_requests(requests, sink, wait=False)
        return stream

    async def _submit_patiently(self, requests: Sequence[Request]) -> OutputStream:
        """The same with a while to wait for room."""
        stream, sink = self._open(requests)
        submitting = asyncio.ensure_future(asyncio.to_thread(self.manager.submit_requests, requests, sink))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:  # the thread goes on: what it still submits is nobody's
            submitting.add_done_callback(lambda done: _end_unwanted(done, stream))
            raise
        return stream

    def _open(self, requests: Sequence[Request]) -> tuple[OutputStream, Callable[[GenerationOutput], None]]:
        loop = asyncio.get_running_loop()
        receiver, bridge = _Receiver(loop), self._bridges.setdefault(loop, _Bridge(loop))
        return OutputStream(self.manager, requests, receiver), lambda output: bridge.put(receiver, output)

    def abort(self, request_id: str) -> None:
        """Ends a request and all its samples; their iterators get terminal outputs."""
        self.manager.cancel_request(request_id)

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return self.manager.stats()

    def check_health(self) -> None:
        """Raises what ended the engine thread, if anything did.

        Raises:
            EngineError: the engine has failed. EngineStoppedError: it does not run.
        """
        if self.manager.failure is not None:
            raise self.manager.failure
        if not self.manager.is_running():
            raise EngineStoppedError("the engine thread does not run; call start()")


def _end_unwanted(submitting: asyncio.Future[None], stream: OutputStream) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        stream.close()
