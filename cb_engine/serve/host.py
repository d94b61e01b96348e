"""The engine's life in a server: loading, ready, restarted, draining, dead. Owns the model, the engine and its state.

LOADING -> READY -> DRAINING -> STOPPED
             | ^        the engine fails: RESTARTING, and READY again,
             v |        or DEAD if it has failed too often
         RESTARTING --> DEAD
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from cb_engine.api.async_engine import AsyncEngine
from cb_engine.api.attach import attach
from cb_engine.api.manager import ContinuousBatchingManager
from cb_engine.config import EngineConfig
from cb_engine.device import release_host_memory, release_idle_workers
from cb_engine.errors import EngineError
from cb_engine.hints import WorkloadHints
from cb_engine.serve.errors import APIError
from cb_engine.serve.pause import Pause
from cb_engine.serve.settings import ServeSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL = 0.05  # seconds between looks at a running engine


class State(StrEnum):
    """See the module docstring."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    DEAD = "dead"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Health:
    """What /health says; `reason` is None if all is well."""

    state: State
    reason: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether requests are taken and answered."""
        return self.reason is None


class EngineHost:
    """See the module docstring.

    Args:
        load: returns a causal LM and its tokenizer; runs in a thread of its own.
        config, hints: of the engine.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Any, Any]],
        settings: ServeSettings,
        *,
        config: EngineConfig | None = None,
        hints: WorkloadHints | None = None,
    ) -> None:
        self._load = load
        self._settings = settings
        self._config = config
        self._hints = hints
        self._model: Any = None
        self._tokenizer: Any = None
        self._engine: AsyncEngine | None = None
        self._task: asyncio.Task[None] | None = None
        self._restarts_left = settings.engine_restarts
        self.pause = Pause()
        self.state = State.LOADING
        self.num_restarts = 0
        self.started_at = time.time()
        self.load_error: BaseException | None = None

    # ---- life ------------------------------------------------------------------------------------------------

    def start(self, ready: Callable[[Any, Any], None]) -> None:
        """Loads the model in the background and keeps the engine alive from then on.

        Args:
            ready: called with model and tokenizer once they are there, before the first request is taken.
        """
        self._task = asyncio.create_task(self._live(ready), name="cb_engine_host")

    async def _live(self, ready: Callable[[Any, Any], None]) -> None:
        try:
            self._model, self._tokenizer = await _in_thread(self._load)
            await _in_thread(lambda: attach(self._model, tokenizer=self._tokenizer))
            self._engine = await self._make_engine()
            ready(self._model, self._tokenizer)
            await asyncio.to_thread(_settled.add, self)
        except Exception as error:
            logger.error("the model could not be loaded: %s", error)
            logger.debug("loading failed", exc_info=True)
            self.load_error, self.state = error, State.DEAD
            return
        if self.state is State.LOADING:
            self.state = State.READY
            logger.info("%s is ready after %.1f s", self._settings.model_name, time.time() - self.started_at)
        while True:
            while self._engine.manager.is_running():
                await asyncio.sleep(_POLL)
            if not await self._restart():
                return

    async def _restart(self) -> bool:
        """The engine has ended; makes another one, unless it is not to be, or has failed too often."""
        if self.state is not State.READY or not self._restarts_left or self._engine is None:
            self.state = State.DEAD if self.state is State.READY else self.state
            return False
        self._restarts_left -= 1
        self.num_restarts += 1
        self.state = State.RESTARTING
        self.pause.end()
        logger.warning("the engine failed and is made anew; it may fail %d times more", self._restarts_left)
        try:
            await asyncio.to_thread(_discard, self._engine.manager)  # its memory goes before the next one comes
            self._engine = await self._make_engine()
            await asyncio.to_thread(_settled.add, self)
        except Exception:
            logger.exception("the engine could not be made anew")
            self.state = State.DEAD
            return False
        if self.state is State.RESTARTING:
            self.state = State.READY
        return True

    async def _make_engine(self) -> AsyncEngine:
        def make() -> ContinuousBatchingManager:
            manager: ContinuousBatchingManager = self._model.init_continuous_batching(
                continuous_batching_config=self._config, workload_hints=self._hints
            )
            return manager

        engine = AsyncEngine(await _in_thread(make))
        await engine.start()
        return engine

    def begin_drain(self) -> None:
        """From now on no request is taken; what runs goes on."""
        if self.state is not State.DEAD:
            self.state = State.DRAINING
        self.pause.end()  # what runs could not end

    async def stop(self) -> None:
        """Ends the engine; what still runs is aborted."""
        self.state = State.STOPPED
        self.pause.end()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.manager.destroy)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(_settled.remove, self)

    # ---- questions -------------------------------------------------------------------------------------------

    @property
    def manager(self) -> ContinuousBatchingManager | None:
        """The engine's manager, running or not; None before the model is there."""
        return None if self._engine is None else self._engine.manager

    @property
    def model(self) -> Any:
        """The loaded model; None before it is there."""
        return self._model

    def engine(self) -> AsyncEngine:
        """The engine, for a request.

        Raises:
            APIError: it takes none now.
        """
        health = self.health()
        if self._engine is None or health.state is not State.READY:
            raise APIError(503, health.reason or "not ready", code=health.state, retry_after=self._settings.retry_after)
        return self._engine

    def health(self) -> Health:
        """The truth at this moment: what the engine's thread is, not what was last heard of it."""
        if self.state is not State.READY or self._engine is None:
            return Health(self.state, _REASONS[self.state])
        manager = self._engine.manager
        if isinstance(manager.failure, EngineError) or not manager.is_running():
            return Health(State.RESTARTING if self._restarts_left else State.DEAD, "the engine has failed")
        seconds = manager.step_seconds
        if seconds > self._settings.hang_timeout:
            return Health(State.READY, f"the engine has been busy with one step for {seconds:.0f} s")
        return Health(State.READY)


