"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them in a text (Hermes, Qwen)."""

from __future__ import annotations

from collections.abc import Callable, Collection

from cb_engine.serve.parsers.tool_parser import JsonToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonToolParser):
    """Reads objects between tags. A closing tag that is missing does no harm."""

    def __init__(self, names: Collection[str] | None, new_id: Callable[[], str]) -> None:
        super().__init__((OPEN,), names, new_id)

    def _openers(self) -> tuple[str, ...]:
        return ()

    def _take_opener(self, token: str) -> None:
        raise RuntimeError(f"there are no openers, got {token!r}")

    def _glue(self) -> tuple[str, ...]:
        return (CLOSE,)

    def _take_glue(self, token: str) -> None:
        self._state = self._content

    def _object_may_follow(self) -> bool:
        return False
