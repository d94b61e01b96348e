"""Which tokens the grammars of a step's requests allow, for all rows in few calls.

Owns the threads that fill masks. Does not know requests, logits or devices.

    rows of the batch     r0: no grammar    r1: two drafts      r2: none
                          [ .               t   d1   d2         t ]
    masks, rows 1 to 4                      m0  m1   m2         m0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cb_engine.grammar.state import EndTokens, GrammarState

if TYPE_CHECKING:
    from llguidance import LLExecutor


@dataclass(frozen=True, slots=True)
class MaskAsk:
    """The rows of one request: `row` of the batch, and one more behind each of its drafts."""

    grammar: GrammarState
    row: int
    draft_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenMasks:
    """What some rows of a batch may choose from."""

    rows: tuple[int, ...]  # in order
    bits: npt.NDArray[
        np.uint8
    ]  # [len(rows), bytes]: bit t % 8 of byte t // 8 is token t; tokens beyond are not allowed


class MaskMaker:
    """See the module docstring.

    Args:
        num_threads: that fill masks.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None

    def make(self, asks: Sequence[MaskAsk]) -> TokenMasks:
        """Fills the masks of a step. A grammar that fails while it does so allows nothing, and says so (`error`); one
        that turns out to be over is told (`has_no_more_tokens`).

        Args:
            asks: one or more, of one tokenizer; in the order of their rows.
        """
        rows: list[int] = []
        places: list[int] = []  # of each one's first row, among these
        for ask in asks:
            places.append(len(rows))
            rows += range(ask.row, ask.row + 1 + len(ask.draft_token_ids))
        bits = np.zeros((len(rows), asks[0].grammar.num_bytes), np.uint8)
        self._fill(asks, places, bits)
        by_ends: dict[EndTokens, list[int]] = {}
        for ask, place in zip(asks, places, strict=True):
            size = 1 + len(ask.draft_token_ids)
            if ask.grammar.matcher.is_error():
                bits[place : place + size] = 0  # it has left no mask, or half of one
            else:
                by_ends.setdefault(ask.grammar.ends, []).extend(range(place, place + size))
        must_end = np.zeros(len(rows), np.bool_)
        for ends, of_them in by_ends.items():
            must_end[of_them] = ends.apply(bits, of_them)
        if must_end.any():
            for ask, place in zip(asks, places, strict=True):
                if must_end[place]:
                    ask.grammar.has_no_more_tokens()
        return TokenMasks(tuple(rows), bits)

    def _fill(self, asks: Sequence[MaskAsk], places: Sequence[int], bits: npt.NDArray[np.uint8]) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=self._num_threads)
        one = [(ask.grammar.matcher, place) for ask, place in zip(asks, places, strict=True) if not ask.draft_token_ids]
        several = [
            (ask.grammar.matcher, place, list(ask.draft_token_ids))
            for ask, place in zip(asks, places, strict=True)
            if ask.draft_token_ids
        ]
        count, size = bits.shape
        if one:
            self._executor.unsafe_compute_mask_ptr(one, bits.ctypes.data, size, count)
        if several:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(several, bits.ctypes.data, size, count)
