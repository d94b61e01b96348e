"""The model's forward, one callable per shape.

Owns compiled code and the record of which shapes were warmed, used and missed. Does not know requests or caches:
it takes packed tokens and returns the logits of the wanted rows.
"""

from __future__ import annotations

import logging
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cb_engine.errors import EngineStoppedError, ShapeNotWarmedError
from cb_engine.runner.buckets import Bucket, BucketTable, StepKind

logger = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Coverage:
    """Which padded shapes were run in warm-up, which were used since, and how often one was met without it."""

    warmed: set[Bucket] = field(default_factory=set)
    used: set[Bucket] = field(default_factory=set)
    missed: Counter[Bucket] = field(default_factory=Counter)

    @property
    def never_used(self) -> set[Bucket]:
        """Shapes that warm-up has run and no step has needed."""
        return self.warmed - self.used


class ForwardTable:
    """Invariant: after `freeze()` nothing is compiled any more."""

    def __init__(
        self,
        shadow: nn.Module,
        buckets: BucketTable,
        *,
        takes_logits_to_keep: bool,
        compiled_kinds: frozenset[StepKind],
        compile_options: Mapping[str, Any],
        strict: bool,
    ) -> None:
        self._takes_logits_to_keep = takes_logits_to_keep
        self._buckets = buckets
        self._compiled_kinds = compiled_kinds
        self._compile_options = dict(compile_options)
        self._strict = strict
        self._compiled: dict[tuple[StepKind, int, int], Forward] = {}  # by (kind, sequences, tokens)
        self.is_frozen = False
        self.coverage = Coverage()
        self.set_shadow(shadow)

    def set_shadow(self, shadow: nn.Module) -> None:
        """Takes a module tree. Code compiled for another one is of no use, so warm-up is open again for it."""
        self._eager: Forward | None = _forward_of(shadow, self._takes_logits_to_keep)
        if self._compiled:
            self._compiled = {}
            self.coverage = Coverage()
            self.is_frozen = False

    def drop_shadow(self) -> None:
        """Lets go of the module tree; nothing runs until another one is set."""
        self._eager = None

    def pads(self, kind: StepKind) -> bool:
        """Whether steps of this kind have the shape of a listed bucket."""
        return self._buckets.pads_decode if kind is StepKind.DECODE else self._buckets.pads_prefill

    def get(self, bucket: Bucket, num_logits: int) -> Forward:
        """The callable for a step of this shape.

        A padded shape that was not warmed before `freeze()` runs eagerly, is counted and warned about once. A step
        that wants more logits than its bucket has (prompt log-probabilities) is not static and runs eagerly too.

        Raises:
            ShapeNotWarmedError: instead, in strict mode.
        """
        if self._eager is None:
            raise EngineStoppedError("the engine was closed; make a new one")
        if not self.pads(bucket.kind) or num_logits > bucket.num_seqs:
            return self._eager
        if not self.is_frozen:
            self.coverage.warmed.add(bucket)
        elif bucket in self.coverage.warmed:
            self.coverage.used.add(bucket)
        else:
            self._report_miss(bucket)
            return self._eager
        if bucket.kind not in self._compiled_kinds:
            return self._eager
        # Attention is opaque to compiled code, so the width of the block tables is no part of its shape.
        shape = (bucket.kind, bucket.num_seqs, bucket.num_tokens)
        if shape not in self._compiled:
            self._compiled[shape] = self._compile(self._eager, "_".join(map(str, shape)))
        return self._compiled[shape]

    def freeze(self) -> None:
        """Warm-up is over: from now on an unknown shape is a miss."""
        self.is_frozen = True

    def _report_miss(self, bucket: Bucket) -> None:
        if self._strict:
            raise ShapeNotWarmedError(
                f"{bucket} was not warmed up; give workload_hints that cover it, or leave strict_shapes off"
            )
        if not self.coverage.missed:
            logger.warning("%s was not warmed up and runs eagerly; workload_hints that cover it avoid this", bucket)
        self.coverage.missed[bucket] += 1

    def _compile(self, eager: Forward, shape: str) -> Forward:
        """Compiles a function of the shape's own: torch keeps compiled code per code object and gives up on one
        with many shapes."""
        name = f"step_{shape}_{id(self):x}"
        own = types.FunctionType(
            eager.__code__.replace(co_name=name),
            eager.__globals__,
            name,
            closure=eager.__closure__,
        )
        return torch.compile(own, dynamic=False, **self._compile_options)


def _forward_of(shadow: nn.Module, takes_logits_to_keep: bool) -> Forward:
    def with_logits_to_keep(ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = shadow(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=wanted
        ).logits
        return logits[0]

    def with_all_logits(ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = shadow(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits[0].index_select(0, wanted.to(logits.device))

    return with_logits_to_keep if takes_logits_to_keep else with_all_logits
