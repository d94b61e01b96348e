"""The contract between the model's attention layers and a device's kernels.

Owns: the nouns `KVSpec`, `KVCache`, `AttentionMetadata` and the `AttentionBackend` interface.
Does not know: models, requests, schedulers. A backend sees packed tensors and block tables only.

A step packs the tokens of all its requests in one row; request `i` owns the query rows
`query_start_loc[i] : query_start_loc[i + 1]`, and they are the last ones of its `seq_lens[i]` tokens:

    request i      |<------------- seq_lens[i] ------------->|
    tokens         | already in the cache  |  this step      |
                   0                       ^                 ^
                   seq_lens[i] - query_len[i]        seq_lens[i]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class KVSpec:
    """Shape of one layer's share of the KV cache. Layers with equal specs can share a block table."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int  # tokens per block

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block of one layer takes, keys and values together."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values. The order of the axes belongs to the backend that allocated them.

    The first axis is always the block, so that a block is copied with `k[dst] = k[src]`.
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """One step, as every layer of one KV-cache group sees it. Completed by `AttentionBackend.plan`, read by `run`.

    Shapes: T packed query tokens (padding rows included), B requests (padding rows included), W blocks per row.
    """

    slot_mapping: torch.Tensor  # [T] int64: block_id * block_size + offset where each token's K and V are written
    block_table: torch.Tensor  # [B, W] int32: block ids in order; unused entries are the null block 0
    query_start_loc: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32: tokens in the cache once this step's are written; 0 for a padding row
    max_query_len: int  # host copy of the largest query length
    max_seq_len: int  # host copy of the largest entry of seq_lens

    @property
    def is_decode(self) -> bool:
        """Whether every request has exactly one query token, so that row i of q belongs to request i."""
        return self.max_query_len == 1


@dataclass(frozen=True)
class AttentionParams:
    """What a layer's attention is, beside its tensors.

    Attributes:
        scale: factor on the scores.
        window: a query at position p sees the keys at positions in (p - window, p]; None sees all up to p.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: [num_heads] extra logits that take part in the softmax and contribute no value (GPT-OSS).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class NativeInputs(NamedTuple):
    """One layer's cache and the step's metadata, as the operators of `cb_engine/native` take them."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


class NativeParams(NamedTuple):
    """`AttentionParams` likewise: 0 where there is no window and no soft-cap."""

    scale: float
    window: int
    softcap: float
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, params: AttentionParams) -> NativeParams:
        """The same in other words."""
        return cls(params.scale, params.window or 0, params.softcap or 0.0, params.sinks)


class AttentionBackend(ABC):
    """Kernels of one device. `plan()` runs once a step and group, `run()` once a layer."""

    name: str
    preferred_block_size: int  # tokens per block that the kernels like best

    @abstractmethod
    def allocate(self, spec: KVSpec, num_blocks: int, device: torch.device) -> KVCache:
        """Allocates keys and values for `num_blocks` blocks (block 0, the null block, included).

        Their content is undefined: `run` reads no slot that it has not written.
        """

    def plan(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Adds whatever all layers of a group share; nothing, where the kernels read the tensors as they are."""
        return metadata

    @abstractmethod
    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Writes the step's keys and values to the cache, then attends to everything the cache holds.

        Args:
            query: [T, num_heads, head_dim], any strides whose last axis is contiguous.
            key, value: [T, num_kv_heads, head_dim], likewise.
            cache: the layer's cache, from `allocate`; written in place.
            metadata: of this step, from `plan`.
            params: of this layer.

        Returns:
            [T, num_heads, head_dim], contiguous, in the query's dtype. Rows of padding hold finite values.
        """

    def native_inputs(self, cache: KVCache, metadata: AttentionMetadata) -> NativeInputs | None:
        """For native operators that attend by themselves; None if the cache is not laid out for them."""
        return None

    def copy_blocks(self, cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies whole blocks `src[i] -> dst[i]` (both [N] int64), for copy-on-write forks."""
        cache.k.index_copy_(0, dst, cache.k.index_select(0, src))
        cache.v.index_copy_(0, dst, cache.v.index_select(0, src))
