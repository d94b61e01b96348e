"""What the parsers of all tool formats share: text outside of calls, and text that may yet be a call.

Owns: the search for markers, what is held back and for how long, the numbering of calls.
Does not know: any format.

A parser is a set of states. A state is a method that takes characters from `text[at:]` and returns the index
behind them; it leaves what it cannot judge yet to the next piece (`_wait`). The text since a marker is held
until it is certain to be a call, and then dropped; if it turns out to be none, it comes out as content, every
character of it, and is not looked through again.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable

from cb_engine.serve.parsers.call_reader import CallReader
from cb_engine.serve.parsers.events import Content, Event, ToolCallArguments, ToolCallStart
from cb_engine.serve.parsers.json_scanner import WHITESPACE, skip_whitespace

State = Callable[[str, int], int]

MAX_HELD = 1 << 18  # characters that may wait for a call's name; more than that is content
MAX_SPACES = 64  # characters of white space that are dropped before a marker; more than that is content
MAX_HEADER = 512  # characters of a marker and the markup behind it, up to the first object or the arguments


def partial_marker(text: str, start: int, markers: Iterable[str]) -> int:
    """Return where in `text[start:]` a suffix begins that may become one of the markers; `len(text)` if none does."""
    first = len(text)
    for marker in markers:
        at = text.find(marker[0], max(start, len(text) - len(marker) + 1))
        while 0 <= at < first:
            if marker.startswith(text[at:]):
                first = at
            at = text.find(marker[0], at + 1)
    return first


class ToolParser(ABC):
    """Turns text into content and tool calls."""

    def __init__(self, markers: tuple[str, ...], names: Collection[str] | None, new_id: Callable[[], str]) -> None:
        """Begin a text.

        Args:
            markers: each of them may begin a call, anywhere in the text.
            names: the functions there are; None if that is not known.
            new_id: makes the id of a call.
        """
        self._markers = markers
        self._marker = re.compile("|".join(map(re.escape, markers))) if markers else None
        self._names = names
        self._new_id = new_id
        self._state: State = self._content
        self._tail = ""  # text that a state could not judge yet; comes again before the next piece
        self._held: list[str] = []  # text that is dropped if a call comes of it, else content
        self._num_held = 0
        self._after_call = False  # white space that comes now stands between a call and what follows
        self._index = -1
        self._events: list[Event] = []

    def feed(self, delta: str) -> list[Event]:
        """Take the next piece of text; return what it settles."""
        text = self._tail + delta
        self._tail = ""
        at = 0
        while at < len(text):
            at = self._state(text, at)
        return self._take_events()

    def finish(self) -> list[Event]:
        """End the text; return what was held back."""
        self._end_of_text()
        self._emit_content("".join(self._held) + self._tail)
        self._tail = ""
        self._drop_held()
        return self._take_events()

    @abstractmethod
    def _opened(self, text: str, at: int) -> int:
        """Read on behind a marker, which is held."""

    @abstractmethod
    def _end_of_text(self) -> None:
        """Announce what is certain enough, and drop what is markup, before what is left becomes content."""

    def _content(self, text: str, at: int) -> int:
        """Read content up to a marker."""
        if self._after_call:
            at = skip_whitespace(text, at, len(text))
            if at == len(text):
                return at
        if self._marker is None:
            self._emit_content(text[at:])
            return len(text)
        found = self._marker.search(text, at)
        marker_at = found.start() if found else partial_marker(text, at, self._markers)
        first_space = max(at, marker_at - MAX_SPACES)
        spaces_at = first_space + len(text[first_space:marker_at].rstrip(WHITESPACE))
        self._emit_content(text[at:spaces_at])
        if found is None:
            return self._wait(text, spaces_at)
        self._hold(text[spaces_at : found.end()])
        self._state = self._opened
        return found.end()

    def _wait(self, text: str, at: int) -> int:
        self._tail = text[at:]
        return len(text)

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_held += len(text)

    def _drop_held(self) -> None:
        self._held.clear()
        self._num_held = 0

    def _no_call(self) -> None:
        """What is held is content after all, and so is what follows up to the next marker."""
        self._emit_content("".join(self._held))
        self._drop_held()
        self._state = self._content

    def _emit_content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))
            self._after_call = False

    def _emit_start(self, name: str, call_id: str | None = None) -> None:
        self._drop_held()
        self._index += 1
        self._after_call = True
        self._events.append(ToolCallStart(self._index, call_id or self._new_id(), name))

    def _emit_arguments(self, delta: str) -> None:
        if delta:
            self._events.append(ToolCallArguments(self._index, delta))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class JsonToolParser(ToolParser):
    """For formats whose calls are JSON objects with a name: reads the objects, and the markup between them."""

    marked = True  # a marker comes before the objects

    def __init__(self, markers: tuple[str, ...], names: Collection[str] | None, new_id: Callable[[], str]) -> None:
        super().__init__(markers, names, new_id)
        self._reader: CallReader | None = None

    @abstractmethod
    def _openers(self) -> tuple[str, ...]:
        """Markup that may come before the first object, or before more markup."""

    @abstractmethod
    def _take_opener(self, token: str) -> None:
        """Note markup before the first object."""

    @abstractmethod
    def _glue(self) -> tuple[str, ...]:
        """Markup that may follow a call."""

    @abstractmethod
    def _take_glue(self, token: str) -> None:
        """Note markup that followed a call."""

    @abstractmethod
    def _object_may_follow(self) -> bool:
        """Whether another object may come without a marker."""

    def _no_object(self, text: str, at: int) -> int:
        """Read on where there is neither an object nor an opener."""
        self._no_call()
        return at

    def _opened(self, text: str, at: int) -> int:
        start = skip_whitespace(text, at, min(len(text), at + MAX_HEADER - self._num_held))
        self._hold(text[at:start])
        if self._num_held >= MAX_HEADER:
            self._no_call()
            return start
        if start == len(text):
            return start
        if text[start] == "{":
            self._begin_object()
            return start
        openers = self._openers()
        if any(token.startswith(text[start:]) for token in openers if len(token) > len(text) - start):
            return self._wait(text, start)
        for token in openers:
            if text.startswith(token, start):
                self._hold(token)
                self._take_opener(token)
                return start + len(token)
        return self._no_object(text, start)

    def _begin_object(self) -> None:
        self._reader = CallReader(marked=self.marked, names=self._names)
        self._state = self._object

    def _object(self, text: str, at: int) -> int:
        reader = self._reader
        if reader is None:
            raise RuntimeError("no object was begun")
        was_announced = reader.announced
        end = len(text) if was_announced else min(len(text), at + MAX_HELD - self._num_held)
        stop = reader.feed(text, at, end)
        if not reader.announced:
            self._hold(text[at:stop])
            if reader.failed or self._num_held >= MAX_HELD:
                self._no_call()
            return stop
        self._emit_call(reader, was_announced)
        if reader.done or reader.failed:
            self._state = self._between
        return stop

    def _emit_call(self, reader: CallReader, was_announced: bool) -> None:
        if not was_announced and reader.name is not None:
            self._emit_start(reader.name)
        self._emit_arguments(reader.take_arguments())

    def _between(self, text: str, at: int) -> int:
        """Read on behind a call."""
        at = skip_whitespace(text, at, len(text))
        if at == len(text):
            return at
        if text[at] == "{" and self._object_may_follow():
            self._begin_object()
            return at
        for token in self._glue():
            if text.startswith(token, at):
                self._take_glue(token)
                return at + len(token)
        if any(token.startswith(text[at:]) for token in self._glue() if len(token) > len(text) - at):
            return self._wait(text, at)
        self._state = self._content
        return at

    def _end_of_text(self) -> None:
        if self._state == self._object and self._reader is not None and not self._reader.announced:
            if self._reader.end_of_text():
                self._emit_call(self._reader, was_announced=False)
        elif self._state == self._between:
            self._tail = ""  # the beginning of markup
