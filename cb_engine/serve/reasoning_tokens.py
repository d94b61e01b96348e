"""How many tokens of an answer are reasoning, for `usage`. Owns the count of one answer as it comes."""

from __future__ import annotations

from collections.abc import Sequence

from cb_engine.serve.parsers import ReasoningFormat
from cb_engine.serve.parsers.tool_parser import MAX_SPACES
from cb_engine.serve.token_texts import TokenTexts


class ReasoningTokens:
    """Counts the tokens up to the marker that ends reasoning, the markers included.

    Args:
        form: None counts nothing.
        is_open: the prompt has opened the reasoning.
    """

    def __init__(self, form: ReasoningFormat | None, texts: TokenTexts, *, is_open: bool) -> None:
        self._texts = texts
        self._start, self._end = (marker.encode() for marker in form.markers) if form is not None else (b"", b"")
        self._is_over = form is None
        self._is_open = is_open
        self._seen = b""  # not looked through to the end yet
        self._num_before = 0  # tokens of what may be the opening marker

    def add(self, token_ids: Sequence[int]) -> int:
        """How many tokens more are reasoning, now that these have come."""
        count = 0
        for token_id in token_ids:
            if self._is_over:
                break
            self._seen += self._texts.data(token_id)
            if self._is_open:
                count += 1
                self._look_for_end()
            else:
                self._num_before += 1
                count += self._look_for_start()
        return count

    def _look_for_start(self) -> int:
        text = self._seen.lstrip()
        if text.startswith(self._start) and len(self._seen) - len(text) < MAX_SPACES:
            self._is_open = True
            self._seen = text[len(self._start) :]
            self._look_for_end()
            return self._num_before
        too_far = len(self._seen) - len(text) >= MAX_SPACES  # the parser looks no further
        self._is_over = too_far or not self._start.startswith(text)
        return 0

    def _look_for_end(self) -> None:
        self._is_over = self._end in self._seen
        self._seen = self._seen[-len(self._end) + 1 :]
