"""The only thing that touches the device.

Owns the KV tensors, the target's module tree and the drafter that runs beside it. Decides nothing: it executes plans,
`Bucket -> InputBatch -> attention plan -> forward -> sampler`, and reports what came out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

from cb_engine.attention.backend import AttentionBackend, KVCache
from cb_engine.config import ResolvedConfig
from cb_engine.errors import CBEngineError, StaticShapeError
from cb_engine.kv_cache.block import NULL_BLOCK_ID
from cb_engine.kv_cache.block_manager import BlockCopy, BlockManager, KVGroup
from cb_engine.native import build
from cb_engine.runner.buckets import Bucket, BucketTable, DraftShapes, StepKind, climb, ladder
from cb_engine.runner.drafters.chain import ChainDrafter, Passes
from cb_engine.runner.drafters.source import DraftSource
from cb_engine.runner.executor import EagerExecutor, Executor
from cb_engine.runner.forward import Coverage, Forward, ForwardTable, ShapeGuard, logits_forward
from cb_engine.runner.input_batch import InputBatch, make_input_batch, prompt_logprob_rows
from cb_engine.runner.kv_layout import LayerGroup, layer_spec, only
from cb_engine.runner.paged_model import PagedModel
from cb_engine.runner.probe import ModelProfile
from cb_engine.runner.row_sampler import RowSampler, TokenSampler
from cb_engine.runner.static_device import FakeStaticDevice
from cb_engine.sampling import Sampler
from cb_engine.sampling.static_sampler import StaticSampler
from cb_engine.scheduler.output import ModelOutput, SchedulerOutput

logger = logging.getLogger(__name__)

_SMALLEST_STEP = Bucket(StepKind.PREFILL, 1, 1, 1)


class StepFailedError(CBEngineError):
    """No request of a plan could be computed."""


class ModelRunner:
    """Invariant: between two calls no step is bound, and the user's model is as it was.

    Args:
        groups: all layers, the drafter's included, in the groups of the block tables.
        drafts: what drafts on the device, if anything does.
    """

    def __init__(
        self,
        shadow: nn.Module,
        profile: ModelProfile,
        config: ResolvedConfig,
        backend: AttentionBackend,
        groups: Sequence[LayerGroup],
        pools: Sequence[KVGroup],
        *,
        blocks: BlockManager,
        drafts: DraftSource | None = None,
    ) -> None:
        self._profile = profile
        self._config = config
        self._backend = backend
        self._groups = groups
        self._shadow: nn.Module | None = shadow
        self._drafts = drafts
        self._drafts_model: PagedModel | None = None
        self.executor = make_executor(config)
        self.buckets = BucketTable(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_blocks_per_seq=config.expected_blocks_per_seq,
            pads_decode=config.pads_decode,
            pads_prefill=config.pads_prefill,
            drafts=_draft_shapes(config, drafts),
        )
        self._guard = ShapeGuard(self.buckets, strict=config.strict_shapes or self.executor.is_static)
        self._allocate(pools)
        self._target = PagedModel(
            self._forward_table(self._target_forward(shadow)),
            only(groups, drafters=False),
            self._caches[False],
            backend=backend,
            executor=self.executor,
            input_device=profile.input_device,
            output_device=profile.output_device,
        )
        self.drafter = None if drafts is None else self._make_drafter(drafts, shadow, blocks)
        self._sampler = RowSampler(self._make_sampler(), self.executor)
        self.executor.freeze()

    def _allocate(self, pools: Sequence[KVGroup]) -> None:
        self._caches: dict[bool, dict[int, KVCache]] = {False: {}, True: {}}  # by whether they are the drafter's
        with torch.inference_mode():
            for group, pool in zip(self._groups, pools, strict=True):
                for layer in group.layers:
                    spec = layer_spec(layer, self._config.block_size)
                    cache = self._backend.allocate(spec, pool.num_blocks, layer.device)
                    self._caches[layer.is_drafters][layer.layer_idx] = self.executor.adopt(cache)

    def _make_sampler(self) -> TokenSampler:
        if self._config.max_logprobs is not None:
            return StaticSampler(self.executor.run, max_logprobs=self._config.max_logprobs)
        on_cpu = self._profile.output_device.type == "cpu"
        return Sampler(native=self._config.fuse_modules and on_cpu and build.load())

    def _make_drafter(self, drafts: DraftSource, shadow: nn.Module, blocks: BlockManager) -> ChainDrafter:
        groups = drafts.groups(self._groups)
        own = any(layer.is_drafters for group in groups for layer in group.layers)
        input_device, output_device = drafts.devices(self._profile)
        self._drafts_model = PagedModel(
            self._forward_table(drafts.forward(shadow)),
            groups,
            self._caches[own],
            backend=self._backend,
            executor=self.executor,
            input_device=input_device,
            output_device=output_device,
        )
        return drafts.drafter(
            Passes(
                model=self._drafts_model,
                executor=self.executor,
                buckets=self.buckets,
                block_size=self._config.block_size,
                tables=blocks.block_tables,
                num_groups=len(self._groups),
                group=next((i for i, g in enumerate(groups) if own and g.layers), 0),
            )
        )

    def _target_forward(self, shadow: nn.Module) -> Forward:
        forward = logits_forward(shadow, takes_logits_to_keep=self._profile.takes_logits_to_keep)
        return forward if self._drafts is None else self._drafts.tap(shadow, forward)

    def _forward_table(self, forward: Forward) -> ForwardTable:
        config = self._config
        compiled = [kind for kind in StepKind if (config.compile_prefill if kind.is_prefill else config.compile)]
        return ForwardTable(
            forward, self._guard, compiled_kinds=frozenset(compiled), compile_options=config.compile_options
        )

    def drop_shadow(self) -> None:
        """Lets go of the module tree and of all that hangs on it, packed weights for one. The drafter's own stays."""
        self._shadow = None
        self._target.forwards.drop_forward()
        if self._drafts is not None and self._drafts_model is not None:
            self._drafts_model.forwards.drop_forward()
            self._drafts.drop_shadow()

    def set_shadow(self, shadow: nn.Module) -> None:
        """Takes a new module tree over the same layers; the cache stays. Compiled code has to be warmed up again."""
        self._shadow = shadow
        self._target.forwards.set_forward(self._target_forward(shadow))
        if self._drafts is not None and self._drafts_model is not None:
            self._drafts_model.forwards.set_forward(self._drafts.forward(shadow))

    def sync_drafter(self, *, said: bool, target_changed: bool) -> bool:
        """Makes the drafter's tree anew if its own weights have changed; what it has computed with others is dropped.

        Args:
            said: weights were written, the drafter's perhaps too, in a way that nobody can see.
            target_changed: the target gets other weights.

        Returns:
            whether the tree was made anew.

        Raises:
            ModelChangedError: the drafter is another model altogether.
        """
        if self._drafts is None or self._drafts_model is None or self.drafter is None or self._shadow is None:
            return False
        changed = self._drafts.has_changed() or said
        if changed:
            self._drafts_model.forwards.drop_forward()
            self._drafts.rebuild()
            self._drafts_model.forwards.set_forward(self._drafts.forward(self._shadow))
        if changed or target_changed:
            self.drafter.weights_changed(own=changed)
        return changed

    def close(self) -> None:
        """Lets go of everything on the device, and of the drafter's modules."""
        self.drop_shadow()
        for caches in self._caches.values():
            caches.clear()
        self._drafts = self._drafts_model = self.drafter = None

    @property
    def is_warm(self) -> bool:
        """Whether warm-up has run for the code there is now."""
        return self._guard.is_frozen

    @property
    def coverage(self) -> Coverage:
        """Which padded shapes were warmed, used and missed."""
        return self._guard.coverage

    # ---- steps -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        """Computes one step.

        A request that makes the step fail is found by halving the batch, so that its neighbours get their tokens:
        computing a step again is harmless, it writes the same keys and values to the same slots.

        Raises:
            StepFailedError: no request could be computed.
            ShapeNotWarmedError: in strict mode, see `ShapeGuard.admits`.
        """
        self._copy_blocks(plan.block_copies)
        output = self._execute_or_split(plan)
        if len(output.errors) == len(plan.scheduled):
            raise StepFailedError(next(iter(output.errors.values())))
        return output

    @torch.inference_mode()
    def works(self) -> bool:
        """Whether a step of nobody's can be computed, head and sampler included. If so, one that failed is the fault
        of its requests."""
        warmed = [b for b in self.coverage.warmed if not b.kind.is_draft and b.kind is not StepKind.VERIFY]
        bucket = min(warmed, default=_SMALLEST_STEP, key=lambda b: (b.num_tokens, b.num_blocks))
        try:
            self._warm_target(bucket)
        except Exception:
            logger.exception("a step without any request failed too")
            return False
        return True

    def _execute_or_split(self, plan: SchedulerOutput) -> ModelOutput:
        try:
            return self._execute(plan)
        except StaticShapeError:
            raise  # no request's fault
        except Exception as error:
            if len(plan.scheduled) == 1:
                request_id = plan.scheduled[0].request.request_id
                logger.exception("the step of request %s failed", request_id)
                return ModelOutput(errors={request_id: f"{type(error).__name__}: {error}"})
        middle = len(plan.scheduled) // 2
        first, second = (self._execute_or_split(plan.part(*ends)) for ends in ((0, middle), (middle, None)))
        return ModelOutput(
            {**first.sampled, **second.sampled},
            {**first.prompt_logprobs, **second.prompt_logprobs},
            {**first.errors, **second.errors},
        )

    def _execute(self, plan: SchedulerOutput) -> ModelOutput:
        kind = self._kind_of(plan)
        width = plan.block_tables[0].shape[1]
        bucket = self.buckets.pad(kind, len(plan.scheduled), plan.num_tokens, width)
        num_logits = self._num_logits(bucket)
        batch = make_input_batch(
            plan.scheduled,
            plan.block_tables,
            bucket,
            self._config.block_size,
            num_logits=num_logits,
            static_sizes=self.executor.is_static,
        )
        is_static = True
        if self.executor.is_static:
            if any(map(prompt_logprob_rows, plan.scheduled)):
                batch = batch.with_logits_of_all_rows()  # also where few rows would do: one shape for all mixes
        elif 0 < num_logits < batch.logits_indices.numel():
            is_static = False
        logits = self._forward(batch, is_static=is_static)
        if self.drafter is not None:
            self.drafter.observe(plan.scheduled)
        return self._sample(plan, bucket, logits)

    def _kind_of(self, plan: SchedulerOutput) -> StepKind:
        if not self._config.decode_fast_path:
            return StepKind.PREFILL
        if plan.is_verify:
            return StepKind.VERIFY
        return StepKind.DECODE if plan.is_decode else StepKind.PREFILL

    def _num_logits(self, bucket: Bucket) -> int:
        """How many rows of logits a padded step wants; 0 if it is not padded."""
        if not self.buckets.pads(bucket.kind):
            return 0
        return bucket.num_tokens if bucket.kind is StepKind.VERIFY else bucket.num_seqs

    @record_function("cb_engine.forward")  # a name in a profiler's trace
    def _forward(self, batch: InputBatch, *, is_static: bool = True) -> torch.Tensor:
        """Logits [R, vocab] of the batch's wanted rows."""
        logits: torch.Tensor = self._target.run(batch, is_static=is_static)
        return logits

    @record_function("cb_engine.sample")
    def _sample(self, plan: SchedulerOutput, bucket: Bucket, logits: torch.Tensor) -> ModelOutput:
        static = self.executor.is_static
        width = 1 + max(len(item.draft_token_ids) for item in plan.scheduled)
        shape = (bucket.num_seqs, bucket.width) if static else (len(plan.scheduled), width)
        return self._sampler.sample(plan.scheduled, logits, self._num_logits(bucket) if static else 0, shape)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Does the copies in order, as many at once as do not touch each other's blocks."""
        pending: list[BlockCopy] = []
        touched: set[tuple[int, int]] = set()
        for copy in copies:
            if {(copy.group, copy.src), (copy.group, copy.dst)} & touched:
                self._copy_together(pending)
                pending, touched = [], set()
            pending.append(copy)
            touched.add((copy.group, copy.dst))
        self._copy_together(pending)
        if self.drafter is not None:
            self.drafter.copied(copies)

    def _copy_together(self, copies: Sequence[BlockCopy]) -> None:
        most = self._config.max_num_seqs
        for group in range(len(self._groups)):
            mine = [(c.src, c.dst) for c in copies if c.group == group]
            for start in range(0, len(mine), most):
                self._copy_in_group(group, mine[start : start + most])

    def _copy_in_group(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies of which none touches another's blocks; where shapes are static, the null block's onto itself fill
        them up to a known number."""
        size = climb(len(pairs), self._config.max_num_seqs) if self.executor.is_static else len(pairs)
        padded = [*pairs, *[(NULL_BLOCK_ID, NULL_BLOCK_ID)] * (size - len(pairs))]
        on_host = torch.tensor(padded, dtype=torch.int64).t().contiguous()
        devices = dict.fromkeys(layer.device for layer in self._groups[group].layers)
        ends = {str(device): on_host.to(device) for device in devices}
        self.executor.run("copy_blocks", self._copy, group, ends)

    def _copy(self, group: int, ends: dict[str, torch.Tensor]) -> None:
        """On the device: `ends[device]` [2, C], where from and where to."""
        for layer in self._groups[group].layers:
            src, dst = ends[str(layer.device)].unbind(0)
            self._backend.copy_blocks(self._caches[layer.is_drafters][layer.layer_idx], src, dst)

    # ---- warm-up ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def warmup(self, progress: Callable[[int, int], object] | None = None, *, compile_only: bool = False) -> int:
        """Runs the step's own functions over every listed shape, largest first, then freezes the list: forward, sampler
        and acceptance of the target, all passes of the drafter, and copies of blocks. No value is read from the device.
        Where nothing is padded, one small step of the target makes what is made at first use.

        Args:
            progress: called with (shapes done, shapes in all) after each.
            compile_only: let the device compile without computing, where it can.

        Returns:
            the number of shapes.
        """
        shapes = self.buckets.all()
        compile_mode = self.executor.compile_only() if compile_only else nullcontext()
        with self._guard.warming(), self.executor.warming(), compile_mode:
            for done, bucket in enumerate(shapes, start=1):
                if bucket.kind.is_draft:
                    self._warm_drafter(bucket)
                else:
                    self._warm_target(bucket)
                if progress is not None:
                    progress(done, len(shapes))
            self._warm_copies()
        if not shapes and not compile_only:
            self._warm_target(_SMALLEST_STEP)
        return len(shapes)

    def _warm_copies(self) -> None:
        if self.executor.is_static:
            for group in range(len(self._groups)):
                for size in ladder(self._config.max_num_seqs):
                    self._copy_in_group(group, [(NULL_BLOCK_ID, NULL_BLOCK_ID)] * size)

    def _warm_drafter(self, bucket: Bucket) -> None:
        if self.drafter is not None:
            self.drafter.warm(bucket)

    def _warm_target(self, bucket: Bucket) -> None:
        tables = [np.zeros((0, 0), np.int32) for _ in self._groups]
        num_logits = self._num_logits(bucket) or 1
        static = self.executor.is_static
        batch = make_input_batch(
            (), tables, bucket, self._config.block_size, num_logits=num_logits, static_sizes=static
        )
        self._sampler.warm(self._forward(batch), num_logits, bucket)
        if static and bucket.kind is StepKind.PREFILL:  # as if log-probabilities of prompts were wanted
            self._sampler.warm(self._forward(batch.with_logits_of_all_rows()), num_logits, bucket)


def _draft_shapes(config: ResolvedConfig, drafts: DraftSource | None) -> DraftShapes | None:
    if config.speculative is None:
        return None
    num_tokens = config.speculative.num_tokens
    return DraftShapes(num_tokens) if drafts is None else drafts.shapes(num_tokens)


def make_executor(config: ResolvedConfig) -> Executor:
    """What runs the functions of a step under these settings."""
    return FakeStaticDevice() if config.fake_static_device else EagerExecutor()
