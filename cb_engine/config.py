"""The engine's settings: what a caller may say, and what it comes to.

Owns `EngineConfig` (every field optional, None meaning "decide for me"), the translation of transformers' names at
the public edge, and `ResolvedConfig`, which nobody changes any more. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from cb_engine.hints import WorkloadHints
from cb_engine.speculative_config import SpeculativeConfig, speculative_config

SchedulerType = Literal["fifo", "prefill_first"]
RunningPolicy = Literal["recompute", "continue", "abort"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. None means that the engine decides, from the device and the workload hints.

    Attributes:
        block_size: tokens per KV block.
        num_blocks: KV blocks of each layer group; None sizes the pool from free memory.
        max_memory_percent: share (0, 1] of the free memory that the pool may take.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens computed in one step.
        max_prefill_chunk: tokens of one prompt computed in one step.
        max_model_len: longest sequence, prompt and output; None takes the model's limit.
        enable_prefix_caching: keep computed blocks and reuse them for equal prefixes.
        decode_fast_path: False sends decode steps through the general path; anything else leaves them their own.
        pad_decode_batches: pad eager steps to buckets; compiled and accelerator steps always are.
        compile: compile the decode steps with `torch.compile`.
        compile_prefill: compile the other steps too.
        compile_options: keyword arguments for `torch.compile` (backend, mode, fullgraph, options).
        pack_weights: keep a copy of linear weights in the layout of the CPU's matrix kernels (uncompiled engines only);
            None does so if memory allows.
        fuse_modules: on the CPU, let native kernels draw tokens, and compute norms, MLPs, attention and whole layers of
            known kinds (uncompiled engines only; all but norms need packed weights); None does so.
        strict_shapes: a padded shape that warm-up has not run is an error rather than run eagerly, also before warm-up.
        attention_backend: "torch", "native", "static" (plain PyTorch without data-dependent shapes), or "auto": native
            where it can be built.
        scheduler_type: "fifo" lets decodes go first, "prefill_first" lets prompts.
        max_queue_size: requests that may wait beyond those for which there are seats, `max_num_seqs` of them; 0 is
            unlimited.
        max_queued_tokens: prompt tokens of all that wait, seat or not; 0 is unlimited.
        running_on_weight_change: what becomes of running requests when weights change under them.
        return_logprobs: report the log-probability of every sampled token, also where SamplingParams asks for none.
        seed: makes requests without a seed of their own reproducible too, given the order of submission.
        speculative: a SpeculativeConfig or a dict of its fields, `{"method": "ngram"}` for one; None: no speculation.
        fake_static_device: run steps as a device with static shapes would, which refuses every shape that warm-up has
            not run: proves on a CPU what a Gaudi would have to compile. Slow.
    """

    block_size: int | None = None
    num_blocks: int | None = None
    max_memory_percent: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_prefill_chunk: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    decode_fast_path: bool | None = None
    pad_decode_batches: bool | None = None
    compile: bool = False
    compile_prefill: bool = False
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    pack_weights: bool | None = None
    fuse_modules: bool | None = None
    strict_shapes: bool = False
    attention_backend: Literal["auto", "torch", "native", "static"] = "auto"
    scheduler_type: SchedulerType = "fifo"
    max_queue_size: int = 0
    max_queued_tokens: int = 0
    running_on_weight_change: RunningPolicy = "recompute"
    return_logprobs: bool = False
    seed: int | None = None
    speculative: SpeculativeConfig | Mapping[str, Any] | None = None
    fake_static_device: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} must be an integer or None, not {value!r}")
            if value is not None and not 1 <= value <= _POSITIVE[name]:
                raise ValueError(
                    f"{name}={value} must be from 1 to {_POSITIVE[name]}, or None to let the engine decide"
                )
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in _OPTIONAL_FLAGS):
                raise TypeError(f"{name} must be True or False, not {value!r}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, allowed))}")
        percent = self.max_memory_percent
        if percent is not None and (isinstance(percent, bool) or not isinstance(percent, int | float)):
            raise TypeError(f"max_memory_percent must be a number or None, not {percent!r}")
        if percent is not None and not 0 < percent <= 1:
            raise ValueError(f"max_memory_percent={self.max_memory_percent} must be in (0, 1]: it is a share")
        for name in ("max_queue_size", "max_queued_tokens"):
            limit = getattr(self, name)
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
                raise ValueError(f"{name}={limit!r} must be 0 (unlimited) or positive")
        if not isinstance(self.compile_options, Mapping):
            raise TypeError(f"compile_options must be a dict of torch.compile arguments, not {self.compile_options!r}")
        unknown = self.compile_options.keys() - _COMPILE_OPTIONS
        if unknown:
            raise ValueError(
                f"compile_options has an unknown key {sorted(unknown)[0]!r}; known ones: {', '.join(_COMPILE_OPTIONS)}"
            )
        if self.compile_options.get("mode") in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"compile_options mode={self.compile_options['mode']!r} captures graphs around attention, whose inputs "
                "change every step; use 'default' or 'max-autotune-no-cudagraphs'"
            )
        for name in ("pack_weights", "fuse_modules"):
            if getattr(self, name) and (self.compile or self.compile_prefill):
                raise ValueError(f"{name}=True is for uncompiled engines: the compiler does this itself")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise TypeError(f"seed must be an integer or None, not {self.seed!r}")
        object.__setattr__(self, "speculative", speculative_config(self.speculative))
        if self.fake_static_device:
            self._check_static()

    def _check_static(self) -> None:
        """What a device with static shapes cannot have."""
        wishes = {
            "compile": self.compile,
            "compile_prefill": self.compile_prefill,
            "decode_fast_path=False": self.decode_fast_path is False,
            "pad_decode_batches=False": self.pad_decode_batches is False,
            "attention_backend": self.attention_backend not in ("auto", "static"),
        }
        for name, wished in wishes.items():
            if wished:
                raise ValueError(f"fake_static_device=True excludes {name}: its steps are padded, and of one kind")


