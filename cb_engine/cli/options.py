"""The options that commands share: where the model comes from, the engine's settings, and sampling.

Owns their names, help texts and panels, and what they come to: arguments of `load_model`, an `EngineConfig`, workload
hints, changes to `SamplingParams`. An option that is not given is None and leaves the decision where it was. Names of
`transformers serve` are accepted where they mean the same. Imports no torch: `--help` has to be quick.

See `spreading.py` for how a command takes a group of options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import typer

from cb_engine.cli.spreading import OptionError, naming_options
from cb_engine.config import EngineConfig
from cb_engine.hints import WorkloadHints
from cb_engine.sampling_params import LogprobsMode, SamplingParams
from cb_engine.speculative_config import parse_speculative

MODEL = "Model"
ENGINE = "Engine"
HINTS = "Workload hints"
SAMPLING = "Sampling"

MODEL_HELP = "`demo` (SmolLM2-135M-Instruct, needs no hub), a local folder, or a hub id."

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is loaded."""

    dtype: Annotated[
        Dtype,
        typer.Option("--dtype", help="Type of the weights; `auto` keeps the checkpoint's own.", rich_help_panel=MODEL),
    ] = "auto"
    device: Annotated[
        str,
        typer.Option(
            "--device",
            "--device-map",
            metavar="DEVICE",
            help="Where the weights go: `cpu`, `cuda`, `cuda:1`, or a device map by its name; `auto` fills the "
            "accelerators there are, else the CPU.",
            rich_help_panel=MODEL,
        ),
    ] = "auto"
    revision: Annotated[
        str | None,
        typer.Option("--revision", help="Branch, tag or commit of a hub id.", rich_help_panel=MODEL),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.", rich_help_panel=MODEL),
    ] = False

    def load_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `cb_engine.models.load_model`."""
        return {
            "dtype": self.dtype,
            "device_map": self.device,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings of the engine, named like the fields of `EngineConfig` and `WorkloadHints`."""

    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="Requests that run at once.", rich_help_panel=ENGINE)
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens",
            "--cb-max-batch-tokens",
            help="Tokens computed in one step.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    max_prefill_chunk: Annotated[
        int | None,
        typer.Option("--max-prefill-chunk", help="Tokens of one prompt computed in one step.", rich_help_panel=ENGINE),
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            help="Longest sequence, prompt and answer, in tokens; by default the model's limit.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", "--cb-block-size", help="Tokens per KV block.", rich_help_panel=ENGINE),
    ] = None
    num_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-blocks",
            "--cb-num-blocks",
            help="KV blocks of each layer group; by default as many as free memory allows.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    max_memory_percent: Annotated[
        float | None,
        typer.Option(
            "--max-memory-percent",
            "--cb-max-memory-percent",
            help="Share of the free memory that the KV cache may take, above 0 and up to 1.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Keep computed blocks and reuse them for equal prefixes.",
            rich_help_panel=ENGINE,
        ),
    ] = True
    decode_fast_path: Annotated[
        bool | None,
        typer.Option(
            "--decode-fast-path/--no-decode-fast-path",
            help="Give steps that only decode a path of their own; on by default.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    pad_decode_batches: Annotated[
        bool | None,
        typer.Option(
            "--pad-decode-batches/--no-pad-decode-batches",
            help="Pad eager steps to fixed shapes; by default where the device needs it.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the decode steps with torch.compile.", rich_help_panel=ENGINE)
    ] = False
    compile_prefill: Annotated[
        bool, typer.Option("--compile-prefill", help="Compile the other steps too.", rich_help_panel=ENGINE)
    ] = False
    pack_weights: Annotated[
        bool | None,
        typer.Option(
            "--pack-weights/--no-pack-weights",
            help="On a CPU, keep a copy of linear weights in the layout of its kernels; by default if memory allows.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    fuse_modules: Annotated[
        bool | None,
        typer.Option(
            "--fuse-modules/--no-fuse-modules",
            help="On a CPU, let native kernels compute modules of known kinds; on by default.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    strict_shapes: Annotated[
        bool,
        typer.Option(
            "--strict-shapes",
            help="A padded shape that warm-up has not run is an error rather than run eagerly.",
            rich_help_panel=ENGINE,
        ),
    ] = False
    attention_backend: Annotated[
        Literal["auto", "torch", "native", "static"],
        typer.Option("--attention-backend", help="Who computes attention.", rich_help_panel=ENGINE),
    ] = "auto"
    scheduler_type: Annotated[
        Literal["fifo", "prefill_first"],
        typer.Option("--scheduler-type", help="`prefill_first` lets prompts go first.", rich_help_panel=ENGINE),
    ] = "fifo"
    speculative: Annotated[
        str | None,
        typer.Option(
            "--speculative",
            metavar="METHOD|JSON",
            help='Speculative decoding: `ngram` or `suffix`, or a JSON object of settings, for example \'{"method": '
            '"draft_model", "model": "FOLDER"}\'. Changes no output.',
            rich_help_panel=ENGINE,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            "--default-seed",
            help="Makes what is drawn reproducible, for requests without a seed of their own.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    max_prompt_length: Annotated[
        int | None,
        typer.Option(
            "--max-prompt-length",
            help="Tokens of the longest prompt to expect.",
            rich_help_panel=HINTS,
            metavar="N",
            min=1,
        ),
    ] = None
    max_generated_length: Annotated[
        int | None,
        typer.Option(
            "--max-generated-length",
            help="Tokens of the longest answer to expect.",
            rich_help_panel=HINTS,
            metavar="N",
            min=1,
        ),
    ] = None
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--num-requests",
            help="Requests to expect, or to expect at once.",
            rich_help_panel=HINTS,
            metavar="N",
            min=1,
        ),
    ] = None

    def config(self, **more: Any) -> EngineConfig:
        """The settings as an EngineConfig.

        Args:
            **more: fields of EngineConfig that a command sets by itself.

        Raises:
            OptionError: naming the option that is wrong.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in WorkloadHints.__annotations__}
        with naming_options(ENGINE_FIELDS):
            if self.speculative is not None:
                given["speculative"] = parse_speculative(self.speculative)
            return EngineConfig(**given, **more)

    def hints(self, **expected: int | None) -> WorkloadHints:
        """The workload hints: those given, else `expected`."""
        given = {name: getattr(self, name) or expected.get(name) for name in WorkloadHints.__annotations__}
        return {name: value for name, value in given.items() if value}  # type: ignore[return-value]


ENGINE_FIELDS = tuple(field.name for field in fields(EngineOptions))


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen, named like the fields of `SamplingParams`."""

    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "--max-new-tokens",
            help="Most tokens of an answer; by default the model's own setting, else 1024.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    min_tokens: Annotated[
        int | None,
        typer.Option("--min-tokens", help="No end before so many tokens.", rich_help_panel=SAMPLING),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            "-t",
            help="0 is greedy; by default the model's own setting, or 1 if --top-p, --top-k or --min-p is given.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Draw from the likeliest tokens that hold this share.", rich_help_panel=SAMPLING),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", help="Draw from so many likeliest tokens; 0: all.", rich_help_panel=SAMPLING),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            help="Draw from tokens at least this likely, as a share of the likeliest one.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            help="Above 1: makes what is in prompt or answer less likely.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option("--presence-penalty", help="Taken off tokens that are in the answer.", rich_help_panel=SAMPLING),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            "--frequency-penalty", help="The same for each time they are in the answer.", rich_help_panel=SAMPLING
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop", metavar="TEXT", help="End at this text, which is left out; repeatable.", rich_help_panel=SAMPLING
        ),
    ] = None
    stop_token_ids: Annotated[
        str | None,
        typer.Option(
            "--stop-token-ids", metavar="ID,ID", help="End at one of these token ids.", rich_help_panel=SAMPLING
        ),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on at the model's end token.", rich_help_panel=SAMPLING)
    ] = False
    bad_words: Annotated[
        list[str] | None,
        typer.Option("--bad-words", metavar="TEXT", help="Never say this; repeatable.", rich_help_panel=SAMPLING),
    ] = None
    allowed_token_ids: Annotated[
        str | None,
        typer.Option(
            "--allowed-token-ids", metavar="ID,ID", help="Say nothing but these token ids.", rich_help_panel=SAMPLING
        ),
    ] = None
    logit_bias: Annotated[
        str | None,
        typer.Option(
            "--logit-bias",
            metavar="JSON",
            help="Added to the logits of token ids, for example '{\"42\": -5}'.",
            rich_help_panel=SAMPLING,
        ),
    ] = None

    structured: Annotated[
        str | None,
        typer.Option(
            "--structured",
            metavar="JSON",
            help='What the text must be: \'{"json_schema": {...}}\', \'{"regex": "..."}\', \'{"choice": [...]}\', '
            '\'{"grammar": "..."}\' or \'{"json_object": true}\'.',
            rich_help_panel=SAMPLING,
        ),
    ] = None
    skip_special_tokens: Annotated[
        bool | None,
        typer.Option(
            "--skip-special-tokens/--keep-special-tokens",
            help="Leave special tokens out of the text; on by default.",
            rich_help_panel=SAMPLING,
        ),
    ] = None

    def changes(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given, checked.

        Raises:
            OptionError: naming the option that is wrong.
        """
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("stop_token_ids", "allowed_token_ids"):
            given[name] = _token_ids(name, given[name])
        given["logit_bias"] = _bias(given["logit_bias"])
        given["structured"] = _json_object("structured", given["structured"], 'like {"regex": "[0-9]+"}')
        given["ignore_eos"] = self.ignore_eos or None
        return checked_changes({name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What is generated and reported for each prompt."""

    n: Annotated[int | None, typer.Option("--n", "-n", help="Answers to each prompt.", rich_help_panel=SAMPLING)] = None
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            metavar="N",
            help="Report log-probabilities: 0 for each token's own, N for the N likeliest as well.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(
            "--prompt-logprobs", metavar="N", help="The same for the tokens of the prompt.", rich_help_panel=SAMPLING
        ),
    ] = None
    logprobs_mode: Annotated[
        LogprobsMode | None,
        typer.Option(
            "--logprobs-mode",
            help="Of the distribution that was drawn from, or of the model's own.",
            rich_help_panel=SAMPLING,
        ),
    ] = None

    def changes(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given, checked.

        Raises:
            OptionError: naming the option that is wrong.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return checked_changes({name: value for name, value in given.items() if value is not None})


# Fields of SamplingParams that tell one request from another: an option, the same for all, would do nothing.
PER_REQUEST_ONLY = ("priority", "cache_salt", "speculative")


def checked_changes(changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` if SamplingParams takes them.

    Raises:
        OptionError: naming the option that is wrong.
    """
    with naming_options(changes):
        SamplingParams(**changes)
    return changes


def changes_from_json(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams as they stand in JSON, whose objects have no numbers for keys.

    Raises:
        ValueError: an unknown field, or a key of logit_bias that is no token id.
    """
    unknown = given.keys() - SamplingParams.__dataclass_fields__.keys()
    if unknown:
        raise ValueError(
            f"sampling_params has no field {sorted(unknown)[0]!r}; "
            f"its fields: {', '.join(SamplingParams.__dataclass_fields__)}"
        )
    changes = dict(given)
    if isinstance(changes.get("logit_bias"), Mapping):
        changes["logit_bias"] = _numbered("logit_bias", changes["logit_bias"])
    return changes


def overlay(base: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """`base` with `changes`. Who asks for top_p, top_k or min_p means to draw, also where `base` is greedy.

    Raises:
        ValueError, TypeError: see SamplingParams.
    """
    draws = any(changes.get(name) is not None for name in ("top_p", "top_k", "min_p"))
    if draws and base.is_greedy and "temperature" not in changes:
        return base.clone(temperature=1.0, **changes)
    return base.clone(**changes)


def _token_ids(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise OptionError(
            f"--{name.replace('_', '-')} must be token ids with commas between them, got {text!r}"
        ) from None


def _bias(text: str | None) -> dict[int, Any] | None:
    given = _json_object("logit_bias", text, 'of token ids and numbers like {"42": -5}')
    if given is None:
        return None
    with naming_options(["logit_bias"]):
        return _numbered("logit_bias", given)


def _json_object(name: str, text: str | None, example: str) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        given = json.loads(text)
    except json.JSONDecodeError:
        given = None
    if not isinstance(given, dict):
        raise OptionError(f"--{name.replace('_', '-')} must be a JSON object {example}, got {text!r}")
    return given


def _numbered(name: str, given: Mapping[Any, Any]) -> dict[int, Any]:
    try:
        return {int(key): value for key, value in given.items()}
    except ValueError:
        raise ValueError(f"{name} must have token ids for keys, got {list(given)!r}") from None
