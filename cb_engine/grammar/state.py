"""One request's place in its grammar.

Owns what the grammar has seen of the output. A `GrammarState` is made at the door and kept on its Request; the
Scheduler alone advances it, token by token, as it appends them. Everybody else asks, and leaves it where it was.
Does not know requests, schedulers or logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher


DEAD_END = "no token can continue it"


@dataclass(frozen=True)
class EndTokens:
    """Which tokens end a request, and when they may: where its grammar can end, and nowhere else.

    llguidance has one token of its own for the end, which no model generates: in a mask it tells that the grammar can
    end there. `apply` puts the request's own in its place.
    """

    sentinel: int  # llguidance's own
    legal: frozenset[int]  # EOS, unless it is ignored, and the request's stop tokens
    ignored: frozenset[int]  # EOS where it is ignored: never

    def apply(self, bits: npt.NDArray[np.uint8], rows: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Sets the bits of these tokens, in place.

        Args:
            bits: `[R, bytes]`, masks as llguidance fills them: bit `t % 8` of byte `t // 8` is token `t`.
            rows: which of them; every one at most once.

        Returns:
            `[len(rows)]`: where nothing but the end is possible.
        """
        byte, bit = divmod(self.sentinel, 8)
        may_end = bits[rows, byte] >> bit & 1
        must_end = may_end > 0
        for token_id in (self.sentinel, *self.legal, *self.ignored):
            byte, bit = divmod(token_id, 8)
            bits[rows, byte] &= 255 - (1 << bit)
        for at in np.flatnonzero(must_end):
            must_end[at] = not bits[rows[int(at)]].any()
        for token_id in self.legal:
            byte, bit = divmod(token_id, 8)
            bits[rows, byte] |= may_end << bit
        return must_end


class GrammarState:
    """See the module docstring.

    Args:
        matcher: at the grammar's start; this state's own from here on.
        num_tokens: of a mask.
        can_roll_back: whether the matcher can take tokens back; no drafts are verified for one that cannot.
    """

    __slots__ = ("_can_roll_back", "_must_end", "_num_tokens", "ends", "matcher")

    def __init__(self, matcher: LLMatcher, ends: EndTokens, num_tokens: int, *, can_roll_back: bool) -> None:
        self.matcher = matcher  # for masks to be filled from
        self.ends = ends
        self._num_tokens = num_tokens
        self._can_roll_back = can_roll_back
        self._must_end = False  # set by whoever has filled a mask for the next token

    def advance(self, token_id: int) -> None:
        """Takes in a token of the output, the one that ends it excepted. What goes wrong is told by `error`."""
        self.matcher.consume_token(token_id)

    def has_no_more_tokens(self) -> None:
        """A mask of the next token has shown that there is none but the end."""
        self._must_end = True

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow, so that the output is whole."""
        return self.error is None and (self._must_end or self.matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """What went wrong for good, if anything did."""
        return f"the grammar failed: {plain(self.matcher.get_error())}" if self.matcher.is_error() else None

    @property
    def num_bytes(self) -> int:
        """Of a mask, as llguidance fills it: whole words of 32 bits."""
        return (self._num_tokens + 31) // 32 * 4

    def num_legal(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, in order, may come next as text; 0 if the matcher cannot take tokens back."""
        if not self._can_roll_back:
            return 0
        text = list(takewhile(self._is_text, token_ids))
        return self.matcher.validate_tokens(text) if text else 0

    def _is_text(self, token_id: int) -> bool:
        is_end = token_id in self.ends.legal or token_id in self.ends.ignored
        return 0 <= token_id < self._num_tokens and not is_end


def plain(error: str) -> str:
    """What matters of an error of llguidance, on one line: no listing, no state."""
    lines = [line.strip() for line in error.splitlines()]
    cause = next((line for line in lines if line.startswith("error: ")), None)
    text = (cause or next(iter(lines), "")).removeprefix("error: ")
    if text.startswith("NoExtension"):
        text = DEAD_END
    return text if len(text) <= 300 else text[:297] + "..."
