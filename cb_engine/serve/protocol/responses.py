"""/v1/responses: items in, items out. Owns its body and the translation into a chat's.

Nothing is kept here from one request to the next: whoever continues a conversation sends all of it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from cb_engine.serve.protocol.base import (
    EchoedModel,
    EngineFields,
    Entries,
    JsonSchema,
    Label,
    Metadata,
    RequestModel,
    ResponseFormat,
    SomeEntries,
    StrictModel,
)
from cb_engine.serve.protocol.chat import (
    CalledFunction,
    CalledTool,
    ChatRequest,
    FunctionDefinition,
    Message,
    NamedFunction,
    NamedTool,
    TextPart,
    Tool,
)


class TextContent(EchoedModel):
    """A piece of text, a client's own or one that this server has written before."""

    readings: ClassVar[frozenset[str]] = frozenset({"parsed"})

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {"annotations": (([],), "only text is taken")}

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    logprobs: list[Any] | None = None  # of an answer that comes back; they change nothing


class MessageItem(EchoedModel):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Entries[TextContent]
    id: str | None = None
    status: str | None = None


class FunctionCallItem(EchoedModel):
    """A call that the model has made."""

    readings: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(EchoedModel):
    """What came of it."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Entries[TextContent]
    id: str | None = None
    status: str | None = None


class ReasoningItem(EchoedModel):
    """What the model thought before."""

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "encrypted_content": ((), "this server writes reasoning in the clear")
    }

    type: Literal["reasoning"]
    summary: Entries[TextContent] = Field(default_factory=list)
    content: Entries[TextContent] | None = None
    id: str | None = None
    status: str | None = None


_ITEM_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _kind_of_item(item: Any) -> str | None:
    """By its type, so that what is wrong with it is said of that kind; one without a type is a message."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"<{kind}>" if kind in _ITEM_KINDS else None  # no field has such a name


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _kind_of_item,
        custom_error_type="item_kind",
        custom_error_message=f"an item must be an object whose type is one of {', '.join(_ITEM_KINDS)}",
    ),
]


class FunctionTool(StrictModel):
    """A function that may be called; flat, where a chat's is wrapped."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(StrictModel):
    """`tool_choice` for one function."""

    type: Literal["function"]
    name: str


class TextFormat(StrictModel):
    """The form of the answer; flat, where a chat's is wrapped."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(RequestModel):
    """What is wanted of the answer's text."""

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {"verbosity": (("medium",), "say it in the prompt")}

    format: TextFormat | None = None


class ReasoningSettings(RequestModel):
    """What is wanted of the model's reasoning."""

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "summary": ((), "reasoning is given as it is, without a summary"),
        "generate_summary": ((), "reasoning is given as it is, without a summary"),
    }

    effort: str | None = None


class ResponsesRequest(EngineFields):
    """The body."""

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "previous_response_id": ((), "answers are not kept; send the whole conversation as input"),
        "conversation": ((), "answers are not kept; send the whole conversation as input"),
        "store": ((False,), "answers are not kept"),
        "background": ((False,), "wait for the answer, or stream it"),
        "truncation": (("disabled",), "shorten the input"),
        "prompt": ((), "prompts are not kept; send the text"),
        "max_tool_calls": ((), "no tools are run here"),
        "service_tier": (("auto", "default"), "there is one tier"),
        "stream_options": (({}, {"include_obfuscation": False}), "events are not obfuscated"),
    }

    model: str | None = None
    input: str | SomeEntries[InputItem]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Entries[str] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    tools: Entries[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    include: Entries[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    metadata: Metadata | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: str | None = None  # equal beginnings are found without it
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def form_field(self) -> str:
        """See `SamplingFields`."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        return "text" if self.text is not None and self.text.format is not None else "tools"

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer comes with log-probabilities."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())

    def as_chat(self) -> ChatRequest:
        """The same wish as a chat's body.

        Raises:
            ValueError: the fields do not go together.
        """
        same = {name: getattr(self, name) for name in EngineFields.model_fields}
        for name in ("model", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop"):
            same[name] = getattr(self, name)
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
        return ChatRequest(
            **same,
            logit_bias=self.logit_bias,
            stream=self.stream,
            messages=self._messages(),
            max_tokens=self.max_output_tokens,
            logprobs=True if self.wants_logprobs else None,
            top_logprobs=self.top_logprobs,
            tools=[_as_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_as_response_format(self.text),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _messages(self) -> list[Message]:
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*messages, Message(role="user", content=self.input)]
        turn = _AssistantTurn()
        for item in self.input:
            message = turn.take(item)
            if message is not None:
                messages += [*turn.end(), message]
        return [*messages, *turn.end()]


class _AssistantTurn:
    """Gathers the items of one turn of the assistant's: reasoning, text and calls make one message."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: list[CalledTool] = []

    def take(self, item: InputItem) -> Message | None:
        """Takes an item in; returns the message of one that is not the assistant's."""
        match item:
            case ReasoningItem():
                self._reasoning.append(_joined(item.content or item.summary))
            case FunctionCallItem():
                function = CalledFunction(name=item.name, arguments=item.arguments)
                self._calls.append(CalledTool(id=item.call_id, function=function))
            case FunctionOutputItem():
                return Message(role="tool", tool_call_id=item.call_id, content=_joined(item.output))
            case MessageItem() if item.role == "assistant":
                self._text.append(_joined(item.content))
            case MessageItem():
                return Message(role=item.role, content=[TextPart(type="text", text=_joined(item.content))])
        return None

    def end(self) -> list[Message]:
        """The assistant's message, if there was anything of it."""
        if not (self._reasoning or self._text or self._calls):
            return []
        message = Message(
            role="assistant",
            content="\n".join(self._text),
            reasoning_content="\n".join(self._reasoning) or None,
            tool_calls=self._calls or None,
        )
        self._reasoning, self._text, self._calls = [], [], []
        return [message]


def _joined(content: str | list[TextContent]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _as_tool(tool: FunctionTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _as_response_format(text: TextSettings | None) -> ResponseFormat | None:
    form = None if text is None else text.format
    if form is None:
        return None
    schema = None if form.schema_ is None else JsonSchema(name=form.name, schema=form.schema_, strict=form.strict)
    return ResponseFormat(type=form.type, json_schema=schema)
