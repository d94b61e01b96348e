"""Which objects are calls, and from when."""

from __future__ import annotations

import pytest

from cb_engine.serve.parsers.call_reader import CallReader


def reader(
    text: str, *, marked: bool = True, names: frozenset[str] | None = frozenset({"f"})
) -> tuple[CallReader, str]:
    """A reader that has read the text one character at a time, and the arguments that came out."""
    made, arguments = CallReader(marked=marked, names=names), ""
    for char in text:
        taken = made.feed(char, 0, 1)
        arguments += made.take_arguments()
        if not taken:
            break
    return made, arguments


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": [1, "}"]}}', '{"a": [1, "}"]}'),
        ('{"name":"f","parameters":{ "a" :1 }}', '{ "a" :1 }'),
        ('{ "arguments": {"a": 1}, "name": "f" }', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\\\n\\"}"}', '{"a": "é\\n"}'),
        ('{"arguments": " {}", "name": "f"}', "{}"),
        ('{"id": "1", "type": "function", "name": "f", "arguments": {}}', "{}"),
        ('{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": True,}, }', '{"a": True,}'),
        ('{"na\\u006de": "\\u0066", "arguments": {}}', "{}"),
    ],
)
def test_a_call(text, arguments, marked):
    made, out = reader(text, marked=marked)
    assert made.done
    assert (made.name, out) == ("f", arguments)


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "g", "arguments": {}}',
        '{"name": 1}',
        '{"name" "f"}',
        '{"arguments": {}}',
        "{}",
        "{1}",
        '{"name": ""}',
        "{'name': 'f'}",
        '{"name": "\\x"}',
        '{"' + "k" * 300 + '": 1}',
        '{"name": "' + "n" * 300 + '"}',
    ],
)
def test_no_call(text, marked):
    made, out = reader(text, marked=marked)
    assert made.failed
    assert not made.announced
    assert not out


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "age": 3}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": 1}',
        '{"name": "f", "arguments": "word"}',
        '{"name": "f", "arguments": nothing}',
    ],
)
def test_without_a_marker_the_members_have_to_be_a_calls(text):
    made, out = reader(text, marked=False)
    assert made.failed
    assert not made.announced
    assert not out
    assert reader(text, marked=True)[0].done


def test_a_name_alone_is_a_call_where_a_marker_or_the_functions_say_so():
    assert reader('{"name": "x"}', marked=True, names=None)[0].done
    assert reader('{"name": "f"}', marked=False)[0].done
    assert reader('{"name": "x"}', marked=False, names=None)[0].failed
    assert reader('{"name": "x", "arguments": {}}', marked=False, names=None)[0].done


def test_a_name_is_something_that_can_be_printed():
    for name in ("\\ud83d", "a\\nb", "\\u0000"):
        assert reader(f'{{"name": "{name}"', names=None)[0].failed


def test_behind_a_marker_the_name_is_enough():
    assert not reader('{"name": "f', marked=True)[0].announced
    assert reader('{"name": "f"', marked=True)[0].announced
    assert not reader('{"name": "f", "arguments": ', marked=False)[0].announced
    assert reader('{"name": "f", "arguments": {', marked=False)[0].announced


def test_arguments_come_as_they_are_read():
    assert reader('{"name": "f", "arguments": {"a": "tr')[1] == '{"a": "tr'
    assert reader('{"name": "f", "arguments": "{\\"a\\": \\"tr\\')[1] == '{"a": "tr'


def test_at_the_end_a_known_name_makes_a_call():
    for text, is_call in [('{"name": "f", "par', True), ('{"name": "f', False), ('{"arguments": {"a": 1}', False)]:
        assert reader(text, marked=False)[0].end_of_text() is is_call
    assert not reader('{"name": "f", "par', marked=False, names=None)[0].end_of_text()
