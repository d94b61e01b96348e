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

_Tasks = queue.SimpleQueue[tuple[Callable[[], Any], "Future[Any]"] | None]


class Pause:
    """See the module docstring. Thread-safe."""

    def __init__(self) -> None:
        self._tasks: _Tasks | None = None  # of the thread that holds the engine; None: nobody does
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether the engine is held."""
        return self._tasks is not None

    def begin(self, manager: ContinuousBatchingManager) -> None:
        """Returns once the engine stands still; one that does already goes on standing.

        Raises:
            EngineError, RuntimeError: there is no engine to be held.
        """
        with self._lock:
            if self._tasks is not None:
                return
            held: Future[None] = Future()
            tasks: _Tasks = queue.SimpleQueue()
            threading.Thread(target=_hold, args=(manager, held, tasks), name="cb_engine_pause", daemon=True).start()
            held.result()
            self._tasks = tasks

    def end(self) -> None:
        """Lets the engine go on."""
        with self._lock:
            if self._tasks is not None:
                self._tasks.put(None)
                self._tasks = None

    def call(self, action: Callable[[], T]) -> T:
        """Does something with the engine, held or not, and returns its result."""
        with self._lock:
            if self._tasks is None:
                return action()
            done: Future[T] = Future()
            self._tasks.put((action, done))
            return done.result()


def _hold(manager: ContinuousBatchingManager, held: Future[None], tasks: _Tasks) -> None:
    try:
        with manager.pause():
            held.set_result(None)
            while (task := tasks.get()) is not None:
                _do(*task)
    except Exception as error:
        if not held.done():
            held.set_exception(error)


def _do(action: Callable[[], Any], done: Future[Any]) -> None:
    try:
        done.set_result(action())
    except Exception as error:
        done.set_exception(error)