_COMPILE_OPTIONS = ("backend", "mode", "fullgraph", "options")  # shapes are static: `dynamic` is not a choice
_POSITIVE = {  # and the largest value that makes sense
    "block_size": 1 << 16,
    "num_blocks": 1 << 24,
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 24,
    "max_prefill_chunk": 1 << 24,
    "max_model_len": 1 << 26,
}
_OPTIONAL_FLAGS = ("decode_fast_path", "pad_decode_batches", "pack_weights", "fuse_modules")
_FLAGS = (
    *_OPTIONAL_FLAGS,
    "enable_prefix_caching",
    "compile",
    "compile_prefill",
    "strict_shapes",
    "return_logprobs",
    "fake_static_device",
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "attention_backend": ("auto", "torch", "native", "static"),
    "scheduler_type": ("fifo", "prefill_first"),
    "running_on_weight_change": ("recompute", "continue", "abort"),
}

# transformers' spelling -> ours, where only the name differs.
_RENAMED = {
    "page_size": "block_size",
    "max_batch_tokens": "max_num_batched_tokens",
    "max_requests_per_batch": "max_num_seqs",
    "allow_block_sharing": "enable_prefix_caching",
}
# transformers' fields that describe its own machinery. At these values nothing is asked of ours; at others something
# is asked that this engine does not have, and saying so beats pretending.
_MOOT: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_async_batching": ((None, False), "steps are not overlapped; leave it None"),
    "use_cuda_graph": ((None, False, (False, False)), "no graphs are captured; use compile=True"),
    "q_padding_interval_size": ((0,), "shapes follow power-of-two buckets; leave it 0"),
    "kv_padding_interval_size": ((0,), "shapes follow power-of-two buckets; leave it 0"),
    "safety_margin": ((None,), "admission reserves a block for every running request; leave it None"),
    "cpu_offload_space": ((0, 0.0, None), "preempted requests are recomputed, not swapped; leave it 0"),
    "max_cached_graphs": ((None,), "deprecated upstream; leave it None"),
}
# Always true here, or without any effect on what is computed.
_GRANTED = (
    "auto_switch_to_flash",
    "cpu_offload_space_safety_threshold",
    "per_request_processors",
    "drop_unsupported_processors",
    "disable_nccl_graph_mixing",
    "cpu_group_timeout",
    "use_default_compile_configs",  # its own __post_init__ has turned it into default_compile_level
)
_UPSTREAM_ONLY = (
    "max_blocks_per_request",
    "varlen_compile_config",
    "decode_compile_config",
    "default_compile_level",
)


@dataclass(frozen=True)
class Translated:
    """A caller's configuration in our words, and the table width that only transformers' config can carry."""

    config: EngineConfig
    max_blocks_per_request: int | None = None


