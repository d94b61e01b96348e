"""The reference backend against attention written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cb_engine.attention import torch_backend
from cb_engine.attention.backend import AttentionMetadata, AttentionParams, KVCache, KVSpec
from cb_engine.attention.torch_backend import TorchBackend

BLOCK = 4


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    window: int | None,
    softcap: float | None,
    sink: float | None,
) -> torch.Tensor:
    """One head, one query: [D] over keys [L, D]."""
    first = 0 if window is None else max(0, position - window + 1)
    scores = [float(q @ k[i]) * 0.5 for i in range(first, position + 1)]
    if softcap is not None:
        scores = [softcap * math.tanh(s / softcap) for s in scores]
    weights = [math.exp(s) for s in scores]
    total = sum(weights) + (math.exp(sink) if sink is not None else 0.0)
    return sum((w / total * v[first + i] for i, w in enumerate(weights)), torch.zeros_like(q))


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (1.5, True)])
@pytest.mark.parametrize("spans", [[(0, 1)], [(5, 1), (3, 1), (0, 1)], [(6, 1), (2, 5), (0, 9), (4, 4)]])
def test_decode_prefill_and_mixed(
    window: int | None, softcap: float | None, sinks: bool, spans: list[tuple[int, int]]
) -> None:
    """`spans` are (tokens in the cache before, tokens of this step) per request; the pool starts full of NaN."""
    heads, kv_heads, dim = 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    backend = TorchBackend()
    cache = backend.allocate(KVSpec(kv_heads, dim, torch.float32, BLOCK), 32, torch.device("cpu"))
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)
    lens = [past + new for past, new in spans]
    keys = [torch.randn(n, kv_heads, dim, generator=generator) for n in lens]
    values = [torch.randn(n, kv_heads, dim, generator=generator) for n in lens]
    table = torch.zeros(len(spans), 4, dtype=torch.int32)
    ids = iter(torch.randperm(31, generator=generator).add(1).tolist())
    for i, n in enumerate(lens):
        # Blocks that no query's window reaches are given back: the table has the null block there.
        first = 0 if window is None else max(0, spans[i][0] - window + 1) // BLOCK
        for block in range(first, -(-n // BLOCK)):
            table[i, block] = next(ids)

    def slot(i: int, position: int) -> int:
        return int(table[i, position // BLOCK]) * BLOCK + position % BLOCK

    for i, (past, _) in enumerate(spans):
        for position in range(past):
            if table[i, position // BLOCK] == 0:
                continue
            cache.k.flatten(0, 1)[slot(i, position)] = keys[i][position]
            cache.v.flatten(0, 1)[slot(i, position)] = values[i][position]
    slots = [slot(i, p) for i, (past, new) in enumerate(spans) for p in range(past, past + new)]
    metadata = backend.plan(
        AttentionMetadata(
            slot_mapping=torch.tensor(slots),
            block_table=table,
            query_start_loc=torch.tensor([0, *torch.tensor([new for _, new in spans]).cumsum(0).tolist()]),
            seq_lens=torch.tensor(lens),
            max_query_len=max(new for _, new in spans),
            max_seq_len=max(lens),
        )
    )
    query = torch.randn(len(slots), heads, dim, generator=generator)
    sink = torch.randn(heads, generator=generator) if sinks else None
    k_new = torch.cat([keys[i][past:] for i, (past, _) in enumerate(spans)])
    v_new = torch.cat([values[i][past:] for i, (past, _) in enumerate(spans)])
    out = backend.run(query, k_new, v_new, cache, metadata, AttentionParams(0.5, window, softcap, sink))
    row = 0
    for i, (past, new) in enumerate(spans):
        for position in range(past, past + new):
            for head in range(heads):
                kv = head // (heads // kv_heads)
                own_sink = None if sink is None else float(sink[head])
                answer = by_hand(
                    query[row, head], keys[i][:, kv], values[i][:, kv], position, window, softcap, own_sink
                )
                torch.testing.assert_close(out[row, head], answer, atol=1e-5, rtol=1e-5)
            row += 1


def test_a_wide_table_is_read_only_as_far_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in parts, if it is large: the answer does not depend on either."""
    backend = TorchBackend()
    cache = backend.allocate(KVSpec(1, 4, torch.float32, BLOCK), 12, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    cache.k.normal_(generator=generator)
    cache.v.normal_(generator=generator)
    gathered: list[int] = []
    attend = torch_backend.attend_blocks

    def spy(q: torch.Tensor, c: KVCache, table: torch.Tensor, *args: Any) -> torch.Tensor:
        gathered.append(table.numel())
        return attend(q, c, table, *args)

    monkeypatch.setattr(torch_backend, "attend_blocks", spy)
    outs = []
    q = torch.randn(3, 1, 4, generator=generator)
    for width, limit in ((2, 1 << 17), (500, 1 << 17), (500, 8)):
        monkeypatch.setattr(torch_backend, "_GATHERED_TOKENS", limit)
        table = torch.zeros(3, width, dtype=torch.int32)
        table[:, :2] = torch.tensor([[1, 2], [3, 4], [5, 6]])
        metadata = backend.plan(
            AttentionMetadata(
                slot_mapping=torch.tensor([9, 14, 25]),
                block_table=table,
                query_start_loc=torch.arange(4),
                seq_lens=torch.tensor([6, 3, 6]),
                max_query_len=1,
                max_seq_len=6,
            )
        )
        outs.append(backend.run(q, q, q, cache, metadata, AttentionParams(1.0)))
    assert gathered == [6, 6, 2, 2, 2]
    assert torch.equal(outs[0], outs[1])
    torch.testing.assert_close(outs[0], outs[2])


def test_padding_rows_are_finite_and_read_nothing() -> None:
    backend = TorchBackend()
    cache = backend.allocate(KVSpec(1, 4, torch.float32, BLOCK), 4, torch.device("cpu"))
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)
    metadata = backend.plan(
        AttentionMetadata(
            slot_mapping=torch.tensor([4, 0]),
            block_table=torch.tensor([[1], [0]], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 1, 2]),
            seq_lens=torch.tensor([1, 0]),
            max_query_len=1,
            max_seq_len=1,
        )
    )
    one = torch.ones(2, 1, 4)
    out = backend.run(one, one, one * 3, cache, metadata, AttentionParams(1.0))
    assert out.tolist() == [[[3.0] * 4], [[0.0] * 4]]
