"""Paged attention for devices with static shapes: every shape follows from those of the step's tensors.

Owns the arithmetic that lays ragged rows out in tiles. The cache layout is that of `TorchBackend`, and so is the
attention of a tile. The host reads no value, so all of it can be recorded in a graph and replayed.

T packed rows of B requests are cut into tiles of `size = ceil(T / B)` rows, each of one request: it gathers the keys of
its own request and no others. How many tiles a request needs depends on values, how many all of them need at most does
not. That is about 2 * B; a decode step has exactly one a request.

    rows      r0 r0 r0 r0 r0 | r1 | r2 r2 | padding          T = 9, B = 4, size = 3
    tiles    [r0 r0 r0] [r0 r0 .] [r1 . .] [r2 r2 .] [. . .]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cb_engine.attention.backend import AttentionBackend, AttentionMetadata, AttentionParams, KVCache, KVSpec
from cb_engine.attention.torch_backend import attend_blocks

_TILE_ROWS = 128  # at most; bounds the scores of one tile
# Keys that are gathered, and scores that are computed, at once: they bound a step's temporary memory.
_GATHERED_TOKENS = 1 << 17
_SCORED_PAIRS = 1 << 22


@dataclass(frozen=True)
class StaticMetadata(AttentionMetadata):
    """Adds the tiles, N of `size` rows each, the unused ones among them."""

    tile_rows: torch.Tensor  # [N, size] int64: the packed row of each of a tile's rows; any where there is none
    tile_positions: torch.Tensor  # [N, size] int64: its position in its request; negative where there is none
    tile_tables: torch.Tensor  # [N, W] int32
    row_places: torch.Tensor  # [T] int64: where a packed row lies in the flattened tiles
    is_padding: torch.Tensor  # [T] bool: rows of no request


class StaticBackend(AttentionBackend):
    """See the module docstring."""

    name = "static"
    preferred_block_size = 128  # as in Gaudi's own kernels: fewer, longer pieces to gather

    def allocate(self, spec: KVSpec, num_blocks: int, device: torch.device) -> KVCache:
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return KVCache(*(torch.empty(shape, dtype=spec.dtype, device=device) for _ in range(2)))

    def plan(self, metadata: AttentionMetadata) -> StaticMetadata:
        device = metadata.slot_mapping.device
        num_rows, num_requests = metadata.slot_mapping.numel(), metadata.seq_lens.numel()
        size = min(-(-num_rows // num_requests), _TILE_ROWS)
        num_tiles = (num_rows + num_requests * (size - 1)) // size

        bounds, seq_lens = metadata.query_start_loc.to(torch.int64), metadata.seq_lens.to(torch.int64)
        starts, ends = bounds[:-1], bounds[1:]
        tiles_each = (ends - starts + size - 1) // size
        tile_ends = tiles_each.cumsum(0)
        tile_starts = tile_ends - tiles_each

        tiles = torch.arange(num_tiles, device=device)
        owners = _owners(tiles, tile_ends)
        first_rows = starts[owners] + (tiles - tile_starts[owners]) * size
        rows = first_rows.unsqueeze(1) + torch.arange(size, device=device)
        # A tile behind the last request's begins behind its rows, so that `used` tells it apart as well.
        row_ends = ends[owners].unsqueeze(1)
        used = rows < row_ends
        positions = torch.where(used, seq_lens[owners].unsqueeze(1) - (row_ends - rows), -1)

        # Rows of padding lie where they would if the last request went on, so there is a place for them too.
        packed = torch.arange(num_rows, device=device)
        of_row = _owners(packed, ends)
        within = packed - starts[of_row]
        places = (tile_starts[of_row] + within // size) * size + within % size
        return StaticMetadata(
            **vars(metadata),
            tile_rows=rows.clamp(max=num_rows - 1),
            tile_positions=positions,
            tile_tables=metadata.block_table.index_select(0, owners),
            row_places=places,
            is_padding=packed >= ends[-1],
        )

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        if not isinstance(metadata, StaticMetadata):
            raise TypeError("metadata was planned by another backend")
        block_size = cache.k.shape[1]
        # Written through the cache itself: a graph does not see writes to a view of it.
        slots = (metadata.slot_mapping // block_size, metadata.slot_mapping % block_size)
        cache.k.index_put_(slots, key)
        cache.v.index_put_(slots, value)

        num_tiles, size = metadata.tile_rows.shape
        queries = query.index_select(0, metadata.tile_rows.flatten()).view(num_tiles, size, *query.shape[1:])
        length = metadata.tile_tables.shape[1] * block_size
        at_once = max(1, min(_GATHERED_TOKENS // length, _SCORED_PAIRS // (length * size)))
        parts = [slice(start, start + at_once) for start in range(0, num_tiles, at_once)]
        tables, positions = metadata.tile_tables, metadata.tile_positions
        outs = [attend_blocks(queries[part], cache, tables[part], positions[part], params) for part in parts]
        out = torch.cat(outs).flatten(0, 1).index_select(0, metadata.row_places)
        return out.masked_fill(metadata.is_padding[:, None, None], 0)


def _owners(items: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The index of the request that each item belongs to, given where the items of each request end; the last request
    for those behind all ends."""
    # `searchsorted` in words that every device has.
    return (ends <= items.unsqueeze(1)).sum(1).clamp(max=ends.numel() - 1)