def translate_config(config: EngineConfig | Mapping[str, Any] | object | None) -> Translated:
    """Accepts an EngineConfig, transformers' `ContinuousBatchingConfig`, or a dict with names of either.

    Raises:
        ValueError: an unknown name, or a transformers setting that asks for what this engine does not have.
    """
    if config is None:
        return Translated(EngineConfig())
    if isinstance(config, EngineConfig):
        return Translated(config)
    if isinstance(config, Mapping):
        return _translate_names(dict(config))
    if is_dataclass(config) and not isinstance(config, type):
        given = {f.name: getattr(config, f.name) for f in fields(config)}
        defaults = {f.name: f.default for f in fields(config)}
        # An untouched field means "no wish", which lets our own default hold (a page of 256 tokens is not ours).
        return _translate_names({k: v for k, v in given.items() if v != defaults[k]})
    raise TypeError(
        "continuous_batching_config must be an EngineConfig, a ContinuousBatchingConfig or a dict, not "
        f"{type(config).__name__}"
    )


def _translate_names(given: dict[str, Any]) -> Translated:
    known = {f.name for f in fields(EngineConfig)}
    ours: dict[str, Any] = {}
    width: int | None = None
    for name, value in given.items():
        if name in known:
            ours[name] = value
        elif name in _RENAMED:
            if given.get(_RENAMED[name], value) != value:
                raise ValueError(
                    f"{name}={value!r} and {_RENAMED[name]}={given[_RENAMED[name]]!r} are the same setting"
                )
            ours[_RENAMED[name]] = value
        elif name in _MOOT:
            if value not in _MOOT[name][0]:
                raise ValueError(f"{name}={value!r} is not available: {_MOOT[name][1]}")
        elif name == "max_blocks_per_request":
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"max_blocks_per_request={value!r} must be None, 0 (no fast path) or positive")
            if value == 0:
                ours["decode_fast_path"] = False
            width = value or None
        elif name not in _GRANTED and name not in _UPSTREAM_ONLY:
            raise ValueError(f"unknown setting {name!r}; known ones: {', '.join(sorted(known))}")
    ours.update(_translate_compile(given))
    return Translated(EngineConfig(**ours), width)


def _translate_compile(given: Mapping[str, Any]) -> dict[str, Any]:
    """transformers has a config per path and levels 0 to 3; ours are two switches and one set of options."""
    level = given.get("default_compile_level") or 0
    configs = [given.get("decode_compile_config"), given.get("varlen_compile_config")]
    options = [_compile_options(c) for c in configs if c is not None]
    if len(options) == 2 and options[0] != options[1]:
        raise ValueError("decode_compile_config and varlen_compile_config differ: compile_options is one for both")
    if not level and not options:
        return {}
    modes = {1: "default", 2: "max-autotune-no-cudagraphs", 3: "max-autotune-no-cudagraphs"}
    if level not in (0, *modes):
        raise ValueError(f"default_compile_level={level!r} must be 0, 1, 2 or 3")
    chosen = options[0] if options else {"mode": modes[level]}
    return {"compile": True, "compile_prefill": configs[1] is not None, "compile_options": chosen}


def _compile_options(config: object) -> dict[str, Any]:
    raw = dict(config) if isinstance(config, Mapping) else asdict(config)  # type: ignore[call-overload]
    if raw.get("mode") == "reduce-overhead":
        raw["mode"] = None  # CompileConfig's default, meant for graphs that are not captured here
    return {k: v for k, v in raw.items() if k in _COMPILE_OPTIONS and v is not None}


