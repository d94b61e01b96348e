"""Layer groups and the sizes of their pools, for small figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cb_engine.config import DeviceDefaults, EngineConfig, ResolvedConfig, Translated, resolve_config
from cb_engine.kv_cache.block_manager import KVGroup
from cb_engine.runner import kv_layout
from cb_engine.runner.kv_layout import LayerGroup, group_layers, layer_spec, size_groups
from cb_engine.runner.probe import AttentionLayer

CPU = torch.device("cpu")
META = torch.device("meta")


def layer(index: int, window: int | None = None, *, heads: int = 2, dim: int = 8, device: torch.device = CPU):
    return AttentionLayer(index, 4, heads, dim, window, torch.float32, device)


def config(**changes: Any) -> ResolvedConfig:
    """16-token blocks, 4 sequences of at most 100 tokens (7 blocks), chunks of 32."""
    defaults = DeviceDefaults(memory_percent=0.5, max_num_seqs=4, max_num_batched_tokens=32, pads=False)
    resolved = resolve_config(Translated(EngineConfig()), {}, model_max_len=100, device=defaults, block_size=16)
    return replace(resolved, **changes)


@pytest.fixture
def memory(monkeypatch):
    """Free bytes per device type; a test changes what it wants."""
    free = {"cpu": 1 << 40, "meta": 1 << 40}
    monkeypatch.setattr(kv_layout, "free_memory", lambda device: free[device.type])
    return free


def test_layers_with_one_window_share_a_group_and_full_attention_comes_first():
    layers = [layer(0, 64), layer(1), layer(2, 16), layer(3, 64), layer(4)]
    groups = group_layers(layers)
    assert [(g.window, [x.layer_idx for x in g.layers]) for g in groups] == [
        (None, [1, 4]),
        (16, [2]),
        (64, [0, 3]),
    ]


def test_layers_of_different_sizes_may_share_a_group():
    [group] = group_layers([layer(0), layer(1, heads=4), layer(2, dim=16)])
    assert len(group.layers) == 3


def test_a_layers_share_of_a_block():
    spec = layer_spec(layer(0, heads=2, dim=8), 16)
    assert spec.bytes_per_block == 2 * 16 * 2 * 8 * 4  # keys and values, tokens, heads, dim, bytes


def test_num_blocks_is_given_to_every_group_beside_the_null_block():
    groups = group_layers([layer(0), layer(1, 16)])
    assert size_groups(groups, config(num_blocks=10)) == (KVGroup(None, 11), KVGroup(16, 11))


def test_with_memory_to_spare_every_sequence_gets_its_largest_size(memory):
    groups = group_layers([layer(0), layer(1, 16)])
    # Full: 7 blocks each. Window 16, chunk 32: at most 47 tokens at once, which touch at worst 4 blocks.
    assert size_groups(groups, config()) == (KVGroup(None, 4 * 7 + 1), KVGroup(16, 4 * 4 + 1))


def test_a_window_that_is_longer_than_the_longest_sequence_costs_no_more_than_full_attention(memory):
    groups = group_layers([layer(0, 4096)])
    assert size_groups(groups, config()) == (KVGroup(4096, 29),)


def test_hints_size_the_pool(memory):
    assert size_groups(group_layers([layer(0)]), config(expected_model_len=33)) == (KVGroup(None, 4 * 3 + 1),)


def test_scarce_memory_is_shared_in_proportion(memory):
    groups = group_layers([layer(0), layer(1), layer(2, 16)])
    # A block of one layer takes 2 KiB: a sequence takes 7 blocks of two layers and 4 of one, 36 KiB.
    memory["cpu"] = 2 * 36 * 1024 * 2  # and half of the free memory may be taken: two sequences
    assert size_groups(groups, config()) == (KVGroup(None, 2 * 7 + 1), KVGroup(16, 2 * 4 + 1))


def test_a_fraction_of_a_sequence_is_used_as_well(memory):
    memory["cpu"] = 2 * 5 * 2048  # 5 blocks of the 7 of a sequence
    assert size_groups(group_layers([layer(0)]), config()) == (KVGroup(None, 6),)


def test_the_tightest_device_decides(memory):
    groups = group_layers([layer(0), layer(1, device=META)])
    memory["meta"] = 2 * 7 * 2048  # one sequence
    assert size_groups(groups, config()) == (KVGroup(None, 8),)


def test_no_room_for_a_block_is_an_error_that_says_what_to_do(memory):
    memory["cpu"] = 2047 * 2
    with pytest.raises(ValueError, match=r"no memory for a single KV block.*max_memory_percent"):
        size_groups(group_layers([layer(0)]), config())


def test_every_group_needs_a_block(memory):
    groups = (LayerGroup(None, (layer(0),)), LayerGroup(1, (layer(1, 1),)))
    memory["cpu"] = 2 * (7 + 3) * 2048 // 4  # a quarter of a sequence: one full block, and no window block
    with pytest.raises(ValueError, match="no memory for a single KV block"):
        size_groups(groups, config(max_prefill_chunk=16))
