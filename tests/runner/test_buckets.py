"""Ladders, padding, and that warm-up's list and look-up's answers are the same shapes."""

from __future__ import annotations

import itertools

import pytest

from cb_engine.runner.buckets import Bucket, BucketTable, StepKind, climb, ladder

DECODE, PREFILL = StepKind.DECODE, StepKind.PREFILL


def make_table(seqs: int = 8, tokens: int = 64, blocks: int = 4, *, decode: bool = True, prefill: bool = True):
    return BucketTable(seqs, tokens, blocks, pads_decode=decode, pads_prefill=prefill)


@pytest.mark.parametrize(
    ("top", "bottom", "steps"),
    [
        (1, 1, (1,)),
        (2, 1, (1, 2)),
        (8, 1, (1, 2, 4, 8)),
        (9, 1, (1, 2, 4, 8, 9)),
        (24, 1, (1, 2, 4, 8, 16, 24)),
        (100, 16, (16, 32, 64, 100)),
        (64, 16, (16, 32, 64)),
        (64, 17, (32, 64)),  # a bottom between two powers is rounded up
        (16, 16, (16,)),
        (10, 16, (10,)),  # the top may lie below the bottom
    ],
)
def test_a_ladder_climbs_in_powers_of_two_and_ends_with_its_top(top: int, bottom: int, steps: tuple[int, ...]):
    assert ladder(top, bottom) == steps


@pytest.mark.parametrize(
    ("value", "top", "bottom", "step"),
    [
        (1, 24, 1, 1),
        (3, 24, 1, 4),
        (4, 24, 1, 4),
        (16, 24, 1, 16),
        (17, 24, 1, 24),  # 32 would exceed the top
        (24, 24, 1, 24),
        (25, 24, 1, 25),  # beyond the top: as it is
        (1, 100, 16, 16),
        (33, 100, 16, 64),
        (65, 100, 16, 100),
        (3, 10, 16, 10),
    ],
)
def test_a_value_climbs_to_the_first_step_that_holds_it(value: int, top: int, bottom: int, step: int):
    assert climb(value, top, bottom) == step


@pytest.mark.parametrize(("top", "bottom"), [(1, 1), (7, 1), (8, 1), (33, 1), (40, 16), (9, 16), (50, 17)])
def test_climb_finds_the_steps_of_the_ladder(top: int, bottom: int):
    steps = ladder(top, bottom)
    assert [climb(v, top, bottom) for v in range(1, top + 1)] == [
        min(s for s in steps if s >= v) for v in range(1, top + 1)
    ]


@pytest.mark.parametrize(
    ("kind", "sizes", "bucket"),
    [
        (DECODE, (5, 5, 3), (8, 1, 4)),
        (DECODE, (11, 11, 5), (12, 1, 5)),
        (DECODE, (1, 1, 1), (1, 1, 1)),
        (DECODE, (2, 2, 9), (2, 1, 9)),  # wider than the hints said: as it is
        (PREFILL, (3, 7, 2), (4, 16, 5)),
        (PREFILL, (12, 33, 5), (12, 64, 5)),
        (PREFILL, (9, 65, 1), (12, 100, 5)),
        (PREFILL, (1, 100, 9), (1, 100, 9)),
    ],
)
def test_a_step_is_padded_to_its_bucket(kind: StepKind, sizes: tuple[int, int, int], bucket: tuple[int, int, int]):
    assert make_table(12, 100, 5).pad(kind, *sizes) == Bucket(kind, *bucket)


def test_rows_of_a_bucket():
    assert Bucket(DECODE, 8, 1, 4).num_tokens == 8
    assert Bucket(PREFILL, 4, 64, 4).num_tokens == 64


def test_a_kind_that_is_not_padded_keeps_its_sizes_and_lists_nothing():
    table = make_table(decode=False)
    assert table.pad(DECODE, 5, 5, 3) == Bucket(DECODE, 5, 1, 3)
    assert {b.kind for b in table.all()} == {PREFILL}
    table = make_table(prefill=False)
    assert table.pad(PREFILL, 3, 7, 2) == Bucket(PREFILL, 3, 7, 2)
    assert {b.kind for b in table.all()} == {DECODE}
    assert make_table(decode=False, prefill=False).all() == ()


def test_all_shapes_of_a_small_engine():
    assert make_table(2, 20, 3).all() == (
        Bucket(PREFILL, 2, 20, 3),
        Bucket(PREFILL, 1, 20, 3),
        Bucket(PREFILL, 2, 16, 3),
        Bucket(PREFILL, 1, 16, 3),
        Bucket(DECODE, 2, 1, 3),
        Bucket(DECODE, 2, 1, 2),
        Bucket(DECODE, 2, 1, 1),
        Bucket(DECODE, 1, 1, 3),
        Bucket(DECODE, 1, 1, 2),
        Bucket(DECODE, 1, 1, 1),
    )


LIMITS = [(1, 1, 1), (3, 5, 2), (4, 4, 3), (5, 40, 3), (7, 17, 5), (8, 64, 4), (20, 20, 1), (33, 48, 2)]


@pytest.mark.parametrize(("seqs", "tokens", "blocks"), LIMITS)
def test_every_step_within_the_limits_is_padded_to_a_listed_shape(seqs: int, tokens: int, blocks: int):
    table = make_table(seqs, tokens, blocks)
    listed = set(table.all())
    reached = set()
    for s, b in itertools.product(range(1, seqs + 1), range(1, blocks + 1)):
        reached.add(table.pad(DECODE, s, s, b))
        reached |= {table.pad(PREFILL, s, t, b) for t in range(s, tokens + 1)}
    assert reached <= listed


@pytest.mark.parametrize(("seqs", "tokens", "blocks"), LIMITS)
def test_shapes_are_listed_once_and_largest_first(seqs: int, tokens: int, blocks: int):
    listed = make_table(seqs, tokens, blocks).all()
    assert len(set(listed)) == len(listed)
    rows = [b.num_tokens for b in listed]
    assert rows == sorted(rows, reverse=True)
    assert listed[0].num_seqs == seqs


@pytest.mark.parametrize(("seqs", "tokens", "blocks"), LIMITS)
def test_a_shape_holds_the_step_and_padding_it_again_changes_nothing(seqs: int, tokens: int, blocks: int):
    table = make_table(seqs, tokens, blocks)
    for s, t in itertools.product(range(1, seqs + 1), range(1, tokens + 1)):
        if s > t:
            continue
        for bucket in (table.pad(DECODE, s, s, blocks), table.pad(PREFILL, s, t, blocks)):
            need = s if bucket.kind is DECODE else t
            assert bucket.num_seqs >= s
            assert bucket.num_tokens >= need
            assert table.pad(bucket.kind, bucket.num_seqs, bucket.num_tokens, bucket.num_blocks) == bucket
