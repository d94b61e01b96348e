"""What a response is made of: events while it streams, one message when it is whole.

Owns: the events, the message that they add up to, and when a tool call counts as cut off.
Does not know: formats, markers, the shape of an HTTP answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cb_engine.serve.parsers.json_scanner import JsonValueScanner


@dataclass(frozen=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins: calls are numbered from 0, and nothing else comes before the last one's arguments end."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments, as the model wrote it."""

    index: int
    delta: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments


@dataclass(frozen=True)
class ToolCall:
    """One call, whole: `arguments` is JSON text unless the model wrote something else, or was cut off."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedMessage:
    """A whole response.

    `content` and `reasoning` are None where there is no text of that kind at all. `is_truncated` says that the
    last call's arguments never came to their end.
    """

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    is_truncated: bool


class TruncationCheck:
    """Follows a stream of events and knows whether the last call's arguments are complete."""

    def __init__(self) -> None:
        self._arguments: JsonValueScanner | None = None

    def observe(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, ToolCallStart):
            self._arguments = JsonValueScanner()
        elif isinstance(event, ToolCallArguments) and self._arguments is not None:
            self._arguments.feed(event.delta, 0, len(event.delta))

    @property
    def is_truncated(self) -> bool:
        """Whether, if the stream ended here, a call would be cut off."""
        return self._arguments is not None and not self._arguments.may_end


def collect(events: Iterable[Event]) -> ParsedMessage:
    """Add events up to the message that they stream.

    Args:
        events: all events of one response, in order.
    """
    content: list[str] = []
    reasoning: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    truncation = TruncationCheck()
    for event in events:
        truncation.observe(event)
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart():
                starts.append(event)
                arguments.append([])
            case ToolCallArguments(index, delta):
                arguments[index].append(delta)
    calls = (ToolCall(s.id, s.name, "".join(pieces)) for s, pieces in zip(starts, arguments, strict=True))
    return ParsedMessage(
        content="".join(content) or None,
        reasoning="".join(reasoning) or None,
        tool_calls=tuple(calls),
        is_truncated=truncation.is_truncated,
    )


def merge(events: Iterable[Event]) -> list[Event]:
    """Join neighbours of the same kind, so that a delta of the model makes few deltas for the client."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == event.index:
            merged[-1] = ToolCallArguments(event.index, last.delta + event.delta)
        else:
            merged.append(event)
    return merged
