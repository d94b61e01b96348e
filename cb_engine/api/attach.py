"""`attach(model)`: gives one model instance the batch interface of transformers' `ContinuousMixin`.

Owns what is stored on the model: an `Attachment` and bound methods, all on the instance. The class, the modules, the
config and the weights stay as they are, and `detach` takes everything away again.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from tqdm.auto import tqdm

from cb_engine.api.generation_config import GenerationSettings
from cb_engine.api.manager import ContinuousBatchingManager, spread_params
from cb_engine.config import EngineConfig, translate_config
from cb_engine.engine import Engine
from cb_engine.errors import EngineError, EngineStoppedError, UnsupportedModelError
from cb_engine.hints import WorkloadHints, normalize_hints
from cb_engine.intake import RequestOptions, naming_input, to_token_ids
from cb_engine.outputs import GenerationOutput
from cb_engine.request import Request
from cb_engine.runner.probe import profile_model
from cb_engine.runner.shadow import make_shadow
from cb_engine.sampling_params import SamplingParams

Config = EngineConfig | Mapping[str, Any] | object | None
Hints = WorkloadHints | Mapping[str, Any] | object | None

_ATTRIBUTE = "_cb_engine"


@dataclass
class Attachment:
    """What `attach` stores on the model. A copy of the model gets a fresh one: engines are not copied."""

    tokenizer: Any | None = None
    persistent: ContinuousBatchingManager | None = field(default=None, repr=False)
    managers: weakref.WeakSet[ContinuousBatchingManager] = field(default_factory=weakref.WeakSet, repr=False)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # guards both

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        return Attachment(self.tokenizer)

    def __reduce__(self) -> tuple[type[Attachment], tuple[Any]]:
        return Attachment, (self.tokenizer,)


def attach(model: nn.Module, *, tokenizer: Any | None = None) -> nn.Module:
    """Gives this model instance `generate_batch` and the rest of the continuous-batching interface.

    The model is run once, on four tokens, to learn its attention layers; attaching again replaces the tokenizer.

    Args:
        model: a transformers causal LM, or a PEFT wrapper of one, its weights where they should be.
        tokenizer: for text prompts, text outputs and stop strings.

    Returns:
        the model.

    Raises:
        UnsupportedModelError: naming the layer or setting that the engine would compute wrongly.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach needs a loaded model, not {model!r}; load it with AutoModelForCausalLM.from_pretrained"
        )
    if isinstance(model, OptimizedModule):
        raise UnsupportedModelError(
            "attach needs the model itself, not what torch.compile made of it; attach the one that was compiled "
            "(`compiled._orig_mod`), and let EngineConfig(compile=True) compile the steps"
        )
    if _ATTRIBUTE in model.__dict__:
        detach(model)
    profile_model(model, make_shadow(model))
    object.__setattr__(model, _ATTRIBUTE, Attachment(tokenizer))
    for function in _METHODS:
        object.__setattr__(model, function.__name__, functools.partial(function, model))
    return model


def detach(model: nn.Module) -> nn.Module:
    """Undoes `attach`, ending a persistent manager; does nothing to a model that is not attached."""
    if _ATTRIBUTE not in model.__dict__:
        return model
    destroy_cached_continuous_batching_manager(model)
    for function in _METHODS:
        object.__delattr__(model, function.__name__)
    object.__delattr__(model, _ATTRIBUTE)
    return model


def weights_changed(model: nn.Module) -> None:
    """Tells the model's managers, the persistent one and those in use, that weights were written in place in a way that
    neither torch's version counters nor a look at some of the values shows: its own, or those of what drafts for it.

    Raises:
        ValueError: the model is not attached.
    """
    if _ATTRIBUTE not in model.__dict__:
        raise ValueError(
            f"this {type(model).__name__} is not attached; if it drafts for a model that is, call weights_changed on "
            "that one, whose drafter is made anew too"
        )
    attachment = _attachment(model)
    with attachment.lock:
        managers = list(attachment.managers)
    for manager in managers:
        with suppress(EngineError, EngineStoppedError):  # it computes nothing any more
            manager.weights_changed()


def _attachment(model: nn.Module) -> Attachment:
    attachment = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(attachment, Attachment):
        raise ValueError(f"this {type(model).__name__} is not attached; call cb_engine.attach(model) first")
    return attachment


# ---- methods of an attached model; `self` is the model -----------------------------------------------------------


