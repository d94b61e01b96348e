"""The step that is bound while a module tree runs: which cache and which metadata each layer gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cb_engine.attention.backend import AttentionBackend, AttentionMetadata, AttentionParams, KVCache, NativeInputs
from cb_engine.runner.input_batch import InputBatch
from cb_engine.runner.kv_layout import LayerGroup

StepTensors = tuple[dict[str, AttentionMetadata], ...]  # per layer group, by device


def step_tensors(groups: Sequence[LayerGroup], batch: InputBatch) -> StepTensors:
    """A batch's attention metadata, once on every device that a group has layers on."""
    return tuple(
        {
            str(device): AttentionMetadata(
                slot_mapping=inputs.slot_mapping.to(device, non_blocking=True),
                block_table=inputs.block_table.to(device, non_blocking=True),
                query_start_loc=batch.query_start_loc.to(device, non_blocking=True),
                seq_lens=batch.seq_lens.to(device, non_blocking=True),
                max_query_len=batch.max_query_len,
                max_seq_len=batch.max_seq_len,
            )
            for device in dict.fromkeys(layer.device for layer in group.layers)
        }
        for group, inputs in zip(groups, batch.groups, strict=True)
    )


class PagedStep:
    """Attention of all layers for one step; planned once per group and device, run once per layer."""

    def __init__(
        self,
        backend: AttentionBackend,
        groups: Sequence[LayerGroup],
        caches: Mapping[int, KVCache],
        tensors: StepTensors,
    ) -> None:
        self._backend = backend
        self._caches = caches
        self._metadata: dict[int, AttentionMetadata] = {}
        for group, by_device in zip(groups, tensors, strict=True):
            planned = {device: backend.plan(metadata) for device, metadata in by_device.items()}
            for layer in group.layers:
                self._metadata[layer.layer_idx] = planned[str(layer.device)]

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `StepContext.attend`."""
        cache, metadata = self._caches[layer_idx], self._metadata[layer_idx]
        return self._backend.run(query, key, value, cache, metadata, params)

    def native_inputs(self, layer_idx: int) -> NativeInputs | None:
        """See `StepContext.native_inputs`."""
        return self._backend.native_inputs(self._caches[layer_idx], self._metadata[layer_idx])
