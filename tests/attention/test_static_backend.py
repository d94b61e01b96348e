"""The backend without data-dependent shapes against the reference, over ragged batches of every make."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from cb_engine.attention import static_backend, torch_backend
from cb_engine.attention.backend import AttentionBackend, AttentionMetadata, AttentionParams, KVCache, KVSpec
from cb_engine.attention.selection import select_backend
from cb_engine.attention.static_backend import StaticBackend
from cb_engine.attention.torch_backend import TorchBackend
from cb_engine.runner.static_device import FakeStaticDevice

BLOCK = 4
HEADS, KV_HEADS, DIM = 6, 2, 8
Span = tuple[int, int]  # tokens in the cache before, tokens of this step


@dataclass
class Step:
    """One step's tensors, and the cache as it is before."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: KVCache
    metadata: AttentionMetadata
    num_rows: int  # without padding

    def run(self, backend: AttentionBackend, params: AttentionParams) -> torch.Tensor:
        cache = KVCache(self.cache.k.clone(), self.cache.v.clone())
        return backend.run(self.query, self.key, self.value, cache, backend.plan(self.metadata), params)


def make_step(
    spans: Sequence[Span],
    *,
    num_rows: int = 0,
    num_seqs: int = 0,
    width: int = 0,
    window: int | None = None,
    decode: bool = False,
    seed: int = 0,
) -> Step:
    """Packs `spans`; `num_rows`, `num_seqs` and `width` pad what they exceed. What nobody has written is NaN, and so
    are the query, key and value of a row of padding."""
    generator = torch.Generator().manual_seed(seed)
    lens = [past + new for past, new in spans]
    total, batch = sum(new for _, new in spans), len(spans)
    num_rows, num_seqs = max(num_rows, total), max(num_seqs, batch)
    needed = [-(-n // BLOCK) for n in lens]
    table = torch.zeros(num_seqs, max(width, *needed, 1), dtype=torch.int32)
    ids = torch.randperm(sum(needed) + 2, generator=generator).add(1).tolist()
    k, v = (torch.full((len(ids) + 1, BLOCK, KV_HEADS, DIM), math.nan) for _ in range(2))
    slots = torch.zeros(num_rows, dtype=torch.int64)
    row = 0
    for i, (past, new) in enumerate(spans):
        # Blocks that no query's window reaches are given back: the table has the null block there.
        first = 0 if window is None else max(0, past - window + 1) // BLOCK
        for block in range(first, needed[i]):
            table[i, block] = ids.pop()
        for position in range(first * BLOCK, past + new):
            slot = int(table[i, position // BLOCK]) * BLOCK + position % BLOCK
            if position < past:
                k.flatten(0, 1)[slot].normal_(generator=generator)
                v.flatten(0, 1)[slot].normal_(generator=generator)
            else:
                slots[row] = slot
                row += 1
    bounds = torch.full((num_seqs + 1,), total, dtype=torch.int32)
    bounds[: batch + 1] = torch.tensor([0, *(new for _, new in spans)]).cumsum(0)
    if decode:
        bounds = torch.arange(num_seqs + 1, dtype=torch.int32)
    seq_lens = torch.zeros(num_seqs, dtype=torch.int32)
    seq_lens[:batch] = torch.tensor(lens)
    metadata = AttentionMetadata(
        slot_mapping=slots,
        block_table=table,
        query_start_loc=bounds,
        seq_lens=seq_lens,
        max_query_len=1 if decode else max(2, *(new for _, new in spans)),
        max_seq_len=max(lens),
    )
    query, key, value = (torch.randn(num_rows, n, DIM, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))
    for tensor in (query, key, value):
        tensor[total:] = math.nan
    return Step(query, key, value, KVCache(k, v), metadata, total)


def check(step: Step, params: AttentionParams) -> None:
    found, expected = step.run(StaticBackend(), params), step.run(TorchBackend(), params)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert found.is_contiguous()
    assert expected[: step.num_rows].abs().amax(-1).min() > 0  # the reference has computed every row
    assert not found[step.num_rows :].any()


PARAMS = [
    AttentionParams(0.5),
    AttentionParams(0.5, window=1),
    AttentionParams(0.5, window=5, softcap=1.5),
    AttentionParams(0.5, window=6, sinks=torch.linspace(-1, 1, HEADS)),
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"window {p.window}, softcap {p.softcap}")
@pytest.mark.parametrize("seed", range(12))
def test_random_ragged_batches(seed: int, params: AttentionParams) -> None:
    rng = random.Random(seed)
    spans = [(rng.randint(0, 14), rng.choice([1, 1, 2, 3, 9])) for _ in range(rng.randint(1, 7))]
    total = sum(new for _, new in spans)
    step = make_step(
        spans,
        num_rows=total + rng.choice([0, 1, 5, 30]),
        num_seqs=len(spans) + rng.choice([0, 1, 4]),
        width=rng.choice([0, 9]),
        window=params.window,
        seed=seed,
    )
    check(step, params)


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"window {p.window}, softcap {p.softcap}")
def test_every_residue_of_the_block_size(params: AttentionParams) -> None:
    """Four tokens, as a verify step has them, after every number of tokens; so one of them begins a block."""
    spans = [(past, 4) for past in range(3 * BLOCK)]
    check(make_step(spans, num_rows=16 * 4, num_seqs=16, window=params.window), params)


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"window {p.window}, softcap {p.softcap}")
def test_decode(params: AttentionParams) -> None:
    spans = [(past, 1) for past in range(13)]
    check(make_step(spans, num_rows=16, num_seqs=16, width=6, window=params.window, decode=True), params)


def test_decode_rows_without_a_token_lie_anywhere() -> None:
    step = make_step([(3, 1), (6, 1), (2, 1)], decode=True)
    step.metadata.seq_lens[1] = 0
    step.metadata.slot_mapping[1] = 0
    out = step.run(StaticBackend(), AttentionParams(0.5))
    torch.testing.assert_close(out, step.run(TorchBackend(), AttentionParams(0.5)), atol=2e-5, rtol=1e-5)
    assert [bool(row.any()) for row in out] == [True, False, True]


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 40)],  # one request, one tile
        [(0, 33), (7, 1), (2, 1), (0, 1)],  # the tiles of one request outnumber the requests
        [(3, 1), (2, 1), (0, 33)],
        [(5, 2), (5, 2), (5, 2)],  # tiles without a gap
        [(5, 0), (1, 3), (6, 0), (0, 2), (4, 0)],  # requests that compute nothing
    ],
    ids=str,
)
@pytest.mark.parametrize("padding", [0, 7])
def test_tiles(spans: list[Span], padding: int) -> None:
    total = sum(new for _, new in spans)
    check(make_step(spans, num_rows=total + padding, num_seqs=len(spans) + padding % 3), PARAMS[2])


