"""How much KV cache there is and which layers share a block table.

Owns the split of layers into groups and the sizing of their pools. Does not allocate: the ModelRunner does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cb_engine.attention.backend import KVSpec
from cb_engine.config import ResolvedConfig
from cb_engine.device import free_memory
from cb_engine.kv_cache.block_manager import KVGroup
from cb_engine.runner.probe import AttentionLayer


@dataclass(frozen=True)
class LayerGroup:
    """Layers that see the same tokens: all full-attention ones, or all with one window."""

    window: int | None
    layers: tuple[AttentionLayer, ...]


def group_layers(layers: Sequence[AttentionLayer]) -> tuple[LayerGroup, ...]:
    """Groups layers by window, full attention first."""
    windows = sorted({layer.window for layer in layers}, key=lambda w: (w is not None, w or 0))
    return tuple(LayerGroup(w, tuple(x for x in layers if x.window == w)) for w in windows)


def only(groups: Sequence[LayerGroup], *, drafters: bool) -> tuple[LayerGroup, ...]:
    """The same groups with the drafter's layers alone, or with the target's; some may be empty."""
    return tuple(LayerGroup(g.window, tuple(x for x in g.layers if x.is_drafters == drafters)) for g in groups)


def layer_spec(layer: AttentionLayer, block_size: int) -> KVSpec:
    """The shape of a layer's share of the cache."""
    return KVSpec(layer.num_kv_heads, layer.head_dim, layer.dtype, block_size)


def size_groups(groups: Sequence[LayerGroup], config: ResolvedConfig) -> tuple[KVGroup, ...]:
    """Decides the blocks of each group's pool; the null block is added on top.

    With `num_blocks` every group gets that many. Otherwise as many sequences of the largest size are provided for
    as the free memory of the tightest device allows, and never more than could be used at once.

    Raises:
        ValueError: not even one sequence block fits.
    """
    if config.num_blocks is not None:
        _check_memory(groups, config.num_blocks + 1, config.block_size)
        return tuple(KVGroup(g.window, config.num_blocks + 1) for g in groups)
    per_seq = [_blocks_per_seq(g.window, config) for g in groups]
    # Hints tell what is likely, not what is allowed: one sequence of the maximum length has to fit too.
    seqs = max(config.max_num_seqs, config.max_model_len / config.expected_model_len)
    for device in {layer.device for g in groups for layer in g.layers}:
        bytes_per_seq = sum(
            n * _bytes_per_block(g, device, config.block_size) for g, n in zip(groups, per_seq, strict=True)
        )
        if bytes_per_seq:
            seqs = min(seqs, free_memory(device) * config.memory_percent / bytes_per_seq)
    sizes = tuple(KVGroup(g.window, int(seqs * n) + 1) for g, n in zip(groups, per_seq, strict=True))
    if any(size.num_blocks < 2 for size in sizes):
        raise ValueError("no memory for a single KV block; free some, or raise max_memory_percent")
    return sizes


def _check_memory(groups: Sequence[LayerGroup], num_blocks: int, block_size: int) -> None:
    for device in {layer.device for g in groups for layer in g.layers}:
        wanted = num_blocks * sum(_bytes_per_block(g, device, block_size) for g in groups)
        if wanted > (free := free_memory(device)):
            raise ValueError(
                f"num_blocks={num_blocks - 1} needs {wanted / 2**30:.1f} GiB on {device}, where {free / 2**30:.1f} GiB "
                "are free; lower it, or leave it None"
            )


def _blocks_per_seq(window: int | None, config: ResolvedConfig) -> int:
    """Blocks that the longest announced sequence can hold at once in a group."""
    if window is None:
        return config.expected_blocks_per_seq
    return min(config.expected_blocks_per_seq, (window - 1 + config.max_prefill_chunk) // config.block_size + 2)


def _bytes_per_block(group: LayerGroup, device: torch.device, block_size: int) -> int:
    return sum(layer_spec(x, block_size).bytes_per_block for x in group.layers if x.device == device)