@dataclass(frozen=True)
class ResolvedConfig:
    """What an EngineConfig has come to for one model, device and workload. Read by all, changed by none."""

    block_size: int
    num_blocks: int | None
    memory_percent: float
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    max_model_len: int
    expected_model_len: int  # longest sequence the hints announce; sizes the pool and the block ladder
    enable_prefix_caching: bool
    decode_fast_path: bool
    pads_decode: bool
    pads_prefill: bool
    compile: bool
    compile_prefill: bool
    compile_options: Mapping[str, Any]
    pack_weights: bool | None
    fuse_modules: bool
    strict_shapes: bool
    attention_backend: str
    scheduler_type: SchedulerType
    max_queue_size: int
    max_queued_tokens: int
    running_on_weight_change: RunningPolicy
    return_logprobs: bool
    seed: int | None
    speculative: SpeculativeConfig | None
    fake_static_device: bool
    max_logprobs: int | None  # the most that a request may ask for; None: the whole vocabulary

    @property
    def expected_blocks_per_seq(self) -> int:
        """Width of the block table of the longest sequence announced."""
        return -(-self.expected_model_len // self.block_size)


@dataclass(frozen=True)
class DeviceDefaults:
    """What suits a device when the caller has no wish; see `cb_engine.device`."""

    memory_percent: float
    max_num_seqs: int
    max_num_batched_tokens: int
    pads: bool


_STATIC_LOGPROBS = 20  # as in OpenAI's interface

# For models that name no limit, and callers that name none either.
_FALLBACK_MODEL_LEN = 32768


def resolve_config(
    translated: Translated,
    hints: WorkloadHints,
    *,
    model_max_len: int | None,
    device: DeviceDefaults,
    block_size: int,
) -> ResolvedConfig:
    """Decides everything a caller has left open. What the caller said always wins over hints and defaults.

    Args:
        model_max_len: the longest sequence the model's positions are defined for, None if it names none.
        block_size: tokens per block that suit the attention backend.

    Raises:
        ValueError: two settings that exclude each other, with the way out.
    """
    config = translated.config
    if model_max_len and config.max_model_len and config.max_model_len > model_max_len:
        raise ValueError(
            f"max_model_len={config.max_model_len} exceeds {model_max_len}, the length up to which the model's "
            "positions are defined and do not depend on the other requests of a batch; lower it"
        )
    if config.compile and config.decode_fast_path is False:
        raise ValueError("compile=True compiles the decode fast path, which decode_fast_path=False turns off")
    max_model_len = config.max_model_len or model_max_len or _FALLBACK_MODEL_LEN
    block_size = config.block_size or block_size
    max_num_seqs, max_num_batched_tokens = _step_limits(config, hints, device)
    fast_path = config.decode_fast_path is not False
    compiled = config.compile or config.compile_prefill
    static = config.fake_static_device
    pads = static or (device.pads if config.pad_decode_batches is None else config.pad_decode_batches)
    return ResolvedConfig(
        block_size=block_size,
        num_blocks=config.num_blocks,
        memory_percent=config.max_memory_percent or device.memory_percent,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk=min(config.max_prefill_chunk or max_num_batched_tokens, max_num_batched_tokens),
        max_model_len=max_model_len,
        expected_model_len=_expected_len(translated, hints, max_model_len, block_size),
        enable_prefix_caching=config.enable_prefix_caching,
        decode_fast_path=fast_path,
        pads_decode=fast_path and (pads or config.compile),
        pads_prefill=device.pads or static or config.compile_prefill,
        compile=config.compile,
        compile_prefill=config.compile_prefill,
        compile_options=config.compile_options,
        # Both are opaque to a compiler, which has its own ways to the same end.
        pack_weights=False if compiled or static else config.pack_weights,
        fuse_modules=config.fuse_modules is not False and not compiled and not static,
        strict_shapes=config.strict_shapes,
        attention_backend="static" if static else config.attention_backend,
        scheduler_type=config.scheduler_type,
        max_queue_size=config.max_queue_size,
        max_queued_tokens=config.max_queued_tokens,
        running_on_weight_change=config.running_on_weight_change,
        return_logprobs=config.return_logprobs,
        seed=config.seed,
        speculative=speculative_config(config.speculative),
        fake_static_device=static,
        max_logprobs=_STATIC_LOGPROBS if static else None,
    )


def _step_limits(config: EngineConfig, hints: WorkloadHints, device: DeviceDefaults) -> tuple[int, int]:
    tokens = config.max_num_batched_tokens or device.max_num_batched_tokens
    if config.max_num_seqs and config.max_num_batched_tokens and config.max_num_seqs > tokens:
        raise ValueError(
            f"max_num_seqs={config.max_num_seqs} exceeds max_num_batched_tokens={tokens}: a step could not give each "
            "sequence its token; raise the latter"
        )
    if config.max_num_seqs:
        return config.max_num_seqs, max(tokens, config.max_num_seqs)
    known = min(hints.get("num_requests") or device.max_num_seqs, device.max_num_seqs)
    return min(known, tokens), tokens


def _expected_len(translated: Translated, hints: WorkloadHints, max_model_len: int, block_size: int) -> int:
    if translated.max_blocks_per_request:
        return min(translated.max_blocks_per_request * block_size, max_model_len)
    prompt, generated = hints.get("max_prompt_length"), hints.get("max_generated_length")
    if not prompt or not generated:
        return max_model_len
    return min(prompt + generated, max_model_len)
