"""Settings: what is refused and how it is named, transformers' spellings, and what open settings come to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers import CompileConfig, ContinuousBatchingConfig

from cb_engine.config import (
    DeviceDefaults,
    EngineConfig,
    ResolvedConfig,
    Translated,
    resolve_config,
    translate_config,
)
from cb_engine.hints import WorkloadHints
from cb_engine.speculative_config import SpeculativeConfig

# ---- EngineConfig ------------------------------------------------------------------------------------------------

POSITIVE = ["block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk", "max_model_len"]
FLAGS = [
    "enable_prefix_caching",
    "compile",
    "compile_prefill",
    "strict_shapes",
    "return_logprobs",
    "fake_static_device",
]
OPTIONAL_FLAGS = ["decode_fast_path", "pad_decode_batches", "pack_weights", "fuse_modules"]
QUEUE_LIMITS = ["max_queue_size", "max_queued_tokens"]
CHOICES = ["attention_backend", "scheduler_type", "running_on_weight_change"]

BAD: list[tuple[str, Any]] = [
    *((name, bad) for name in POSITIVE for bad in (0, -1, 1.5, "8", True)),
    *((name, bad) for name in FLAGS for bad in (None, 1, "yes")),
    *((name, bad) for name in OPTIONAL_FLAGS for bad in (1, "yes")),
    *((name, bad) for name in CHOICES for bad in ("nonsense", None, 3)),
    *(("max_memory_percent", bad) for bad in (0, -0.1, 1.01, 90, float("nan"), "0.5", True)),
    *((name, bad) for name in QUEUE_LIMITS for bad in (-1, None, 1.0, "3", True)),
    *(("seed", bad) for bad in (1.0, "3", True)),
    *(("compile_options", bad) for bad in (None, 5, "mode")),
    *(("speculative", bad) for bad in ("ngram", {}, {"method": "medusa"}, {"method": "ngram", "k": 3}, 7)),
]


def call(name: str, value: Any) -> EngineConfig:
    return EngineConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{n}={v!r}" for n, v in BAD])
def test_a_bad_value_is_refused_by_the_name_of_its_field(name: str, value: Any):
    with pytest.raises((TypeError, ValueError), match=name):
        call(name, value)


GOOD: list[tuple[str, Any]] = [
    *((name, good) for name in POSITIVE for good in (None, 1, 4096)),
    *((name, good) for name in FLAGS for good in (True, False)),
    *((name, good) for name in OPTIONAL_FLAGS for good in (None, True, False)),
    *(("attention_backend", good) for good in ("auto", "torch", "native")),
    *(("scheduler_type", good) for good in ("fifo", "prefill_first")),
    *(("running_on_weight_change", good) for good in ("recompute", "continue", "abort")),
    *(("max_memory_percent", good) for good in (None, 0.01, 1, 1.0)),
    *((name, good) for name in QUEUE_LIMITS for good in (0, 7)),
    *(("seed", good) for good in (None, 0, -3, 2**64 - 1)),
    ("compile_options", {"mode": "default"}),
    *(("speculative", good) for good in (None, SpeculativeConfig(method="ngram"))),
]


@pytest.mark.parametrize(("name", "value"), GOOD, ids=[f"{n}={v!r}" for n, v in GOOD])
def test_a_good_value_is_kept(name: str, value: Any):
    assert getattr(call(name, value), name) == value


def test_these_tests_know_every_field():
    fields = {f.name for f in dataclasses.fields(EngineConfig)}
    assert {name for name, _ in BAD} == {name for name, _ in GOOD} == fields


def test_a_config_is_frozen_and_takes_keywords_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().block_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        EngineConfig(16)  # type: ignore[misc]


# ---- translation -------------------------------------------------------------------------------------------------


def translated(**fields: Any) -> EngineConfig:
    """What transformers' config comes to; the same has to come of a dict with its names."""
    from_dict = translate_config(fields)
    assert translate_config(ContinuousBatchingConfig(**fields)) == from_dict
    return from_dict.config


def test_nothing_said_means_nothing_decided():
    assert translate_config(None) == Translated(EngineConfig())
    assert translate_config({}) == Translated(EngineConfig())
    assert translate_config(ContinuousBatchingConfig()) == Translated(EngineConfig())


