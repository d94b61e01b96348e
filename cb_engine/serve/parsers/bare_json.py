"""Calls that are JSON objects with nothing around them that would mark them as calls.

Llama 3 writes `{"name": ..., "parameters": {...}}`, sometimes behind `<|python_tag|>`, and several with `;` or
a line break between them. Models that know no format of their own write such an object, or a list of them,
often fenced as Markdown. Only at the beginning of an answer, or behind the tag, can it be a call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from cb_engine.serve.parsers.tool_parser import JsonToolParser

PYTHON_TAG = "<|python_tag|>"
_FENCE = "```"


class BareJsonParser(JsonToolParser):
    """Reads objects and lists of them. Any other answer is content, from where it shows."""

    marked = False  # Llama puts its tag before Python code as well

    def __init__(self, tag: str | None, names: Collection[str] | None, new_id: Callable[[], str]) -> None:
        """Begin an answer.

        Args:
            tag: a token that may come before the objects, anywhere in the text.
            names: as for all parsers.
            new_id: as for all parsers.
        """
        super().__init__((tag,) if tag else (), names, new_id)
        self._state = self._opened
        self._in_list = False
        self._in_fence = False

    def _openers(self) -> tuple[str, ...]:
        if self._in_list:
            return ()
        if self._in_fence:
            return ("[",)
        # A tag is held by itself if it was found in a text.
        tags = self._markers if not "".join(self._held).strip() else ()
        return (*tags, _FENCE + "json", _FENCE, "[")

    def _take_opener(self, token: str) -> None:
        self._in_fence = self._in_fence or token.startswith(_FENCE)
        self._in_list = token == "["

    def _glue(self) -> tuple[str, ...]:
        return (";", *((",", "]") if self._in_list else ()), *((_FENCE,) if self._in_fence else ()))

    def _take_glue(self, token: str) -> None:
        if token == "]":
            self._in_list = False
        elif token == _FENCE:
            self._in_fence = False

    def _object_may_follow(self) -> bool:
        return True

    def _no_call(self) -> None:
        self._in_list = self._in_fence = False
        super()._no_call()
