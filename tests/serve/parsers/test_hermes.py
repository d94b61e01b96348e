"""Calls between tags."""

from __future__ import annotations

import re

import pytest
from parsing import calls, parser, read

from cb_engine.serve.parsers import Content, ToolCallArguments, ToolCallStart, ToolFormat

HERMES = ToolFormat.HERMES
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def test_text_and_calls_in_a_row():
    second = '<tool_call>\n{ "arguments": {"zone":  [1]}, "name": "clock"}\n</tool_call>'
    message = read(f"Let me look.\n\n{CALL}\n{second}\n", HERMES)
    assert message.content == "Let me look."
    assert calls(message) == [("get_weather", '{"city": "Oslo"}'), ("clock", '{"zone":  [1]}')]
    assert not message.is_truncated
    ids = [call.id for call in message.tool_calls]
    assert all(re.fullmatch("call_[0-9a-f]{24}", id) for id in ids)
    assert len(set(ids)) == 2


def test_a_call_alone_has_no_content():
    assert read(f"\n\n{CALL}\n", HERMES).content is None


def test_text_behind_a_call_is_content_without_the_line_break():
    assert read(f"{CALL}\nThat is all.\n", HERMES).content == "That is all.\n"


def test_the_name_comes_as_soon_as_it_is_complete_and_arguments_as_they_come():
    made = parser(HERMES)
    assert made.feed('Hm.<tool_call>\n{"name": "get_we') == [Content("Hm.")]
    [start] = made.feed('ather"')
    assert isinstance(start, ToolCallStart)
    assert (start.index, start.name) == (0, "get_weather")
    assert made.feed(', "arguments": {"ci') == [ToolCallArguments(0, '{"ci')]
    assert made.feed('ty": "Os') == [ToolCallArguments(0, 'ty": "Os')]
    assert made.feed('lo"}}\n</tool_call>') == [ToolCallArguments(0, 'lo"}')]
    assert made.finish() == []


def test_only_what_may_be_a_marker_or_space_before_it_waits():
    made = parser(HERMES)
    assert made.feed("a <b> c") == [Content("a <b> c")]
    assert made.feed(" \n") == []
    assert made.feed("d <tool_c") == [Content(" \nd")]
    assert made.feed("ake>") == [Content(" <tool_cake>")]
    assert made.feed("e<t") == [Content("e")]
    assert made.finish() == [Content("<t")]


@pytest.mark.parametrize(
    "text",
    [
        "The tag <tool_call> begins a call, </tool_call> ends it.\n",
        "<tool_call>\n{'name': 'clock'}\n</tool_call>",
        '<tool_call>\n{"name": "launch", "arguments": {"city": "Oslo"}}\n</tool_call>',
        '<tool_call>{"arguments": {"city": "Oslo"}}</tool_call>',
        '<tool_call>{"name": "cl',
        '<tool_call>{"arguments": {"city": "Os',
        "<tool_call>",
        "  \n ",
        "text \n",
        "<tool_call>" + " " * 1000 + '{"name": "clock"}',
    ],
)
def test_what_is_no_call_is_content_to_the_character(text):
    message = read(text, HERMES)
    assert message.content == text
    assert message.tool_calls == ()
    assert not message.is_truncated


def test_a_call_behind_what_was_none():
    message = read(f"<tool_call>oops <tool_call>{CALL}", HERMES)
    assert message.content == "<tool_call>oops <tool_call>"
    assert calls(message) == [("get_weather", '{"city": "Oslo"}')]


def test_any_name_will_do_where_functions_are_not_known():
    message = read('<tool_call>{"name": "launch", "arguments": {}}</tool_call>', HERMES, functions=None)
    assert calls(message) == [("launch", "{}")]


@pytest.mark.parametrize(
    "text", ['{"name": "clock", "arguments": {"a": 1}', '{"name": "clock", "arguments": {"a": 1}}']
)
@pytest.mark.parametrize("close", ["</tool_call>", "\n</tool_call>", "", "</tool"])
def test_a_missing_brace_or_closing_tag_does_no_harm(text, close):
    message = read(f"<tool_call>{text}{close}", HERMES)
    assert message.content is None
    assert calls(message) == [("clock", '{"a": 1}')]
    assert not message.is_truncated


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "clock"', ""),
        ('{"name": "clock", "argum', ""),
        ('{"name": "clock", "arguments": {"a": {}', '{"a": {}'),
    ],
)
def test_a_call_that_is_cut_off_says_so(text, arguments):
    message = read(f"Hm.\n<tool_call>{text}", HERMES)
    assert message.content == "Hm."
    assert calls(message) == [("clock", arguments)]
    assert message.is_truncated


def test_arguments_that_break_end_the_call_and_the_rest_is_content():
    message = read('<tool_call>{"name": "clock", "arguments": {"a": 1]}</tool_call>', HERMES)
    assert calls(message) == [("clock", '{"a": 1')]
    assert message.content == "]}</tool_call>"


def test_white_space_beyond_the_limit_is_content():
    message = read("a" + "\n" * 100 + CALL, HERMES)
    assert message.content == "a" + "\n" * 36
    assert len(message.tool_calls) == 1