def test_a_request_that_computes_nan_harms_no_other_row() -> None:
    step = make_step([(5, 2), (3, 2), (0, 1)], num_rows=9)
    expected = step.run(StaticBackend(), PARAMS[0])
    for bad, request in ((slice(2, 4), 1), (slice(4, 5), 2)):  # one in the middle, one beside the padding
        value = step.value.clone()
        step.value[bad] = math.nan
        out = step.run(StaticBackend(), PARAMS[0])
        assert out[bad].isnan().all(), request
        out[bad] = expected[bad]
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        step.value = value


def test_fewer_rows_than_padded_requests() -> None:
    check(make_step([(4, 1), (2, 1)], num_seqs=8), PARAMS[0])


def test_a_step_of_padding_alone() -> None:
    """As warm-up has it."""
    step = make_step([(0, 0)], num_rows=16, num_seqs=4, width=3)
    assert not step.run(StaticBackend(), PARAMS[3]).any()


def test_what_is_computed_at_once_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step([(3, 30), (20, 5), (9, 1)], num_rows=40)
    whole = step.run(StaticBackend(), PARAMS[0])
    gathered: list[tuple[int, int]] = []
    attend = torch_backend.attend_blocks

    def spy(q: torch.Tensor, c: KVCache, table: torch.Tensor, *args: Any) -> torch.Tensor:
        gathered.append((table.numel() * BLOCK, q.shape[1]))
        return attend(q, c, table, *args)

    monkeypatch.setattr(static_backend, "attend_blocks", spy)
    for name, limit in (("_GATHERED_TOKENS", 80), ("_SCORED_PAIRS", 200), ("_TILE_ROWS", 3)):
        monkeypatch.setattr(static_backend, name, limit)
        gathered.clear()
        torch.testing.assert_close(step.run(StaticBackend(), PARAMS[0]), whole)
        assert len(gathered) > 1
        assert max(tokens for tokens, _ in gathered) <= 80
    assert {size for _, size in gathered} == {3}


