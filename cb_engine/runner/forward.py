"""A module tree's forward, one callable per shape, and the record of the shapes.

Owns compiled code, and which shapes were warmed, used and missed. Does not know requests or caches: a forward takes
packed tokens and returns what its maker decided, the logits of the wanted rows for one.
"""

from __future__ import annotations

import logging
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cb_engine.errors import EngineStoppedError, ShapeNotWarmedError
from cb_engine.runner.buckets import Bucket, BucketTable, StepKind

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]


@dataclass
class Coverage:
    """Which padded shapes were run in warm-up, which of them were used since, and how often a step had one that warm-up
    had not run, be it that warm-up came later or never."""

    warmed: set[Bucket] = field(default_factory=set)
    used: set[Bucket] = field(default_factory=set)
    missed: Counter[Bucket] = field(default_factory=Counter)

    @property
    def never_used(self) -> set[Bucket]:
        """Shapes that warm-up has run and no step has needed."""
        return self.warmed - self.used

    def report(self) -> str:
        """The same as text, a line for each kind of step and each list."""
        lists = {"used": self.used, "never used": self.never_used, "missed": set(self.missed)}
        lines = [f"shapes: {len(self.warmed)} captured, {len(self.used)} used, {len(self.missed)} missed"]
        for name, buckets in lists.items():
            for kind in sorted({bucket.kind for bucket in buckets}):
                shapes = sorted(b for b in buckets if b.kind is kind)
                texts = " ".join(f"{b.num_seqs}x{b.width}/{b.num_blocks}" for b in shapes)
                lines.append(f"  {name}, {kind} (sequences x width / blocks): {texts}")
        return "\n".join(lines)


class ShapeGuard:
    """Knows what warm-up has run. In strict mode no other shape ever gets in. Else one that comes before the end of
    warm-up may be compiled, one that comes after it runs eagerly, and both are counted. One for all module trees of an
    engine."""

    def __init__(self, buckets: BucketTable, *, strict: bool) -> None:
        self._buckets = buckets
        self._strict = strict
        self._is_warming = False
        self.reopen()

    def reopen(self) -> None:
        """What was compiled is gone, and has to be warmed up again."""
        self.coverage = Coverage()
        self.is_frozen = False
        self._early: set[Bucket] = set()  # came before the end of warm-up, which had not run them

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Within, what comes is what warm-up runs; after it, if nothing fails, an unknown shape is a miss."""
        self._is_warming = True
        try:
            yield
            self.is_frozen = True
        finally:
            self._is_warming = False

    def admits(self, bucket: Bucket) -> bool:
        """Whether a padded step has a shape whose code is there, or may still be made.

        A shape that warm-up has not run is counted; the first one after it is warned about.

        Raises:
            ShapeNotWarmedError: instead, in strict mode.
        """
        coverage = self.coverage
        if self._is_warming:
            coverage.warmed.add(bucket)
            return True
        if bucket in coverage.warmed:
            coverage.used.add(bucket)
            return True
        if self._strict:
            raise ShapeNotWarmedError(self._refusal(bucket))
        is_early = not self.is_frozen or bucket in self._early
        if is_early:
            self._early.add(bucket)
        elif not coverage.missed.keys() - self._early:
            logger.warning("%s was not warmed up and runs eagerly; workload_hints that cover it avoid this", bucket)
        coverage.missed[bucket] += 1
        return is_early

    def _refusal(self, bucket: Bucket) -> str:
        if self.is_frozen:
            return f"{bucket} was not warmed up; give workload_hints that cover it, or leave strict_shapes off"
        return (
            f"{bucket} is not warmed up, since warm-up has not run; call warmup() first, or leave warmup=True of "
            "generate_batch and continuous_batching_context_manager as it is"
        )

    def pads(self, kind: StepKind) -> bool:
        """See `BucketTable.pads`."""
        return self._buckets.pads(kind)

    @property
    def fails_on_recompile(self) -> bool:
        """Whether compiled code has to be there by now."""
        return self.is_frozen and self._strict


class ForwardTable:
    """The callables of one module tree. Invariant: after the guard is frozen nothing is compiled any more.

    Args:
        forward: over the tree.
        compiled_kinds: the steps that are compiled, each shape apart.
    """

    def __init__(
        self,
        forward: Forward,
        guard: ShapeGuard,
        *,
        compiled_kinds: frozenset[StepKind],
        compile_options: Mapping[str, Any],
    ) -> None:
        self._guard = guard
        self._compiled_kinds = compiled_kinds
        self._compile_options = dict(compile_options)
        self._compiled: dict[tuple[StepKind, int, int], Forward] = {}  # by (kind, sequences, tokens)
        self._eager: Forward | None = forward

    def set_forward(self, forward: Forward) -> None:
        """Takes another module tree's. Code compiled for the last one is of no use, so warm-up is open again."""
        self.drop_forward()
        self._eager = forward

    def drop_forward(self) -> None:
        """Lets go of the module tree, and of the code that was compiled for it; nothing runs until another is set."""
        self._eager = None
        if self._compiled:
            self._compiled = {}
            self._guard.reopen()

    def get(self, bucket: Bucket, *, is_static: bool) -> Forward:
        """The callable for a step of this shape.

        Args:
            is_static: whether all of its tensors have the bucket's shape; a step that wants more logits (prompt
                log-probabilities) has not, and runs eagerly.

        Raises:
            ShapeNotWarmedError: see `ShapeGuard.admits`.
        """
        if self._eager is None:
            raise EngineStoppedError("the engine was closed; make a new one")
        if not self._guard.pads(bucket.kind) or not is_static:
            return self._eager
        if not self._guard.admits(bucket) or bucket.kind not in self._compiled_kinds:
            return self._eager
        # Attention is opaque to compiled code, so the width of the block tables is no part of its shape.
        shape = (bucket.kind, bucket.num_seqs, bucket.num_tokens)
        if shape not in self._compiled:
            self._compiled[shape] = self._compile(self._eager, "_".join(map(str, shape)))
        return self._guarded(self._compiled[shape], bucket) if self._guard.fails_on_recompile else self._compiled[shape]

    def _compile(self, eager: Forward, shape: str) -> Forward:
        """Compiles a function of the shape's own: torch keeps compiled code per code object and gives up on one
        with many shapes."""
        name = f"step_{shape}_{id(self):x}"
        code: types.CodeType = eager.__code__
        own = types.FunctionType(
            code.replace(co_name=name),
            eager.__globals__,
            name,
            closure=eager.__closure__,
        )
        return torch.compile(own, dynamic=False, **self._compile_options)

    @staticmethod
    def _guarded(compiled: Forward, bucket: Bucket) -> Forward:
        """In strict mode torch itself raises where it would compile once more. Its error is one of many kinds that a
        request or a proposer may be blamed for, so it gets the name of what it is."""

        def call(*args: Any) -> Any:
            with torch.compiler.set_stance("fail_on_recompile"):
                try:
                    return compiled(*args)
                except RuntimeError as error:
                    if "fail_on_recompile" not in str(error):
                        raise
                    raise ShapeNotWarmedError(f"{bucket} was warmed up for other arguments: {error}") from error

        return call


def logits_forward(shadow: nn.Module, *, takes_logits_to_keep: bool) -> Forward:
    """`(ids [1, T], positions [1, T], wanted [R]) -> logits [R, vocab]` of a causal LM."""

    def with_logits_to_keep(ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = shadow(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=wanted
        ).logits
        return logits[0]

    def with_all_logits(ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = shadow(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits[0].index_select(0, wanted.to(logits.device))

    return with_logits_to_keep if takes_logits_to_keep else with_all_logits
