"""Events add up to a message."""

from __future__ import annotations

from cb_engine.serve.parsers import (
    Content,
    ParsedMessage,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    collect,
)
from cb_engine.serve.parsers.events import merge


def test_collect_joins_each_kind_and_each_call():
    events = [
        Reasoning("think "),
        Reasoning("hard"),
        Content("Let me "),
        Content("see."),
        ToolCallStart(0, "a", "f"),
        ToolCallArguments(0, '{"x"'),
        ToolCallArguments(0, ": 1}"),
        ToolCallStart(1, "b", "g"),
        ToolCallArguments(1, "{}"),
    ]
    assert collect(events) == ParsedMessage(
        content="Let me see.",
        reasoning="think hard",
        tool_calls=(ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "g", "{}")),
        is_truncated=False,
    )


def test_nothing_of_a_kind_is_none():
    assert collect([]) == ParsedMessage(content=None, reasoning=None, tool_calls=(), is_truncated=False)


def test_a_call_is_truncated_until_its_arguments_are_whole():
    start = ToolCallStart(0, "a", "f")
    assert collect([start]).is_truncated
    assert collect([start, ToolCallArguments(0, '{"x": "}')]).is_truncated
    assert not collect([start, ToolCallArguments(0, '{"x": "}"}')]).is_truncated
    assert not collect([start, ToolCallArguments(0, "5")]).is_truncated


def test_merge_joins_neighbours_of_a_kind_only():
    start = ToolCallStart(0, "a", "f")
    events = [
        Reasoning("r"),
        Reasoning("s"),
        Content("a"),
        Content("b"),
        start,
        ToolCallArguments(0, "{"),
        ToolCallArguments(0, "}"),
        Content("c"),
    ]
    assert merge(events) == [Reasoning("rs"), Content("ab"), start, ToolCallArguments(0, "{}"), Content("c")]
