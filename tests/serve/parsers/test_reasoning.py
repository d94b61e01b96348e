"""Reasoning before the answer."""

from __future__ import annotations

import pytest
from parsing import calls, parser, read

from cb_engine.serve.parsers import Content, Reasoning, ReasoningFormat, ToolFormat

THINK = ReasoningFormat.THINK
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm, so.\n</think>\n\nYes.\n", False, "Hm, so.", "Yes.\n"),
        ("\n <think>Hm</think>Yes", False, "Hm", "Yes"),
        ("Hm, so.\n</think>\n\nYes.", True, "Hm, so.", "Yes."),
        ("\n<think>\nHm\n</think>\nYes.", True, "Hm", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, None, "Yes."),
        ("<think>\nHm, so.\n", False, "Hm, so.\n", None),
        ("Hm, so", True, "Hm, so", None),
        ("Hm</thin", True, "Hm</thin", None),
        ("<thi", True, "<thi", None),
        ("<thi", False, None, "<thi"),
        ("Yes. <think>no</think>", False, None, "Yes. <think>no</think>"),
        ("<think>a</think>b</think><think>", False, "a", "b</think><think>"),
        ("<think>a <b> </thinker> c\n\nd</think>  e", False, "a <b> </thinker> c\n\nd", "  e"),
        ("  \nYes.", False, None, "  \nYes."),
        ("", True, None, None),
        ("\n", False, None, "\n"),
    ],
)
def test_reasoning_and_answer(text, is_open, reasoning, content):
    message = read(text, reasoning=THINK, starts_in_reasoning=is_open)
    assert (message.reasoning, message.content) == (reasoning, content)


def test_mistrals_markers():
    message = read("[THINK]Hm[/THINK]Yes.", reasoning=ReasoningFormat.MISTRAL)
    assert (message.reasoning, message.content) == ("Hm", "Yes.")


def test_a_call_inside_reasoning_is_text_and_behind_it_a_call():
    message = read(f"I could write {CALL}\n</think>\n\n{CALL}", ToolFormat.HERMES, THINK, True)
    assert message.reasoning == f"I could write {CALL}"
    assert message.content is None
    assert calls(message) == [("clock", "{}")]


def test_an_answer_that_is_nothing_but_a_call_may_follow_reasoning():
    message = read('<think>Hm</think>\n\n{"name": "clock", "parameters": {}}', ToolFormat.LLAMA3_JSON, THINK)
    assert (message.reasoning, message.content) == ("Hm", None)
    assert calls(message) == [("clock", "{}")]


def test_without_a_format_markers_are_text():
    assert read("<think>Hm</think>Yes").content == "<think>Hm</think>Yes"


def test_only_what_may_be_a_marker_waits():
    made = parser(reasoning=THINK)
    assert made.feed("<thi") == []
    assert made.feed("nk>a <b") == [Reasoning("a <b")]
    assert made.feed(">\n") == [Reasoning(">")]
    assert made.feed("c</") == [Reasoning("\nc")]
    assert made.feed("think>\n") == []
    assert made.feed("d<think>") == [Content("d<think>")]


def test_open_reasoning_needs_a_format():
    with pytest.raises(ValueError, match="starts_in_reasoning=True needs a reasoning format"):
        parser(starts_in_reasoning=True)
