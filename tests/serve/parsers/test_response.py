"""What holds for every format: cuts do not matter, nothing is lost, and little is held back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parsing import parser, pieces, stream

from cb_engine.serve.parsers import (
    Content,
    Event,
    Reasoning,
    ReasoningFormat,
    ToolCallArguments,
    ToolCallStart,
    ToolFormat,
    collect,
)
from cb_engine.serve.parsers.tool_parser import MAX_HELD

FORMATS = [None, *ToolFormat]
# Whole and broken markup of all formats: what is put together of these is mostly broken.
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "</tool_call", "<function=", "clock", "get_weather>", "</function>"),
    *("<parameter=", "city>", "</parameter>", "<parameter=days>\n3\n</parameter>", "<function=clock>"),
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]abcdefghi", "[TOOL", "<think>", "</think>", "</thi"),
    *('{"name": "clock", "arguments": {}}', '{"name": "clock"', ', "arguments": {"a": [1, "}"]}}', '{"arguments": {'),
    *('{"name": "launch", "parameters": {}}', '"name"', '"clock"', '{"x": 1}, "name": "clock"}', '"{\\"a\\": 1}"'),
    *("{", "}", "[", "]", ",", ":", ";", '"', "\\", "\\u00e9", "\\ud83d", "\\ude00", "```json", "```", "null", "7"),
    *(" ", "\n", "\n\n", " " * 40, "text", "é", "😀", "<", "f"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
REASONING = st.sampled_from([(None, False), (ReasoningFormat.THINK, False), (ReasoningFormat.THINK, True)])
CUTS = st.lists(st.integers(0, 400), max_size=12)
SETTINGS = settings(derandomize=True, deadline=None)


def assert_cuts_do_not_matter(form: Any, text: str, reasoning: Any, cuts: list[int], known: bool) -> None:
    """Whole, cut at some places, and cut at every place, a text streams the same events."""
    arguments = (form, *reasoning) if known else (form, *reasoning, None)
    whole = stream(parser(*arguments), [text])
    assert stream(parser(*arguments), pieces(text, [min(cut, len(text)) for cut in cuts])) == whole
    assert stream(parser(*arguments), list(text)) == whole


@pytest.mark.parametrize("form", FORMATS)
@SETTINGS
@given(text=TEXTS, reasoning=REASONING, cuts=CUTS, known=st.booleans())
def test_cuts_do_not_matter(form, text, reasoning, cuts, known):
    assert_cuts_do_not_matter(form, text, reasoning, cuts, known)


@pytest.mark.parametrize("form", FORMATS)
@SETTINGS
@given(text=TEXTS, cut=st.integers(0, 400))
def test_what_is_out_is_never_taken_back(form, text, cut):
    made = parser(form)
    before = made.feed(text[:cut])
    after = made.feed(text[cut:]) + made.finish()
    assert stream_text(before) == stream_text(before + after)[: len(stream_text(before))]
    assert stream_text(before + after) == stream_text(stream(parser(form), [text]))


@pytest.mark.parametrize("form", FORMATS)
@SETTINGS
@given(text=TEXTS)
def test_without_a_call_all_is_content_and_with_one_no_character_comes_twice(form, text):
    message = collect(stream(parser(form), list(text)))
    if not message.tool_calls:
        assert (message.content or "") == text
    rest = iter(text)
    assert all(char in rest for char in message.content or "")  # in order, each at most once


@pytest.mark.parametrize("form", FORMATS)
@SETTINGS
@given(text=TEXTS)
def test_what_waits_is_short_or_may_be_a_call(form, text):
    """Text without the characters that begin a marker or an object comes out at once, but for white space."""
    made = parser(form)
    plain = "".join(char for char in text if char not in "<[{`")
    made.feed("x")
    shown = "".join(event.text for char in plain for event in made.feed(char) if isinstance(event, Content))
    assert plain[: len(shown)] == shown
    assert not plain[len(shown) :].strip()
    assert len(plain) - len(shown) <= 64


NAMES = st.sampled_from(["clock", "get_weather"])
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "note", "k"]), st.text(max_size=12), max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
WORDS = st.text(alphabet=st.sampled_from("abc <>.é\n"), max_size=12).map(str.strip)


def written(form: ToolFormat, made: list[tuple[str, str]]) -> str:
    """Calls as a model writes them."""
    if form is ToolFormat.QWEN_XML:
        blocks = []
        for name, arguments in made:
            values = (f"<parameter={k}>\n{json.dumps(v)}\n</parameter>\n" for k, v in json.loads(arguments).items())
            blocks.append(f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>")
        return "\n".join(blocks)
    if form is ToolFormat.MISTRAL_ARGS:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in made)
    key = "parameters" if form is ToolFormat.LLAMA3_JSON else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in made]
    match form:
        case ToolFormat.HERMES:
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
        case ToolFormat.MISTRAL:
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case ToolFormat.LLAMA3_JSON:
            return "; ".join(objects)
    return f"[{', '.join(objects)}]"


@pytest.mark.parametrize("form", list(ToolFormat))
@SETTINGS
@given(words=WORDS, calls=CALLS, thought=st.none() | WORDS, ascii_only=st.booleans(), cuts=CUTS)
def test_what_a_model_writes_is_what_comes_out(form, words, calls, thought, ascii_only, cuts):
    assume(form is not ToolFormat.QWEN_XML or "</parameter>" not in json.dumps(calls))  # there it ends a value
    made = [(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments in calls]
    if form in (ToolFormat.JSON, ToolFormat.LLAMA3_JSON):
        words = ""  # these have no call behind text
    text = (words + "\n" if words else "") + written(form, made) + "\n"
    if thought is not None:
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    # Between XML tags the texts are JSON here, which functions with string parameters would take literally.
    read = parser(form, ReasoningFormat.THINK, False, None)
    message = collect(stream(read, pieces(text, [min(cut, len(text)) for cut in cuts])))
    assert message.content == (words or None)
    assert message.reasoning == (thought or None)
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == calls
    if form is not ToolFormat.QWEN_XML:
        assert [call.arguments for call in message.tool_calls] == [arguments for _, arguments in made]
    assert not message.is_truncated


@pytest.mark.parametrize("form", list(ToolFormat))
@SETTINGS
@given(
    calls=CALLS,
    edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3), st.sampled_from(FRAGMENTS))),
    cuts=CUTS,
)
def test_cuts_do_not_matter_to_calls_that_were_damaged(form, calls, edits, cuts):
    text = "So: \n" * (len(edits) % 2) + written(form, [(name, json.dumps(arguments)) for name, arguments in calls])
    for at, removed, added in edits:
        text = text[:at] + added + text[at + removed :]
    assert_cuts_do_not_matter(form, text, (None, False), cuts, known=True)


@pytest.mark.parametrize("form", list(ToolFormat))
def test_wherever_a_response_is_cut_off_its_calls_are_a_beginning_of_the_whole(form):
    text = written(form, [("get_weather", '{"city": "\\"Oslo\\", {}"}'), ("clock", "{}")])
    whole = collect(stream(parser(form), [text])).tool_calls
    for end in range(len(text)):
        message = collect(stream(parser(form), [text[:end]]))
        assert len(message.tool_calls) <= len(whole)
        for call, expected in zip(message.tool_calls, whole, strict=False):
            assert call.name == expected.name
            assert expected.arguments.startswith(call.arguments)
        for call, expected in list(zip(message.tool_calls, whole, strict=False))[:-1]:
            assert call.arguments == expected.arguments
        if message.tool_calls:
            is_whole = message.tool_calls[-1].arguments == whole[len(message.tool_calls) - 1].arguments
            assert message.is_truncated is not is_whole


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (ToolFormat.HERMES, '<tool_call>{"arguments": {"a": "' + "x" * MAX_HELD),
        (ToolFormat.JSON, '{"id": "' + "x" * MAX_HELD),
        (ToolFormat.MISTRAL, '[TOOL_CALLS][{"extra": [' + "1," * (MAX_HELD // 2)),
    ],
)
def test_no_more_is_held_back_than_the_limit(form, text):
    made = parser(form)
    start, rest = text[:MAX_HELD], text[MAX_HELD:]
    shown = "".join(e.text for e in made.feed(start[:-1]) + made.feed(start[-1] + rest) if isinstance(e, Content))
    assert shown == text
    assert stream(parser(form), [text]) == [Content(text)]


@pytest.mark.parametrize(
    ("form", "head", "body"),
    [
        (None, "", "ab "),
        (ToolFormat.HERMES, "", "ab <"),
        (ToolFormat.HERMES, "", " "),
        (ToolFormat.HERMES, '<tool_call>{"name": "clock", "arguments": {"a": "', "x\\n"),
        (ToolFormat.HERMES, "", "<tool_call>x"),
        (ToolFormat.MISTRAL, "", "[TOOL_CALLS]a "),
        (ToolFormat.LLAMA3_JSON, '{"name": "clock", "parameters": "{', '\\"'),
        (ToolFormat.QWEN_XML, "<function=get_weather><parameter=city>", "</param\n"),
    ],
)
def test_a_long_text_in_single_characters_keeps_the_state_small(form, head, body):
    """The cost of a piece is bounded by what a parser keeps from the pieces before it."""
    made = parser(form)
    made.feed(head)
    shown = 0
    for fed, char in enumerate(body * (50_000 // len(body)), 1):
        for event in made.feed(char):
            shown += len(event.text if isinstance(event, Content) else getattr(event, "delta", ""))
        assert fed - 2 * shown < 600  # of an escape of two characters one comes out


def test_neighbours_of_a_kind_come_as_one_event():
    made = parser(ToolFormat.HERMES, ReasoningFormat.THINK)
    events = made.feed('<think>a\nb</think>\n\nc < d <tool_call>{"name": "clock", "arguments": "{\\"a\\": 1}"}')
    assert [type(event) for event in events] == [Reasoning, Content, ToolCallStart, ToolCallArguments]


def test_a_parser_is_for_one_response():
    made = parser(ToolFormat.HERMES)
    made.feed("a <")
    assert made.finish() == [Content(" <")]
    assert made.finish() == []
    with pytest.raises(RuntimeError, match="make a new parser"):
        made.feed("b")


def test_truncation_is_told_while_streaming():
    made = parser(ToolFormat.HERMES)
    made.feed('<tool_call>{"name": "clock", "arguments": {')
    assert made.is_truncated
    made.feed("}")
    assert not made.is_truncated
    made.feed("}</tool_call>")
    made.finish()
    assert not made.is_truncated


def stream_text(events: list[Event]) -> str:
    """All that events say, in order."""
    parts = []
    for event in events:
        match event:
            case Content(text) | Reasoning(text):
                parts.append(text)
            case ToolCallStart(index, _, name):
                parts.append(f"\0{index}{name}\0")
            case ToolCallArguments(_, delta):
                parts.append(delta)
    return "".join(parts)