def run_on(device: FakeStaticDevice, step: Step, params: AttentionParams) -> torch.Tensor:
    """`Step.run` as one call of a device."""
    backend, cache = StaticBackend(), KVCache(step.cache.k.clone(), step.cache.v.clone())

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        return backend.run(query, key, value, cache, backend.plan(metadata), params)

    return device.to_host(device.run("attend", attend, step.query, step.key, step.value, step.metadata))


@pytest.mark.parametrize("decode", [False, True])
def test_one_graph_serves_every_step_of_a_bucket(decode: bool) -> None:
    device = FakeStaticDevice()
    rng = random.Random(0)
    for seed in range(6):
        spans = [(rng.randint(0, 14), 1 if decode else rng.randint(1, 4)) for _ in range(rng.randint(1, 8))]
        step = make_step(spans, num_rows=8 if decode else 32, num_seqs=8, width=6, window=5, decode=decode, seed=seed)
        expected = step.run(TorchBackend(), PARAMS[2])
        # The host's sizes are the bucket's, as for every static device.
        step.metadata = replace(step.metadata, max_query_len=1 if decode else 4, max_seq_len=6 * BLOCK)
        with torch.inference_mode():
            torch.testing.assert_close(run_on(device, step, PARAMS[2]), expected, atol=2e-5, rtol=1e-5)
    assert device.num_compiles == 1


def test_bf16_and_a_strided_query() -> None:
    step = make_step([(5, 3), (0, 6)], num_rows=12, num_seqs=3)
    step.cache = KVCache(step.cache.k.bfloat16(), step.cache.v.bfloat16())
    step.key, step.value = step.key.bfloat16(), step.value.bfloat16()
    step.query = step.query.bfloat16().transpose(0, 1).contiguous().transpose(0, 1)
    out = step.run(StaticBackend(), PARAMS[0])
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, step.run(TorchBackend(), PARAMS[0]), atol=2e-2, rtol=2e-2)


def test_it_is_selected_by_name_and_takes_its_own_metadata_only() -> None:
    backend = select_backend("static", [torch.device("cpu")], [torch.float32])
    assert isinstance(backend, StaticBackend)
    step = make_step([(0, 2)])
    with pytest.raises(TypeError, match="another backend"):
        backend.run(step.query, step.key, step.value, step.cache, TorchBackend().plan(step.metadata), PARAMS[0])


def test_the_cache_is_laid_out_as_that_of_the_reference() -> None:
    spec = KVSpec(KV_HEADS, DIM, torch.float32, BLOCK)
    step = make_step([(5, 3), (0, 6)])
    caches = [KVCache(step.cache.k.clone(), step.cache.v.clone()) for _ in range(2)]
    for backend, cache in zip((StaticBackend(), TorchBackend()), caches, strict=True):
        assert backend.allocate(spec, 3, torch.device("cpu")).k.shape == (3, BLOCK, KV_HEADS, DIM)
        backend.run(step.query, step.key, step.value, cache, backend.plan(step.metadata), PARAMS[0])
    torch.testing.assert_close(caches[0].k, caches[1].k, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(caches[0].v, caches[1].v, equal_nan=True, rtol=0, atol=0)
