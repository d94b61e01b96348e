"""Keeps an engine fed from an input of any length, and hands the answers out as they come.

A thread reads, encodes and submits lines; the caller's thread takes outputs and delivers answers. So many lines and no
more are on their way between the two, whatever the length of the input. Ctrl-C and a failed engine end a run early:
what was finished is delivered, the rest is left out.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cb_engine.cli.answers import Answer
from cb_engine.cli.encoding import Encoder
from cb_engine.cli.prompts import PromptLine
from cb_engine.cli.report import Reporter, refusal
from cb_engine.errors import CBEngineError
from cb_engine.outputs import GenerationOutput

if TYPE_CHECKING:
    from cb_engine.api.manager import ContinuousBatchingManager

_END_WAIT = 30.0  # seconds that cancelled requests have to end in


@dataclass
class _Prompt:
    """A line on its way: the `position`-th of this run."""

    position: int
    line: PromptLine
    request_ids: list[str]  # of its samples
    outputs: dict[str, GenerationOutput] = field(default_factory=dict)


@dataclass(frozen=True)
class _Refused:
    """A line that cannot be run."""

    position: int
    line: PromptLine
    reason: str


@dataclass(frozen=True)
class _Withdrawn:
    """A line that the engine did not take after all: it has failed or stopped."""

    request_ids: list[str]


@dataclass(frozen=True)
class _InputEnded:
    """All lines are submitted; or reading them has failed."""

    failure: BaseException | None = None


@dataclass(frozen=True)
class _CtrlC:
    """The user wants an end."""


_Event = _Prompt | _Refused | _Withdrawn | _InputEnded | _CtrlC | GenerationOutput


@dataclass
class Tally:
    """What a run has come to."""

    answered: int = 0
    failed: int = 0
    first_failure: str = ""
    interrupted: bool = False
    engine_failure: str | None = None


class Feed:
    """One run.

    Args:
        manager: started.
        encoder: makes requests of lines.
        reporter: makes answers of outputs.
        deliver: takes an answer and its position among this run's lines; returns how many answers it is done with.
        window: how many lines may be on their way.
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        encoder: Encoder,
        reporter: Reporter,
        deliver: Callable[[int, Answer], int],
        window: int,
    ) -> None:
        self._manager = manager
        self._encoder = encoder
        self._reporter = reporter
        self._deliver = deliver
        self._room = threading.Semaphore(window)
        self._stopping = threading.Event()
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._pending: dict[str, _Prompt] = {}  # by the request id of each sample that has not ended
        self._input_ended = False
        self._tally = Tally()

    def run(self, lines: Iterable[PromptLine]) -> Tally:
        """Answers all lines, or those that are done when the run is cut off."""
        feeder = threading.Thread(target=self._feed, args=(lines,), name="cb_engine feed", daemon=True)
        with self._ctrl_c_is_an_event():
            feeder.start()
            try:
                while not (self._input_ended and not self._pending) and not self._is_cut_off:
                    self._handle(self._events.get())
            finally:
                self._stopping.set()
                self._room.release()
                feeder.join(timeout=1.0)  # it may wait for input for ever
            self._drain()
        return self._tally

    @property
    def _is_cut_off(self) -> bool:
        return self._tally.interrupted or self._tally.engine_failure is not None

    # ---- on the feeding thread -------------------------------------------------------------------------------

    def _feed(self, lines: Iterable[PromptLine]) -> None:
        try:
            for position, line in enumerate(lines):
                self._room.acquire()
                if self._stopping.is_set():
                    return
                self._submit(position, line)
            self._events.put(_InputEnded())
        except BaseException as error:
            self._events.put(_InputEnded(error))

    def _submit(self, position: int, line: PromptLine) -> None:
        from cb_engine.intake import RequestOptions

        try:
            token_ids, params = self._encoder.encode(line)
            options = RequestOptions(request_id=f"line-{line.index}")
            requests = self._manager.engine.intake.make(token_ids, params, options)
        except (ValueError, TypeError) as error:
            self._events.put(_Refused(position, line, str(error)))
            return
        ids = [request.request_id for request in requests]
        self._events.put(_Prompt(position, line, ids))  # before its outputs
        try:
            self._manager.submit_requests(requests, self._events.put)
        except BaseException:
            self._events.put(_Withdrawn(ids))
            raise

    # ---- on the caller's thread ------------------------------------------------------------------------------

    def _handle(self, event: _Event) -> None:
        match event:
            case _Prompt():
                self._pending |= dict.fromkeys(event.request_ids, event)
            case _Refused():
                self._finish(event.position, refusal(event.line, event.reason))
            case GenerationOutput():
                self._collect(event)
            case _Withdrawn():
                for request_id in event.request_ids:
                    del self._pending[request_id]
            case _CtrlC():
                self._tally.interrupted = True
            case _InputEnded():
                self._input_ended = True
                if isinstance(event.failure, CBEngineError):
                    self._tally.engine_failure = str(event.failure)
                elif event.failure is not None:
                    raise event.failure

    def _collect(self, output: GenerationOutput) -> None:
        prompt = self._pending.pop(output.request_id)
        prompt.outputs[output.request_id] = output
        failure = self._manager.failure
        if failure is not None and output.error == str(failure):
            self._tally.engine_failure = str(failure)
        if len(prompt.outputs) < len(prompt.request_ids) or self._left_out(prompt):
            return
        outputs = [prompt.outputs[request_id] for request_id in prompt.request_ids]
        self._finish(prompt.position, self._reporter.answer(prompt.line, outputs))

    def _left_out(self, prompt: _Prompt) -> bool:
        """Whether the prompt's end is not its own: it was cancelled, or the engine failed under it."""
        failure = self._tally.engine_failure
        return any(
            output.finish_reason == "abort" or (failure is not None and output.error == failure)
            for output in prompt.outputs.values()
        )

    def _finish(self, position: int, answer: Answer) -> None:
        if "error" in answer:
            self._tally.failed += 1
            self._tally.first_failure = self._tally.first_failure or f"line {answer['index'] + 1}: {answer['error']}"
        else:
            self._tally.answered += 1
        for _ in range(self._deliver(position, answer)):
            self._room.release()

    def _drain(self) -> None:
        """Ends what is still on its way, and delivers what was finished meanwhile."""
        if self._pending and self._tally.engine_failure is None:
            self._manager.cancel_requests(list(self._pending))
        while self._pending or not self._events.empty():
            try:
                self._handle(self._events.get(timeout=_END_WAIT))
            except queue.Empty:
                return

    @contextmanager
    def _ctrl_c_is_an_event(self) -> Iterator[None]:
        """Ctrl-C comes between two answers, never within a line; a second one interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def first(*_: object) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._events.put(_CtrlC())

        before = signal.signal(signal.SIGINT, first)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
