"""Prompt lookup: what followed the last time that the request's own text ended like this.

Owns the rule and, for each running request, an index of its n-grams. Knows no other request, no model and no device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cb_engine.request import Request
from cb_engine.speculative.proposer import NO_DRAFT, Draft, DraftAsk


def read_on(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on (a place inside); where the text ends, what was read is read again.

    A copy that starts close to the end repeats with the distance between the two as its period, so that a text that
    goes round in a loop is continued as far as wanted.
    """
    copied = tuple(token_ids[start : start + count])
    if len(copied) < count:
        copied = (copied * (count // len(copied) + 1))[:count]
    return copied


class NgramProposer:
    """Copies what followed the latest occurrence of the longest n-gram that ends the request's tokens.

    The n-gram's length n is the draft's kind. Each new token is indexed once, so a call costs the same however long
    the request has become.
    """

    catch_up_seconds = 0.0

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram={min_ngram} and max_ngram={max_ngram}: 1 <= min_ngram <= max_ngram is needed")
        self._sizes = range(min_ngram, max_ngram + 1)
        self._indices: dict[Request, _NgramIndex] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """See `Proposer`."""
        return [self._draft(ask.request, ask.max_tokens) for ask in asks]

    def forget(self, request: Request) -> None:
        """See `Proposer`."""
        self._indices.pop(request, None)

    def _draft(self, request: Request, max_tokens: int) -> Draft:
        index = self._indices.get(request)
        if index is None or not index.is_of(request.token_ids):
            index = self._indices[request] = _NgramIndex(request.token_ids, self._sizes)
        index.extend()
        size, end = index.find_longest()
        if size == 0 or max_tokens < 1:
            return NO_DRAFT
        return Draft(read_on(request.token_ids, end, max_tokens), size)


class _NgramIndex:
    """Where each n-gram of one growing token list last ended, among those that another token follows."""

    __slots__ = ("_last_token_id", "_num_indexed", "_places", "_token_ids")

    def __init__(self, token_ids: list[int], sizes: range) -> None:
        self._token_ids = token_ids
        self._places = [_Places(token_ids, size) for size in sizes]
        self._num_indexed = 0  # n-grams that end at this many tokens, or fewer, are in
        self._last_token_id = -1  # the token before that place

    def is_of(self, token_ids: list[int]) -> bool:
        """Whether this index is of that list, which has but grown. A sign, not a proof: it costs no comparison."""
        if token_ids is not self._token_ids or len(token_ids) <= self._num_indexed:
            return False
        return self._num_indexed == 0 or token_ids[self._num_indexed - 1] == self._last_token_id

    def extend(self) -> None:
        """Takes in the n-grams that have got a follower since the last call."""
        num_followed = len(self._token_ids) - 1
        if num_followed <= self._num_indexed:
            return
        for places in self._places:
            places.put(range(max(self._num_indexed + 1, places.size), num_followed + 1))
        self._num_indexed = num_followed
        self._last_token_id = self._token_ids[num_followed - 1]

    def find_longest(self) -> tuple[int, int]:
        """The size of the longest n-gram that ends the list and occurred before, and where it last ended; or 0, 0."""
        found = (0, 0)
        for places in self._places:
            end = places.find(len(self._token_ids))
            if not end:  # then no longer one did
                break
            found = (places.size, end)
        return found


class _Places:
    """Where each n-gram of one size last ended. A hash table of places alone, at most 12 bytes for each: the text
    tells which n-gram a place is of, so what is found is right whatever hashes are equal."""

    __slots__ = ("_cells", "_num_used", "_token_ids", "size")

    def __init__(self, token_ids: list[int], size: int) -> None:
        self._token_ids = token_ids
        self.size = size
        self._cells = array("i", bytes(array("i").itemsize * 16))  # 0: empty; as many as a power of two
        self._num_used = 0

    def put(self, ends: range) -> None:
        """The n-grams that end there."""
        self._make_room(self._num_used + len(ends))
        cells, cell_of = self._cells, self._cell_of
        for end in ends:
            cell = cell_of(end)
            self._num_used += not cells[cell]
            cells[cell] = end

    def find(self, end: int) -> int:
        """Where the n-gram that ends at `end` was put last; 0 if it never was."""
        return self._cells[self._cell_of(end)] if end >= self.size else 0

    def _cell_of(self, end: int) -> int:
        """The cell that the n-gram is in, or the one where there is room for it."""
        token_ids, size, cells = self._token_ids, self.size, self._cells
        ngram = token_ids[end - size : end]
        mask = len(cells) - 1
        cell = hash(tuple(ngram)) & mask
        while (place := cells[cell]) and token_ids[place - size : place] != ngram:
            cell = (cell + 1) & mask
        return cell

    def _make_room(self, num_used: int) -> None:
        places, size = self._cells, len(self._cells)
        while 3 * num_used > 2 * size:
            size *= 2
        if size > len(places):
            self._cells = array("i", bytes(places.itemsize * size))
            for place in filter(None, places):
                self._cells[self._cell_of(place)] = place
