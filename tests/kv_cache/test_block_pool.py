"""The pool of one layer group: states, order of reuse, the prefix index, and its self-check."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cb_engine.kv_cache.block import hash_block, root_hash
from cb_engine.kv_cache.block_pool import BlockPool

ROOT = root_hash(0, None)


def insert(pool: BlockPool, block_id: int, tokens: tuple[int, ...], parent: bytes = ROOT) -> bytes:
    """Offers a held block to the index; returns its hash."""
    block_hash = hash_block(parent, tokens)
    pool.insert(block_id, block_hash, parent, tokens)
    return block_hash


def states(pool: BlockPool) -> tuple[int, int, int]:
    """(live, cached, free)"""
    return pool.num_live, pool.num_cached, pool.num_available - pool.num_cached


def test_the_null_block_is_outside_all_counts_and_never_handed_out():
    pool = BlockPool(4)
    assert (pool.num_usable, states(pool)) == (3, (0, 0, 3))
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    pool.share([0, 0])
    pool.release([0])
    assert pool.ref_count(0) == 0
    pool.check({1: 1, 2: 1, 3: 1})


def test_a_pool_without_a_usable_block_is_refused():
    with pytest.raises(ValueError, match="num_blocks=1"):
        BlockPool(1)


def test_more_than_available_is_refused_and_changes_nothing():
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="2 blocks asked for, 1 available"):
        pool.allocate(2)
    assert states(pool) == (2, 0, 1)


def test_a_block_goes_from_free_to_held_to_free_when_it_has_no_content():
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    assert states(pool) == (1, 0, 1)
    pool.release([block])
    assert states(pool) == (0, 0, 2)
    assert pool.allocate(1) == [block]  # the latest freed is the warmest


def test_a_block_with_content_becomes_cached_and_a_hit_revives_it():
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    block_hash = insert(pool, block, (1, 2))
    pool.release([block])
    assert states(pool) == (0, 1, 1)
    assert pool.is_evictable(block)
    assert pool.find(block_hash, ROOT, [1, 2]) == block
    pool.share([block])
    assert states(pool) == (1, 0, 1)
    assert not pool.is_evictable(block)
    pool.share([block])
    assert pool.ref_count(block) == 2
    pool.release([block])
    assert states(pool) == (1, 0, 1)  # one holder is left
    pool.release([block])
    assert states(pool) == (0, 1, 1)
    pool.check({})


def test_the_block_that_begins_with_most_tokens_is_found_until_it_is_forgotten():
    pool = BlockPool(5)
    a, b, c = pool.allocate(3)
    insert(pool, a, (1, 2, 3))
    insert(pool, b, (1, 2, 4))
    insert(pool, c, (1, 2, 3), parent=hash_block(ROOT, (1,)))
    found, equal = pool.find_longest(ROOT, [1, 2, 3, 5])
    assert (found and found.block_id, equal) == (a, 3)
    found, equal = pool.find_longest(ROOT, [1, 2, 7])
    assert (found and found.block_id, equal) == (b, 2)  # the latest of equals
    assert pool.find_longest(ROOT, [7]) == (None, 0)
    pool.check({a: 1, b: 1, c: 1})
    pool.forget([b])
    found, equal = pool.find_longest(ROOT, [1, 2, 4])
    assert (found and found.block_id, equal) == (a, 2)
    pool.drop_cache()
    assert pool.find_longest(ROOT, [1, 2, 3]) == (None, 0)
    pool.check({a: 1, b: 1, c: 1})


def test_a_look_up_compares_a_limited_number_of_blocks():
    pool = BlockPool(40)
    for index, block in enumerate(pool.allocate(30)):
        insert(pool, block, (1, index))
    assert pool.find_longest(ROOT, [1, 0])[1] == 1  # the oldest is out of sight
    assert pool.find_longest(ROOT, [1, 29])[1] == 2


def test_free_blocks_are_taken_before_cached_ones_are_evicted():
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    name = insert(pool, a, (1,))
    pool.release([a])
    pool.release([b])
    assert a not in pool.allocate(2)
    assert pool.find(name, ROOT, [1]) == a
    assert pool.allocate(1) == [a]
    assert pool.find(name, ROOT, [1]) is None


def test_the_least_recently_released_is_evicted_first_and_a_hit_renews():
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    for block in (a, b, c):
        insert(pool, block, (block,))
    for block in (a, b, c):
        pool.release([block])
    pool.share([a])  # used again, hence now the latest
    pool.release([a])
    assert pool.allocate(3) == [b, c, a]


def test_a_sequence_is_released_tail_first_so_its_head_survives_longest():
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    parent = ROOT
    for block in (a, b, c):
        parent = insert(pool, block, (block,), parent)
    pool.release([a, b, c])
    assert pool.allocate(2) == [c, b]
    assert pool.find(hash_block(ROOT, (a,)), ROOT, [a]) == a


def test_eviction_goes_block_by_block():
    pool = BlockPool(4)
    ids = pool.allocate(3)
    for block in ids:
        insert(pool, block, (block,))
    pool.release(ids)
    pool.allocate(1)
    assert states(pool) == (1, 2, 0)


def test_the_first_block_under_a_hash_stays_and_its_twin_goes_free():
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    name = insert(pool, a, (5, 6))
    assert insert(pool, b, (5, 6)) == name
    pool.release([a, b])
    assert pool.find(name, ROOT, [5, 6]) == a
    assert states(pool) == (0, 1, 2)
    pool.check({})


def test_an_equal_hash_with_other_tokens_or_another_parent_is_no_hit():
    pool = BlockPool(4)
    [a] = pool.allocate(1)
    pool.insert(a, b"same", ROOT, [1, 2])
    assert pool.find(b"same", ROOT, [1, 2]) == a
    assert pool.find(b"same", ROOT, [1, 3]) is None
    assert pool.find(b"same", root_hash(1, None), [1, 2]) is None
    assert pool.find(b"other", ROOT, [1, 2]) is None


def test_a_colliding_block_is_left_uncached():
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.insert(a, b"same", ROOT, [1, 2])
    pool.insert(b, b"same", ROOT, [3, 4])
    assert pool.find(b"same", ROOT, [3, 4]) is None
    pool.release([a, b])
    assert states(pool) == (0, 1, 2)


def test_drop_cache_frees_unheld_blocks_and_leaves_held_ones_held():
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    names = [insert(pool, block, (block,)) for block in (a, b)]
    pool.release([a])
    pool.drop_cache()
    assert states(pool) == (1, 0, 2)
    assert [pool.find(n, ROOT, [block]) for n, block in zip(names, (a, b), strict=True)] == [None, None]
    pool.check({b: 1})
    pool.release([b])  # its content was forgotten while it was held
    assert states(pool) == (0, 0, 3)
    assert insert_again(pool)


def insert_again(pool: BlockPool) -> bool:
    """Whether the pool caches anew after it was dropped."""
    [block] = pool.allocate(1)
    name = insert(pool, block, (9,))
    return pool.find(name, ROOT, [9]) == block


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (root_hash(1, None), "weight_version"),
        (root_hash(0, "salt"), "cache_salt"),
        (root_hash(0, "None"), "cache_salt spelt None"),
    ],
)
def test_everything_that_kv_depends_on_is_in_the_root(change: bytes, differs: str):
    assert change != ROOT, differs


def test_hashes_chain_and_have_128_bits():
    first = hash_block(ROOT, [1, 2])
    assert len(first) == 16
    assert hash_block(first, [3, 4]) != hash_block(ROOT, [3, 4])
    assert hash_block(ROOT, [1, 2]) == first
    assert hash_block(ROOT, [2, 1]) != first
    assert hash_block(ROOT, [258]) != hash_block(ROOT, [1, 2])  # no two token lists share bytes


def _held_and_free(pool: BlockPool) -> None:
    pool._free.append(1)


def _free_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[-1])


def _lost(pool: BlockPool) -> None:
    pool._free.pop()


def _held_by_nobody(pool: BlockPool) -> None:
    pool._blocks[1].ref_count = 2


def _free_and_cached(pool: BlockPool) -> None:
    pool._cached[pool._free[-1]] = None


def _unknown_hash(pool: BlockPool) -> None:
    pool._blocks[1].block_hash = b"nobody knows it"


@pytest.mark.parametrize(
    "corrupt", [_held_and_free, _free_twice, _lost, _held_by_nobody, _free_and_cached, _unknown_hash]
)
def test_check_finds_a_corrupted_book(corrupt: Callable[[BlockPool], None]):
    pool = BlockPool(5)
    assert pool.allocate(1) == [1]
    pool.check({1: 1})
    corrupt(pool)
    with pytest.raises(RuntimeError, match="block"):
        pool.check({1: 1})


def test_check_compares_references_with_table_entries():
    pool = BlockPool(5)
    [a] = pool.allocate(1)
    with pytest.raises(RuntimeError, match=f"block {a}: ref_count 1, but 0"):
        pool.check({})
    with pytest.raises(RuntimeError, match="ref_count 0, but 1"):
        pool.check({a: 1, 3: 1})
