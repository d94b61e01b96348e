"""Reads one JSON object that may be a tool call, a piece at a time.

Owns: which members make a call, when it is known to be one, and the text of its arguments.
Does not know: what stands around the object, in which format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from enum import Enum, auto

from cb_engine.serve.parsers.json_scanner import JsonValueScanner, StringUnescaper, skip_whitespace

_ARGUMENTS_KEYS = ("arguments", "parameters")
# Without a marker only its members tell a call from an answer in JSON: these are all that a call may have.
_BARE_KEYS = frozenset({"name", "id", "type", *_ARGUMENTS_KEYS})
_LONGEST_KEY = 256  # characters as written, quotes included; also of a name


class _Role(Enum):
    NAME = auto()
    ARGUMENTS = auto()
    OTHER = auto()


class CallReader:
    """Reads an object from its `{` to its `}`.

    It is a call from the moment that it is `announced`: where a marker came before, as soon as its name is
    known; without one, when the arguments have begun as an object as well. Until then nothing is certain and
    the caller keeps the text; from then on `take_arguments` hands out the arguments as they come.
    """

    def __init__(self, *, marked: bool, names: Collection[str] | None) -> None:
        """Begin before the object's `{`.

        Args:
            marked: a marker came before the object, so whatever it holds is meant as a call.
            names: the functions there are; None if that is not known, so that any name will do.
        """
        self.name: str | None = None
        self.announced = False
        self.done = False  # the closing brace was taken
        self.failed = False  # what comes next does not belong to a call; nothing more is taken
        self._marked = marked
        self._names = names
        self._state: Callable[[str, int, int], int] = self._open
        self._key = ""
        self._short = ""  # the key or the name that is being read, as written
        self._scanner = JsonValueScanner()
        self._role = _Role.OTHER
        self._arguments = _ArgumentsText()
        self._has_arguments = False

    def feed(self, text: str, start: int, end: int) -> int:
        """Take characters from `text[start:end]`; return the index behind the last one taken."""
        at = start
        while at < end and not (self.done or self.failed):
            at = self._state(text, at, end)
        return at

    def take_arguments(self) -> str:
        """Return the arguments' text that came since the last time; nothing before the call is announced."""
        return self._arguments.take() if self.announced else ""

    def end_of_text(self) -> bool:
        """Nothing more comes: return whether this is a call. One cut off behind the name of a known function is."""
        self.announced = self.announced or (self._names is not None and self.name is not None)
        return self.announced

    # What is expected next; each takes at least one character, or fails, or hands over to another.

    def _open(self, text: str, at: int, end: int) -> int:
        self._state = self._key_or_end
        return at + 1

    def _key_or_end(self, text: str, at: int, end: int) -> int:
        at = skip_whitespace(text, at, end)
        if at == end:
            return at
        if text[at] == "}":  # also behind a comma, as models leave one there
            return self._close(at)
        self._scanner, self._short = JsonValueScanner(), ""
        self.failed = text[at] != '"'
        self._state = self._in_key
        return at

    def _in_key(self, text: str, at: int, end: int) -> int:
        stop = self._scan_short(text, at, end)
        if self._scanner.done:
            self._key = self._unquoted() or ""
            self._role = self._role_of(self._key)
            self.failed = not self._marked and self._key not in _BARE_KEYS
            self._state = self._colon
        return stop

    def _colon(self, text: str, at: int, end: int) -> int:
        at = skip_whitespace(text, at, end)
        if at == end:
            return at
        if text[at] != ":":
            self.failed = True
            return at
        self._state = self._before_value
        return at + 1

    def _before_value(self, text: str, at: int, end: int) -> int:
        at = skip_whitespace(text, at, end)
        if at == end:
            return at
        self._scanner, self._short = JsonValueScanner(), ""
        self._state = self._in_name if self._role is _Role.NAME else self._in_value
        if self._role is _Role.ARGUMENTS:
            self._has_arguments = True
            self.failed = not self._marked and text[at] not in '{"n'  # an object, a string that holds one, null
        return at

    def _in_name(self, text: str, at: int, end: int) -> int:
        if not self._short and text[at] != '"':
            self.failed = True
            return at
        stop = self._scan_short(text, at, end)
        if self._scanner.done:
            self._take_name(self._unquoted())
            self._state = self._after_value
        return stop

    def _in_value(self, text: str, at: int, end: int) -> int:
        stop = self._scanner.feed(text, at, end)
        if self._role is _Role.ARGUMENTS:
            self._arguments.feed(self._scanner, text[at:stop])
            self._announce_if_certain()
        self.failed = self.failed or self._scanner.failed
        if self._scanner.done:
            self._state = self._after_value
        return stop

    def _after_value(self, text: str, at: int, end: int) -> int:
        at = skip_whitespace(text, at, end)
        if at == end:
            return at
        if text[at] == "}":
            return self._close(at)
        if text[at] != ",":
            self.failed = True
            return at
        self._state = self._key_or_end
        return at + 1

    def _close(self, at: int) -> int:
        known = self.name is not None and (self._marked or self._names is not None)
        if known or self.announced:
            self.done = self.announced = True
            self._arguments.end_of_object()
        else:
            self.failed = True
        return at + 1

    def _scan_short(self, text: str, at: int, end: int) -> int:
        stop = self._scanner.feed(text, at, min(end, at + _LONGEST_KEY - len(self._short)))
        self._short += text[at:stop]
        self.failed = not self._scanner.done and len(self._short) >= _LONGEST_KEY
        return stop

    def _unquoted(self) -> str | None:
        try:
            value = json.loads(self._short, strict=False)
        except json.JSONDecodeError:
            return None
        return value if isinstance(value, str) else None

    def _role_of(self, key: str) -> _Role:
        if key == "name" and self.name is None:
            return _Role.NAME
        if key in _ARGUMENTS_KEYS and not self._has_arguments:
            return _Role.ARGUMENTS
        return _Role.OTHER

    def _take_name(self, name: str | None) -> None:
        if not name or not name.isprintable() or (self._names is not None and name not in self._names):
            self.failed = True
            return
        self.name = name
        self.announced = self._marked
        self._announce_if_certain()

    def _announce_if_certain(self) -> None:
        if not self._marked and self._arguments.begun and not self._arguments.is_object:
            self.failed = True
        elif self.name is not None and self._arguments.begun:
            self.announced = True


