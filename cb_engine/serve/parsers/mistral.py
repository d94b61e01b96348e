"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and the newer `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from cb_engine.serve.parsers.json_scanner import JsonValueScanner, skip_whitespace
from cb_engine.serve.parsers.tool_parser import MAX_HEADER, JsonToolParser

MARKER, ARGS = "[TOOL_CALLS]", "[ARGS]"
# What stands between the marker and the arguments; models of the time between the two syntaxes write an id, or
# no [ARGS].
_HEADER = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(\[ARGS\])?\s*")
_HEADER_END = re.compile(r"\{|\[ARGS\]")
_HEADER_SO_FAR = re.compile(r"[\w.-]+\s*(?:\[(?:A\w*|C\w*(?:\]\s*\w*\s*(?:\[\w*)?)?)?)?")
_MODEL_ID = re.compile(r"[a-zA-Z0-9]{9}")


class MistralParser(JsonToolParser):
    """Reads both syntaxes; each marker may bring either."""

    def __init__(self, names: Collection[str] | None, new_id: Callable[[], str]) -> None:
        super().__init__((MARKER,), names, new_id)
        self._in_list = False
        self._arguments = JsonValueScanner()

    def _openers(self) -> tuple[str, ...]:
        return () if self._in_list else ("[",)

    def _take_opener(self, token: str) -> None:
        self._in_list = True

    def _glue(self) -> tuple[str, ...]:
        return (",", "]") if self._in_list else ()

    def _take_glue(self, token: str) -> None:
        if token == "]":
            self._in_list = False

    def _object_may_follow(self) -> bool:
        return self._in_list

    def _no_call(self) -> None:
        self._in_list = False
        super()._no_call()

    def _no_object(self, text: str, at: int) -> int:
        if self._in_list:
            return super()._no_object(text, at)
        self._state = self._header
        return at

    def _header(self, text: str, at: int) -> int:
        limit = min(len(text), at + MAX_HEADER)
        end = _HEADER_END.search(text, at, limit)
        if end is None and limit == len(text) and _HEADER_SO_FAR.fullmatch(text, at):
            return self._wait(text, at)
        stop = at if end is None else end.start() if end[0] == "{" else end.end()
        header = _HEADER.fullmatch(text, at, stop)
        if header is None or (self._names is not None and header[1] not in self._names):
            self._no_call()
            return at
        self._emit_start(header[1], header[2] if header[2] and _MODEL_ID.fullmatch(header[2]) else None)
        self._arguments = JsonValueScanner()
        self._state = self._raw_arguments
        return stop

    def _raw_arguments(self, text: str, at: int) -> int:
        if self._arguments.kind is None:
            at = skip_whitespace(text, at, len(text))
        stop = self._arguments.feed(text, at, len(text))
        self._emit_arguments(text[at:stop])
        if self._arguments.done or self._arguments.failed:
            self._state = self._between
        return stop
