"""The one thread that runs an engine.

Owns that thread, its pauses, its end and its failure. Does not know what a request is to its caller: outputs go to a
`deliver` function, and other threads reach the engine by commands alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from cb_engine.device import release_idle_workers
from cb_engine.engine import AbortAll, Call, Command, Engine
from cb_engine.errors import EngineError, EngineStoppedError
from cb_engine.outputs import GenerationOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineThread:
    """Invariant: the engine is touched by its thread alone while that runs and is not parked.

    Args:
        engine: the engine to run.
        deliver: takes each step's outputs, on the engine thread.
        closed: called when the thread ends, with the failure that ended it or None.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[GenerationOutput]], None],
        closed: Callable[[BaseException | None], None],
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._closed = closed
        self._thread: threading.Thread | None = None
        self._state = threading.Condition(threading.RLock())  # guards all below
        self._running = False  # from start() until the thread has decided to end
        self._stopping = False
        self._parked = False
        self._has_waited = True  # the engine has stood still since its last step
        self._step_began: float | None = None  # `time.perf_counter()`; None between steps
        self._pausers: list[threading.Thread] = []
        self._calls: list[Future[Any]] = []  # calls that wait for the engine thread
        self._failure: BaseException | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread takes work."""
        return self._running

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, if it failed."""
        return self._failure

    @property
    def step_seconds(self) -> float:
        """How long the step under way has taken so far; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.perf_counter() - began

    def start(self) -> None:
        """Starts the thread. One that runs goes on, also if it had been asked to stop.

        Raises:
            EngineError, EngineStoppedError: the engine failed before, or was given up.
        """
        with self._state:
            self._raise_failure()
            self._stopping = False
            if self._running:
                return
        self.join()  # the last thread may still be on its way out
        self._launch()

    def _launch(self) -> None:
        with self._state:
            self._raise_failure()
            if self._running:
                return  # another caller was quicker
            release_idle_workers()
            self._running = self._has_waited = True
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="cb_engine", daemon=True)
            self._thread.start()

    def stop(self, *, abort: bool) -> None:
        """Asks the thread to end once the accepted work is done, or aborted; does not wait.

        Raises:
            RuntimeError: the calling thread holds a pause, which would keep the work from ever being done.
        """
        with self._state:
            if threading.current_thread() in self._pausers:
                raise RuntimeError("stop() inside pause(): leave the pause first")
            self._stopping = True
            if abort:
                self._engine.submit(AbortAll())
            self._state.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread; returns whether it has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def give_up(self, reason: BaseException) -> None:
        """From now on nothing is accepted and nothing starts."""
        with self._state:
            self._failure = self._failure or reason

    def submit(self, command: Command) -> None:
        """Hands a command to the engine; before `start` it waits for it.

        Raises:
            EngineStoppedError: the thread is stopping or was given up. EngineError: the engine has failed.
            QueueFullError, ValueError: see `Engine.submit`.
        """
        with self._state:
            self._raise_failure()
            if self._stopping:
                raise EngineStoppedError("the manager is stopping or has stopped; call start() to use it again")
            self._engine.submit(command)
            self._state.notify_all()

    def submit_now(self, command: Command) -> None:
        """The same for commands that a stopping engine still has to follow, an abort for example."""
        with self._state:
            self._engine.submit(command)
            self._state.notify_all()

    def call(self, action: Callable[[], T]) -> T:
        """Runs `action` at a step's edge and returns its result; other requests wait for it as for a step.

        Raises:
            EngineError: the engine has failed, or fails before the action's turn comes.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        with self._state:
            self._raise_failure()
            holds_it = self._parked and threading.current_thread() in self._pausers
            if not holds_it:
                if not self._running:
                    return action()  # nobody else touches the engine now, and nobody can while the lock is held
                self._calls = [call for call in self._calls if not call.done()] + [future]
                self._engine.submit(Call(run))
                self._state.notify_all()
        # Whoever holds a pause needs no lock: the engine stands still until the pause ends, and others may submit.
        return action() if holds_it else future.result()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Holds the engine at a step's edge for the duration of the block; several holders may overlap.

        Raises:
            RuntimeError: no thread runs. EngineError: the engine has failed.
        """
        with self._state:
            self._raise_failure()
            if not self._running:
                raise RuntimeError("pause() needs a running manager; call start() first")
            self._pausers.append(threading.current_thread())
            self._state.notify_all()
            self._state.wait_for(lambda: self._parked or not self._running)
        try:
            self._raise_failure()
            yield
        finally:
            with self._state:
                self._pausers.remove(threading.current_thread())
                self._state.notify_all()

    # ---- on the engine thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: EngineError | None = None
        try:
            while self._wait_for_turn():
                if self._has_waited:  # weights may have been written meanwhile
                    self._has_waited = False
                    self._engine.sync_weights()
                self._step_began = time.perf_counter()
                outputs = self._engine.step()
                self._step_began = None
                self._deliver(outputs)
        except BaseException as error:
            logger.exception("the engine failed")
            failure = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
            failure.__cause__ = failure.__cause__ or error
            self._end(failure)
            self._deliver_failure(str(failure))
        release_idle_workers()
        self._closed(failure)

    def _wait_for_turn(self) -> bool:
        """Parks while paused and sleeps while idle; returns False when it is time to end."""
        with self._state:
            while True:
                if self._pausers:
                    self._parked = self._has_waited = True
                    self._state.notify_all()
                    self._state.wait()
                    continue
                self._parked = False
                if self._engine.has_work:
                    return True
                if self._stopping:
                    self._end(None)
                    return False
                self._has_waited = True
                self._state.wait()

    def _end(self, failure: EngineError | None) -> None:
        """From here on the thread takes no work; callers that wait for it learn why."""
        with self._state:
            self._failure = self._failure or failure
            self._running = self._parked = False
            self._step_began = None
            self._stopping = True
            for call in self._calls:
                if not call.done():
                    call.set_exception(EngineError(str(failure)))
            self._calls = []
            self._state.notify_all()

    def _deliver_failure(self, message: str) -> None:
        try:
            self._deliver(self._engine.fail_all(message))
        except Exception:  # a broken engine may be unable even to do that; the mailbox ends what is open
            logger.exception("the failed engine could not end its requests")

    def _raise_failure(self) -> None:
        if isinstance(self._failure, EngineStoppedError):
            raise self._failure
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure
