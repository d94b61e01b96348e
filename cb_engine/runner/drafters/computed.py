"""What a drafter has computed, block by block.

Owns that fact for the cache of the drafter's own layers, which nobody else writes. It belongs to the block and not to a
request: who comes to hold the block, by a prefix hit, as a fork or after a preemption, has what is in it, and a block
that has gone to somebody else tells by its tokens that it is another's.

    block     its rows are those of                       a request asks for its first tokens, block by block
    b3        A B C D  at the beginning                   b3: A B C D    all known
    b7        E F      behind A B C D                     b7: E X        known up to E
    b1        -                                           b1:            nothing

A block is known by the name of what comes before it, as in `kv_cache/block.py`, and by its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from cb_engine.kv_cache.block import common_prefix_length, hash_block
from cb_engine.kv_cache.block_manager import Int32Array
from cb_engine.request import Request

_BEGINNING = b"beginning"


@dataclass(slots=True)
class _Rows:
    """The first rows of a block: of these tokens, behind the prefix of that name."""

    prefix: bytes
    token_ids: list[int]


@dataclass(slots=True)
class _Whole:
    """How many of a request's first blocks have been found to be whole. They stay so while it holds them."""

    num_blocks: int
    num_preemptions: int


class ComputedRows:
    """See the module docstring. Has at most one entry for each block of the pool.

    Tables are those of the group of the drafter's layers, which gives no block back before its request ends.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._rows: dict[int, _Rows] = {}  # by block
        self._whole: WeakKeyDictionary[Request, _Whole] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[Request, list[bytes]] = WeakKeyDictionary()  # of its first i blocks

    def count(self, request: Request, table: Int32Array, limit: int) -> int:
        """How many of the request's first `limit` tokens have their rows in these blocks, all before them included."""
        whole = self._whole.get(request)
        block = whole.num_blocks if whole is not None and whole.num_preemptions == request.num_preemptions else 0
        known = block * self._size
        while known < limit:
            rows = self._rows.get(int(table[block]))
            if rows is None or rows.prefix != self._name(request, block):
                break
            end = min(known + self._size, limit)
            same = common_prefix_length(rows.token_ids, request.token_ids[known:end])
            known += same
            if same < self._size:
                break
            block += 1
        self._whole[request] = _Whole(block, request.num_preemptions)
        return min(known, limit)

    def add(self, request: Request, table: Int32Array, start: int, token_ids: Sequence[int]) -> None:
        """The rows from `start` on have been computed, of these tokens: the request's own, and guesses behind them.
        Those of all its tokens before are there."""
        block, offset = divmod(start, self._size)
        prefix = self._name(request, block)
        tokens = [*request.token_ids[start - offset : start], *token_ids]
        for first in range(0, len(tokens), self._size):
            own = tokens[first : first + self._size]
            rows = self._rows.get(int(table[block]))
            # Rows behind the same ones again are still right.
            if rows is None or rows.prefix != prefix or rows.token_ids[: len(own)] != own:
                self._rows[int(table[block])] = _Rows(prefix, own)
            prefix = hash_block(prefix, own) if len(own) == self._size else prefix
            block += 1

    def remove(self, table: Int32Array, start: int, end: int) -> None:
        """Something else has been written to the rows from `start` to `end` of these blocks."""
        for block in range(start // self._size, -(-end // self._size)):
            rows = self._rows.get(int(table[block]))
            if rows is not None:
                del rows.token_ids[max(0, start - block * self._size) :]

    def copy(self, src: int, dst: int) -> None:
        """A block has been copied."""
        rows = self._rows.get(src)
        if rows is None:
            self._rows.pop(dst, None)
        else:
            self._rows[dst] = _Rows(rows.prefix, list(rows.token_ids))

    def forget(self, request: Request) -> None:
        """The request has ended; what is in its blocks stays known."""
        self._whole.pop(request, None)
        self._names.pop(request, None)

    def clear(self) -> None:
        """Nothing that was computed so far is of any use."""
        self._rows.clear()
        self._whole.clear()

    def _name(self, request: Request, num_blocks: int) -> bytes:
        """Of the request's first so many blocks."""
        names = self._names.setdefault(request, [_BEGINNING])
        while len(names) <= num_blocks:
            start = (len(names) - 1) * self._size
            names.append(hash_block(names[-1], request.token_ids[start : start + self._size]))
        return names[num_blocks]
