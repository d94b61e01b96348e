"""The synchronous core: one step at a time, on one thread.

Owns the scheduler, the block manager, the runner and the weight version. Does not know threads, HTTP or callers:
other threads reach it through `submit`, whose commands are carried out at the next step's edge.

    step():  drain commands -> schedule() -> execute(plan) -> update_from_output -> draft -> deliver
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cb_engine.attention.backend import AttentionBackend
from cb_engine.attention.selection import select_backend
from cb_engine.config import EngineConfig, ResolvedConfig, resolve_config, translate_config
from cb_engine.device import device_defaults, release_host_memory
from cb_engine.errors import EngineError, ModelChangedError, QueueFullError
from cb_engine.hints import WorkloadHints, normalize_hints
from cb_engine.intake import Intake, RequestOptions
from cb_engine.kv_cache.block_manager import BlockManager
from cb_engine.metrics import EngineStats, StepClock, take_stats
from cb_engine.output_processor import OutputProcessor
from cb_engine.outputs import GenerationOutput
from cb_engine.request import Request
from cb_engine.runner.drafters.source import draft_source
from cb_engine.runner.forward import Coverage
from cb_engine.runner.fusion import Fusion, fused_shadow
from cb_engine.runner.kv_layout import group_layers, size_groups
from cb_engine.runner.model_runner import ModelRunner, StepFailedError
from cb_engine.runner.probe import AttentionLayer, profile_model, run_probe
from cb_engine.runner.shadow import Fingerprint, fingerprint, make_shadow
from cb_engine.sampling_params import SamplingParams
from cb_engine.scheduler.output import ModelOutput, SchedulerOutput
from cb_engine.scheduler.scheduler import Scheduler, SchedulerConfig, make_fork_groups
from cb_engine.speculative.lookup import make_lookup
from cb_engine.speculative_config import SpeculativeConfig
from cb_engine.speculator import NoSpeculation, Speculator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Add:
    """Command: queue these requests; those with equal prompts compute it once."""

    requests: Sequence[Request]


@dataclass(frozen=True)
class Abort:
    """Command: end these requests with what they have."""

    request_ids: Sequence[str]


@dataclass(frozen=True)
class AbortAll:
    """Command: end everything that was submitted before."""


@dataclass(frozen=True)
class Call:
    """Command: run something at the step's edge, on the engine thread (a weight update, for example)."""

    action: Callable[[], None]


Command = Add | Abort | AbortAll | Call


