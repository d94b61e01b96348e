"""Threads for what takes time and is not the engine's: templates, tokenisation, grammars, large bodies.

Owns the threads and their time limit. None of this may run on the event loop, which would hold up every stream and
/health with it, or on the engine thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cb_engine.serve.errors import APIError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_THREADS = 4
_MAX_STUCK = 8  # threads that may be lost to work that does not end before no more is taken


class TextWorkers:
    """See the module docstring.

    Args:
        time_limit: seconds that one piece of work may take, its wait for a thread included.
    """

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._pool = self._make_pool()
        self._num_stuck = 0

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)` in a thread.

        Raises:
            APIError: it took too long. Whatever else the work raises.
        """
        if self._num_stuck >= _MAX_STUCK:
            raise APIError(503, "too many texts are being worked on without end; try later", code="overloaded")
        job = self._pool.submit(work, *args)
        future = asyncio.wrap_future(job)
        try:
            async with asyncio.timeout(self._time_limit):  # `wait_for` loses a cancellation that comes with the result
                return await asyncio.shield(future)
        except TimeoutError:
            if not job.cancel():  # it has begun
                self._abandon(future)
            raise APIError(
                400, f"the request's text took more than {self._time_limit:g} s to prepare; make it simpler"
            ) from None

    def _abandon(self, future: asyncio.Future[Any]) -> None:
        """A thread cannot be ended; others take its place until it does so by itself."""
        logger.warning("a text is worked on for more than %g s; its thread is left alone", self._time_limit)
        self._num_stuck += 1
        self._pool.shutdown(wait=False)
        self._pool = self._make_pool()

        def ended(done: asyncio.Future[Any]) -> None:
            self._num_stuck -= 1
            if not done.cancelled():
                done.exception()  # nobody else asks for it

        future.add_done_callback(ended)

    def close(self) -> None:
        """Takes no more work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _make_pool() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="cb_engine_text")
