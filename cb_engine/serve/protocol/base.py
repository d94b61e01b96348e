"""What the interfaces have in common: strict models, and the fields of sampling.

A field that is not known is refused. So is one that OpenAI's own interface has and this server could only ignore, with
the reason.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

T = TypeVar("T")

# A list that is wrong is wrong with its first bad entry: one error for each would take more memory than the body.
Entries = Annotated[list[T], Field(fail_fast=True)]
SomeEntries = Annotated[list[T], Field(min_length=1, fail_fast=True)]
TokenIds = Entries[Annotated[int, Field(ge=0)]]
# Both go to the log, in OpenAI's bounds.
Label = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)]


class StrictModel(BaseModel):
    """No unknown fields, and no silent conversions ("3" is no number)."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RequestModel(StrictModel):
    """Base of all bodies."""

    # Fields of OpenAI's that ask for what there is not: name -> (values that ask for nothing, why not).
    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in cls.refused.keys() & data.keys():
            harmless, reason = cls.refused[name]
            if data[name] is not None and data[name] not in harmless:
                raise ValueError(f"{name} is not supported: {reason}")
        return {name: value for name, value in data.items() if name not in cls.refused}


class EchoedModel(RequestModel):
    """What a server has written and a client sends back as its library's object: that has fields of other versions,
    which are null, and readings of its own of what others say."""

    readings: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        asks = {name: value for name, value in data.items() if value is not None or name in cls.model_fields}
        return {name: value for name, value in asks.items() if name not in cls.readings}


class StreamOptions(RequestModel):
    """What a stream holds beside the text."""

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "include_obfuscation": ((False,), "chunks are not padded"),
    }

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: in every chunk

    @model_validator(mode="after")
    def _check(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage=true")
        return self


class JsonSchema(StrictModel):
    """OpenAI's wrapping of a JSON schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # it is always kept to


class ResponseFormat(StrictModel):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format: type json_schema and the field json_schema belong together")
        return self


class StructuredOutputs(StrictModel):
    """vLLM's way to ask for a form; exactly one."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Entries[str] | None = None
    grammar: str | None = None
    compact: bool | None = None  # of JSON: no whitespace between its parts

    def fields(self) -> dict[str, Any]:
        """In the words of the engine's `StructuredOutput`."""
        given = {
            "json_schema": self.json_,
            "json_object": self.json_object,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "compact": self.compact,
        }
        return {name: value for name, value in given.items() if value is not None}


class EngineFields(RequestModel):
    """Fields beyond OpenAI's, as in vLLM and SGLang; all interfaces know them. None: the default."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Entries[str] | None = None
    allowed_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    speculative: bool | None = None
    structured_outputs: StructuredOutputs | None = None


class SamplingFields(EngineFields):
    """What chats and completions have in common."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | Entries[str] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: Label | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream=true; leave it out")
        return self

    @property
    def form_field(self) -> str:
        """Where it says what form the answer must have: that of its tools, if nowhere else."""
        names = ("structured_outputs", "response_format")
        return next((name for name in names if getattr(self, name) is not None), "tools")

    @property
    def num_samples(self) -> int:
        """Of each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk on usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_usage_so_far(self) -> bool:
        """Whether all chunks tell it."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
