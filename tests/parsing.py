"""Feeds a parser a text cut into pieces, and makes texts to feed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from cb_engine.serve.parsers import (
    Event,
    ParsedMessage,
    ReasoningFormat,
    ResponseParser,
    Tool,
    ToolCallStart,
    ToolFormat,
    collect,
    make_response_parser,
)
from cb_engine.serve.parsers.events import merge

WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
CLOCK = Tool("clock")
FUNCTIONS = (WEATHER, CLOCK)


def parser(
    tools: ToolFormat | None = None,
    reasoning: ReasoningFormat | None = None,
    starts_in_reasoning: bool = False,
    functions: Sequence[Tool] | None = FUNCTIONS,
) -> ResponseParser:
    """`make_response_parser` with the functions above."""
    return make_response_parser(
        tools=tools, reasoning=reasoning, starts_in_reasoning=starts_in_reasoning, functions=functions
    )


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    """The text cut at the given places."""
    edges = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def stream(made: ResponseParser, deltas: Sequence[str]) -> list[Event]:
    """All events of a text, with neighbours of a kind joined and ids taken out, so that streams compare."""
    events = [event for delta in deltas for event in made.feed(delta)] + made.finish()
    return merge(dataclasses.replace(e, id="") if isinstance(e, ToolCallStart) else e for e in events)


def read(text: str, *args, **kwargs) -> ParsedMessage:
    """The message of a text that comes one character at a time."""
    made = parser(*args, **kwargs)
    message = collect([event for char in text for event in made.feed(char)] + made.finish())
    assert message.is_truncated == made.is_truncated
    return message


def calls(message: ParsedMessage) -> list[tuple[str, str]]:
    """Names and arguments."""
    return [(call.name, call.arguments) for call in message.tool_calls]