async def _in_thread(work: Callable[[], T]) -> T:
    """`work()` in a thread. The workers that its products of matrices have started must not stay with that thread:
    the engine's own would be slower for them, see `release_idle_workers`."""

    def run() -> T:
        try:
            return work()
        finally:
            release_idle_workers()

    return await asyncio.to_thread(run)


class _Settled:
    """The hosts of this process whose modules the garbage collector has been told to leave alone: a full collection
    looks at the half million objects of torch, transformers and the model for a quarter of a second, while every
    request waits. That is the whole process's setting, so the last host takes it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: weakref.WeakSet[EngineHost] = weakref.WeakSet()

    def add(self, host: EngineHost) -> None:
        """What there is now stays, unless the host has been stopped meanwhile."""
        with self._lock:
            if host.state is not State.STOPPED:
                gc.collect()
                gc.freeze()
                self._hosts.add(host)

    def remove(self, host: EngineHost) -> None:
        """It has ended."""
        with self._lock:
            if host in self._hosts:
                self._hosts.discard(host)
                if not self._hosts:
                    gc.unfreeze()

    def collect(self) -> None:
        """Finds all garbage, also what has become some since it was told to stay."""
        with self._lock:
            gc.unfreeze()
            gc.collect()
            if self._hosts:
                gc.freeze()


_settled = _Settled()


def _discard(manager: ContinuousBatchingManager) -> None:
    """Gives all memory of a failed engine back. Its module tree, packed weights and all, is a cycle that nobody would
    look for until much later, and what glibc keeps of it is in pieces that the next engine's tensors do not fit in."""
    manager.destroy()
    _settled.collect()
    release_host_memory()


_REASONS = {
    State.LOADING: "the model is being loaded",
    State.RESTARTING: "the engine has failed and is being made anew",
    State.DRAINING: "the server is shutting down",
    State.DEAD: "the engine is dead",
    State.STOPPED: "the server has stopped",
    State.READY: "the engine is not there",
}