def init_continuous_batching(
    self: nn.Module,
    generation_config: Any | None = None,
    continuous_batching_config: Config = None,
    workload_hints: Hints = None,
) -> ContinuousBatchingManager:
    """Returns a manager for this model: the persistent one, if there is one and it suits, else a new one.

    Args:
        generation_config: what requests without SamplingParams follow; by default the model's own.
        continuous_batching_config: an EngineConfig, transformers' ContinuousBatchingConfig, or a dict.
        workload_hints: what is known of the work to come; see `WorkloadHints`.
    """
    settings = _settings_of(self, generation_config, {})
    return _manager(self, settings, continuous_batching_config, workload_hints)


def _settings_of(model: nn.Module, given: Any | None, overrides: Mapping[str, Any]) -> GenerationSettings:
    return GenerationSettings.of(getattr(model, "generation_config", None), given, overrides)


def _manager(
    model: nn.Module,
    settings: GenerationSettings,
    config: Config,
    hints: Hints,
    *,
    persistent: bool = False,
    session: bool = False,
    follow: bool = True,
) -> ContinuousBatchingManager:
    """The persistent manager if it suits and still fits the model, else a new one.

    Args:
        persistent: a new manager becomes the persistent one, unless another is in use.
        session: begin a session of it, before anybody else can end it.
        follow: requests without SamplingParams follow `settings` from now on.
    """
    attachment = _attachment(model)
    if config is None:
        config = getattr(settings.config, "continuous_batching_config", None)
    wished = None if config is None else translate_config(config)
    with attachment.lock:
        manager = attachment.persistent
        if manager is not None and not (manager.suits(wished) and manager.follows_model()):
            if not manager.in_use:
                manager.destroy()
                attachment.persistent = None
            manager = None
        if manager is None:
            engine = Engine(
                model,
                tokenizer=attachment.tokenizer,
                config=config,
                hints=hints,
                eos_token_id=settings.eos_token_id,
            )
            manager = ContinuousBatchingManager(engine, settings, wished or translate_config(None))
            attachment.managers.add(manager)
            if persistent and attachment.persistent is None:
                attachment.persistent = manager
        if session:
            manager.begin_session(settings if follow else None)
        elif follow:
            manager.follow(settings)
        return manager


def destroy_cached_continuous_batching_manager(self: nn.Module) -> None:
    """Ends the persistent manager, if there is one, and frees its cache."""
    attachment = _attachment(self)
    with attachment.lock:
        if attachment.persistent is not None:
            attachment.persistent.destroy()
            attachment.persistent = None


@contextmanager
def continuous_batching_context_manager(
    self: nn.Module,
    generation_config: Any | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: Config = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: Hints = None,
) -> Generator[ContinuousBatchingManager, None, None]:
    """A started manager for the duration of the block; work accepted in it is finished at its end.

    Args:
        block, timeout: how long the end waits for that work.
        persistent_manager: keep the manager, its cache and compiled code for the next call.
        warmup: run every padded shape first.

    If the block raises, unfinished work is aborted, unless others use the same persistent manager.
    """
    settings = _settings_of(self, generation_config, {})
    manager = _manager(
        self, settings, continuous_batching_config, workload_hints, persistent=persistent_manager, session=True
    )
    with _session(self, manager, with_settings=True, warmup=warmup, block=block, timeout=timeout):
        yield manager


@contextmanager
def _session(
    model: nn.Module,
    manager: ContinuousBatchingManager,
    *,
    with_settings: bool,
    warmup: bool,
    block: bool = True,
    timeout: float | None = None,
    progress_bar: bool = False,
) -> Generator[None, None, None]:
    """One caller's use of a manager whose session has begun; the last of several callers stops it."""
    failed = True
    try:
        if warmup:
            manager.warmup(progress_bar)
        yield
        failed = False
    finally:
        manager.end_session(
            with_settings=with_settings,
            block=block,
            timeout=timeout,
            keep=_attachment(model).persistent is manager,
            hard_stop=failed,
        )


