"""Groups of options, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from cb_engine.cli.options import (
    PER_REQUEST_ONLY,
    EngineOptions,
    ModelOptions,
    ReportOptions,
    SamplingOptions,
    changes_from_json,
    overlay,
)
from cb_engine.cli.spreading import OptionError, naming_options, spread
from cb_engine.config import EngineConfig
from cb_engine.hints import WorkloadHints
from cb_engine.sampling_params import SamplingParams
from cb_engine.speculative_config import SpeculativeConfig

# Fields of EngineConfig that a command decides by itself, or that are for tests and trainers.
NOT_OPTIONS = {
    "max_queued_tokens",
    "compile_options",
    "fake_static_device",
    "max_queue_size",
    "return_logprobs",
    "running_on_weight_change",
}


def parsed(group: type, *arguments: str) -> object:
    """The group as a command would receive it."""
    received: list[object] = []

    def take(options: object) -> None:
        received.append(options)

    take.__annotations__["options"] = group
    app = typer.Typer()
    app.command()(spread(take))
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return received[0]


def test_a_group_arrives_whole() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Size:
        width: Annotated[int, typer.Option("--width")] = 1
        name: Annotated[str | None, typer.Option("--name")] = None

    assert parsed(Size) == Size()
    assert parsed(Size, "--width", "3", "--name", "x") == Size(width=3, name="x")


def test_an_option_that_two_groups_have_is_refused() -> None:
    def command(one: SamplingOptions, other: SamplingOptions) -> None: ...

    with pytest.raises(TypeError, match="'max_tokens' is declared twice"):
        spread(command)


@pytest.mark.parametrize("group", [ModelOptions, EngineOptions, SamplingOptions, ReportOptions])
def test_nothing_given_is_the_default(group: type) -> None:
    assert parsed(group) == group()


def test_defaults_ask_for_nothing() -> None:
    assert EngineOptions().config() == EngineConfig()
    assert EngineOptions().hints() == {}
    assert SamplingOptions().changes() == {}
    assert ReportOptions().changes() == {}


def test_every_engine_setting_is_an_option_or_left_out_on_purpose() -> None:
    options = {f.name for f in fields(EngineOptions)} - WorkloadHints.__annotations__.keys()
    assert options | NOT_OPTIONS == {f.name for f in fields(EngineConfig)}
    assert not options & NOT_OPTIONS
    assert WorkloadHints.__annotations__.keys() <= {f.name for f in fields(EngineOptions)}


def test_every_sampling_field_is_an_option_or_left_out_on_purpose() -> None:
    options = {f.name for group in (SamplingOptions, ReportOptions) for f in fields(group)} | {"seed"}
    assert options | set(PER_REQUEST_ONLY) == {f.name for f in fields(SamplingParams)}


ENGINE_CASES = {
    "--max-num-seqs 7": {"max_num_seqs": 7},
    "--max-num-batched-tokens 64": {"max_num_batched_tokens": 64},
    "--cb-max-batch-tokens 64": {"max_num_batched_tokens": 64},
    "--max-prefill-chunk 16": {"max_prefill_chunk": 16},
    "--max-model-len 128": {"max_model_len": 128},
    "--block-size 8": {"block_size": 8},
    "--cb-block-size 8": {"block_size": 8},
    "--num-blocks 9": {"num_blocks": 9},
    "--cb-num-blocks 9": {"num_blocks": 9},
    "--max-memory-percent 0.5": {"max_memory_percent": 0.5},
    "--cb-max-memory-percent 0.5": {"max_memory_percent": 0.5},
    "--no-prefix-caching": {"enable_prefix_caching": False},
    "--no-decode-fast-path": {"decode_fast_path": False},
    "--pad-decode-batches": {"pad_decode_batches": True},
    "--compile": {"compile": True},
    "--compile-prefill": {"compile_prefill": True},
    "--no-pack-weights": {"pack_weights": False},
    "--no-fuse-modules": {"fuse_modules": False},
    "--strict-shapes": {"strict_shapes": True},
    "--attention-backend torch": {"attention_backend": "torch"},
    "--scheduler-type prefill_first": {"scheduler_type": "prefill_first"},
    "--speculative ngram": {"speculative": SpeculativeConfig(method="ngram")},
    "--seed 5": {"seed": 5},
    "--default-seed 5": {"seed": 5},
}


@pytest.mark.parametrize("arguments", ENGINE_CASES)
def test_an_engine_option_sets_its_field(arguments: str) -> None:
    options = parsed(EngineOptions, *arguments.split())
    assert isinstance(options, EngineOptions)
    assert options.config() == EngineConfig(**ENGINE_CASES[arguments])


def test_speculative_settings_as_json() -> None:
    options = EngineOptions(speculative='{"method": "ngram", "num_speculative_tokens": 3}')
    assert options.config().speculative == SpeculativeConfig(method="ngram", num_speculative_tokens=3)


def test_hints_given_win_over_those_expected() -> None:
    options = EngineOptions(max_prompt_length=10)
    assert options.hints(num_requests=4, max_prompt_length=99) == {"max_prompt_length": 10, "num_requests": 4}


def test_a_command_may_set_more() -> None:
    assert EngineOptions().config(max_queue_size=3).max_queue_size == 3


def test_sampling_options_become_fields() -> None:
    options = parsed(
        SamplingOptions,
        *["--max-new-tokens", "9", "--min-tokens", "2", "-t", "0.5", "--top-p", "0.9", "--top-k", "5"],
        *["--min-p", "0.1", "--repetition-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "0.3"],
        *["--stop", "a b", "--stop", "c", "--stop-token-ids", "4,5", "--ignore-eos", "--bad-words", "x"],
        *["--allowed-token-ids", "7 8", "--logit-bias", '{"3": -1.5}', "--keep-special-tokens"],
        *["--structured", '{"regex": "a+"}'],
    )
    assert isinstance(options, SamplingOptions)
    assert options.changes() == {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "stop": ["a b", "c"],
        "stop_token_ids": (4, 5),
        "ignore_eos": True,
        "bad_words": ["x"],
        "allowed_token_ids": (7, 8),
        "logit_bias": {3: -1.5},
        "structured": {"regex": "a+"},
        "skip_special_tokens": False,
    }


def test_report_options_become_fields() -> None:
    options = parsed(ReportOptions, "-n", "2", "--logprobs", "0", "--prompt-logprobs", "3", "--logprobs-mode", "raw")
    assert isinstance(options, ReportOptions)
    assert options.changes() == {"n": 2, "logprobs": 0, "prompt_logprobs": 3, "logprobs_mode": "raw"}


def test_model_options_become_load_arguments() -> None:
    options = parsed(ModelOptions, "--dtype", "float32", "--device-map", "cpu", "--revision", "v1")
    assert isinstance(options, ModelOptions)
    assert options.load_arguments() == {
        "dtype": "float32",
        "device_map": "cpu",
        "revision": "v1",
        "trust_remote_code": False,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EngineOptions(max_num_seqs=0), "--max-num-seqs=0 must be from 1 to 65536, or be left out"),
        (EngineOptions(max_memory_percent=80.0), "--max-memory-percent=80.0 must be in (0, 1]: it is a share"),
        (EngineOptions(pack_weights=True, compile=True), "--pack-weights=True is for uncompiled engines"),
        (EngineOptions(speculative="magic"), "--speculative method='magic' must be one of 'ngram'"),
        (EngineOptions(speculative="{"), "--speculative must be a method or a JSON object"),
    ],
    ids=["seqs", "percent", "pack", "method", "json"],
)
def test_wrong_engine_values_name_the_option(options: EngineOptions, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        options.config()
    assert caught.value.format_message().startswith(message)
    assert "\n" not in caught.value.format_message()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SamplingOptions(top_p=2.0), "--top-p must be above 0 and at most 1, got 2.0"),
        (SamplingOptions(min_tokens=5, max_tokens=3), "--min-tokens must not exceed --max-tokens"),
        (SamplingOptions(stop_token_ids="1;2"), "--stop-token-ids must be token ids with commas"),
        (SamplingOptions(allowed_token_ids=""), "--allowed-token-ids must not be empty"),
        (SamplingOptions(logit_bias="[1]"), "--logit-bias must be a JSON object"),
        (SamplingOptions(logit_bias='{"a": 1}'), "--logit-bias must have token ids for keys"),
        (SamplingOptions(structured="a+"), "--structured must be a JSON object"),
        (SamplingOptions(structured='{"regex": "a", "choice": ["b"]}'), "--structured must have exactly one of"),
        (SamplingOptions(stop=[""]), "--stop must not hold an empty string"),
    ],
    ids=["top_p", "min_tokens", "stop_ids", "allowed", "bias", "bias_key", "form", "forms", "stop"],
)
def test_wrong_sampling_values_name_the_option(options: SamplingOptions, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        options.changes()
    assert caught.value.format_message().startswith(message)


def test_a_field_within_another_word_is_left_alone() -> None:
    with pytest.raises(OptionError) as caught, naming_options(["n", "seed"]):
        raise ValueError("seed is wrong\nin no-seed and seeds")
    assert caught.value.format_message() == "--seed is wrong in no-seed and seeds"


def test_asking_for_nucleus_sampling_draws() -> None:
    greedy = SamplingParams(temperature=0.0)
    assert overlay(greedy, {"top_p": 0.9}) == SamplingParams(temperature=1.0, top_p=0.9)
    assert overlay(greedy, {"top_p": 0.9, "temperature": 0.0}) == SamplingParams(temperature=0.0, top_p=0.9)
    assert overlay(greedy, {"max_tokens": 3}) == SamplingParams(temperature=0.0, max_tokens=3)
    assert overlay(SamplingParams(temperature=0.5), {"top_k": 4}) == SamplingParams(temperature=0.5, top_k=4)


def test_json_has_no_numbers_for_keys() -> None:
    assert changes_from_json({"logit_bias": {"3": 1}, "top_k": 2}) == {"logit_bias": {3: 1}, "top_k": 2}
    with pytest.raises(ValueError, match="no field 'topk'; its fields: n, temperature"):
        changes_from_json({"topk": 2})
