"""Llama's JSON calls, and answers that are nothing but calls."""

from __future__ import annotations

import pytest
from parsing import calls, parser, read

from cb_engine.serve.parsers import Content, ToolCallArguments, ToolCallStart, ToolFormat

LLAMA, JSON = ToolFormat.LLAMA3_JSON, ToolFormat.JSON
BOTH = [("get_weather", '{"city": "Oslo"}'), ("clock", "{}")]
ONE, TWO = '{"name": "get_weather", "parameters": {"city": "Oslo"}}', '{"name": "clock", "arguments": {}}'


@pytest.mark.parametrize("form", [LLAMA, JSON])
@pytest.mark.parametrize(
    "text",
    [
        f"{ONE}; {TWO}",
        f"{ONE}\n{TWO}\n",
        f"{ONE}{TWO}",
        f"\n\n{ONE} ;{TWO}",
        f"[{ONE}, {TWO}]",
        f"[\n{ONE},\n{TWO}\n]\n",
        f"```json\n{ONE}\n{TWO}\n```\n",
        f"```\n[{ONE},{TWO}]```",
        f"```json [{ONE}, {TWO}]",
        f"[{ONE}, {TWO}",
    ],
)
def test_an_answer_of_calls(text, form):
    message = read(text, form)
    assert message.content is None
    assert calls(message) == BOTH


@pytest.mark.parametrize("text", [f"{ONE}; <|python_tag|>{TWO}", f"{ONE};{TWO}", f"[{ONE}, {TWO}]"])
@pytest.mark.parametrize("before", ["", "Let me look.\n"])
def test_llamas_tag_may_come_anywhere(text, before):
    message = read(f"{before}<|python_tag|>{text}", LLAMA)
    assert message.content == (before.strip() or None)
    assert calls(message) == BOTH


def test_llama_names_the_type_at_times():
    message = read('{"type": "function", "name": "clock", "parameters": {"zone": "CET"}}', LLAMA)
    assert calls(message) == [("clock", '{"zone": "CET"}')]


@pytest.mark.parametrize("form", [LLAMA, JSON])
@pytest.mark.parametrize(
    "text",
    [
        "Plain text.\n",
        f"As JSON: {ONE}",
        '{"name": "Alice", "age": 30}',
        '{"name": "launch", "parameters": {}}',
        '{"answer": {"name": "clock", "arguments": {}}}',
        "[1, 2, 3]",
        "[]",
        '["name"]',
        "```python\nprint(1)\n```",
        "```json\n[]\n```",
        "``",
        '{"name": "cl',
        "   ",
        "\n" * 600 + ONE,
    ],
)
def test_any_other_answer_is_content_to_the_character(text, form):
    message = read(text, form)
    assert message.content == text
    assert message.tool_calls == ()


def test_python_behind_llamas_tag_is_content():
    assert read("Run:\n<|python_tag|>import math", LLAMA).content == "Run:\n<|python_tag|>import math"


def test_where_functions_are_not_known_arguments_make_the_call():
    assert calls(read('{"name": "launch", "arguments": {"at": 1}}', JSON, functions=None)) == [("launch", '{"at": 1}')]
    assert read('{"name": "Alice"}', JSON, functions=None).content == '{"name": "Alice"}'


def test_an_answer_in_json_is_shown_once_a_member_tells():
    made = parser(JSON)
    assert made.feed('{"name": "clock", "si') == []
    assert made.feed('ze": ') == [Content('{"name": "clock", "size": ')]
    assert made.feed("3}") == [Content("3}")]


def test_a_call_is_announced_with_its_first_argument_character():
    made = parser(JSON)
    assert made.feed('{"name": "clock", "arguments": ') == []
    start, arguments = made.feed('{"z')
    assert isinstance(start, ToolCallStart)
    assert arguments == ToolCallArguments(0, '{"z')


def test_text_behind_a_call_is_content():
    message = read(f"{ONE}\nI called it.", JSON)
    assert calls(message) == BOTH[:1]
    assert message.content == "I called it."


def test_a_call_that_is_cut_off_says_so():
    for text, arguments in [('{"name": "clock", "param', ""), ('{"name": "clock", "parameters": {"a', '{"a')]:
        message = read(text, LLAMA)
        assert calls(message) == [("clock", arguments)]
        assert message.is_truncated
