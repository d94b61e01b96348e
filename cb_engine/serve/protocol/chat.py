"""/v1/chat/completions: messages, tools, and what the template takes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from cb_engine.serve.protocol.base import (
    EchoedModel,
    Entries,
    Label,
    Metadata,
    SamplingFields,
    SomeEntries,
    StrictModel,
)


class TextPart(EchoedModel):
    """A piece of a message. Only text: this server fetches and decodes nothing else."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class CalledFunction(EchoedModel):
    """What an assistant has called."""

    readings: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    name: str
    arguments: str = ""  # JSON


class CalledTool(EchoedModel):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a stream's pieces; the order says the same


class Message(EchoedModel):
    """One turn."""

    readings: ClassVar[frozenset[str]] = frozenset({"parsed"})

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "refusal": ((), "give what was said as content"),
        "audio": ((), "this server speaks text"),
        "annotations": (([],), "give what was said as content"),
        "function_call": ((), "it was replaced by tool_calls"),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Entries[TextPart] | None = None
    name: str | None = None
    tool_calls: Entries[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belong to a message of the assistant's, not of role {self.role!r}")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role 'tool' needs tool_call_id")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"tool_call_id belongs to a message of role 'tool', not of role {self.role!r}")
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise ValueError(f"a message of role {self.role!r} needs content")
        return self


class FunctionDefinition(StrictModel):
    """What a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments of enforced calls keep to `parameters` either way


class Tool(StrictModel):
    """OpenAI's wrapping of a function."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(StrictModel):
    """A function by its name."""

    name: str


class NamedTool(StrictModel):
    """`tool_choice` for one function."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields):
    """The body."""

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "functions": ((), "it was replaced by tools"),
        "function_call": ((), "it was replaced by tool_choice"),
        "audio": ((), "this server speaks text"),
        "modalities": ((["text"],), "this server speaks text"),
        "prediction": ((), "predicted outputs are not taken; the engine's own speculation needs none"),
        "web_search_options": ((), "this server searches nothing"),
        "store": ((False,), "answers are not kept"),
        "service_tier": (("auto", "default"), "there is one tier"),
        "verbosity": (("medium",), "say it in the prompt"),
        "moderation": ((), "nothing is moderated here"),
        "prompt_cache_retention": ((), "prompts are kept while there is room"),
        "prompt_cache_options": ((), "prompts are kept while there is room"),
    }

    messages: SomeEntries[Message]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Entries[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    metadata: Metadata | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: str | None = None  # equal beginnings are found without it

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same setting; give one of them")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def named_tool(self) -> str | None:
        """The function that has to be called, if it is a certain one."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
