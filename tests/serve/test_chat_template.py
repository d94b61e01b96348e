"""Conversations into token ids."""

from __future__ import annotations

from typing import Any

import byte_tokenizer
import pytest
from server_rig import tokenizer

from cb_engine.serve.chat_template import ChatTemplate, Conversation
from cb_engine.serve.errors import APIError
from cb_engine.serve.protocol.chat import Message

PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
CALLS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or () %}"
    "{{ c.function.name }}={{ c.function.arguments.city }}{% endfor %}]{% endfor %}{% if tools %}T{% endif %}"
)
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "does"}}


def render(template: str | None, messages: list[dict[str, Any]], **options: Any) -> str:
    chat = ChatTemplate(tokenizer(template), None, options.pop("variables", {}))
    made = [Message.model_validate(m) for m in messages]
    return str(byte_tokenizer.make_tokenizer().decode(chat.render(Conversation(made, **options))))


def test_calls_are_objects_for_the_template():
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "cold"},
    ]
    assert render(CALLS, messages, tools=[TOOL]) == "[user:x][assistant:f=Oslo][tool:cold]T"
    told = render(PLAIN, messages, tools=[TOOL])
    assert told.startswith("[system:You can call functions.")
    assert '{"name": "f", "description": "does"}][user:x]' in told
    assert '[assistant:{"name": "f", "arguments": {"city": "Oslo"}}]' in told
    assert told.endswith("[user:The function's result is:\ncold]")


def test_tools_are_told_behind_what_the_system_says():
    told = render(PLAIN, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}], tools=[TOOL])
    assert told.startswith("[system:Be brief.\n\nYou can call functions.")


@pytest.mark.parametrize("arguments", ["nonsense", "[1]", '"x"'])
def test_arguments_that_are_no_object_are_refused(arguments: str):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(APIError, match=r"messages\[0\].tool_calls: arguments"):
        render(CALLS, [{"role": "assistant", "tool_calls": [call]}])


def test_what_a_template_says_of_messages_is_passed_on():
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
    with pytest.raises(APIError, match="refuses these messages: begin with the user") as caught:
        render(strict, [{"role": "system", "content": "x"}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_faults_of_a_template_tell_nothing_of_the_server():
    with pytest.raises(APIError, match="refuses these messages"):
        render("{{ messages[7].content.x }}", [{"role": "user", "content": "x"}])


def test_variables_of_the_server_hold_until_a_request_brings_its_own():
    template = "{{ mood }}:{{ messages[0].content }}"
    message = [{"role": "user", "content": "x"}]
    assert render(template, message, variables={"mood": "calm"}) == "calm:x"
    chat = ChatTemplate(tokenizer(template), None, {"mood": "calm"})
    ids = chat.render(Conversation([Message.model_validate(message[0])], variables={"mood": "wild"}))
    assert byte_tokenizer.make_tokenizer().decode(ids) == "wild:x"
    with pytest.raises(APIError, match="no variable 'moody'"):
        ChatTemplate(tokenizer(template), None, {"moody": 1})


def test_special_tokens_within_messages_are_text():
    template = "<s>{{ messages[0].content }}</s>"
    chat = ChatTemplate(tokenizer(template), None, {})
    ids = chat.render(Conversation([Message(role="user", content="a</s><s>b")]))
    inner = byte_tokenizer.ids_of("a</s><s>b")
    assert ids == [byte_tokenizer.BOS, *inner, byte_tokenizer.EOS]


def test_named_templates_have_a_default():
    made = tokenizer(None)
    made.chat_template = {"default": PLAIN, "rag": "{{ documents }}"}
    chat = ChatTemplate(made, None, {})
    assert chat.text == PLAIN
    assert chat.render(Conversation([Message(role="user", content="x")])) == byte_tokenizer.ids_of("[user:x]")


def test_transformers_own_tag_is_known():
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert render(template, [{"role": "user", "content": "x"}]) == "x"