def test_an_engine_config_passes_as_it_is():
    config = EngineConfig(block_size=8)
    assert translate_config(config).config is config


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"page_size": 32}, {"block_size": 32}),
        ({"max_batch_tokens": 512}, {"max_num_batched_tokens": 512}),
        ({"max_requests_per_batch": 7}, {"max_num_seqs": 7}),
        ({"allow_block_sharing": False}, {"enable_prefix_caching": False}),
        ({"num_blocks": 99}, {"num_blocks": 99}),
        ({"max_memory_percent": 0.5}, {"max_memory_percent": 0.5}),
        ({"scheduler_type": "prefill_first"}, {"scheduler_type": "prefill_first"}),
        ({"max_queue_size": 4}, {"max_queue_size": 4}),
        ({"return_logprobs": True}, {"return_logprobs": True}),
        ({"seed": 11}, {"seed": 11}),
    ],
)
def test_transformers_names_are_translated(theirs: dict[str, Any], ours: dict[str, Any]):
    assert translated(**theirs) == EngineConfig(**ours)


def test_the_deprecated_block_size_of_transformers_is_its_page_size():
    assert translate_config(ContinuousBatchingConfig(block_size=64)).config == EngineConfig(block_size=64)


def test_a_dict_may_mix_both_spellings():
    assert translate_config({"page_size": 8, "max_num_seqs": 3, "compile": True}).config == EngineConfig(
        block_size=8, max_num_seqs=3, compile=True
    )


def test_two_spellings_of_one_setting_that_differ_are_refused():
    with pytest.raises(ValueError, match="page_size"):
        translate_config({"page_size": 8, "block_size": 16})


@pytest.mark.parametrize("name", ["pagesize", "block_sizes", "max_new_tokens"])
def test_an_unknown_key_is_refused_by_name(name: str):
    with pytest.raises(ValueError, match=f"unknown setting '{name}'"):
        translate_config({name: 1})


@pytest.mark.parametrize("bad", [3, "fifo", EngineConfig, [("block_size", 3)]])
def test_anything_else_is_refused(bad: Any):
    with pytest.raises(TypeError, match="continuous_batching_config"):
        translate_config(bad)


def test_a_bad_value_is_refused_in_a_dict_as_well():
    with pytest.raises(ValueError, match="block_size=0"):
        translate_config({"page_size": 0})


@pytest.mark.parametrize(("given", "width", "fast"), [(None, None, None), (0, None, False), (5, 5, None)])
def test_max_blocks_per_request(given: int | None, width: int | None, fast: bool | None):
    for config in (ContinuousBatchingConfig(max_blocks_per_request=given), {"max_blocks_per_request": given}):
        result = translate_config(config)
        assert (result.max_blocks_per_request, result.config.decode_fast_path) == (width, fast)


@pytest.mark.parametrize("bad", [-1, 1.5, "4"])
def test_a_bad_max_blocks_per_request_is_refused_by_name(bad: Any):
    with pytest.raises((TypeError, ValueError), match="max_blocks_per_request"):
        translate_config({"max_blocks_per_request": bad})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_async_batching", True),
        ("use_cuda_graph", True),
        ("use_cuda_graph", (False, True)),
        ("q_padding_interval_size", 64),
        ("kv_padding_interval_size", 64),
        ("safety_margin", 0.2),
        ("cpu_offload_space", 1.0),
        ("max_cached_graphs", 3),
    ],
)
def test_what_this_engine_does_not_have_is_refused_by_name(name: str, value: Any):
    for config in (ContinuousBatchingConfig(**{name: value}), {name: value}):
        with pytest.raises(ValueError, match=f"{name}="):
            translate_config(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_async_batching", False),
        ("use_cuda_graph", False),
        ("use_cuda_graph", (False, False)),
        ("cpu_offload_space", None),
        ("auto_switch_to_flash", False),
        ("cpu_offload_space_safety_threshold", 0.5),
        ("per_request_processors", True),
        ("drop_unsupported_processors", False),
        ("disable_nccl_graph_mixing", False),
        ("cpu_group_timeout", None),
    ],
)
def test_what_asks_for_nothing_or_is_always_so_is_accepted(name: str, value: Any):
    assert translated(**{name: value}) == EngineConfig()


def test_every_field_of_transformers_config_is_known():
    for field in dataclasses.fields(ContinuousBatchingConfig):
        translate_config({field.name: None if field.default is dataclasses.MISSING else field.default} | {"seed": 1})


