"""/v1/responses through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_rig import NAME, PROMPT, ServerRig, says, serving

GREEDY: dict[str, Any] = {"model": NAME, "input": "Hi", "temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def rig() -> Iterator[ServerRig]:
    with serving() as made:
        yield made


def respond(rig: ServerRig, **fields: Any) -> Any:
    return rig.client().responses.create(**{**GREEDY, **fields})


def test_the_answer_is_the_chats(rig: ServerRig):
    chat = rig.client().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=12
    )
    answer = respond(rig)
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == len(PROMPT)
    assert answer.usage.output_tokens == 12
    assert answer.model == NAME


def test_input_may_be_items(rig: ServerRig):
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    assert respond(rig, input=items).output_text == respond(rig).output_text
    told = respond(rig, instructions="Be brief")
    system = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    assert told.output_text == respond(rig, input=system).output_text
    assert told.instructions == "Be brief"


def test_an_answer_can_be_sent_back_as_it_came(rig: ServerRig):
    items = [{"role": "user", "content": "Hi"}, *respond(rig).output, {"role": "user", "content": "And?"}]
    assert respond(rig, input=items).output_text


def test_the_stream_has_the_events_in_their_order():
    with serving(says("one two")) as rig:
        fields = {"max_output_tokens": 50}
        events = list(respond(rig, stream=True, **fields))
        kinds = [e.type for e in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert set(kinds[4:-4]) == {"response.output_text.delta"}
        assert [e.sequence_number for e in events] == list(range(len(events)))
        assert "".join(e.delta for e in events[4:-4]) == "one two"
        final = events[-1].response
        assert final.output_text == "one two" == respond(rig, **fields).output_text
        assert final.status == "completed"
        assert final.usage.output_tokens == len("one two") + 1
        item = events[2].item.id
        assert {e.item_id for e in events[3:-2]} == {item} == {final.output[0].id}
        assert events[2].item.content == [], "an item is shown as it was then"


TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TEMPLATE = "{% if tools %}T{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}A{# <tool_call> <think> #}"


def test_reasoning_text_and_calls_are_items():
    with serving(says(f"<think>Hmm.</think>Wait.{CALL}", "THiA"), template=TEMPLATE) as rig:
        fields = {"tools": [TOOL], "max_output_tokens": 200}
        answer = respond(rig, **fields)
        reasoning, message, call = answer.output
        assert [i.type for i in answer.output] == ["reasoning", "message", "function_call"]
        assert reasoning.content[0].text == "Hmm."
        assert message.content[0].text == "Wait."
        assert (call.name, call.arguments, call.status) == ("weather", '{"city": "Oslo"}', "completed")
        assert answer.usage.output_tokens_details.reasoning_tokens == len("<think>Hmm.</think>")

        events = list(respond(rig, stream=True, **fields))
        final = events[-1].response
        strip = {"id", "call_id"}
        assert [i.model_dump(exclude=strip) for i in final.output] == [
            i.model_dump(exclude=strip) for i in answer.output
        ]
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == '{"city": "Oslo"}'
        assert [e.arguments for e in events if e.type == "response.function_call_arguments.done"] == ["".join(deltas)]
        assert [e.text for e in events if e.type == "response.reasoning_text.done"] == ["Hmm."]


def test_what_came_of_a_call_goes_in():
    with serving(says("Cold.", "THi1A"), template=TEMPLATE) as rig:
        items = [
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "?"}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ]
        assert respond(rig, input=items, tools=[TOOL], max_output_tokens=50).output_text == "Cold."


def test_log_probabilities(rig: ServerRig):
    answer = respond(rig, top_logprobs=2, include=["message.output_text.logprobs"])
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == 12
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    events = list(respond(rig, stream=True, top_logprobs=2))
    final = events[-1].response.output[0].content[0].logprobs
    assert [e.logprob for e in final] == [e.logprob for e in logprobs]


def test_log_probabilities_of_a_call_are_not_the_next_texts():
    with serving(says(f"{CALL}Hi", "THiA"), template=TEMPLATE) as rig:
        fields = {"tools": [TOOL], "max_output_tokens": 200, "top_logprobs": 0, "stream": True}
        final = list(respond(rig, **fields))[-1].response
        call, message = final.output
        assert (call.type, message.content[0].text) == ("function_call", "Hi")
        assert [entry.token for entry in message.content[0].logprobs] == ["H", "i", "</s>"]


@pytest.mark.parametrize(
    ("item", "param", "message"),
    [
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "mood": 1},
            "input.1.mood",
            "unknown",
        ),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "input.1.arguments", "required"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input.1.content.0.text", "required"),
        ({"type": "item_reference", "id": "x"}, "input.1", "type is one of message, function_call"),
        ("x", "input.1", "type is one of message"),
    ],
    ids=["unknown", "missing", "deep", "kind", "text"],
)
def test_what_is_wrong_with_an_item_is_said(rig: ServerRig, item: Any, param: str, message: str):
    answer = rig.post("/v1/responses", {"model": NAME, "input": [{"role": "user", "content": "x"}, item]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


def test_a_clients_own_objects_come_back(rig: ServerRig):
    """As `model_dump()` of the official client gives them, readings and fields of later versions included."""
    text: dict[str, Any] = {"type": "output_text", "text": "1", "annotations": [], "logprobs": None, "parsed": {"a": 1}}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text], "phase": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "i", "status": "completed",
         "parsed_arguments": {}, "namespace": None, "caller": None},
        {"type": "function_call_output", "call_id": "c", "output": "2", "caller": None},
    ]  # fmt: skip
    answer = rig.post("/v1/responses", {"model": NAME, "input": items, "max_output_tokens": 2})
    assert answer.status_code == 200, answer.text
    items[1]["phase"] = "commentary"
    assert rig.post("/v1/responses", {"model": NAME, "input": items}).json()["error"]["param"] == "input.1.phase"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"previous_response_id": "resp_1"}, "answers are not kept"),
        ({"store": True}, "answers are not kept"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"nonsense": 1}}, "unknown field 'nonsense'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ],
    ids=["previous", "store", "background", "empty", "tool choice", "temperature", "unknown", "reference"],
)
def test_what_cannot_be_done_is_refused(rig: ServerRig, fields: dict[str, Any], message: str):
    with pytest.raises(openai.BadRequestError, match=message):
        respond(rig, **fields)
