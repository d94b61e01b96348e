"""The only thing that touches the device.

Owns the KV tensors, the forward of every shape and each request's SamplingState. Decides nothing: it executes
plans, `Bucket -> InputBatch -> attention plan -> forward -> sampler`, and reports what came out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

from cb_engine.attention.backend import AttentionBackend, KVCache
from cb_engine.attention.interface import bind
from cb_engine.config import ResolvedConfig
from cb_engine.errors import CBEngineError, ShapeNotWarmedError
from cb_engine.kv_cache.block_manager import BlockCopy, KVGroup
from cb_engine.native import build
from cb_engine.outputs import TokenLogprob
from cb_engine.request import Request
from cb_engine.runner.buckets import BucketTable, StepKind
from cb_engine.runner.forward import Coverage, ForwardTable
from cb_engine.runner.input_batch import InputBatch, make_input_batch, prompt_logprob_rows
from cb_engine.runner.kv_layout import LayerGroup, layer_spec
from cb_engine.runner.logprobs import candidate_entries, prompt_entries
from cb_engine.runner.probe import ModelProfile
from cb_engine.runner.step import PagedStep
from cb_engine.sampling import Sampler, SamplingState
from cb_engine.sampling_params import SamplingParams
from cb_engine.scheduler.output import ModelOutput, SampledToken, ScheduledRequest, SchedulerOutput

logger = logging.getLogger(__name__)


class StepFailedError(CBEngineError):
    """No request of a plan could be computed."""


class ModelRunner:
    """Invariant: between two calls no step is bound, and the user's model is as it was."""

    def __init__(
        self,
        shadow: nn.Module,
        profile: ModelProfile,
        config: ResolvedConfig,
        backend: AttentionBackend,
        groups: Sequence[LayerGroup],
        pools: Sequence[KVGroup],
    ) -> None:
        self._profile = profile
        self._config = config
        self._backend = backend
        self._groups = groups
        self._sampler = Sampler(native=config.fuse_modules and profile.output_device.type == "cpu" and build.load())
        self._states: WeakKeyDictionary[Request, SamplingState] = WeakKeyDictionary()
        self.buckets = BucketTable(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_blocks_per_seq=config.expected_blocks_per_seq,
            pads_decode=config.pads_decode,
            pads_prefill=config.pads_prefill,
        )
        compiled = [StepKind.DECODE] * config.compile + [StepKind.PREFILL] * config.compile_prefill
        self._forwards = ForwardTable(
            shadow,
            self.buckets,
            takes_logits_to_keep=profile.takes_logits_to_keep,
            compiled_kinds=frozenset(compiled),
            compile_options=config.compile_options,
            strict=config.strict_shapes,
        )
        self._caches: dict[int, KVCache] = {}
        with torch.inference_mode():
            for group, pool in zip(groups, pools, strict=True):
                for layer in group.layers:
                    spec = layer_spec(layer, config.block_size)
                    self._caches[layer.layer_idx] = backend.allocate(spec, pool.num_blocks, layer.device)

    def drop_shadow(self) -> None:
        """Lets go of the module tree and of all that hangs on it, packed weights for one."""
        self._forwards.drop_shadow()

    def set_shadow(self, shadow: nn.Module) -> None:
        """Takes a new module tree over the same layers; the cache stays. Compiled code has to be warmed up again."""
        self._forwards.set_shadow(shadow)

    def close(self) -> None:
        """Lets go of everything on the device."""
        self.drop_shadow()
        self._caches.clear()

    @property
    def is_warm(self) -> bool:
        """Whether warm-up has run for the code there is now."""
        return self._forwards.is_frozen

    @property
    def coverage(self) -> Coverage:
        """Which padded shapes were warmed, used and missed."""
        return self._forwards.coverage

    # ---- steps -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        """Computes one step.

        A request that makes the step fail is found by halving the batch, so that its neighbours get their tokens:
        computing a step again is harmless, it writes the same keys and values to the same slots.

        Raises:
            StepFailedError: no request could be computed.
            ShapeNotWarmedError: in strict mode, see `ForwardTable.get`.
        """
        self._copy_blocks(plan.block_copies)
        output = self._execute_or_split(plan)
        if len(output.errors) == len(plan.scheduled):
            raise StepFailedError(next(iter(output.errors.values())))
        return output

    def _execute_or_split(self, plan: SchedulerOutput) -> ModelOutput:
        try:
            return self._execute(plan)
        except ShapeNotWarmedError:
            raise
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
        fast = plan.is_decode and self._config.decode_fast_path
        kind = StepKind.DECODE if fast else StepKind.PREFILL
        width = plan.block_tables[0].shape[1]
        bucket = self.buckets.pad(kind, len(plan.scheduled), plan.num_tokens, width)
        static_logits = self._forwards.pads(kind)
        batch = make_input_batch(
            plan.scheduled, plan.block_tables, bucket, self._config.block_size, static_logits=static_logits
        )
        return self._sample(plan.scheduled, self._forward(batch))

    @record_function("cb_engine.forward")  # a name in a profiler's trace
    def _forward(self, batch: InputBatch) -> torch.Tensor:
        """Logits [R, vocab] of the batch's wanted rows."""
        forward = self._forwards.get(batch.bucket, batch.logits_indices.numel())
        device = self._profile.input_device
        with bind(PagedStep(self._backend, self._groups, self._caches, batch)):
            return forward(
                batch.input_ids.to(device),
                batch.position_ids.to(device),
                batch.logits_indices.to(self._profile.output_device),
            )

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

    def _copy_together(self, copies: Sequence[BlockCopy]) -> None:
        for index, group in enumerate(self._groups):
            mine = [(c.src, c.dst) for c in copies if c.group == index]
            if not mine:
                continue
            pairs = torch.tensor(mine, dtype=torch.int64)
            for layer in group.layers:
                src, dst = pairs.to(layer.device).unbind(1)
                self._backend.copy_blocks(self._caches[layer.layer_idx], src, dst)

    # ---- sampling --------------------------------------------------------------------------------------------

    @record_function("cb_engine.sample")
    def _sample(self, scheduled: Sequence[ScheduledRequest], logits: torch.Tensor) -> ModelOutput:
        """Splits the wanted rows into prompt rows and sampling rows (see `_logits_indices`) and draws tokens."""
        entries: dict[str, list[list[TokenLogprob]]] = {}
        sampling: list[ScheduledRequest] = []
        rows: list[int] = []
        row = 0
        for item in scheduled:
            prompt_rows = len(prompt_logprob_rows(item))
            if item.request.sampling_params.prompt_logprobs is not None:
                entries[item.request.request_id] = prompt_entries(item, logits[row : row + prompt_rows])
            row += prompt_rows
            if item.samples:
                sampling.append(item)
                rows.append(row)
                row += 1
        if not sampling:
            return ModelOutput(prompt_logprobs=entries)
        wanted = logits[: len(rows)] if rows[-1] == len(rows) - 1 else logits[rows]
        output = self._sampler(wanted, [self._state_of(item.request) for item in sampling])
        ids = output.token_ids.tolist()
        failed = output.failed.tolist()
        logprobs = None if output.logprobs is None else output.logprobs.tolist()
        sampled: dict[str, SampledToken] = {}
        for i, item in enumerate(sampling):
            request = item.request
            if failed[i]:
                token = SampledToken(ids[i], failed=_NOTHING_TO_DRAW)
            elif logprobs is None or request.sampling_params.logprobs is None:
                token = SampledToken(ids[i])
            else:
                token = SampledToken(ids[i], logprobs[i], candidate_entries(output, i, ids[i], logprobs[i]))
            sampled[request.request_id] = token
        return ModelOutput(sampled, entries)

    def _state_of(self, request: Request) -> SamplingState:
        state = self._states.get(request)
        if state is None:
            state = self._states[request] = SamplingState(
                params=request.sampling_params,
                seed=request.seed,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=request.output_token_ids,
                stop_token_ids=request.stop_token_ids,
                bad_words_ids=request.bad_words_ids,
            )
        return state

    # ---- warm-up ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def warmup(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Runs the step's own functions over every listed shape, largest first, then freezes the list.

        Args:
            progress: called with (shapes done, shapes in all) after each.

        Returns:
            the number of shapes.
        """
        shapes = self.buckets.all()
        tables = [np.zeros((0, 0), np.int32) for _ in self._groups]
        for done, bucket in enumerate(shapes, start=1):
            batch = make_input_batch((), tables, bucket, self._config.block_size, static_logits=True)
            logits = self._forward(batch)
            self._sampler(logits[: bucket.num_seqs], [_GREEDY] * bucket.num_seqs)
            if progress is not None:
                progress(done, len(shapes))
        self._forwards.freeze()
        return len(shapes)


_NOTHING_TO_DRAW = (
    "the logits held NaN or infinity, or logit_bias, allowed_token_ids and bad_words together left no token"
)

_GREEDY = SamplingState(SamplingParams(temperature=0.0), 0, (), (), frozenset(), ())  # what warm-up samples with
