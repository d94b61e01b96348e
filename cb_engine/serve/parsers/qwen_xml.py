"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` (Qwen3-Coder).

Here the arguments' JSON text is ours: a parameter that the tool's schema calls a string is escaped as it comes;
any other is kept until its end is known, and is taken as JSON if it is JSON, else as a string.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cb_engine.serve.parsers.json_scanner import skip_whitespace
from cb_engine.serve.parsers.tool_parser import MAX_HEADER, MAX_HELD, ToolParser, partial_marker
from cb_engine.serve.parsers.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


class QwenXmlParser(ToolParser):
    """Reads function blocks, with or without the tags around them."""

    def __init__(self, functions: Sequence[Tool] | None, new_id: Callable[[], str]) -> None:
        """Begin a text.

        Args:
            functions: the functions there are, for their names and the types of their parameters; None if that
                is not known.
            new_id: makes the id of a call.
        """
        names = None if functions is None else {tool.name for tool in functions}
        super().__init__((OPEN, FUNCTION), names, new_id)
        self._schemas = {tool.name: tool.parameters or {} for tool in functions or ()}
        self._schema: Mapping[str, Any] = {}  # of the call that is being read
        self._num_parameters = 0
        self._value = _ParameterValue(is_string=True)

    def _opened(self, text: str, at: int) -> int:
        if self._held[-1].endswith(FUNCTION):
            self._state = self._function_name
            return at
        start = skip_whitespace(text, at, min(len(text), at + MAX_HEADER - self._num_held))
        self._hold(text[at:start])
        if self._num_held >= MAX_HEADER:
            self._no_call()
            return start
        if text.startswith(FUNCTION, start):
            self._hold(FUNCTION)
            self._state = self._function_name
            return start + len(FUNCTION)
        if FUNCTION.startswith(text[start:]):
            return self._wait(text, start)
        self._no_call()
        return start

    def _function_name(self, text: str, at: int) -> int:
        end = text.find(">", at, at + MAX_HEADER)
        if end < 0 and len(text) - at < MAX_HEADER:
            return self._wait(text, at)
        name = text[at:end].strip()
        if end < 0 or not name or (self._names is not None and name not in self._names):
            self._no_call()
            return at
        self._emit_start(name)
        self._schema = self._schemas.get(name, {})
        self._num_parameters = 0
        self._state = self._function_body
        return end + 1

    def _function_body(self, text: str, at: int) -> int:
        at = skip_whitespace(text, at, len(text))
        if text.startswith(FUNCTION_END, at):
            self._end_function()
            return at + len(FUNCTION_END)
        if text.startswith(PARAMETER, at):
            end = text.find(">", at, at + MAX_HEADER)
            if end >= 0:
                self._begin_parameter(text[at + len(PARAMETER) : end].strip())
                return end + 1
            if len(text) - at < MAX_HEADER:
                return self._wait(text, at)
        elif any(tag.startswith(text[at:]) for tag in (FUNCTION_END, PARAMETER)):
            return self._wait(text, at)
        self._end_function()
        return at

    def _end_function(self) -> None:
        self._emit_arguments("}" if self._num_parameters else "{}")
        self._state = self._after_function

    def _begin_parameter(self, name: str) -> None:
        self._emit_arguments(("{" if not self._num_parameters else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._num_parameters += 1
        self._value = _ParameterValue(is_string(self._schema.get("properties", {}).get(name)))
        self._state = self._parameter

    def _parameter(self, text: str, at: int) -> int:
        end = text.find(PARAMETER_END, at)
        if end >= 0:
            self._emit_arguments(self._value.feed(text[at:end]) + self._value.finish())
            self._state = self._function_body
            return end + len(PARAMETER_END)
        end = partial_marker(text, at, (PARAMETER_END,))
        self._emit_arguments(self._value.feed(text[at:end]))
        return self._wait(text, end)

    def _after_function(self, text: str, at: int) -> int:
        at = skip_whitespace(text, at, len(text))
        if text.startswith(CLOSE, at):
            self._state = self._content
            return at + len(CLOSE)
        if CLOSE.startswith(text[at:]):
            return self._wait(text, at)
        self._state = self._content
        return at

    def _end_of_text(self) -> None:
        if self._state in (self._function_body, self._parameter, self._after_function):
            self._tail = ""  # the beginning of a tag


def is_string(schema: Any) -> bool:
    """Whether a parameter's schema allows nothing but strings, so that its text needs no look at its end."""
    if not isinstance(schema, Mapping):
        return False
    choices = string_choices(schema)
    return bool(choices) if choices is not None else schema.get("type") in ("string", ["string"])


def string_choices(schema: Mapping[str, Any]) -> list[str] | None:
    """Return what a schema's `enum` or `const` allows, nothing if not all of it is a string; None if it has neither."""
    if "enum" not in schema and "const" not in schema:
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    return list(values) if isinstance(values, list) and all(isinstance(value, str) for value in values) else []


class _ParameterValue:
    """The text between two tags, less one line break at each end, on its way into JSON."""

    def __init__(self, is_string: bool) -> None:
        self._is_string = is_string
        self._begun = False  # a leading line break would have been seen
        self._opened = False  # the opening quote is out
        self._held: list[str] = []  # of a string: a line break that may be the last; else everything
        self._num_held = 0

    def feed(self, text: str) -> str:
        """Take a piece; return what it adds to the JSON text."""
        if text and not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        self._held.append(text)
        self._num_held += len(text)
        if not self._is_string and self._num_held <= MAX_HELD:
            return ""
        self._is_string = True
        held = self._take()
        if held.endswith("\n"):
            held = held[:-1]
            self._held.append("\n")
            self._num_held = 1
        return self._quote() + _escaped(held)

    def finish(self) -> str:
        """End the value; return what was left."""
        text = self._take().removesuffix("\n")
        if self._is_string:
            return self._quote() + _escaped(text) + '"'
        text = _PYTHON_LITERALS.get(text.strip(), text)
        try:
            json.loads(text)
        except (ValueError, RecursionError):  # no JSON, or JSON too deep to be read
            return json.dumps(text, ensure_ascii=False)
        return text.strip()

    def _quote(self) -> str:
        quote = "" if self._opened else '"'
        self._opened = True
        return quote

    def _take(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        self._num_held = 0
        return text


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
