"""Lookup over all that the engine has seen: what followed in any request, running or ended, that read like this one.

Owns copies of the requests' tokens, an index of them of fixed size, and the vote of the places found. Knows no model
and no device. The samples of one prompt repeat each other, and so do answers to like questions.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from cb_engine.request import Request
from cb_engine.speculative.ngram import read_on
from cb_engine.speculative.proposer import NO_DRAFT, Draft, DraftAsk

_LONGEST_MATCH = 32  # tokens compared backwards from a place; more agreement than that counts no more
_LONGER_BY = 4  # the second context is so much longer than `min_match`
_MAX_PLACES = 16  # places compared for a draft, the latest ones
_DOUBT = 2  # the vote against all places found: that something new comes
_TOKEN_BITS = 8 * array("i").itemsize


class SuffixProposer:
    """Lets the latest places that read like the end of a request vote on how it goes on.

    A place weighs as much as it has tokens in common with the request's end. The draft's kind is the chance that its
    first token is right, by that vote, in tenths. Requests with different cache salts never see each other's tokens.

    Two contexts are indexed. A short one is found soonest, but the latest places of a common one are all strangers;
    the places of the longer one are asked alone if there are any.
    """

    catch_up_seconds = 0.0

    def __init__(self, *, min_match: int = 2, min_probability: float = 0.1, max_indexed_tokens: int = 1 << 20) -> None:
        """Makes an empty index.

        Args:
            min_match: tokens that a place has in common with a request's end, at least.
            min_probability: a draft ends before the token with which its chance to be right falls below this.
            max_indexed_tokens: tokens that can be found; the oldest make room for new ones. 48 to 64 bytes for
                each are reserved at once.
        """
        if not 1 <= min_match <= _LONGEST_MATCH - _LONGER_BY:
            raise ValueError(f"min_match={min_match}: from 1 to {_LONGEST_MATCH - _LONGER_BY} is possible")
        if not 0 < min_probability <= 1:
            raise ValueError(f"min_probability={min_probability}: 0 < min_probability <= 1 is needed")
        if max_indexed_tokens < 1:
            raise ValueError(f"max_indexed_tokens={max_indexed_tokens}: at least 1 is needed")
        self._min_probability = min_probability
        self._index = _PlaceIndex((min_match, min_match + _LONGER_BY), max_indexed_tokens)
        self._logs: dict[Request, _Log] = {}
        self._num_logs_made = 0
        self._prompts: dict[int, int] = {}  # hash -> number of its first place, the oldest first

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """See `Proposer`."""
        logs = [self._update_log(ask.request) for ask in asks]  # all first: neighbours learn from each other's tokens
        return [self._draft(log, ask.max_tokens) for log, ask in zip(logs, asks, strict=True)]

    def forget(self, request: Request) -> None:
        """See `Proposer`. Its text stays, for others, until newer text takes its place."""
        log = self._logs.pop(request, None)
        if log is not None:
            log.close()
            self._index.add(log)

    def _update_log(self, request: Request) -> _Log:
        log = self._logs.get(request)
        if log is None or not log.is_of(request.token_ids):
            log = self._logs[request] = self._make_log(request)
        log.extend()
        self._index.add(log)
        return log

    def _make_log(self, request: Request) -> _Log:
        self._num_logs_made += 1
        log = _Log(request, self._num_logs_made)
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        key = hash((log.salt, prompt))
        if self._prompts.get(key, 0) >= self._index.oldest:
            log.skip(prompt)  # a sample of an indexed prompt: more places that read the same would crowd out others
            return log
        self._prompts.pop(key, None)
        self._prompts[key] = self._index.next
        while self._prompts[oldest := next(iter(self._prompts))] < self._index.oldest:
            del self._prompts[oldest]
        return log

    def _draft(self, log: _Log, max_tokens: int) -> Draft:
        continuations: dict[tuple[int, ...], int] = {}  # -> weight, the latest place's first
        for other, end, num_common in self._index.find(log):
            read = read_on if other is log else _read  # only its own text is known to be a loop where it ends
            tokens = read(other.tokens, end, max_tokens)
            continuations[tokens] = continuations.get(tokens, 0) + num_common
        return self._vote(continuations, max_tokens) if continuations else NO_DRAFT

    def _vote(self, continuations: dict[tuple[int, ...], int], max_tokens: int) -> Draft:
        """Follows the majority, token by token, among those that have agreed so far."""
        draft: list[int] = []
        chance, first_chance = 1.0, 0.0
        for i in range(max_tokens):
            votes: dict[int, int] = {}
            for tokens, weight in continuations.items():
                if i < len(tokens):
                    votes[tokens[i]] = votes.get(tokens[i], 0) + weight
            if not votes:
                break
            winner = max(votes, key=votes.__getitem__)  # of equals the latest
            chance *= votes[winner] / (sum(votes.values()) + _DOUBT)
            if chance < self._min_probability:
                break
            draft.append(winner)
            first_chance = first_chance or chance
            if len(votes) > 1:
                continuations = {t: weight for t, weight in continuations.items() if i < len(t) and t[i] == winner}
        return Draft(tuple(draft), int(10 * first_chance)) if draft else NO_DRAFT


def _read(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    return tuple(token_ids[start : start + count])


class _Log:
    """A copy of one request's tokens, as numbers of fixed width that are compared many at once.

    Tokens that nobody else has are put before them: each place has `_LONGEST_MATCH` tokens before it, and no match
    goes beyond a text's beginning.
    """

    __slots__ = ("_num_seen", "_seed", "_source", "next_end", "salt", "tokens")

    def __init__(self, request: Request, number: int) -> None:
        self.salt = request.sampling_params.cache_salt
        self._seed = zlib.crc32((self.salt or "").encode())
        self.tokens = array("i", [-1 - number % (1 << 31)]) * _LONGEST_MATCH
        self.next_end = len(self.tokens) + 1  # the first place that is not indexed yet
        self._source = request.token_ids
        self._num_seen = 0

    def is_of(self, token_ids: list[int]) -> bool:
        """Whether this log is of that list, which has but grown. A sign, not a proof: it costs no comparison."""
        if token_ids is not self._source or len(token_ids) < self._num_seen:
            return False
        return self._num_seen == 0 or token_ids[self._num_seen - 1] == self.tokens[-1]

    def skip(self, prompt: tuple[int, ...]) -> None:
        """Passes over a prompt: only what comes after it will be indexed, and only its end is kept to compare."""
        self.tokens.extend(prompt[-_LONGEST_MATCH:])
        self.next_end = max(self.next_end, len(self.tokens))
        self._num_seen = len(prompt)

    def extend(self) -> None:
        """Copies what the request has got since the last call."""
        self.tokens.extend(self._source[self._num_seen :])
        self._num_seen = len(self._source)

    def close(self) -> None:
        """Copies what the request has got since the last call, for the last time, and lets go of its list."""
        self.extend()
        self._source = []

    def tail(self, end: int) -> int:
        """The tokens that end at a place as one number; the last one counts most."""
        return int.from_bytes(self.tokens[end - _LONGEST_MATCH : end].tobytes(), "little")

    def context(self, end: int, size: int) -> int:
        """A hash of the `size` tokens that end at a place; another one under another salt, most likely."""
        return zlib.crc32(self.tokens[end - size : end], self._seed)


class _PlaceIndex:
    """The latest places in all logs, each found by the tokens before it, for each context length apart.

    Places are numbered as they come. A number's cell is written over when the index is full, so what is indexed is
    bounded, nothing has to be removed, and a log is gone when its request is forgotten and its last cell written over.
    As in a window of zip: a table from a context's hash to its latest place, and from each place to the one before.
    """

    def __init__(self, context_sizes: tuple[int, int], num_cells: int) -> None:
        self._sizes = context_sizes
        self._num_cells = num_cells
        num_heads = 1 << (num_cells - 1).bit_length()
        self._mask = num_heads - 1
        self._heads = [array("q", bytes(8 * num_heads)) for _ in context_sizes]
        self._previous = [array("q", bytes(8 * num_cells)) for _ in context_sizes]
        self._logs: list[_Log | None] = [None] * num_cells
        self._ends = array("q", bytes(8 * num_cells))
        self.next = num_cells + 1  # the next place's number; so the zeros of the tables are too old to count

    @property
    def oldest(self) -> int:
        """The lowest number whose cell has not been written over."""
        return self.next - self._num_cells

    def add(self, log: _Log) -> None:
        """Indexes the places in a log that have got a follower."""
        start, end = log.next_end, len(log.tokens)
        if end <= start:
            return
        (short, longer), (short_heads, longer_heads) = self._sizes, self._heads
        short_previous, longer_previous = self._previous
        number = self.next
        for place in range(start, end):
            cell = number % self._num_cells
            self._logs[cell] = log
            self._ends[cell] = place
            head = log.context(place, short) & self._mask
            short_previous[cell] = short_heads[head]
            short_heads[head] = number
            head = log.context(place, longer) & self._mask
            longer_previous[cell] = longer_heads[head]
            longer_heads[head] = number
            number += 1
        self.next = number
        log.next_end = end

    def find(self, log: _Log) -> list[tuple[_Log, int, int]]:
        """The latest places that read like the end of `log`: in which log, where, and how many tokens agree."""
        end = len(log.tokens)
        tail = log.tail(end)
        return self._find(log, end, tail, 1) or self._find(log, end, tail, 0)

    def _find(self, log: _Log, end: int, tail: int, which: int) -> list[tuple[_Log, int, int]]:
        size, previous, oldest = self._sizes[which], self._previous[which], self.oldest
        number = self._heads[which][log.context(end, size) & self._mask]
        found = []
        for _ in range(_MAX_PLACES):
            if number < oldest:
                break
            cell = number % self._num_cells
            number = previous[cell]
            other = self._logs[cell]
            if other is None or other.salt != log.salt:
                continue
            place = self._ends[cell]
            differing = tail ^ other.tail(place)  # the highest bit set lies in the last token that differs
            num_common = _LONGEST_MATCH - (differing.bit_length() + _TOKEN_BITS - 1) // _TOKEN_BITS
            if num_common >= size:  # else only the hashes were equal
                found.append((other, place, num_common))
        return found
