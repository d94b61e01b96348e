"""Qwen3-Coder's tags, whose arguments become JSON here."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import FUNCTIONS, calls, parser, pieces, read, stream

from cb_engine.serve.parsers import Content, Tool, ToolCallArguments, ToolCallStart, ToolFormat

XML = ToolFormat.QWEN_XML
CALL = """<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""


def test_text_and_calls_in_a_row():
    message = read(f"Let me look.\n{CALL}\n<tool_call>\n<function=clock>\n</function>\n</tool_call>\n", XML)
    assert message.content == "Let me look."
    assert calls(message) == [("get_weather", '{"city": "Oslo", "days": 3}'), ("clock", "{}")]


def test_without_the_outer_tags():
    message = read("Hm.\n<function=get_weather><parameter=city>Oslo</parameter></function> Done.", XML)
    assert message.content == "Hm.Done."
    assert calls(message) == [("get_weather", '{"city": "Oslo"}')]


def test_a_string_is_escaped_as_it_comes():
    made = parser(XML)
    [start] = made.feed("<tool_call>\n<function=get_weather>")
    assert isinstance(start, ToolCallStart)
    assert made.feed("<parameter=city>") == [ToolCallArguments(0, '{"city": ')]
    assert made.feed('\nOs"l\n') == [ToolCallArguments(0, '"Os\\"l')]
    assert made.feed("o\n</param") == [ToolCallArguments(0, "\\no")]
    assert made.feed("eter>") == [ToolCallArguments(0, '"')]
    assert made.feed("</function>") == [ToolCallArguments(0, "}")]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "", ""),
        ({"type": "string"}, "\n\ta \\ b\n", "\n\ta \\ b\n"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "1"}, "1", "1"),
        ({"type": "string", "enum": ["1", 2]}, "1", 1),
        ({"type": "array"}, "[" * 200_000, "[" * 200_000),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "word", "word"),
        ({"type": "array"}, '[1, {"a": "é"}]', [1, {"a": "é"}]),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "word", "word"),
        (True, "2.5", 2.5),
    ],
)
def test_a_value_is_what_its_schema_says(schema, text, value):
    function = Tool("f", parameters={"type": "object", "properties": {"x": schema}})
    message = read(f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>", XML, functions=[function])
    [(_, arguments)] = calls(message)
    assert json.loads(arguments) == {"x": value}
    assert not message.is_truncated


def test_an_unknown_parameter_is_json_if_it_can_be():
    text = "<function=g><parameter=x>5</parameter><parameter=y>five</parameter></function>"
    assert calls(read(text, XML, functions=None)) == [("g", '{"x": 5, "y": "five"}')]


@settings(derandomize=True, deadline=None)
@given(st.text(alphabet=st.sampled_from('ab<>/"\\\n é'), max_size=30), st.data())
def test_any_string_survives(value, data):
    text = f"<function=get_weather>\n<parameter=city>\n{value}\n</parameter>\n</function>"
    events = stream(parser(XML), pieces(text, data.draw(st.lists(st.integers(0, len(text)), max_size=6))))
    [start, arguments] = events
    assert isinstance(start, ToolCallStart)
    assert isinstance(arguments, ToolCallArguments)
    assert json.loads(arguments.delta) == {"city": value}


@pytest.mark.parametrize(
    "text",
    [
        "The tags are <tool_call> and <function=name>.\n",
        CALL.replace("get_weather", "launch"),
        "<tool_call>\n{}</tool_call>",
        "<function=get_wea",
        "<function=>x",
        "<function=" + "n" * 600 + ">",
        "a <func and <tool",
    ],
)
def test_what_is_no_call_is_content_to_the_character(text):
    message = read(text, XML)
    assert message.content == text
    assert message.tool_calls == ()


def test_a_missing_closing_tag_ends_the_call_where_it_should_be():
    message = read("<tool_call>\n<function=clock>\n<parameter=a>\n1\n</parameter>\n</tool_call>\nDone.", XML)
    assert calls(message) == [("clock", '{"a": 1}')]
    assert message.content == "Done."


def test_a_call_that_is_cut_off_says_so():
    at = CALL.index("</parameter>")
    for cut in (CALL.index("Oslo") + 2, at - 1, at + 4, CALL.index("3") + 1, CALL.index("</function>") + 3):
        message = read(CALL[:cut], XML)
        assert message.content is None
        assert [call.name for call in message.tool_calls] == ["get_weather"]
        assert message.is_truncated


def test_nothing_is_known_of_the_function_but_its_start():
    events = stream(parser(XML, functions=FUNCTIONS), ["Hm. <function=clock>"])
    assert events == [Content("Hm."), ToolCallStart(0, "", "clock")]
