"""One module tree over its own layers of the paged cache: the target, or a drafter.

Owns nothing but the way from a batch to the tree's forward. Does not know plans, sampling or who owns the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cb_engine.attention.backend import AttentionBackend, KVCache
from cb_engine.attention.interface import bind
from cb_engine.runner.executor import Executor
from cb_engine.runner.forward import Forward, ForwardTable
from cb_engine.runner.input_batch import InputBatch
from cb_engine.runner.kv_layout import LayerGroup
from cb_engine.runner.step import PagedStep, StepTensors, step_tensors


class PagedModel:
    """Invariant: between two calls no step is bound.

    Args:
        groups: the tree's own layers, in the groups of the block tables; a group may have none of them.
        caches: by the tree's own layer indices; the caller may empty it.
        input_device, output_device: where token ids go, and where rows are chosen.
    """

    def __init__(
        self,
        forwards: ForwardTable,
        groups: Sequence[LayerGroup],
        caches: Mapping[int, KVCache],
        *,
        backend: AttentionBackend,
        executor: Executor,
        input_device: torch.device,
        output_device: torch.device,
    ) -> None:
        self.forwards = forwards
        self._groups = groups
        self._caches = caches
        self._backend = backend
        self._executor = executor
        self.input_device = input_device
        self._output_device = output_device

    def run(
        self,
        batch: InputBatch,
        *more: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        is_static: bool = True,
    ) -> Any:
        """What the tree's forward returns for a batch.

        Args:
            more: further tensors that the forward takes.
            input_ids: [1, T] in place of the batch's own, which the host does not know.
            is_static: see `ForwardTable.get`.
        """
        forward = self.forwards.get(batch.bucket, is_static=is_static)
        ids = batch.input_ids.to(self.input_device) if input_ids is None else input_ids
        return self._executor.run(
            str(batch.bucket.kind),
            partial(self._bound, forward),
            ids,
            batch.position_ids.to(self.input_device),
            batch.logits_indices.to(self._output_device),
            more,
            step_tensors(self._groups, batch),
        )

    def _bound(
        self,
        forward: Forward,
        ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        more: Sequence[torch.Tensor],
        tensors: StepTensors,
    ) -> Any:
        with bind(PagedStep(self._backend, self._groups, self._caches, tensors)):
            return forward(ids, positions, wanted, *more)