@pytest.mark.parametrize(
    ("level", "mode"), [(1, "default"), (2, "max-autotune-no-cudagraphs"), (3, "max-autotune-no-cudagraphs")]
)
def test_a_compile_level_compiles_with_its_mode(level: int, mode: str):
    config = translated(default_compile_level=level)
    assert (config.compile, config.compile_options) == (True, {"mode": mode})
    assert translated(default_compile_level=0) == EngineConfig()


def test_an_unknown_compile_level_is_refused():
    with pytest.raises(ValueError, match="default_compile_level=4"):
        translated(default_compile_level=4)


def test_the_deprecated_default_compile_configs_become_a_level():
    assert translate_config(ContinuousBatchingConfig(use_default_compile_configs=True)).config.compile
    assert not translate_config(ContinuousBatchingConfig(use_default_compile_configs=False)).config.compile


def test_a_decode_compile_config_compiles_the_decode_steps():
    config = translated(decode_compile_config=CompileConfig(mode="default", backend="eager", fullgraph=True))
    assert (config.compile, config.compile_prefill) == (True, False)
    assert config.compile_options == {"mode": "default", "backend": "eager", "fullgraph": True}


def test_a_varlen_compile_config_compiles_the_other_steps_too():
    config = translated(varlen_compile_config=CompileConfig(options={"x": 1}, mode="default"))
    assert (config.compile, config.compile_prefill) == (True, True)
    assert config.compile_options["options"] == {"x": 1}


def test_a_compile_config_may_be_a_dict():
    config = translate_config({"decode_compile_config": {"mode": "default"}}).config
    assert (config.compile, config.compile_options) == (True, {"mode": "default"})


def test_a_compile_config_goes_before_a_level():
    config = translated(decode_compile_config=CompileConfig(mode="default"), default_compile_level=3)
    assert config.compile_options["mode"] == "default"


def test_modes_that_capture_graphs_are_left_out_or_refused():
    assert "mode" not in translated(decode_compile_config=CompileConfig()).compile_options  # its default captures
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(ValueError, match=mode):
            EngineConfig(compile=True, compile_options={"mode": mode})
    for name in ("pack_weights", "fuse_modules"):
        with pytest.raises(ValueError, match=f"{name}=True is for uncompiled engines"):
            EngineConfig(compile=True, **{name: True})


def test_two_compile_configs_that_differ_are_refused():
    same = CompileConfig(mode="default")
    assert translated(decode_compile_config=same, varlen_compile_config=CompileConfig(mode="default")).compile_prefill
    with pytest.raises(ValueError, match="decode_compile_config and varlen_compile_config differ"):
        translated(decode_compile_config=same, varlen_compile_config=CompileConfig(mode="reduce-overhead"))


# ---- resolution --------------------------------------------------------------------------------------------------

CPU = DeviceDefaults(memory_percent=0.6, max_num_seqs=256, max_num_batched_tokens=1024, pads=False)
GPU = dataclasses.replace(CPU, pads=True)


def resolved(
    hints: WorkloadHints | None = None,
    *,
    device: DeviceDefaults = CPU,
    model_max_len: int | None = 2048,
    width: int | None = None,
    **fields: Any,
) -> ResolvedConfig:
    return resolve_config(
        Translated(EngineConfig(**fields), width),
        hints or {},
        model_max_len=model_max_len,
        device=device,
        block_size=32,
    )


def test_with_nothing_said_device_and_model_decide():
    config = resolved()
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_prefill_chunk) == (256, 1024, 1024)
    assert (config.block_size, config.num_blocks, config.memory_percent) == (32, None, 0.6)
    assert (config.max_model_len, config.expected_model_len, config.expected_blocks_per_seq) == (2048, 2048, 64)
    assert config.decode_fast_path
    assert config.enable_prefix_caching
    assert config.scheduler_type == "fifo"


def test_a_model_without_a_limit_gets_one():
    assert resolved(model_max_len=None).max_model_len == 32768
    assert resolved(model_max_len=None, max_model_len=100_000).max_model_len == 100_000


