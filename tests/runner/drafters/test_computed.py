"""What is said to be computed in a block is what was written there last: against a cache that holds the texts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from cb_engine.kv_cache.block_manager import Int32Array
from cb_engine.request import Request
from cb_engine.runner.drafters.computed import ComputedRows
from cb_engine.sampling_params import SamplingParams

SIZE = 4


def make_request(token_ids: Sequence[int]) -> Request:
    return Request("r", list(token_ids), SamplingParams(), 100)


def table(*blocks: int) -> Int32Array:
    return np.array(blocks, np.int32)


def test_blocks_are_known_by_what_is_in_them_and_before_them() -> None:
    rows = ComputedRows(SIZE)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first = make_request(text)
    assert rows.count(first, table(3, 7, 1), 9) == 0
    rows.add(first, table(3, 7, 1), 0, text[:6])
    assert rows.count(first, table(3, 7, 1), 9) == 6
    assert rows.count(first, table(3, 7, 1), 5) == 5
    assert rows.count(make_request([*text[:5], 99, 98]), table(3, 7), 7) == 5, "shared up to where it differs"
    assert rows.count(make_request(text), table(3, 8, 1), 9) == 4, "the second block is another"
    assert rows.count(make_request([0, *text[1:]]), table(3, 7), 8) == 0
    assert rows.count(make_request([9, 9, 9, 9, 5, 6]), table(9, 7), 6) == 0, "the same tokens behind others"
    rows.add(first, table(3, 7, 1), 6, text[6:])
    rows.copy(1, 5)
    assert rows.count(make_request(text), table(3, 7, 5), 9) == 9
    rows.copy(2, 7)  # a block of which nothing is known
    assert rows.count(make_request(text), table(3, 7, 1), 9) == 4


def test_guesses_count_if_they_come_true() -> None:
    rows, blocks = ComputedRows(SIZE), table(3, 7)
    request = make_request([1, 2, 3])
    rows.add(request, blocks, 0, [1, 2, 3, 50, 51])
    request.append_token(50, 0)
    request.append_token(60, 0)
    assert rows.count(request, blocks, 5) == 4
    rows.add(request, blocks, 4, [60, 61])
    request.append_token(61, 0)
    assert rows.count(request, blocks, 6) == 6
    assert rows.count(request, table(3, 8), 6) == 4, "the block of the guesses has gone to somebody else"


def test_what_is_overwritten_is_known_no_more() -> None:
    rows, blocks = ComputedRows(SIZE), table(3, 7, 9)
    text = list(range(12))
    rows.add(make_request(text), blocks, 0, text)
    rows.remove(blocks, 6, 9)
    assert rows.count(make_request(text), blocks, 12) == 6
    rows.add(make_request(text), blocks, 6, text[6:8])
    assert rows.count(make_request(text), blocks, 12) == 8, "all of the third block is gone"
    rows.clear()
    assert rows.count(make_request(text), blocks, 12) == 0


def test_a_preempted_request_looks_anew() -> None:
    rows, text = ComputedRows(SIZE), list(range(9))
    request = make_request(text)
    rows.add(request, table(3, 7, 1), 0, text)
    assert rows.count(request, table(3, 7, 1), 9) == 9
    request.num_preemptions += 1
    assert rows.count(request, table(2, 7, 1), 9) == 0
    assert rows.count(request, table(3, 7, 1), 9) == 9


def test_against_a_cache_that_holds_the_texts() -> None:
    """Each slot holds the whole text up to its token, as keys do. Whatever is said to be known is there, and what was
    computed and not overwritten is known."""
    rng = random.Random(0)
    rows, pool = ComputedRows(SIZE), range(1, 9)
    slots: dict[tuple[int, int], tuple[int, ...]] = {}
    num_known = 0
    for _ in range(3000):
        text = [rng.randrange(2) for _ in range(rng.randrange(1, 13))]
        request, blocks = make_request(text), table(*rng.sample(pool, 4))
        places = [(int(blocks[i // SIZE]), i % SIZE) for i in range(16)]
        known = rows.count(request, blocks, len(text))
        assert all(slots.get(places[i]) == tuple(text[: i + 1]) for i in range(known))
        num_known += known
        if rng.random() < 0.2:
            src, dst = rng.sample(pool, 2)
            rows.copy(src, dst)
            for i in range(SIZE):
                slots[dst, i] = slots.get((src, i), ())
        elif rng.random() < 0.3:
            start = rng.randrange(12)
            end = rng.randrange(start, 13)
            rows.remove(blocks, start, end)
            slots |= dict.fromkeys(places[start:end], ())
        else:
            tokens = [*text[known:], *(rng.randrange(2) for _ in range(rng.randrange(3)))]
            rows.add(request, blocks, known, tokens)
            whole = [*text[:known], *tokens]
            slots |= {places[i]: tuple(whole[: i + 1]) for i in range(known, len(whole))}
            assert rows.count(request, blocks, len(text)) == len(text)
    assert num_known > 1000
