"""The engine for asyncio: requests as async iterators. What a server stands on.

Owns nothing but the bridge between the engine thread and event loops; a dropped iterator aborts its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from cb_engine.api.manager import ContinuousBatchingManager, post
from cb_engine.errors import EngineStoppedError
from cb_engine.intake import RequestOptions
from cb_engine.metrics import EngineStats
from cb_engine.outputs import GenerationOutput
from cb_engine.sampling_params import SamplingParams


class AsyncEngine:
    """Runs a manager; use it as an async context manager, or call `start` and `stop`.

    Args:
        manager: from `model.init_continuous_batching(...)`.
    """

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self.manager = manager

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop(hard_stop=error[0] is not None)

    async def start(self) -> None:
        """Warms up and starts the engine thread, off the event loop."""
        await asyncio.to_thread(self.manager.warmup)
        self.manager.start()

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
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[GenerationOutput] = asyncio.Queue()
        params = sampling_params or SamplingParams()
        asked = RequestOptions(streaming=streaming, **options)
        requests = await asyncio.to_thread(self.manager.engine.intake.make, prompt, params, asked)

        left = {request.request_id for request in requests}
        try:
            await asyncio.to_thread(
                self.manager.submit_requests, requests, lambda output: post(loop, arrived.put_nowait, output)
            )
            while left:
                output = await arrived.get()
                if output.is_finished():
                    left.discard(output.request_id)
                yield output
        finally:
            self.manager.cancel_requests(left)  # the caller went away

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
