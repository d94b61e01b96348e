"""`NativeBackend`: the C++ kernel for CPUs behind the `AttentionBackend` interface.

Owns: the cache layout that the kernel reads, and the memory behind it. Does not know: models, requests, schedulers.
"""

from __future__ import annotations

import ctypes
import math
import sys

import torch

from cb_engine.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    KVCache,
    KVSpec,
    NativeInputs,
    NativeParams,
)
from cb_engine.native import build

_LANES = 16  # kLanes of kernel_api.h
_HUGE_PAGE = 2 * 1024 * 1024
_MADV_HUGEPAGE = 14
_SMALL_PAGE = 4096
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, without their whole parts, fill the range from 0 to 1 evenly


class NativeBackend(AttentionBackend):
    """Paged attention on the CPU. float32, bfloat16 and float16; any head size, block size and grouping of heads.

    A row's result does not depend on the batch, the chunk or the number of threads it was computed with.
    """

    name = "native"
    preferred_block_size = 32

    def __init__(self) -> None:
        if not self.is_available():
            raise RuntimeError(
                "the native attention kernel could not be built; see the warning, or use another backend"
            )
        self._attention = torch.ops.cb_engine.paged_attention.default
        self._num_tensors = 0  # allocated so far

    @staticmethod
    def is_available() -> bool:
        """Whether the kernel is built or could be built now; warns once with the reason if not."""
        return build.load()

    def allocate(self, spec: KVSpec, num_blocks: int, device: torch.device) -> KVCache:
        """Allocates in the layouts of kernel_api.h: K by groups of 16 tokens, V by pairs of tokens in bfloat16."""
        if device.type != "cpu":
            raise ValueError(f"the native backend runs on the CPU, not on {device}")
        pair = 2 if spec.dtype == torch.bfloat16 else 1
        wide = _LANES if spec.block_size % _LANES == 0 else spec.block_size
        heads = (num_blocks, spec.num_kv_heads)
        k_shape = (*heads, spec.block_size // wide, -(-spec.head_dim // pair), wide, pair)
        v_shape = (*heads, -(-spec.block_size // pair), -(-spec.head_dim // _LANES) * _LANES, pair)
        return KVCache(k=self._allocate(k_shape, spec.dtype), v=self._allocate(v_shape, spec.dtype))

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._num_tensors += 1
        return _on_huge_pages(shape, dtype, self._num_tensors * _GOLDEN % 1)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        output: torch.Tensor = self._attention(
            query,
            key,
            value,
            *self.native_inputs(cache, metadata),
            *NativeParams.of(params),
        )
        return output

    def native_inputs(self, cache: KVCache, metadata: AttentionMetadata) -> NativeInputs:
        """See `AttentionBackend.native_inputs`."""
        return NativeInputs(
            k_cache=cache.k,
            v_cache=cache.v,
            slot_mapping=metadata.slot_mapping,
            block_table=metadata.block_table,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
        )


def _on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype, start: float) -> torch.Tensor:
    """Memory on huge pages where the system has them: blocks lie scattered, and small pages cost a look-up each.

    It is not written to here, so that a block takes memory only once it is used. The system fills a huge page with
    zeros then, which takes it up to some milliseconds; if all layers came to the end of a page with the same block,
    one step would wait for all of them.

    Args:
        start: where in a huge page the tensor begins, from 0 up to 1; another place for each layer.
    """
    count = math.prod(shape)
    if sys.platform != "linux" or count * dtype.itemsize < 2 * _HUGE_PAGE:
        return torch.empty(shape, dtype=dtype)
    raw = torch.empty(count + 2 * _HUGE_PAGE // dtype.itemsize, dtype=dtype)  # not touched, so its pages do not exist
    aligned = -raw.data_ptr() % _HUGE_PAGE
    skip = (aligned + int(start * _HUGE_PAGE) // _SMALL_PAGE * _SMALL_PAGE) // dtype.itemsize
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    advise(raw.data_ptr() + aligned, count * dtype.itemsize + _HUGE_PAGE, _MADV_HUGEPAGE)  # a refusal changes nothing
    return raw[skip : skip + count].view(shape)
