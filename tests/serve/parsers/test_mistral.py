"""Mistral's two syntaxes, and its ids."""

from __future__ import annotations

import pytest
from parsing import calls, parser, read

from cb_engine.serve.parsers import ToolCallArguments, ToolCallStart, ToolFormat

MISTRAL = ToolFormat.MISTRAL
BOTH = [("get_weather", '{"city": "Oslo"}'), ("clock", "{}")]


@pytest.mark.parametrize("form", [ToolFormat.MISTRAL, ToolFormat.MISTRAL_ARGS])
@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]',
        '[TOOL_CALLS] [{"arguments": {"city": "Oslo"}, "name": "get_weather"},\n{"name": "clock"}\n]\n',
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]clock[ARGS]{}',
        '[TOOL_CALLS]get_weather{"city": "Oslo"}[TOOL_CALLS]clock{}',
        '[TOOL_CALLS] get_weather [ARGS] {"city": "Oslo"}\n[TOOL_CALLS] clock[CALL_ID]abc[ARGS]{}',
        '[TOOL_CALLS]{"name": "get_weather", "arguments": {"city": "Oslo"}}[TOOL_CALLS][{"name": "clock"}]',
    ],
)
def test_both_syntaxes(text, form):
    message = read(f"Let me look. {text}", form)
    assert message.content == "Let me look."
    assert calls(message) == BOTH


def test_ids_are_nine_alphanumerics_and_the_models_own_where_it_writes_one():
    text = '[TOOL_CALLS][{"name": "clock", "arguments": {}}][TOOL_CALLS]clock[CALL_ID]Ab3dE6gH9[ARGS]{}'
    ids = [call.id for call in read(text, MISTRAL).tool_calls]
    assert len(ids[0]) == 9
    assert ids[0].isalnum()
    assert ids[0].isascii()
    assert ids[1] == "Ab3dE6gH9"


def test_the_name_comes_before_the_arguments():
    made = parser(MISTRAL)
    assert made.feed("[TOOL_CALLS]clo") == []
    assert made.feed("ck[ARGS") == []
    [start] = made.feed("]")
    assert isinstance(start, ToolCallStart)
    assert start.name == "clock"
    assert made.feed('{"a') == [ToolCallArguments(0, '{"a')]


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]hello world",
        "[TOOL_CALLS]launch[ARGS]{}",
        "[TOOL_CALLS]cloc",
        "[TOOL_CALLS] [",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS][1, 2]",
        '[TOOL_CALLS][{"name": "launch", "arguments": {}}, {"name": "clock"}]',
        "[TOOL_CALLS]" + "clock" * 200 + "[ARGS]{}",
        "[TOOL",
        "an array [1] and [TOOL_BOX]",
    ],
)
def test_what_is_no_call_is_content_to_the_character(text):
    message = read(text, MISTRAL)
    assert message.content == text
    assert message.tool_calls == ()


def test_a_bad_call_in_a_list_leaves_the_good_one_before_it():
    message = read('[TOOL_CALLS][{"name": "clock"}, {"name": "launch", "arguments": {}}]', MISTRAL)
    assert calls(message) == [("clock", "{}")]
    assert message.content == '{"name": "launch", "arguments": {}}]'


def test_a_call_that_is_cut_off_says_so():
    for text, arguments in [('clock[ARGS]{"a', '{"a'), ("clock[ARGS]", ""), ('[{"name": "clock", "ar', "")]:
        message = read("[TOOL_CALLS]" + text, MISTRAL)
        assert calls(message) == [("clock", arguments)]
        assert message.is_truncated
