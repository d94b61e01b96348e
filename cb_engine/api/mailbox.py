"""Where finished and streamed outputs wait for whoever asks. Owns the outputs between engine and caller.

An output goes to exactly one place: the sink registered for its id, or the mailbox. In the mailbox a reader may ask
for the next output of anybody, or of one id; ids that an iterator has claimed are not handed to anybody else.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from cb_engine.outputs import GenerationOutput

logger = logging.getLogger(__name__)

Sink = Callable[[GenerationOutput], None]


class Mailbox:
    """Thread-safe. Invariant: a terminal output is the last that any reader sees of its id."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._boxes: dict[str, deque[tuple[int, GenerationOutput]]] = {}  # numbered in order of arrival
        self._order: dict[int, str] = {}  # number -> id of the outputs that anybody may take, oldest first
        self._sinks: dict[str, Sink] = {}
        self._claimed: set[str] = set()
        self._open: set[str] = set()  # ids whose terminal output nobody has taken yet
        self._closed = False

    def open(self, request_ids: Iterable[str], sink: Sink | None = None) -> None:
        """Announces ids; their outputs go to `sink`, or wait here.

        Raises:
            ValueError: an id is in use; none is announced then.
        """
        ids = list(request_ids)
        with self._changed:
            for request_id in ids:
                if request_id in self._open:
                    raise ValueError(f"request_id {request_id!r} is in use; give another, or fetch its output first")
            for request_id in ids:
                self._open.add(request_id)
                if sink is not None:
                    self._sinks[request_id] = sink

    def register(self, request_id: str, sink: Sink) -> None:
        """Sends an id's outputs to `sink`, those already waiting first."""
        with self._changed:
            self._require_open(request_id)
            self._sinks[request_id] = sink
            self._take_out_of_order(request_id)
            for _, output in self._boxes.pop(request_id, ()):
                self._hand_over(sink, output)

    def claim(self, request_id: str) -> None:
        """Keeps an id's outputs for the caller of `take(request_id)`."""
        with self._changed:
            self._require_open(request_id)
            self._claimed.add(request_id)
            self._take_out_of_order(request_id)

    def deliver(self, outputs: Iterable[GenerationOutput]) -> None:
        """Puts outputs where they belong; called by the engine thread."""
        with self._changed:
            for output in outputs:
                sink = self._sinks.get(output.request_id)
                if sink is not None:
                    self._hand_over(sink, output)
                    continue
                number = next(self._numbers)
                self._boxes.setdefault(output.request_id, deque()).append((number, output))
                if output.request_id not in self._claimed:
                    self._order[number] = output.request_id
            self._changed.notify_all()

    def take(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output of `request_id`, or of anybody.

        Returns:
            None after `timeout` seconds, or at once when nothing can come any more.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                output = self._next(request_id)
                gone = request_id is not None and request_id not in self._open  # another reader has taken its end
                if output is not None or self._closed or gone:
                    return output
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def is_open(self, request_id: str) -> bool:
        """Whether the id's terminal output is still to come or to be taken."""
        with self._changed:
            return request_id in self._open

    def open_ids(self) -> list[str]:
        """All ids whose terminal output is still to come or to be taken."""
        with self._changed:
            return list(self._open)

    def undelivered_ids(self) -> list[str]:
        """Open ids that no terminal output waits for."""
        with self._changed:
            waiting = {i for i, box in self._boxes.items() if box[-1][1].is_finished()}
            return [i for i in self._open if i not in waiting]

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Takes back ids that were announced and not submitted."""
        with self._changed:
            for request_id in request_ids:
                self._forget(request_id)

    def clear(self) -> None:
        """Throws away what nobody has taken, so that the next user does not meet it."""
        with self._changed:
            for request_id, box in list(self._boxes.items()):
                if box[-1][1].is_finished():
                    self._forget(request_id)
            self._boxes.clear()
            self._order.clear()

    def close(self) -> None:
        """Nothing will be delivered any more: readers get what is there, then None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def reopen(self) -> None:
        """Outputs will come again."""
        with self._changed:
            self._closed = False

    # ---- inside, with the lock held ----------------------------------------------------------------------------

    def _next(self, request_id: str | None) -> GenerationOutput | None:
        if request_id is None:
            request_id = next(iter(self._order.values()), None)
        box = self._boxes.get(request_id) if request_id is not None else None
        if not box or request_id is None:
            return None
        number, output = box.popleft()
        self._order.pop(number, None)
        if not box:
            del self._boxes[request_id]
        if output.is_finished():
            self._forget(request_id)
        return output

    def _take_out_of_order(self, request_id: str) -> None:
        for number, _ in self._boxes.get(request_id, ()):
            self._order.pop(number, None)

    def _hand_over(self, sink: Sink, output: GenerationOutput) -> None:
        if output.is_finished():
            self._forget(output.request_id)
        try:
            sink(output)
        except Exception:  # somebody's code, on the engine thread: it must not take the others down
            logger.exception("the receiver of request %s failed", output.request_id)

    def _forget(self, request_id: str) -> None:
        self._open.discard(request_id)
        self._claimed.discard(request_id)
        self._sinks.pop(request_id, None)

    def _require_open(self, request_id: str) -> None:
        if request_id not in self._open:
            raise ValueError(f"request_id {request_id!r} is unknown, or its last output has been taken")
