"""Tables per request and group: allocation, windows, prefix hits, forks and copy-on-write.

Blocks hold 4 tokens throughout, so the numbers can be worked out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cb_engine.kv_cache import block_manager
from cb_engine.kv_cache.block_manager import BlockCopy, BlockManager, KVGroup, SharedPrefix
from cb_engine.request import Request
from cb_engine.sampling_params import SamplingParams

BS = 4
FULL = (None,)


def make_manager(
    windows: Sequence[int | None] = FULL,
    blocks: int | Sequence[int] = 32,
    *,
    caching: bool = True,
    max_num_seqs: int = 4,
) -> BlockManager:
    """`blocks` usable ones per group, the null block not counted."""
    sizes = [blocks] * len(windows) if isinstance(blocks, int) else blocks
    groups = [KVGroup(w, n + 1) for w, n in zip(windows, sizes, strict=True)]
    return BlockManager(
        groups, block_size=BS, max_num_seqs=max_num_seqs, max_model_len=64, enable_prefix_caching=caching
    )


_names = iter(range(10**6))


def make_request(tokens: Sequence[int], **params: Any) -> Request:
    return Request(f"r{next(_names)}", list(tokens), SamplingParams(**params), max_tokens=64)


def tables(manager: BlockManager, request: Request) -> list[list[int]]:
    return [list(t) for t in manager._holdings[request.request_id].tables]


def run(manager: BlockManager, request: Request, num_tokens: int, shared: SharedPrefix | None = None) -> bool:
    """Allocates and, if that went well, computes `num_tokens` tokens."""
    if not manager.allocate(request, num_tokens, shared):
        return False
    request.num_computed_tokens += num_tokens + (shared.num_tokens if shared else 0)
    manager.cache_computed_blocks(request)
    manager.check()
    return True


def leave_behind(manager: BlockManager, tokens: Sequence[int], chunk: int | None = None, **params: Any) -> Request:
    """Computes a prompt, in chunks, and frees it, so that its full blocks are cached."""
    request = make_request(tokens, **params)
    while request.num_remaining_tokens:
        assert run(manager, request, min(chunk or len(tokens), request.num_remaining_tokens))
    manager.free(request)
    return request


# ---- allocation --------------------------------------------------------------------------------------------------


def test_a_table_has_one_block_per_started_run_of_tokens_in_every_group():
    manager = make_manager((None, 64))
    request = make_request(range(9))
    assert run(manager, request, 5)
    assert [len(t) for t in tables(manager, request)] == [2, 2]
    assert run(manager, request, 3)
    assert [len(t) for t in tables(manager, request)] == [2, 2]  # 8 tokens fill two blocks
    assert run(manager, request, 1)
    assert [len(t) for t in tables(manager, request)] == [3, 3]
    assert (manager.num_live_blocks, manager.num_total_blocks) == (6, 64)


@pytest.mark.parametrize("windows", [(None,), (None, 6), (3,)])
def test_tables_grow_token_by_token(windows: tuple[int | None, ...]):
    """Most tokens need nothing new; the others must not be passed over, nor blocks behind a window be kept."""
    manager = make_manager(windows)
    request = make_request(range(40))
    assert run(manager, request, 20)
    for position in range(20, 40):
        assert run(manager, request, 1)
        for window, table in zip(windows, tables(manager, request), strict=True):
            first_seen = 0 if window is None else position - window + 1
            assert [block > 0 for block in table] == [(i + 1) * BS > first_seen for i in range(position // BS + 1)]


def test_a_fork_never_writes_where_its_source_does():
    manager = make_manager()
    source, sibling = make_request(range(10)), make_request(range(10))
    assert run(manager, source, 5)
    assert run(manager, source, 1)  # and there is room for two more
    assert run(manager, sibling, 1, manager.fork(source, 6))
    [copy] = manager.take_copies()
    assert copy.dst == tables(manager, sibling)[0][1] != tables(manager, source)[0][1]
    assert run(manager, source, 1)
    assert manager.take_copies() == ()


def test_allocation_is_all_or_nothing_across_groups():
    manager = make_manager((None, 64), blocks=(8, 2))
    request = make_request(range(12))
    assert not manager.allocate(request, 12)  # 3 blocks: the second group has 2
    assert (manager.num_live_blocks, manager.num_free_blocks) == (0, 10)
    assert run(manager, request, 8)
    before = tables(manager, request)
    assert not manager.allocate(request, 4)
    assert tables(manager, request) == before
    assert manager.num_live_blocks == 4
    manager.check()


def test_free_gives_back_everything_and_twice_is_harmless():
    manager = make_manager((None, 8), caching=False)
    request = make_request(range(9))
    assert run(manager, request, 9)
    manager.free(request)
    manager.free(request)
    assert (manager.num_live_blocks, manager.num_cached_blocks, manager.num_free_blocks) == (0, 0, 64)
    manager.check()


def test_rows_are_reused():
    manager = make_manager(max_num_seqs=1)
    for _ in range(3):
        leave_behind(manager, range(5))
    manager.check()


def test_dense_tables_are_copies_equal_to_the_lists_and_null_beyond_them():
    manager = make_manager((None, 5))
    a, b = make_request(range(6)), make_request(range(30))
    assert run(manager, a, 6)
    for _ in range(4):
        assert run(manager, b, 7)
    dense = manager.block_tables([b, a], 8)
    for group, got in enumerate(dense):
        assert got.dtype == np.int32
        expected = [(tables(manager, r)[group] + [0] * 8)[:8] for r in (b, a)]
        assert got.tolist() == expected
    dense[0][:] = 99
    assert 99 not in manager.block_tables([b, a], 8)[0]
    manager.free(b)
    again = make_request(range(4))
    assert run(manager, again, 4)  # takes b's row, with nothing left of b in it
    assert manager.block_tables([again], 8)[0][0, 1:].tolist() == [0] * 7


def test_capacity_shortage_of_a_full_group():
    manager = make_manager(blocks=3)
    assert manager.capacity_shortage(12, chunk=4) is None
    assert manager.capacity_shortage(13, chunk=4) == (4, 3)


def test_capacity_shortage_of_a_window_group_counts_window_and_chunk_only():
    manager = make_manager((None, 8), blocks=(32, 5))
    # Computing 8 tokens with 7 before them in sight touches 15 tokens: at worst 5 blocks of 4.
    assert manager.capacity_shortage(100, chunk=8) is None
    # A chunk of 16 and the 7 before it are 23 tokens: at worst 7 blocks.
    assert manager.capacity_shortage(100, chunk=16) == (7, 5)
    assert manager.capacity_shortage(20, chunk=16) is None  # 5 blocks in all


def test_room_counts_free_blocks_and_keeps_the_reserve():
    manager = make_manager(blocks=4)
    assert manager.has_room_for(16, chunk=100, reserve=0)
    assert not manager.has_room_for(17, chunk=100, reserve=0)
    assert manager.has_room_for(16, chunk=100, reserve=3)  # an idle pool admits whatever the reserve
    request = make_request(range(4))
    assert run(manager, request, 4)
    assert manager.has_room_for(12, chunk=100, reserve=0)
    assert manager.has_room_for(8, chunk=100, reserve=1)
    assert not manager.has_room_for(12, chunk=100, reserve=1)


def test_a_block_that_a_hit_revives_is_not_room_twice():
    manager = make_manager(blocks=3)
    leave_behind(manager, range(8))
    shared = manager.match_prefix(make_request(range(13)))
    assert shared is not None
    assert shared.num_tokens == 8
    assert manager.has_room_for(4, chunk=100, reserve=0, shared=shared)  # two revived and one new
    assert not manager.has_room_for(5, chunk=100, reserve=0, shared=shared)
    late = make_request(range(13))
    assert not manager.allocate(late, 5, shared)
    assert manager.num_live_blocks == 0
    assert manager.allocate(late, 4, shared)
    manager.check()


def test_a_long_prompt_runs_in_a_window_pool_of_the_size_that_capacity_asks_for():
    # Chunks of 8 under a window of 8 never hold more than 5 blocks, and `capacity_shortage` says that 5 suffice.
    manager = make_manager((None, 8), blocks=(16, 5))
    assert manager.capacity_shortage(48, chunk=8) is None
    request = make_request(range(48))
    for _ in range(6):
        assert run(manager, request, 8)  # and so it is


# ---- windows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "kept_from"),
    # The query at `start` with a window of 6 sees tokens start - 5 .. start.
    [(4, 0), (5, 0), (8, 0), (9, 1), (10, 1), (11, 1), (12, 1), (13, 2), (14, 2), (16, 2), (17, 3)],
)
def test_blocks_behind_the_window_are_given_back_and_no_earlier(start: int, kept_from: int):
    manager = make_manager((6,), caching=False)
    request = make_request(range(20))
    assert run(manager, request, start)
    before = tables(manager, request)[0]
    assert run(manager, request, 1)
    after = tables(manager, request)[0]
    assert after[:kept_from] == [0] * kept_from
    assert after[kept_from : len(before)] == before[kept_from:]
    assert 0 not in after[kept_from:]
    assert manager.num_live_blocks == len(after) - kept_from


def test_only_the_window_group_gives_blocks_back():
    manager = make_manager((None, 4), caching=False)
    request = make_request(range(20))
    for _ in range(20):
        assert run(manager, request, 1)
    full, window = tables(manager, request)
    assert 0 not in full
    # Before token 19 the window began at token 16, so the four blocks before it are gone.
    assert window[:4] == [0] * 4
    assert window[4] != 0
    assert manager.num_live_blocks == 5 + 1


def test_a_small_window_pool_carries_a_long_sequence():
    manager = make_manager((4,), blocks=2, caching=False)
    request = make_request(range(60))
    for _ in range(60):
        assert run(manager, request, 1)


def test_blocks_that_a_window_has_passed_stay_findable():
    manager = make_manager((4,))
    leave_behind(manager, range(20), chunk=1)
    shared = manager.match_prefix(make_request(range(9)))
    assert shared is not None
    assert shared.num_tokens == 8


# ---- prefixes ----------------------------------------------------------------------------------------------------


def test_a_prefix_is_matched_in_whole_blocks():
    manager = make_manager()
    leave_behind(manager, range(11))
    first, second = (manager.match_prefix(make_request(range(n))) for n in (12, 9))
    assert first is not None
    assert first.num_tokens == 8  # the third block was never full
    assert second is not None
    assert second.tables == first.tables
    other = manager.match_prefix(make_request([0, 1, 2, 3, 99, 5, 6, 7, 8]))
    assert other is not None
    assert other.num_tokens == 4
    assert other.tables == (first.tables[0][:1],)
    assert manager.match_prefix(make_request([99, *range(1, 9)])) is None


def test_a_fully_cached_prompt_leaves_a_token_to_compute():
    manager = make_manager()
    leave_behind(manager, range(8))
    shared = manager.match_prefix(make_request(range(8)))
    assert shared is not None
    assert shared.num_tokens == 7
    beginning = manager.match_prefix(make_request(range(4)))
    assert beginning is not None
    assert beginning.num_tokens == 3
    assert manager.match_prefix(make_request(range(2))) is None  # one token is less than half a block


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
def test_part_of_a_block_is_hit_and_copied_before_it_is_written(windows: tuple[int | None, ...]):
    manager = make_manager(windows)
    leave_behind(manager, range(12))
    request = make_request([*range(6), 60, 70, 80])
    shared = manager.match_prefix(request)
    assert shared is not None
    assert shared.num_tokens == 6
    before = manager.num_cached_blocks
    assert run(manager, request, 3, shared)
    copies = manager.take_copies()
    assert [(c.group, c.src, c.dst) for c in copies] == [
        (i, shared.tables[i][1], table[1]) for i, table in enumerate(tables(manager, request))
    ]
    assert manager.num_cached_blocks == before - len(windows)  # the first block is held, the copied one is not
    whole = manager.match_prefix(make_request(range(13)))
    assert whole is not None
    assert whole.num_tokens == 12


def test_the_longest_part_is_hit():
    manager = make_manager()
    leave_behind(manager, [1, 2, 3, 4])
    leave_behind(manager, [1, 2, 9, 9])
    for tokens, expected in (([1, 2, 3, 8, 8], 3), ([1, 2, 9, 8, 8], 3), ([1, 2, 8, 8, 8], 2)):
        shared = manager.match_prefix(make_request(tokens))
        assert shared is not None
        assert shared.num_tokens == expected
    assert manager.match_prefix(make_request([1, 8, 8, 8, 8])) is None


def test_a_part_must_be_there_in_every_group():
    manager = make_manager((None, 4), blocks=(8, 2))
    leave_behind(manager, range(12), chunk=4)  # the window's pool keeps the last two blocks only
    assert manager.match_prefix(make_request([0, 1, 2, 50, 51])) is None
    manager.check()


def test_what_is_left_of_a_shared_prefix_without_a_copy():
    manager = make_manager((None, 4))
    assert manager.without_copy(SharedPrefix(6, ((3, 4), (1, 2)))) == SharedPrefix(4, ((3,), (1,)))
    assert manager.without_copy(SharedPrefix(8, ((3, 4), (0, 4)))) == SharedPrefix(8, ((3, 4), (0, 4)))
    assert manager.without_copy(SharedPrefix(3, ((3,), (1,)))) is None
    # The query at 8 sees 5 to 7, in a block that the window at 11 has passed.
    assert manager.without_copy(SharedPrefix(11, ((3, 4, 5), (0, 0, 3)))) is None


def test_a_hit_shares_the_blocks_and_survives_the_end_of_its_first_holder():
    manager = make_manager()
    a, b = make_request(range(9)), make_request([*range(8), 50])
    assert run(manager, a, 9)
    shared = manager.match_prefix(b)
    assert shared is not None
    assert run(manager, b, 1, shared)
    assert tables(manager, a)[0][:2] == tables(manager, b)[0][:2]
    assert tables(manager, a)[0][2] != tables(manager, b)[0][2]
    assert manager.num_live_blocks == 4
    manager.free(a)
    assert manager.num_live_blocks == 3
    assert manager.take_copies() == ()
    manager.check()


def test_caching_turned_off_finds_and_keeps_nothing():
    manager = make_manager(caching=False)
    leave_behind(manager, range(8))
    assert manager.num_cached_blocks == 0
    assert manager.match_prefix(make_request(range(9))) is None


def test_prompt_logprobs_compute_the_whole_prompt():
    manager = make_manager()
    leave_behind(manager, range(8))
    assert manager.match_prefix(make_request(range(9), prompt_logprobs=0)) is None


@pytest.mark.parametrize("salts", [(None, "a"), ("a", None), ("a", "b")])
def test_a_cache_salt_separates_prefixes(salts: tuple[str | None, str | None]):
    manager = make_manager()
    leave_behind(manager, range(8), cache_salt=salts[0])
    assert manager.match_prefix(make_request(range(9), cache_salt=salts[1])) is None
    assert manager.match_prefix(make_request(range(9), cache_salt=salts[0])) is not None


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
def test_a_weight_version_separates_prefixes(windows: tuple[int | None, ...]):
    manager = make_manager(windows)
    leave_behind(manager, range(12))
    manager.set_weight_version(1)
    assert manager.match_prefix(make_request(range(13))) is None
    leave_behind(manager, range(12))
    assert manager.match_prefix(make_request(range(13))) is not None


def test_a_request_that_runs_through_a_weight_change_is_not_cached_any_more():
    manager = make_manager()
    request = make_request(range(12))
    assert run(manager, request, 4)
    manager.set_weight_version(1)
    request.block_hashes.clear()
    assert run(manager, request, 8)
    manager.free(request)
    assert manager.match_prefix(make_request(range(13))) is None
    assert manager.num_cached_blocks == 0  # what nobody can hit any more takes no place in the cache


def test_a_hash_collision_never_returns_a_block_with_other_tokens(monkeypatch):
    monkeypatch.setattr(block_manager, "hash_block", lambda parent, tokens: b"one name for all")
    manager = make_manager()
    leave_behind(manager, range(12))
    assert manager.match_prefix(make_request([9, 9, 9, 9, 9])) is None
    assert manager.match_prefix(make_request([4, 5, 6, 7, 8])) is None
    honest = manager.match_prefix(make_request(range(9)))
    assert honest is not None
    assert honest.num_tokens == 4  # the second block has the name of the first, and other tokens
    manager.check()


def test_twins_computed_side_by_side_share_nothing_and_leave_one_cached():
    manager = make_manager()
    a, b = make_request(range(8)), make_request(range(8))
    assert run(manager, a, 8)
    assert run(manager, b, 8)
    assert manager.num_live_blocks == 4
    manager.free(a)
    manager.free(b)
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (2, 30)


def test_reset_forgets_all_and_running_requests_are_cached_anew():
    manager = make_manager()
    leave_behind(manager, range(8))
    running = make_request(range(50, 60))
    assert run(manager, running, 8)
    manager.reset_prefix_cache()
    assert manager.num_cached_blocks == 0
    assert manager.match_prefix(make_request(range(9))) is None
    assert manager.match_prefix(make_request(range(50, 60))) is None
    manager.cache_computed_blocks(running)
    assert manager.match_prefix(make_request(range(50, 60))) is not None
    manager.check()


def test_the_least_recently_used_prefix_is_evicted_from_its_tail():
    manager = make_manager(blocks=4)
    leave_behind(manager, range(8))
    leave_behind(manager, range(20, 28))
    leave_behind(manager, range(40, 43))  # needs one block: the tail of the oldest
    found = [manager.match_prefix(make_request(range(start, start + 9))) for start in (0, 20)]
    assert [s.num_tokens if s else 0 for s in found] == [4, 8]


# Hybrid groups: a full one and a window of 8. A prefix of n tokens is followed by the query at n, which sees tokens
# n - 7 .. n, hence of 16 cached tokens the blocks from 9 // 4 = 2 on.


def test_a_window_group_needs_only_the_blocks_in_sight():
    manager = make_manager((None, 8))
    leave_behind(manager, range(17))
    shared = manager.match_prefix(make_request(range(17)))
    assert shared is not None
    assert shared.num_tokens == 16
    full, window = shared.tables
    assert 0 not in full
    assert window[:2] == (0, 0)
    assert 0 not in window[2:]


def evict(manager: BlockManager, group: int, block_id: int) -> None:
    """Throws one cached block out."""
    pool = manager._groups[group].pool
    del pool._cached[block_id]
    pool._forget(pool._blocks[block_id])
    pool._free.append(block_id)


@pytest.mark.parametrize(
    ("group", "gone", "expected"),
    [
        (0, 3, 12),  # a full group's prefix ends at its first gap
        (0, 1, 4),
        (0, 0, 0),
        (1, 0, 16),  # behind the window
        (1, 1, 16),
        (1, 2, 8),  # 16 would need blocks 2 and 3, 12 blocks 1 and 2, 8 blocks 0 and 1
        (1, 3, 12),
    ],
)
def test_a_missing_block_shortens_the_match(group: int, gone: int, expected: int):
    manager = make_manager((None, 8))
    request = make_request(range(17))
    assert run(manager, request, 17)
    missing = tables(manager, request)[group][gone]
    manager.free(request)
    evict(manager, group, missing)
    shared = manager.match_prefix(make_request(range(17)))
    assert (shared.num_tokens if shared else 0) == expected
    if shared is not None:
        assert run(manager, make_request(range(17)), 17 - expected, shared)


def test_a_match_in_a_window_group_can_be_computed_on():
    manager = make_manager((None, 8))
    leave_behind(manager, range(16))
    request = make_request(range(24))
    shared = manager.match_prefix(request)
    assert shared is not None
    assert run(manager, request, 8, shared)
    assert [len(t) for t in tables(manager, request)] == [6, 6]
    # Held in the window group: blocks 2 and 3, revived, and two new ones.
    assert sum(b != 0 for b in tables(manager, request)[1]) == 4


# ---- forks -------------------------------------------------------------------------------------------------------


def test_a_fork_shares_full_blocks_and_copies_the_partial_one():
    manager = make_manager((None, 64))
    source, sibling = make_request(range(7)), make_request(range(7))
    assert run(manager, source, 7)
    shared = manager.fork(source, 6)
    assert shared is not None
    assert shared.num_tokens == 6
    assert run(manager, sibling, 1, shared)
    copies = manager.take_copies()
    for group, (own, theirs) in enumerate(zip(tables(manager, sibling), tables(manager, source), strict=True)):
        assert own[0] == theirs[0]
        assert own[1] != theirs[1]
        assert copies[group] == BlockCopy(group, src=theirs[1], dst=own[1])
    assert manager.take_copies() == ()
    assert manager.num_live_blocks == 2 * 3


def test_a_fork_at_a_block_boundary_copies_nothing():
    manager = make_manager()
    source, sibling = make_request(range(9)), make_request(range(9))
    assert run(manager, source, 9)
    assert run(manager, sibling, 1, manager.fork(source, 8))
    assert manager.take_copies() == ()
    assert tables(manager, sibling)[0][:2] == tables(manager, source)[0][:2]
    assert tables(manager, sibling)[0][2] != tables(manager, source)[0][2]


def test_every_sibling_gets_a_copy_of_its_own_and_the_source_writes_on_in_place():
    manager = make_manager()
    source, a, b = (make_request(range(6)) for _ in range(3))
    assert run(manager, source, 6)
    own = tables(manager, source)[0][1]
    for sibling in (a, b):
        assert run(manager, sibling, 1, manager.fork(source, 5))
    copies = manager.take_copies()
    assert [c.src for c in copies] == [own, own]
    assert len({c.dst for c in copies} | {own}) == 3
    source.token_ids.append(7)
    assert run(manager, source, 1)
    assert tables(manager, source)[0][1] == own
    assert manager.take_copies() == ()


def test_a_fork_that_does_not_fit_leaves_nothing_behind():
    manager = make_manager(blocks=2)
    source, sibling = make_request(range(6)), make_request(range(6))
    assert run(manager, source, 6)
    assert not manager.allocate(sibling, 1, manager.fork(source, 5))  # the copy needs a block
    assert manager.take_copies() == ()
    assert manager.num_live_blocks == 2
    manager.check()


def test_a_fork_outlives_its_source():
    manager = make_manager()
    source, sibling = make_request(range(6)), make_request(range(6))
    assert run(manager, source, 6)
    assert run(manager, sibling, 1, manager.fork(source, 5))
    manager.free(source)
    assert manager.num_live_blocks == 2
    assert manager.num_cached_blocks == 0
    manager.check()


def test_a_fork_is_refused_once_the_window_has_passed_what_the_sibling_would_see():
    manager = make_manager((None, 4))
    source = make_request(range(9))
    assert run(manager, source, 9)
    assert manager.fork(source, 8) is not None
    for token in range(3):
        source.token_ids.append(token)
        assert run(manager, source, 1)
    # The sibling's query at 8 sees tokens 5 .. 8, hence block 1. The source's query at 11 saw 8 .. 11: it gave 1 back.
    assert tables(manager, source)[1][1] == 0
    assert manager.fork(source, 8) is None


def test_a_fork_takes_from_a_window_group_only_what_is_in_sight():
    manager = make_manager((None, 4))
    source, sibling = make_request(range(13)), make_request(range(13))
    assert run(manager, source, 13)
    shared = manager.fork(source, 12)
    assert shared is not None
    assert shared.tables[1][:2] == (0, 0)  # the query at 12 sees 9 .. 12
    assert shared.tables[1][2] == tables(manager, source)[1][2]
    assert run(manager, sibling, 1, shared)


def test_what_a_fork_computes_is_findable_under_its_own_tokens():
    manager = make_manager()
    source, sibling = make_request(range(6)), make_request(range(6))
    assert run(manager, source, 6)
    assert run(manager, sibling, 1, manager.fork(source, 5))
    sibling.token_ids += [70, 71]
    assert run(manager, sibling, 2)
    manager.free(sibling)
    found = manager.match_prefix(make_request([0, 1, 2, 3, 4, 5, 70, 71, 1]))
    assert found is not None
    assert found.num_tokens == 8
    other = manager.match_prefix(make_request([0, 1, 2, 3, 4, 5, 70, 72, 1]))
    assert other is not None
    assert other.num_tokens == 7


# ---- the self-check ----------------------------------------------------------------------------------------------


def test_check_finds_a_table_that_differs_from_its_dense_row():
    manager = make_manager()
    request = make_request(range(6))
    assert run(manager, request, 6)
    manager._groups[0].dense[manager._holdings[request.request_id].row, 1] = 9
    with pytest.raises(RuntimeError, match="differs from its table"):
        manager.check()


def test_check_finds_a_block_that_no_table_names():
    manager = make_manager()
    request = make_request(range(6))
    assert run(manager, request, 6)
    manager._holdings.pop(request.request_id)
    with pytest.raises(RuntimeError, match="table entries"):
        manager.check()


def test_check_finds_a_row_held_twice():
    manager = make_manager()
    request = make_request(range(6))
    assert run(manager, request, 6)
    manager._free_rows.append(manager._holdings[request.request_id].row)
    with pytest.raises(RuntimeError, match="held twice"):
        manager.check()
