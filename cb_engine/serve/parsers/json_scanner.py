"""JSON text in pieces: where a value ends, and what a string says.

Owns: strings, escapes and brackets. Does not check literals, numbers, commas and colons: a model's `True` or
a missing comma is for the client to see, not a reason to lose the rest of a call.
"""

from __future__ import annotations

import re
from typing import Literal

WHITESPACE = " \t\r\n"
_STRING_STOP = re.compile(r'["\\]')
# What is neither a letter, a digit, white space nor plain punctuation is a bracket, a quote, or no JSON.
_STRUCTURE_STOP = re.compile(r"[^\w\s:,.+\-]")
_SCALAR_STOP = re.compile(r"[^\w.+\-]")
_CLOSER = {"{": "}", "[": "]"}


def skip_whitespace(text: str, start: int, end: int) -> int:
    """Return the index of the first character from `start` on that is no white space of JSON; `end` if none is."""
    while start < end and text[start] in WHITESPACE:
        start += 1
    return start


class JsonValueScanner:
    """Finds the end of one JSON value, whose first character is the first that is fed."""

    def __init__(self) -> None:
        self.kind: Literal["structure", "string", "scalar"] | None = None  # None: nothing came yet
        self.done = False  # the value's end is known
        self.failed = False  # a character that cannot be there; nothing more is taken
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False

    @property
    def may_end(self) -> bool:
        """Whether what came is a whole value, if nothing more comes; one that failed is broken, not cut off."""
        return self.done or self.failed or self.kind == "scalar"

    def feed(self, text: str, start: int, end: int) -> int:
        """Take characters from `text[start:end]` up to the value's end.

        Returns:
            The index behind what belongs to the value: `end`, unless it is done or has failed there.
        """
        at = start
        while at < end and not (self.done or self.failed):
            if self.kind is None:
                at = self._begin(text, at)
            elif self.kind == "scalar":
                at = self._scalar(text, at, end)
            elif self._in_string:
                at = self._string(text, at, end)
            else:
                at = self._structure(text, at, end)
        return at

    def _begin(self, text: str, at: int) -> int:
        char = text[at]
        if char in _CLOSER:
            self.kind = "structure"
            self._closers.append(_CLOSER[char])
        elif char == '"':
            self.kind = "string"
            self._in_string = True
        elif _SCALAR_STOP.match(char):
            self.failed = True
            return at
        else:
            self.kind = "scalar"
        return at + 1

    def _scalar(self, text: str, at: int, end: int) -> int:
        stop = _SCALAR_STOP.search(text, at, end)
        if stop is None:
            return end
        self.done = True
        return stop.start()

    def _string(self, text: str, at: int, end: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        stop = _STRING_STOP.search(text, at, end)
        if stop is None:
            return end
        if stop[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._closers
        return stop.end()

    def _structure(self, text: str, at: int, end: int) -> int:
        stop = _STRUCTURE_STOP.search(text, at, end)
        if stop is None:
            return end
        char = stop[0]
        if char == '"':
            self._in_string = True
        elif char in _CLOSER:
            self._closers.append(_CLOSER[char])
        elif char == self._closers[-1]:
            self._closers.pop()
            self.done = not self._closers
        else:
            self.failed = True
            return stop.start()
        return stop.end()


_SIMPLE_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX4 = re.compile(r"[0-9a-fA-F]{4}")
_REPLACEMENT = "\ufffd"


class StringUnescaper:
    """Turns the inside of a JSON string into what it says, a piece at a time.

    An escape that JSON does not know is left as it is; half of a surrogate pair becomes U+FFFD.
    """

    def __init__(self) -> None:
        self._pending = ""  # the beginning of an escape, at most 11 characters

    def feed(self, text: str) -> str:
        """Take a piece; return what it settles."""
        text = self._pending + text
        self._pending = ""
        pieces: list[str] = []
        at = 0
        while at < len(text):
            backslash = text.find("\\", at)
            if backslash < 0:
                pieces.append(text[at:])
                break
            pieces.append(text[at:backslash])
            escape = self._escape(text, backslash)
            if escape is None:
                self._pending = text[backslash:]
                break
            said, length = escape
            pieces.append(said)
            at = backslash + length
        return "".join(pieces)

    def finish(self) -> str:
        """End the string: an escape that was cut off is left as it is."""
        pending, self._pending = self._pending, ""
        return _REPLACEMENT + pending[6:] if len(pending) >= 6 else pending

    def _escape(self, text: str, at: int) -> tuple[str, int] | None:
        """Return what the escape at `at` says and how long it is; None if its end is still to come."""
        if at + 1 == len(text):
            return None
        char = text[at + 1]
        if char != "u":
            return _SIMPLE_ESCAPES.get(char, "\\" + char), 2
        if len(text) < at + 6:
            return None
        unit = self._unit(text, at)
        if unit is None:
            return "\\u", 2
        if not 0xD800 <= unit < 0xE000:
            return chr(unit), 6
        if unit >= 0xDC00:
            return _REPLACEMENT, 6
        rest = text[at + 6 : at + 12]
        if len(rest) < 6 and "\\u".startswith(rest[:2]):
            return None
        low = self._unit(text, at + 6) if rest.startswith("\\u") else None
        if low is None or not 0xDC00 <= low < 0xE000:
            return _REPLACEMENT, 6
        return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)), 12

    @staticmethod
    def _unit(text: str, at: int) -> int | None:
        digits = _HEX4.fullmatch(text, at + 2, at + 6)
        return int(digits[0], 16) if digits else None