def generate_batch(
    self: nn.Module,
    inputs: Sequence[Any],
    generation_config: Any | None = None,
    continuous_batching_config: Config = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    *,
    workload_hints: Hints = None,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Generates for a batch of prompts with continuous batching, with the weights as they are now.

    Args:
        inputs: prompts as token ids (lists, arrays, tensors), or as strings if a tokenizer is attached.
        generation_config: as in transformers' `generate_batch`: what is unset is off, and without a length a request
            may run to the maximum length. By default the model's own.
        continuous_batching_config: an EngineConfig, transformers' ContinuousBatchingConfig, or a dict.
        record_timestamps: record the time of every token.
        progress_bar: show progress.
        persistent_manager: keep the engine for the next call.
        warmup: run every padded shape first (there are none on an uncompiled CPU).
        workload_hints: override what is read off the inputs; all that a kept engine is sized by.
        sampling_params: one for all, or one per input; of the generation config only the EOS and, for those without
            `max_tokens`, the length count then. Excludes GenerationConfig overrides but max_new_tokens.
        **kwargs: GenerationConfig overrides.

    Returns:
        one output per sample, in the order of the inputs; the samples of an input are neighbours.

    Raises:
        ValueError: an input is not valid (its index is named), before anything ran.
        TypeError: an argument that neither this function nor GenerationConfig has.
        EngineError: the engine failed; `.outputs` holds what had finished.
    """
    settings = _settings_of(self, generation_config, kwargs)
    if sampling_params is not None and kwargs.keys() - {"max_new_tokens"}:
        raise TypeError(f"{sorted(kwargs)} and sampling_params both given; put everything into sampling_params")
    inputs = _list_of(inputs)
    if not inputs:
        return {}
    prompts, params = _prompts_of(self, inputs, settings, sampling_params, kwargs.get("max_new_tokens"))
    hints = normalize_hints(workload_hints)
    if not persistent_manager:  # an engine that is kept is not cut to the size of its first call
        hints = _hints_of(prompts, params) | hints
    options = RequestOptions(eos_token_id=_eos_option(settings), record_timestamps=record_timestamps)
    manager = _manager(
        self, settings, continuous_batching_config, hints, persistent=persistent_manager, session=True, follow=False
    )
    with _session(self, manager, with_settings=False, warmup=warmup, progress_bar=progress_bar):
        requests = manager.make_all(prompts, params, options)
        return _collect(manager, requests, progress_bar)


def _list_of(inputs: Any) -> list[Any]:
    if isinstance(inputs, Mapping):
        raise TypeError("inputs must be a list of prompts, not a tokenizer's output or a dict; pass its ['input_ids']")
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Iterable):
        raise TypeError(f"inputs must be a list of prompts, not one {type(inputs).__name__}; put it into a list")
    return list(inputs)


def _prompts_of(
    model: nn.Module,
    inputs: Sequence[Any],
    settings: GenerationSettings,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    max_new_tokens: int | None,
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Token ids and SamplingParams of every input."""
    tokenizer = _attachment(model).tokenizer
    prompts: list[list[int]] = []
    params: list[SamplingParams] = []
    for index, given in enumerate(spread_params(sampling_params, len(inputs))):
        with naming_input(index):
            prompts.append(to_token_ids(inputs[index], tokenizer))
            if given is None:
                params.append(settings.sampling_params(len(prompts[-1])))
            else:
                announced = settings.max_new_tokens if given.max_tokens is None else None
                limit = announced if max_new_tokens is None else max_new_tokens
                params.append(given if limit is None else given.clone(max_tokens=limit))
    return prompts, params


def _hints_of(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> WorkloadHints:
    """What the inputs tell of the work; an open-ended request leaves the generated length unknown."""
    limits = [p.max_tokens for p in params]
    hints: WorkloadHints = {
        "max_prompt_length": max(len(prompt) for prompt in prompts),
        "num_requests": sum(p.n for p in params),
    }
    if all(limit is not None for limit in limits):
        hints["max_generated_length"] = max(limit or 0 for limit in limits)
    return hints


def _eos_option(settings: GenerationSettings) -> int | list[int]:
    return -1 if settings.eos_token_id is None else settings.eos_token_id


def _collect(
    manager: ContinuousBatchingManager, requests: Sequence[Request], progress_bar: bool
) -> dict[str, GenerationOutput]:
    """Submits the requests and waits for their terminal outputs."""
    arrived: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
    outputs: dict[str, GenerationOutput] = {}
    manager.submit_requests(requests, arrived.put)
    try:
        with tqdm(total=len(requests), disable=not progress_bar, desc="Generating", unit="request") as bar:
            num_tokens = 0
            while len(outputs) < len(requests):
                output = arrived.get()
                outputs[output.request_id] = output
                num_tokens += len(output.generated_tokens)
                bar.set_postfix(tokens=num_tokens, refresh=False)
                bar.update()
    except BaseException:
        manager.cancel_requests(request.request_id for request in requests)
        raise
    in_order = {request.request_id: outputs[request.request_id] for request in requests}
    failure = manager.failure
    if failure is not None and any(output.error == str(failure) for output in in_order.values()):
        finished = {i: output for i, output in in_order.items() if output.finish_reason != "error"}
        raise EngineError(str(failure), finished) from failure
    return in_order


_METHODS = (
    init_continuous_batching,
    destroy_cached_continuous_batching_manager,
    continuous_batching_context_manager,
    generate_batch,
)
