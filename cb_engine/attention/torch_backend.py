"""Paged attention in plain PyTorch, for every device torch runs on. The reference that other backends must match.

Owns the cache layout [num_blocks, block_size, num_kv_heads, head_dim]. Decode rows go through one batched product
over their blocks; a prompt chunk gathers the blocks of its own request only, never those of its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cb_engine.attention.backend import AttentionBackend, AttentionMetadata, AttentionParams, KVCache, KVSpec

_GATHERED_TOKENS = 1 << 17  # keys and values that a decode step gathers at once: bounds its temporary memory


@dataclass(frozen=True)
class TorchMetadata(AttentionMetadata):
    """Adds the host's view of the rows: `rows[i]` is (query start, query length, tokens in the cache)."""

    rows: tuple[tuple[int, int, int], ...] = ()
    num_decodes: int = 0  # leading rows with one query token (padding rows after them counted in)


class TorchBackend(AttentionBackend):
    """See the module docstring."""

    name = "torch"
    preferred_block_size = 32

    def allocate(self, spec: KVSpec, num_blocks: int, device: torch.device) -> KVCache:
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return KVCache(*(torch.empty(shape, dtype=spec.dtype, device=device) for _ in range(2)))

    def plan(self, metadata: AttentionMetadata) -> TorchMetadata:
        rows: tuple[tuple[int, int, int], ...] = ()
        num_decodes = metadata.seq_lens.numel()
        if not metadata.is_decode:
            starts, lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
            rows = tuple((starts[i], starts[i + 1] - starts[i], n) for i, n in enumerate(lens))
            num_decodes = next((i for i, row in enumerate(rows) if row[1] != 1), len(rows))
        return TorchMetadata(**vars(metadata), rows=rows, num_decodes=num_decodes)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        if not isinstance(metadata, TorchMetadata):
            raise TypeError("metadata was planned by another backend")
        cache.k.flatten(0, 1).index_copy_(0, metadata.slot_mapping, key)
        cache.v.flatten(0, 1).index_copy_(0, metadata.slot_mapping, value)
        num_decodes = metadata.num_decodes
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        # A padded table is as wide as the longest sequence allowed; only its used part is read, some rows at a time.
        width = max(1, -(-metadata.max_seq_len // cache.k.shape[1]))
        at_once = max(1, _GATHERED_TOKENS // (width * cache.k.shape[1]))
        for start in range(0, num_decodes, at_once):
            rows = slice(start, min(start + at_once, num_decodes))
            positions = metadata.seq_lens[rows].unsqueeze(1).to(torch.int64) - 1
            table = metadata.block_table[rows, :width]
            q = query[rows].unsqueeze(1)
            out[rows] = attend_blocks(q, cache, table, positions, params).squeeze(1)
        for i in range(num_decodes, len(metadata.rows)):
            start, length, total = metadata.rows[i]
            if length == 0 or total == 0:
                continue
            num_blocks = -(-total // cache.k.shape[1])
            positions = torch.arange(total - length, total, device=query.device).unsqueeze(0)
            q = query[start : start + length].unsqueeze(0)
            table = metadata.block_table[i : i + 1, :num_blocks]
            out[start : start + length] = attend_blocks(q, cache, table, positions, params)[0]
        return out


def attend_blocks(
    query: torch.Tensor,
    cache: KVCache,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    params: AttentionParams,
) -> torch.Tensor:
    """Attention of [B, Q, H, D] queries at `positions` [B, Q] over the blocks of `block_table` [B, W].

    A query at a negative position is padding and returns zeros.
    """
    batch, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = cache.k.shape[2]
    groups = num_heads // num_kv_heads
    length = block_table.shape[1] * cache.k.shape[1]
    ids = block_table.flatten().to(torch.int64)
    k = cache.k.index_select(0, ids).view(batch, length, num_kv_heads, head_dim)
    v = cache.v.index_select(0, ids).view(batch, length, num_kv_heads, head_dim)

    slots = torch.arange(length, device=query.device)
    visible = slots <= positions.unsqueeze(-1)  # [B, Q, L]
    if params.window is not None:
        visible &= slots > positions.unsqueeze(-1) - params.window
    # What no query sees (behind the sequence's end, or in blocks that a window has given back) belongs to nobody and
    # may be NaN: 0 * NaN would leak through the product.
    seen = visible.any(dim=1)
    v = v.masked_fill(~seen[:, :, None, None], 0)

    # [B, Hkv, G * Q, D]: the query heads of a KV head side by side, so that keys are read once for all of them.
    q = query.view(batch, num_queries, num_kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, num_kv_heads, groups * num_queries, head_dim)
    scores = torch.matmul(q, k.permute(0, 2, 3, 1)).float() * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores.view(batch, num_kv_heads, groups, num_queries, length)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if params.sinks is not None:
        extra = params.sinks.float().view(1, num_kv_heads, groups, 1, 1).expand(batch, -1, -1, num_queries, 1)
        weights = F.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]
    else:
        weights = F.softmax(scores, dim=-1)
    weights = weights.masked_fill(~visible.any(-1)[:, None, None, :, None], 0)  # padding: all masked, NaN otherwise
    out = torch.matmul(weights.to(v.dtype).flatten(2, 3), v.permute(0, 2, 1, 3))
    out = out.view(batch, num_kv_heads, groups, num_queries, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, num_queries, num_heads, head_dim)
