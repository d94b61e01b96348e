"""Ladders, padding, and that warm-up's list and look-up's answers are the same shapes."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from cb_engine.runner.buckets import Bucket, BucketTable, DraftShapes, StepKind, climb, ladder

DECODE, PREFILL = StepKind.DECODE, StepKind.PREFILL
VERIFY, FIRST, NEXT = StepKind.VERIFY, StepKind.DRAFT_FIRST, StepKind.DRAFT_NEXT
DRAFT_PREFILL = StepKind.DRAFT_PREFILL


def make_table(
    seqs: int = 8,
    tokens: int = 64,
    blocks: int = 4,
    *,
    decode: bool = True,
    prefill: bool = True,
    drafts: DraftShapes | None = None,
) -> BucketTable:
    return BucketTable(seqs, tokens, blocks, pads_decode=decode, pads_prefill=prefill, drafts=drafts)


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


# ---- speculation ---------------------------------------------------------------------------------------------------

LOOKUP = DraftShapes(3)
FIRST_LAYERS = DraftShapes(3, first_width=1)
OWN_MODEL = DraftShapes(3, first_width=4, prefills=True)
SPECULATION = [None, LOOKUP, FIRST_LAYERS, OWN_MODEL, DraftShapes(1, 1), DraftShapes(1, 2, True), DraftShapes(8)]


@pytest.mark.parametrize(
    ("seqs", "tokens", "blocks", "decodes", "prefills"),
    [
        (1, 1, 1, 1, 1),
        (8, 64, 4, 4 * 3, 4 * 3),
        (8, 2048, 16, 4 * 5, 4 * 8),  # a maximum length of 2048 in blocks of 128
        (64, 2048, 32, 7 * 6, 5 * 8 + 7 + 6),  # 32 sequences have at least 32 tokens
        (33, 48, 2, 7 * 2, 5 * 3 + 2 + 1),
    ],
)
def test_without_speculation_there_are_no_more_shapes(
    seqs: int, tokens: int, blocks: int, decodes: int, prefills: int
) -> None:
    plain = make_table(seqs, tokens, blocks).all()
    assert Counter(b.kind for b in plain) == {DECODE: decodes, PREFILL: prefills}
    for drafts in SPECULATION:
        listed = make_table(seqs, tokens, blocks, drafts=drafts).all()
        assert [b for b in listed if b.kind in (DECODE, PREFILL)] == list(plain)
    assert make_table(seqs, tokens, blocks, drafts=None).all() == plain


@pytest.mark.parametrize(
    ("drafts", "kinds"),
    [
        (None, set()),
        (LOOKUP, {VERIFY}),
        (FIRST_LAYERS, {VERIFY, FIRST, NEXT}),
        (OWN_MODEL, {VERIFY, FIRST, NEXT, DRAFT_PREFILL}),
        (DraftShapes(1, first_width=1), {VERIFY, FIRST}),  # one token needs no next pass
        (DraftShapes(1, first_width=2, prefills=True), {VERIFY, FIRST, DRAFT_PREFILL}),
    ],
)
def test_each_way_of_drafting_lists_its_own_kinds_and_no_more(drafts: DraftShapes | None, kinds: set[StepKind]) -> None:
    table = make_table(8, 2048, 16, drafts=drafts)
    counts = Counter(b.kind for b in table.all())
    assert set(counts) == {DECODE, PREFILL} | kinds
    for kind in kinds:
        assert counts[kind] == (32 if kind is DRAFT_PREFILL else 20)


@pytest.mark.parametrize("k", [1, 2, 3, 8, 64])
@pytest.mark.parametrize(
    ("seqs", "seeds"), [(1, (1,)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (33, (1, 2, 4, 8, 16, 32, 33))]
)
def test_a_seed_batch_of_b_gives_b_times_1_plus_k_rows(k: int, seqs: int, seeds: tuple[int, ...]) -> None:
    table = make_table(seqs, 64, 3, drafts=DraftShapes(k, first_width=1 + k, prefills=True))
    for kind, width in ((VERIFY, 1 + k), (FIRST, 1 + k), (NEXT, 1), (DECODE, 1)):
        listed = [b for b in table.all() if b.kind is kind]
        if (kind, k) == (NEXT, 1):
            assert not listed
            continue
        assert {b.width for b in listed} == {width}
        assert sorted({b.num_tokens for b in listed}) == [b * width for b in seeds]
        assert sorted({b.num_blocks for b in listed}) == [1, 2, 3], "no wider than the longest sequence"


@pytest.mark.parametrize(
    ("kind", "sizes", "bucket"),
    [
        (VERIFY, (5, 5, 3), (8, 4, 4)),  # the width is 1 + k however few drafts there are
        (VERIFY, (5, 20, 3), (8, 4, 4)),
        (VERIFY, (12, 13, 5), (12, 4, 5)),
        (VERIFY, (1, 4, 9), (1, 4, 9)),  # wider than the hints said: as it is
        (FIRST, (3, 3, 2), (4, 4, 2)),
        (FIRST, (3, 12, 2), (4, 4, 2)),
        (NEXT, (3, 1, 2), (4, 1, 2)),  # all but one of three have been drafted for
        (NEXT, (2, 0, 1), (2, 1, 1)),
        (DRAFT_PREFILL, (3, 7, 2), (4, 16, 5)),
        (DRAFT_PREFILL, (1, 100, 2), (1, 100, 5)),
    ],
)
def test_a_step_with_drafts_is_padded_to_its_bucket(
    kind: StepKind, sizes: tuple[int, int, int], bucket: tuple[int, int, int]
) -> None:
    assert make_table(12, 100, 5, drafts=OWN_MODEL).pad(kind, *sizes) == Bucket(kind, *bucket)


def test_ragged_rows_without_a_shape_of_their_own_are_packed() -> None:
    table = make_table(12, 100, 5, decode=False, drafts=OWN_MODEL)
    assert table.pad(VERIFY, 3, 7, 2) == table.pad(PREFILL, 3, 7, 2) == Bucket(PREFILL, 4, 16, 5)
    assert table.pad(FIRST, 3, 7, 2) == table.pad(DRAFT_PREFILL, 3, 7, 2) == Bucket(DRAFT_PREFILL, 4, 16, 5)
    table = make_table(12, 100, 5, decode=False, prefill=False, drafts=OWN_MODEL)
    assert table.pad(VERIFY, 3, 7, 2) == Bucket(PREFILL, 3, 7, 2)
    assert table.pad(FIRST, 3, 7, 2) == Bucket(DRAFT_PREFILL, 3, 7, 2)
    assert table.pad(NEXT, 3, 2, 2) == Bucket(NEXT, 3, 1, 2)
    assert table.all() == ()


def a_step(rng: random.Random, table: BucketTable) -> tuple[StepKind, int, int]:
    """Any step that an engine with these limits may take: its kind, sequences and tokens."""
    kinds = [DECODE, PREFILL]
    drafts = table.drafts
    if drafts is not None:
        kinds.append(VERIFY)
        kinds += [FIRST] if drafts.first_width else []
        kinds += [NEXT] if drafts.first_width and drafts.num_tokens > 1 else []
        kinds += [DRAFT_PREFILL] if drafts.prefills else []
    kind, seqs = rng.choice(kinds), rng.randint(1, table.max_num_seqs)
    budget = table.max_num_batched_tokens
    if kind is DECODE:
        return kind, seqs, seqs
    if kind is NEXT:  # some may have been given all theirs
        return kind, seqs, rng.randint(0, seqs)
    if kind is FIRST:  # what a step has verified, or what was passed over since: not held by the budget
        return kind, seqs, rng.randint(seqs, seqs * (drafts.first_width if drafts else 1))
    most = budget if kind.is_prefill else min(budget, seqs * (1 + (drafts.num_tokens if drafts else 0)))
    return kind, seqs, rng.choice((seqs, most, rng.randint(seqs, most)))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_step_its_shape_is_listed_and_holds_it(seed: int) -> None:
    rng = random.Random(seed)
    seqs = rng.randint(1, 40)
    table = make_table(
        seqs,
        rng.randint(seqs, rng.choice((seqs, 100, 300)) + seqs),
        rng.randint(1, 20),
        decode=rng.random() < 0.6,
        prefill=rng.random() < 0.6,
        drafts=rng.choice(SPECULATION),
    )
    listed = table.all()
    assert len(set(listed)) == len(listed)
    assert [b.num_tokens for b in listed] == sorted((b.num_tokens for b in listed), reverse=True)
    reached = set()
    for _ in range(3000):
        kind, num_seqs, num_tokens = a_step(rng, table)
        num_blocks = rng.randint(1, table.max_blocks_per_seq)
        bucket = table.pad(kind, num_seqs, num_tokens, num_blocks)
        reached.add(bucket)
        assert bucket.num_seqs >= num_seqs
        assert bucket.num_tokens >= num_tokens
        assert bucket.num_blocks >= num_blocks
        assert bucket.kind.is_draft == kind.is_draft
        if table.pads(bucket.kind):
            assert bucket in listed
            assert table.pad(bucket.kind, bucket.num_seqs, bucket.num_tokens, bucket.num_blocks) == bucket
        else:
            assert (bucket.num_seqs, bucket.num_blocks) == (num_seqs, num_blocks)
            assert bucket.num_tokens == (num_seqs if kind.is_decode else num_tokens)
    if table.pads_decode:  # none of these is listed for nothing
        ragged = {b for b in listed if not b.kind.is_prefill}
        assert len(ragged - reached) <= 0.2 * len(ragged)
