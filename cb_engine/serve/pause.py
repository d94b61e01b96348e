"""Holds an engine at a step's edge from one HTTP request to another.

Owns the thread that does: a pause belongs to the thread that began it, and while it lasts only that thread may do
something with the engine, taking over new weights for one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from cb_engine.api.manager import ContinuousBatchingManager

T = TypeVar("T")


class Pause:
    """See the module docstring. Thread-safe; nobody waits for anything with the lock held."""

    def __init__(self) -> None:
        self._holder: _Holder | None = None
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether the engine is held, or is about to be."""
        return self._holder is not None

    def begin(self, manager: ContinuousBatchingManager) -> None:
        """Returns once the engine stands still; one that does already goes on standing.

        Raises:
            EngineError, RuntimeError: there is no engine to be held.
        """
        with self._lock:
            holder = self._holder
            if holder is None:
                holder = self._holder = _Holder()
                threading.Thread(target=self._hold, args=(manager, holder), name="cb_engine_pause", daemon=True).start()
        holder.held.result()

    def end(self) -> None:
        """Lets the engine go on; does not wait for it."""
        with self._lock:
            holder, self._holder = self._holder, None
            if holder is not None:
                holder.tasks.put(None)

    def call(self, action: Callable[[], T]) -> T:
        """Does something with the engine, held or not, and returns its result."""
        with self._lock:
            holder = self._holder
            if holder is not None:
                done: Future[T] = Future()
                holder.tasks.put((action, done))  # before the end of the pause, since that needs the lock
        return action() if holder is None else done.result()

    def _hold(self, manager: ContinuousBatchingManager, holder: _Holder) -> None:
        """What the thread does."""
        try:
            with manager.pause():
                holder.held.set_result(None)
                while (task := holder.tasks.get()) is not None:
                    _do(*task)
        except Exception as error:
            self._forget(holder)  # from here on nobody gives it a task
            if not holder.held.done():
                holder.held.set_exception(error)
            while not holder.tasks.empty():
                if (task := holder.tasks.get()) is not None:
                    task[1].set_exception(error)

    def _forget(self, holder: _Holder) -> None:
        with self._lock:
            if self._holder is holder:
                self._holder = None


class _Holder:
    """What the thread that holds an engine is told, and tells."""

    def __init__(self) -> None:
        self.held: Future[None] = Future()
        self.tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()


def _do(action: Callable[[], Any], done: Future[Any]) -> None:
    try:
        done.set_result(action())
    except Exception as error:
        done.set_exception(error)
