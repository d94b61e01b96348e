"""Prompt lookup: what followed the last time that the request's own text ended like this.

Owns the rule and, for each running request, an index of its n-grams. Knows no other request, no model and no device.
"""

from __future__ import annotations

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
    """Copies what followed the earliest occurrence of the longest n-gram that ends the request's tokens.

    The n-gram's length n is the draft's kind. Each new token is indexed once, so a call costs the same however long
    the request has become.
    """

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
    """Where each n-gram of one growing token list first ended, among those that another token follows."""

    __slots__ = ("_first_ends", "_last_token_id", "_num_indexed", "_token_ids")

    def __init__(self, token_ids: list[int], sizes: range) -> None:
        self._token_ids = token_ids
        self._first_ends: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self._num_indexed = 0  # n-grams that end at this many tokens, or fewer, are in
        self._last_token_id = -1  # the token before that place

    def is_of(self, token_ids: list[int]) -> bool:
        """Whether this index is of that list, which has but grown. A sign, not a proof: it costs no comparison."""
        if token_ids is not self._token_ids or len(token_ids) <= self._num_indexed:
            return False
        return self._num_indexed == 0 or token_ids[self._num_indexed - 1] == self._last_token_id

    def extend(self) -> None:
        """Takes in the n-grams that have got a follower since the last call."""
        token_ids = self._token_ids
        num_followed = len(token_ids) - 1
        if num_followed <= self._num_indexed:
            return
        for size, first_ends in self._first_ends.items():
            for end in range(max(self._num_indexed + 1, size), num_followed + 1):
                first_ends.setdefault(tuple(token_ids[end - size : end]), end)
        self._num_indexed = num_followed
        self._last_token_id = token_ids[num_followed - 1]

    def find_longest(self) -> tuple[int, int]:
        """The size of the longest n-gram that ends the list and occurred before, and where it first ended; or 0, 0."""
        found = (0, 0)
        for size, first_ends in self._first_ends.items():
            end = first_ends.get(tuple(self._token_ids[-size:]))
            if end is None:  # then no longer one did
                break
            found = (size, end)
        return found