class Engine:
    """Continuous batching over one model.

    Args:
        model: a transformers causal LM, its weights where they should be. It is read, never changed.
        tokenizer: for text prompts, text outputs and stop strings.
        config: an EngineConfig, transformers' ContinuousBatchingConfig, or a dict.
        hints: workload hints; see `WorkloadHints`.
        eos_token_id: ids that end a request; by default those of the model's generation config.

    Raises:
        UnsupportedModelError: the model has something that would be computed wrongly.
        ValueError: a setting is wrong, or there is no memory for a cache.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any | None = None,
        config: EngineConfig | Mapping[str, Any] | object | None = None,
        hints: WorkloadHints | Mapping[str, Any] | object | None = None,
        eos_token_id: int | Iterable[int] | None = None,
    ) -> None:
        self._model = model
        self._fingerprint = fingerprint(model)
        self._profile = profile_model(model, make_shadow(model))
        translated = translate_config(config)
        backend = _backend_for(translated.config, self._profile.layers)
        self.config: ResolvedConfig = resolve_config(
            translated,
            normalize_hints(hints),
            model_max_len=self._profile.max_model_len,
            device=device_defaults(self._profile.layers[0].device),
            block_size=backend.preferred_block_size,
        )
        shadow = self._build_shadow()  # before the cache is sized: packed weights take memory too
        drafts = draft_source(model, shadow, self._profile, self.config)
        groups = group_layers([*self._profile.layers, *(drafts.layers if drafts else ())])
        pools = size_groups(groups, self.config)
        self._blocks = BlockManager(
            pools,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                max_prefill_chunk=self.config.max_prefill_chunk,
                prefill_first=self.config.scheduler_type == "prefill_first",
            ),
            self._blocks,
        )
        self._runner = ModelRunner(
            shadow, self._profile, self.config, backend, groups, pools, blocks=self._blocks, drafts=drafts
        )
        self._speculator = self._make_speculator(self.config.speculative)
        self._processor = OutputProcessor(self._scheduler, tokenizer)
        self._commands: deque[Command] = deque()
        self._ids: set[str] = set()  # submitted and not ended yet
        self._submit_lock = threading.Lock()  # guards both: many threads may submit
        self._changed: list[Request] = []  # by a step, and not delivered yet
        self._clock = StepClock()
        self.intake = Intake(
            self.config,
            self._blocks,
            vocab_size=self._profile.vocab_size,
            eos_token_id=_model_eos(model) if eos_token_id is None else eos_token_id,
            tokenizer=tokenizer,
        )

    def _make_speculator(self, settings: SpeculativeConfig | None) -> Speculator | NoSpeculation:
        if settings is None:
            return NoSpeculation()
        drafter = self._runner.drafter
        return Speculator(
            self._scheduler,
            drafter or make_lookup(settings),
            settings.num_tokens,
            vocab_size=self._profile.vocab_size,
            adaptive=settings.adaptive,
            costs_time=drafter is not None,
            fixed_width=self.config.pads_decode,
        )

    # ---- work ------------------------------------------------------------------------------------------------

    def add_request(self, prompt: Any, sampling_params: SamplingParams | None = None, **options: Any) -> list[str]:
        """Queues one prompt; see `Intake.make` and `RequestOptions` for what may be given.

        Returns:
            the ids of its samples.
        """
        requests = self.intake.make(prompt, sampling_params or SamplingParams(), RequestOptions(**options))
        self.submit(Add(requests))
        return [request.request_id for request in requests]

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step's edge; its output says `finish_reason="abort"`."""
        self.submit(Abort([request_id]))

    def submit(self, command: Command) -> None:
        """Hands a command to the engine; may be called from any thread.

        Raises:
            ValueError: an id is in use. QueueFullError: `max_queue_size` requests or `max_queued_tokens` of their
                prompts wait already.
        """
        with self._submit_lock:
            if isinstance(command, Add):
                self._let_in(command.requests)
            self._commands.append(command)

    def _let_in(self, requests: Sequence[Request]) -> None:
        limit, most_tokens = self.config.max_queue_size, self.config.max_queued_tokens
        seats = self._scheduler.num_free_seats  # looked at first: whoever takes one meanwhile does not count twice
        seatless = self.num_queued - seats if limit else 0
        if limit and seatless >= limit:
            raise QueueFullError(f"{seatless} requests wait already, max_queue_size is {limit}; try later")
        if most_tokens and self.num_queued_tokens >= most_tokens:
            raise QueueFullError(
                f"{self.num_queued_tokens} prompt tokens wait already, max_queued_tokens is {most_tokens}; try later"
            )
        ids = {request.request_id for request in requests}
        taken = ids & self._ids
        if taken or len(ids) < len(requests):
            name = min(taken) if taken else "twice the same"
            raise ValueError(f"request_id {name!r} is in use; give another, or wait for it to finish")
        self._ids |= ids

    @property
    def num_queued(self) -> int:
        """Requests that wait, those not yet drained included."""
        return self._scheduler.num_waiting + len(self._undrained())

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of these."""
        return self._scheduler.num_waiting_tokens + sum(request.num_prompt_tokens for request in self._undrained())

    def _undrained(self) -> list[Request]:
        return [request for c in tuple(self._commands) if isinstance(c, Add) for request in c.requests]

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._commands) or self._scheduler.has_work

    def step(self) -> list[GenerationOutput]:
        """Runs one step.

        Returns:
            the terminal output of every request that ended, and a snapshot of every streaming one that got a token.

        Raises:
            EngineError: the engine itself failed; every unfinished request is lost.
        """
        self._drain_commands()
        started = time.perf_counter()
        plan = self._scheduler.schedule()
        if plan.scheduled:
            output = self._execute(plan)
            self._changed += self._scheduler.update_from_output(plan, output)
            self._speculator.after_step(plan, output, time.perf_counter() - started)
            self._clock.record(started, plan.num_tokens)
        return self._deliver()

    def _deliver(self) -> list[GenerationOutput]:
        # One that a step has changed may have been ended since.
        changed = list(dict.fromkeys(self._scheduler.take_ended() + self._changed))
        self._changed = []
        outputs = self._processor.process(changed)
        self._speculator.forget([request for request in changed if request.is_finished])
        with self._submit_lock:
            self._ids.difference_update(o.request_id for o in outputs if o.is_finished())
        return outputs

    def _drain_commands(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            match command:
                case Add(requests):
                    make_fork_groups(requests)
                    for request in requests:
                        self._scheduler.add(request)
                case Abort(request_ids):
                    for request_id in request_ids:
                        self._scheduler.abort(request_id)
                case AbortAll():
                    for request in self._scheduler.unfinished():
                        self._scheduler.abort(request.request_id)
                case Call(action):
                    action()

    def _execute(self, plan: SchedulerOutput) -> ModelOutput:
        try:
            output = self._runner.execute(plan)
        except StepFailedError as error:
            if not self._runner.works():
                raise EngineError(f"no request of the step could be computed: {error}") from error
            return ModelOutput(errors={item.request.request_id: str(error) for item in plan.scheduled})
        return output

    def fail_all(self, error: str) -> list[GenerationOutput]:
        """Ends every unfinished request with `finish_reason="error"`; the last thing a broken engine does."""
        pending = self._undrained()
        self._commands.clear()
        for request in pending:
            self._scheduler.add(request)
        for request in self._scheduler.unfinished():
            self._scheduler.fail(request, error)
        return self._deliver()

    def close(self) -> None:
        """Lets go of the cache, compiled code and packed weights at once; the engine cannot run afterwards."""
        self._runner.close()

    # ---- warm-up and weights ---------------------------------------------------------------------------------

    def warmup(self, progress: Callable[[int, int], object] | None = None, *, compile_only: bool = False) -> int:
        """Runs every padded shape once; see `ModelRunner.warmup`."""
        return self._runner.warmup(progress, compile_only=compile_only)

    @property
    def num_shapes(self) -> int:
        """Padded shapes that warm-up runs."""
        return len(self._runner.buckets.all())

    @property
    def is_warm(self) -> bool:
        """Whether warm-up has run for the code there is now."""
        return self._runner.is_warm

    @property
    def fusion(self) -> Fusion:
        """Which modules run in a faster form, and what memory the packed copies of weights take."""
        return self._fusion

    @property
    def coverage(self) -> Coverage:
        """Which padded shapes were warmed, used and missed."""
        return self._runner.coverage

    @property
    def weight_version(self) -> int:
        """Goes up whenever the model's weights are seen, or said, to have changed."""
        return self._blocks.weight_version

    def sync_weights(self) -> bool:
        """Compares the model, and a drafter that was given as an object, with what the engine was built on, and takes
        over what has changed. New weights of a drafter start no new weight version: no output depends on them.

        Torch's version counters show most writes to a parameter; a look at some values of each shows what its fused
        optimizers, and others that write through `.data`, have changed all over. Tell `weights_changed` of less.

        Returns:
            whether anything had changed.

        Raises:
            ModelChangedError: the layers, dtype, device or vocabulary of one of them are not the same any more.
        """
        seen = fingerprint(self._model)
        if seen == self._fingerprint:
            return self._sync_drafter()
        replaced = [t[:2] for t in seen.tensors] != [t[:2] for t in self._fingerprint.tensors]
        restructured = seen.structure != self._fingerprint.structure
        if (replaced or restructured) and profile_model(self._model, make_shadow(self._model)) != self._profile:
            raise ModelChangedError(
                "the model's layers, dtype, device or vocabulary changed; make a new engine for it "
                "(destroy_cached_continuous_batching_manager ends a persistent one)"
            )
        self._start_weight_version(seen, rebuild=replaced or restructured)
        return True

    def weights_changed(self) -> None:
        """Starts a new weight version: packed copies are made anew, the drafter's too, nothing cached so far is hit any
        more, running requests follow `running_on_weight_change`. On the engine thread only."""
        self._start_weight_version(fingerprint(self._model), rebuild=False, said=True)

    def _sync_drafter(self) -> bool:
        was_warm = self.is_warm
        changed = self._runner.sync_drafter(said=False, target_changed=False)
        self._warm_again(was_warm)
        return changed

    def _start_weight_version(self, seen: Fingerprint, *, rebuild: bool, said: bool = False) -> None:
        was_warm = self.is_warm
        self._runner.sync_drafter(said=said, target_changed=True)
        self._fingerprint = seen
        if rebuild or self._fusion.packed_bytes:
            self._runner.drop_shadow()  # the old packed copies go before the new ones are made
            release_host_memory()
            self._runner.set_shadow(self._build_shadow())
        self._warm_again(was_warm)
        self._scheduler.change_weights(self.weight_version + 1, self.config.running_on_weight_change)

    def _warm_again(self, was_warm: bool) -> None:
        """New modules are compiled anew: at once where a step may not wait for it."""
        if was_warm and not self.is_warm and self.config.strict_shapes:
            self.warmup()

    def _build_shadow(self) -> nn.Module:
        shadow, self._fusion = fused_shadow(
            lambda: make_shadow(self._model),
            lambda tree: run_probe(tree, self._profile),
            fuse=self.config.fuse_modules,
            pack=self.config.pack_weights,
        )
        return shadow

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes new values into the model's parameters, in place. On the engine thread only.

        Raises:
            ValueError: an unknown name, a wrong shape or kind of number; nothing is written then.
        """
        own = dict(self._model.named_parameters(remove_duplicate=False)) | dict(self._model.named_buffers())
        for name, tensor in tensors.items():
            if name not in own:
                raise ValueError(f"the model has no parameter {name!r}")
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name!r}: the update is no tensor but {type(tensor).__name__}")
            if own[name].is_floating_point() != tensor.is_floating_point():
                raise ValueError(f"{name!r} is {own[name].dtype}, the update {tensor.dtype}; convert it")
            if own[name].shape != tensor.shape:
                raise ValueError(f"{name!r} has shape {tuple(own[name].shape)}, the update {tuple(tensor.shape)}")
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        self.sync_weights()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. On the engine thread only."""
        self._blocks.reset_prefix_cache()

    # ---- questions -------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of all counters."""
        counted = take_stats(self._scheduler, self._blocks, self._clock, self._runner.coverage)
        # Those wait too that no step has seen yet, in a pause for example.
        return replace(counted, num_waiting=self.num_queued, num_waiting_tokens=self.num_queued_tokens)

    def check(self) -> None:
        """Verifies that no block is lost or held twice.

        Raises:
            RuntimeError: naming the first fault.
        """
        self._blocks.check()


def _backend_for(config: EngineConfig, layers: Sequence[AttentionLayer]) -> AttentionBackend:
    name = "static" if config.fake_static_device else config.attention_backend
    return select_backend(name, [layer.device for layer in layers], [layer.dtype for layer in layers])


def _model_eos(model: nn.Module) -> int | Iterable[int] | None:
    generation_config = getattr(model, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    return eos if eos is not None else getattr(getattr(model, "config", None), "eos_token_id", None)