def test_a_shorter_limit_wins_and_a_longer_one_is_refused():
    assert resolved(max_model_len=100).max_model_len == 100
    with pytest.raises(ValueError, match=r"max_model_len=3000 .* 2048"):
        resolved(max_model_len=3000)


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ({"max_prompt_length": 100, "max_generated_length": 29}, 129),
        ({"max_prompt_length": 100}, 2048),
        ({"max_generated_length": 100}, 2048),
        ({"max_prompt_length": 2000, "max_generated_length": 100}, 2048),
    ],
)
def test_hints_size_the_expected_length_and_never_the_limit(hints: WorkloadHints, expected: int):
    config = resolved(hints)
    assert (config.expected_model_len, config.max_model_len) == (expected, 2048)


def test_the_expected_width_is_rounded_up_to_blocks():
    assert resolved({"max_prompt_length": 100, "max_generated_length": 29}).expected_blocks_per_seq == 5


def test_a_table_width_goes_before_hints():
    hints: WorkloadHints = {"max_prompt_length": 100, "max_generated_length": 29}
    assert resolved(hints, width=3).expected_blocks_per_seq == 3
    assert resolved(hints, width=1000).expected_model_len == 2048


@pytest.mark.parametrize(("requests", "seqs"), [(3, 3), (256, 256), (5000, 256)])
def test_hints_size_the_batch_within_what_suits_the_device(requests: int, seqs: int):
    assert resolved({"num_requests": requests}).max_num_seqs == seqs


def test_what_the_caller_said_goes_before_hints_and_defaults():
    config = resolved(
        {"num_requests": 3},
        max_num_seqs=500,
        max_num_batched_tokens=600,
        max_memory_percent=0.1,
        block_size=8,
        num_blocks=77,
    )
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (500, 600)
    assert (config.memory_percent, config.block_size, config.num_blocks) == (0.1, 8, 77)


def test_a_step_has_a_token_for_every_sequence():
    assert resolved(max_num_seqs=5000).max_num_batched_tokens == 5000
    assert resolved(max_num_batched_tokens=10).max_num_seqs == 10
    with pytest.raises(ValueError, match=r"max_num_seqs=11 exceeds max_num_batched_tokens=10"):
        resolved(max_num_seqs=11, max_num_batched_tokens=10)


@pytest.mark.parametrize(("chunk", "expected"), [(None, 64), (16, 16), (500, 64)])
def test_a_chunk_is_no_larger_than_a_step(chunk: int | None, expected: int):
    assert resolved(max_num_batched_tokens=64, max_prefill_chunk=chunk).max_prefill_chunk == expected


def test_only_an_explicit_false_turns_the_decode_fast_path_off():
    assert resolved({"num_requests": 3}, decode_fast_path=None).decode_fast_path
    assert resolved(decode_fast_path=True).decode_fast_path
    off = resolved(decode_fast_path=False, pad_decode_batches=True, device=GPU)
    assert not off.decode_fast_path
    assert not off.pads_decode


def test_compiling_without_the_decode_fast_path_is_refused():
    with pytest.raises(ValueError, match=r"compile=True.*decode_fast_path=False"):
        resolved(compile=True, decode_fast_path=False)


@pytest.mark.parametrize(
    ("device", "fields", "decode", "prefill"),
    [
        (CPU, {}, False, False),
        (CPU, {"pad_decode_batches": True}, True, False),
        (CPU, {"compile": True}, True, False),
        (CPU, {"compile": True, "pad_decode_batches": False}, True, False),  # a compiled shape is static
        (CPU, {"compile": True, "compile_prefill": True}, True, True),
        (GPU, {}, True, True),
        (GPU, {"pad_decode_batches": False}, False, True),
    ],
)
def test_padding(device: DeviceDefaults, fields: dict[str, Any], decode: bool, prefill: bool):
    config = resolved(device=device, **fields)
    assert (config.pads_decode, config.pads_prefill) == (decode, prefill)


def test_everything_else_is_handed_through():
    fields = {
        "enable_prefix_caching": False,
        "compile": True,
        "compile_prefill": True,
        "compile_options": {"mode": "default"},
        "strict_shapes": True,
        "attention_backend": "torch",
        "scheduler_type": "prefill_first",
        "max_queue_size": 9,
        "max_queued_tokens": 900,
        "running_on_weight_change": "abort",
        "return_logprobs": True,
        "seed": 5,
        "speculative": SpeculativeConfig(method="suffix"),
    }
    config = resolved(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


def test_a_resolved_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved().block_size = 3  # type: ignore[misc]
