"""Where a response stops thinking and begins to answer.

Owns: the markers around reasoning, and the line breaks beside them. Does not know: what the answer holds.
"""

from __future__ import annotations

from collections.abc import Callable

from cb_engine.serve.parsers.formats import ReasoningFormat
from cb_engine.serve.parsers.json_scanner import skip_whitespace
from cb_engine.serve.parsers.tool_parser import MAX_SPACES, partial_marker

_LINE_BREAKS = "\r\n"


class ReasoningSplitter:
    """Splits a text into the reasoning at its beginning and the answer behind it.

    Without a closing marker all of it is reasoning, if it began as reasoning. Line breaks inside the markers
    and between the reasoning and the answer belong to neither.
    """

    def __init__(self, form: ReasoningFormat, *, starts_in_reasoning: bool) -> None:
        """Begin a text.

        Args:
            form: the markers.
            starts_in_reasoning: the prompt ended with the opening marker. That the model repeats it is allowed.
        """
        self._form = form
        self._starts_in_reasoning = starts_in_reasoning
        self._state: Callable[[str], None] = self._start
        self._tail = ""
        self._reasoning: list[str] = []
        self._answer: list[str] = []

    def feed(self, delta: str) -> tuple[str, str]:
        """Take a piece of text; return the reasoning and the answer that it settles, in this order."""
        text, self._tail = self._tail + delta, ""
        if text:
            self._state(text)
        return self._take()

    def finish(self) -> tuple[str, str]:
        """End the text; return what was held back."""
        text, self._tail = self._tail, ""
        if self._state == self._in_reasoning or (self._state == self._start and self._starts_in_reasoning):
            self._reasoning.append(text)
        else:
            self._answer.append(text)
        return self._take()

    def _start(self, text: str) -> None:
        at = skip_whitespace(text, 0, min(len(text), MAX_SPACES))
        may_follow = at < MAX_SPACES
        if may_follow and text.startswith(self._form.start, at):
            self._go(self._begin_reasoning, text[at + len(self._form.start) :])
        elif may_follow and self._form.start.startswith(text[at:]):
            self._tail = text
        elif self._starts_in_reasoning:
            self._go(self._begin_reasoning, text)
        else:
            self._go(self._in_answer, text)

    def _begin_reasoning(self, text: str) -> None:
        text = text.lstrip(_LINE_BREAKS)
        if text:
            self._go(self._in_reasoning, text)

    def _in_reasoning(self, text: str) -> None:
        end = text.find(self._form.end)
        stop = end if end >= 0 else partial_marker(text, 0, (self._form.end,))
        first_break = max(0, stop - MAX_SPACES)
        breaks = first_break + len(text[first_break:stop].rstrip(_LINE_BREAKS))
        self._reasoning.append(text[:breaks])
        if end < 0:
            self._tail = text[breaks:]
        else:
            self._go(self._begin_answer, text[end + len(self._form.end) :])

    def _begin_answer(self, text: str) -> None:
        text = text.lstrip(_LINE_BREAKS)
        if text:
            self._go(self._in_answer, text)

    def _in_answer(self, text: str) -> None:
        self._answer.append(text)

    def _go(self, state: Callable[[str], None], text: str) -> None:
        self._state = state
        if text:
            state(text)

    def _take(self) -> tuple[str, str]:
        reasoning, answer = "".join(self._reasoning), "".join(self._answer)
        self._reasoning.clear()
        self._answer.clear()
        return reasoning, answer
