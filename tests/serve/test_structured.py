"""Forms that answers must have, and tools that must be called, through HTTP."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from server_rig import NAME, USER, ServerRig, random_model, serving

from cb_engine import EngineConfig
from cb_engine.grammar.compiler import GrammarCompiler

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cd"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {"model": NAME, "messages": USER, "temperature": 1.0, "seed": 3, "max_tokens": 300}


@pytest.fixture(scope="module")
def rig() -> Iterator[ServerRig]:
    with serving(random_model(max_position_embeddings=2048)) as made:
        yield made


def ask(rig: ServerRig, **fields: Any) -> Any:
    response = rig.post("/v1/chat/completions", {**CHAT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def texts(answer: Any) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def check_person(text: str) -> None:
    person = json.loads(text)
    assert person.keys() == {"name", "age"}
    assert person["name"] in ("ab", "cd")
    assert 0 <= person["age"] <= 99


def wrapped(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


def test_a_schema_is_kept_to_by_all_samples(rig: ServerRig):
    answer = ask(rig, response_format=wrapped(SCHEMA), n=4)
    for text in texts(answer):
        check_person(text)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert ask(rig, response_format={"type": "text"}, max_tokens=5)["usage"]["completion_tokens"] == 5


def test_a_stream_says_the_same(rig: ServerRig):
    whole = texts(ask(rig, response_format=wrapped(SCHEMA)))[0]
    lines = rig.post("/v1/chat/completions", {**CHAT, "response_format": wrapped(SCHEMA), "stream": True}).text
    events = [json.loads(x[6:]) for x in lines.split("\n\n") if x.startswith("data: {")]
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == whole


def test_the_clients_own_helper_parses_it(rig: ServerRig):
    from pydantic import BaseModel

    class Person(BaseModel):
        name: Literal["ab", "cd"]
        age: Literal[1, 22]

    done = rig.client().chat.completions.parse(
        model=NAME, messages=USER, response_format=Person, max_tokens=400, temperature=1, seed=2
    )
    assert isinstance(done.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[a-c]{3}-[0-9]{2}"}, r"[a-c]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no", "maybe"]}, "yes|no|maybe"),
        ({"grammar": 'start: "a" ("b" | "c")+ "d"'}, "a[bc]+d"),
        ({"json": SCHEMA}, r"\{.*\}"),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
def test_other_forms(rig: ServerRig, form: dict[str, Any], pattern: str):
    answer = ask(rig, structured_outputs=form, n=2)
    for choice in answer["choices"]:
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["message"]["content"], re.DOTALL)
    assert any(choice["finish_reason"] == "stop" for choice in answer["choices"])
    body = {"model": NAME, "prompt": "x", "max_tokens": 300, "structured_outputs": form, "seed": 1}
    text = rig.post("/v1/completions", body).json()["choices"][0]["text"]
    assert re.fullmatch(pattern, text, re.DOTALL)


def test_any_object(rig: ServerRig):
    answer = ask(rig, response_format={"type": "json_object"}, temperature=0, max_tokens=40)
    assert texts(answer)[0].lstrip().startswith("{")


def test_responses_take_a_form_too(rig: ServerRig):
    form = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
    body = {"model": NAME, "input": "Hi", "text": form, "max_output_tokens": 300, "seed": 1}
    answer = rig.post("/v1/responses", body).json()
    check_person(answer["output"][0]["content"][0]["text"])
    assert answer["text"]["format"]["schema"] == SCHEMA


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": wrapped({"type": "nonsense"})},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"regex": "x" * 10000}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"grammar": "start: nothing_there"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    ],
    ids=range(10),
)
def test_bad_forms_are_refused(rig: ServerRig, fields: dict[str, Any]):
    answer = rig.post("/v1/chat/completions", {**CHAT, **fields})
    assert answer.status_code == 400
    assert rig.get("/health").status_code == 200
    error = answer.json()["error"]["message"]
    assert "\n" not in error
    assert "/root" not in error
    assert len(error) < 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_is_too_much_work_is_the_clients_fault(rig: ServerRig, stream: bool):
    form = {"structured_outputs": {"regex": "(ab|cd)*" * 500}, "ignore_eos": True, "stream": stream}
    answer = rig.post("/v1/chat/completions", {**CHAT, **form, "temperature": 1.0, "max_tokens": 40})
    if answer.status_code == 400:
        error = answer.json()["error"]
    else:  # after its first token
        last, done = [line for line in answer.text.split("\n\n") if line][-2:]
        assert (stream, done) == (True, "data: [DONE]")
        error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "form_failed")
    assert "the grammar failed: lexer error: too many expressions constructed; simplify it" in error["message"]
    assert rig.get("/health").status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": ["abc"]}, "allowed_token_ids": [5]},
        {"structured_outputs": {"choice": ["abc"]}, "bad_words": ["abc", "a"]},
        {"allowed_token_ids": [5], "logit_bias": {"5": float("-inf")}},
        {"allowed_token_ids": [2], "min_tokens": 3},
    ],
    ids=["allowed", "bad words", "bias", "minimum"],
)
def test_wishes_that_leave_no_token_are_the_clients_fault(rig: ServerRig, fields: dict[str, Any]):
    content = json.dumps({**CHAT, **fields}).replace("-Infinity", "-1e999")
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{rig.url}/v1/chat/completions", content=content, headers=headers, timeout=30)
    assert answer.status_code == 400
    assert rig.get("/health").status_code == 200


def test_grammars_are_compiled_off_the_loop_and_off_the_engine(rig: ServerRig, monkeypatch: pytest.MonkeyPatch):
    threads: list[str] = []
    start = GrammarCompiler.start

    def spy(self: GrammarCompiler, *args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return start(self, *args, **kwargs)

    monkeypatch.setattr(GrammarCompiler, "start", spy)
    ask(rig, structured_outputs={"regex": "ab{3}"})
    assert threads
    assert all(name.startswith("cb_engine_text") for name in threads)


def test_forms_go_with_speculation_and_preemption():
    repeats = {"type": "array", "items": {"enum": ["aaaa", "bbbb"]}, "minItems": 6, "maxItems": 6}
    fields = {"response_format": wrapped(repeats), "n": 4, "seed": 5}
    with serving() as plain:
        expected = texts(ask(plain, **fields))
        assert all(len(json.loads(text)) == 6 for text in expected)
    for config in (
        EngineConfig(block_size=16, num_blocks=256, speculative={"method": "ngram", "adaptive": False}),
        EngineConfig(block_size=4, num_blocks=40),
    ):
        with serving(config=config) as rig:
            assert texts(ask(rig, **fields)) == expected
            stats = rig.stats()
            assert stats.num_drafts or stats.num_preemptions


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]
TEMPLATES = {
    "json": "{% if tools %}T{% endif %}{{ messages[0].content }}",
    "hermes": "{% if tools %}T{% endif %}{{ messages[0].content }}{# <tool_call> #}",
    "mistral": "{% if tools %}T{% endif %}{{ messages[0].content }}{# [TOOL_CALLS] #}",
    "llama3_json": '{% if tools %}T{% endif %}{{ messages[0].content }}{# "parameters" <|python_tag|> #}',
    "qwen_xml": "{% if tools %}T{% endif %}{{ messages[0].content }}{# <function= <parameter= #}",
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_tools_are_called_when_they_must_be(form: str):
    with serving(template=TEMPLATES[form]) as rig:
        for choice, names in [
            ("required", {"weather", "time"}),
            ({"type": "function", "function": {"name": "time"}}, {"time"}),
        ]:
            fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "n": 3}
            for answered in ask(rig, **fields)["choices"]:
                assert answered["finish_reason"] == "tool_calls"
                (call,) = answered["message"]["tool_calls"]
                assert call["function"]["name"] in names
                assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
                assert not answered["message"]["content"]
        bad = rig.post("/v1/chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": _named("nope")})
        assert bad.status_code == 400


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("end", [{"max_tokens": 9}, {"stop": ["e"]}], ids=["length", "stop"])
def test_a_call_that_must_be_and_is_cut_off_is_no_text(form: str, end: dict[str, Any]):
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", **end}
    with serving(template=TEMPLATES[form]) as rig:
        (choice,) = ask(rig, **fields)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert not choice["message"]["content"]
        lines = rig.post("/v1/chat/completions", {**CHAT, **fields, "stream": True}).text.split("\n\n")
        chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        assert not any(chunk["delta"].get("content") for chunk in chunks)
        assert chunks[-1]["finish_reason"] == "length"
        answer = rig.post(
            "/v1/responses",
            {"model": NAME, "input": "x", "max_output_tokens": 9, "tool_choice": "required",
             "tools": [{"type": "function", **tool["function"]} for tool in TOOLS]},
        ).json()  # fmt: skip
        assert answer["status"] == "incomplete"
        assert "message" not in [item["type"] for item in answer["output"]]


def test_the_marks_of_a_call_that_must_be_cannot_be_hidden(monkeypatch: pytest.MonkeyPatch):
    with serving(template=TEMPLATES["hermes"]) as rig:
        special = dataclasses.replace(rig.context.loaded, special_tokens={"<tool_call>": 1, "</tool_call>": 2})
        monkeypatch.setattr(rig.context, "_loaded", special)
        fields = {"tools": TOOLS, "tool_choice": "required", "skip_special_tokens": True}
        answer = rig.post("/v1/chat/completions", {**CHAT, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "skip_special_tokens")


def test_a_client_streams_a_call_that_must_be(rig: ServerRig):
    stream = rig.client().chat.completions.create(
        model=NAME,
        messages=USER,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
        temperature=1,
        max_tokens=200,  # type: ignore[call-overload]
    )
    name, arguments, end = "", "", None
    for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        end = chunk.choices[0].finish_reason or end
    assert name in ("weather", "time")
    assert end == "tool_calls"


def test_a_form_begins_after_the_reasoning():
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"
    with serving(template=template) as rig:
        for fields in (
            {"response_format": wrapped(SCHEMA)},
            {"structured_outputs": {"choice": ["yes", "no"]}},
            {"structured_outputs": {"regex": "a/b"}},
        ):
            params = _params_of(rig, {**CHAT, **fields})
            assert "thought" in params.structured.grammar
        refused = rig.post("/v1/chat/completions", {**CHAT, "structured_outputs": {"grammar": 'start: "a"'}})
        assert refused.status_code == 400
        assert "turn the reasoning off" in refused.json()["error"]["message"]


def _params_of(rig: ServerRig, body: dict[str, Any]) -> Any:
    from cb_engine.serve.chat import prepare_dialogue
    from cb_engine.serve.protocol.chat import ChatRequest

    return prepare_dialogue(ChatRequest.model_validate(body), rig.context).params