class _ArgumentsText:
    """The value of `arguments` on its way out: JSON as it is, a string of JSON as what it says."""

    def __init__(self) -> None:
        self.begun = False  # the first character that is no white space is known
        self.is_object = False
        self._pieces: list[str] = []
        self._unescaper = StringUnescaper()
        self._inside_string = False
        self._scalar = ""

    def feed(self, scanner: JsonValueScanner, piece: str) -> None:
        """Take what the scanner has taken of the value."""
        if scanner.kind == "structure":
            self._add(piece)
        elif scanner.kind == "string":
            self._feed_string(scanner, piece)
        elif scanner.kind == "scalar":
            self._scalar += piece
            if scanner.done and self._scalar != "null":
                self._add(self._scalar)

    def end_of_object(self) -> None:
        """The call is complete: where nothing came, the arguments are an empty object."""
        if not self.begun:
            self._add("{}")

    def take(self) -> str:
        """Return what came since the last time."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def _feed_string(self, scanner: JsonValueScanner, piece: str) -> None:
        if not self._inside_string:
            self._inside_string = True
            piece = piece[1:]
        if scanner.done:
            piece = piece[:-1]
        self._add(self._unescaper.feed(piece) + (self._unescaper.finish() if scanner.done else ""))

    def _add(self, text: str) -> None:
        if not self.begun:
            text = text.lstrip()
            self.begun = bool(text)
            self.is_object = text.startswith("{")
        if text:
            self._pieces.append(text)
