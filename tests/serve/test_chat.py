"""/v1/chat/completions through the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import byte_tokenizer
import openai
import pytest
from server_rig import NAME, PROMPT, USER, ServerRig, says, serving

from cb_engine.outputs import join_deltas
from cb_engine.serve.generation import Generation, Sample

GREEDY: dict[str, Any] = {"model": NAME, "messages": USER, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def rig() -> Iterator[ServerRig]:
    with serving() as made:
        yield made


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, list[Any]]:
    chunks = list(client.chat.completions.create(**{**GREEDY, **fields}, stream=True))
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


def test_an_answer_has_openais_shape(rig: ServerRig):
    answer = rig.client().chat.completions.create(**GREEDY)
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.index) == ("chat.completion", NAME, 0)
    assert answer.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == len(PROMPT) + 12


def test_a_stream_says_what_the_whole_answer_says(rig: ServerRig):
    whole = rig.client().chat.completions.create(**GREEDY).choices[0].message.content
    text, chunks = streamed(rig.client())
    assert text == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
    assert {c.id for c in chunks} == {chunks[0].id}
    assert all(c.usage is None for c in chunks)


def test_the_stream_ends_with_done_and_usage_if_it_is_wanted(rig: ServerRig):
    body = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    lines = [line for line in rig.post("/v1/chat/completions", body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    _, chunks = streamed(rig.client(), stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12


def test_a_repeated_prompt_is_found_in_the_cache(rig: ServerRig):
    messages = [{"role": "user", "content": "cached " * 10}]
    answers = [rig.client().chat.completions.create(**{**GREEDY, "messages": messages}) for _ in range(2)]
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in answers]
    assert cached == [0, (answers[0].usage.prompt_tokens - 1) // 16 * 16]


def test_sixteen_at_a_time_say_what_one_says(rig: ServerRig):
    prompts = [[{"role": "user", "content": f"question {i}"}] for i in range(16)]

    async def ask(client: openai.AsyncOpenAI, i: int, stream: bool) -> str:
        fields = {**GREEDY, "messages": prompts[i]}
        if not stream:
            return (await client.chat.completions.create(**fields)).choices[0].message.content or ""
        chunks = await client.chat.completions.create(**fields, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in chunks])

    async def all_at_once() -> list[str]:
        async with rig.async_client() as client:
            return await asyncio.gather(*(ask(client, i % 16, i >= 16) for i in range(32)))

    alone = [
        rig.client().chat.completions.create(**{**GREEDY, "messages": m}).choices[0].message.content for m in prompts
    ]
    assert asyncio.run(all_at_once()) == alone + alone


def test_samples_are_choices_of_their_own(rig: ServerRig):
    fields = {**GREEDY, "temperature": 1.5, "n": 3, "seed": 7}
    answers = [rig.client().chat.completions.create(**fields) for _ in range(2)]
    texts = [[c.message.content for c in a.choices] for a in answers]
    assert texts[0] == texts[1], "the seed fixes all samples"
    assert len(set(texts[0])) == 3
    assert [c.index for c in answers[0].choices] == [0, 1, 2]
    chunks = list(rig.client().chat.completions.create(**fields, stream=True))
    joined = ["", "", ""]
    for chunk in chunks:
        joined[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert joined == texts[0]


def test_log_probabilities_have_openais_shape(rig: ServerRig):
    fields = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    answer = rig.client().chat.completions.create(**fields)
    content = answer.choices[0].logprobs.content
    assert len(content) == 12
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert entry.bytes == list(entry.token.encode()) or entry.token == "\ufffd"
    _, chunks = streamed(rig.client(), logprobs=True, top_logprobs=3)
    assert [e for c in chunks for e in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])] == content


def test_ids_and_prompt_log_probabilities_are_given_on_demand(rig: ServerRig):
    extra = {"return_token_ids": True, "prompt_logprobs": 1}
    answer = rig.post("/v1/chat/completions", {**GREEDY, **extra}).json()
    assert answer["prompt_token_ids"] == byte_tokenizer.ids_of(PROMPT)
    assert len(answer["choices"][0]["token_ids"]) == 12
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(PROMPT)
    for token_id, entry in zip(byte_tokenizer.ids_of(PROMPT), answer["prompt_logprobs"], strict=True):
        assert entry is None or str(token_id) in entry
    as_ids = rig.post("/v1/chat/completions", {**GREEDY, "logprobs": True, "return_tokens_as_token_ids": True}).json()
    tokens = [entry["token"] for entry in as_ids["choices"][0]["logprobs"]["content"]]
    assert tokens == [f"token_id:{i}" for i in answer["choices"][0]["token_ids"]]


def test_stop_strings_and_the_end():
    with serving(says("one two three")) as rig:
        client = rig.client()
        fields = {**GREEDY, "max_tokens": 50}
        whole = client.chat.completions.create(**fields).choices[0]
        assert (whole.message.content, whole.finish_reason) == ("one two three", "stop")
        stopped = client.chat.completions.create(**fields, stop=["two"]).choices[0]
        assert (stopped.message.content, stopped.finish_reason) == ("one ", "stop")
        assert stopped.model_extra is not None
        assert stopped.model_extra["stop_reason"] == "two"
        text, chunks = streamed(client, max_tokens=50, stop="two")
        assert (text, chunks[-1].choices[0].finish_reason) == ("one ", "stop")
        text, _ = streamed(client, max_completion_tokens=5, max_tokens=None)
        assert text == "one t"


def test_content_parts_and_the_developers_role(rig: ServerRig):
    plain = [{"role": "system", "content": "Be brief"}, *USER]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    texts = [
        rig.client().chat.completions.create(**{**GREEDY, "messages": m}).choices[0].message.content
        for m in (plain, parts)
    ]
    assert texts[0] == texts[1]


def test_an_answer_can_be_sent_back_as_it_came(rig: ServerRig):
    answer = rig.client().chat.completions.create(**GREEDY).choices[0].message
    messages: list[Any] = [*USER, answer, {"role": "user", "content": "And?"}]
    rig.client().chat.completions.create(**{**GREEDY, "messages": messages})


def test_a_clients_own_objects_come_back(rig: ServerRig):
    """As the official client's `parse` gives them: with its readings of text and arguments, and much that is null."""
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    called = {"id": "c", "type": "function", "function": function}
    nulls = dict.fromkeys(("refusal", "audio", "annotations", "function_call", "of_a_later_version"))
    turn = {"role": "assistant", "content": '{"a":1}', "parsed": {"a": 1}, "tool_calls": [called], **nulls}
    messages = [*USER, turn, {"role": "tool", "tool_call_id": "c", "content": "2"}]
    answer = rig.post("/v1/chat/completions", {**GREEDY, "messages": messages})
    assert answer.status_code == 200, answer.text
    messages[1] = {**turn, "of_a_later_version": 1}
    answer = rig.post("/v1/chat/completions", {**GREEDY, "messages": messages})
    assert answer.json()["error"]["param"] == "messages.1.of_a_later_version"


def test_usage_can_be_had_with_every_chunk(rig: ServerRig):
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = streamed(rig.client(), stream_options=options, max_tokens=100)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 100
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {len(PROMPT)}
    body = {"model": NAME, "prompt": "x", "max_tokens": 3, "stream": True, "stream_options": options}
    events = [line[6:] for line in rig.post("/v1/completions", body).text.split("\n\n") if line]
    assert all(json.loads(data)["usage"]["prompt_tokens"] == 1 for data in events[:-1])


def test_an_event_is_one_line_wherever_lines_are_taken_to_end():
    text = "a\u2028b\u2029c\x85d\x0be\x1cf"
    fields = {"structured_outputs": {"choice": [text]}, "max_tokens": 50, "stream": True}
    with serving() as rig:
        lines = rig.post("/v1/chat/completions", {**GREEDY, **fields}).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert {line[:5] for line in lines if line} == {"data:"}


def test_a_final_message_can_be_continued(rig: ServerRig):
    messages = [*USER, {"role": "assistant", "content": "Once"}]
    answer = rig.post(
        "/v1/chat/completions",
        {**GREEDY, "messages": messages, "continue_final_message": True, "return_token_ids": True},
    ).json()
    assert answer["prompt_token_ids"] == byte_tokenizer.ids_of("<user>Hi\n<assistant>Once")


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOL_TEMPLATE = "{% if tools %}T{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}A"
HERMES_TEMPLATE = TOOL_TEMPLATE + "{# <tool_call> #}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def called(rig: ServerRig, **fields: Any) -> Any:
    return rig.client().chat.completions.create(**{**GREEDY, "max_tokens": 200, "tools": [WEATHER], **fields})


def test_tool_calls_are_read_from_the_text():
    with serving(says("Let me see. " + CALL, "THiA"), template=HERMES_TEMPLATE) as rig:
        choice = called(rig).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')

        chunks = list(called(rig, stream=True))
        deltas = [d for c in chunks for d in c.choices[0].delta.tool_calls or ()]
        assert deltas[0].function.name == "weather"
        assert "".join(d.function.arguments or "" for d in deltas) == '{"city": "Oslo"}'
        assert len(deltas) > 3, "arguments are streamed as they come"
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Let me see."
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

        # One that is cut off is not one that may be run.
        assert called(rig, max_tokens=60).choices[0].finish_reason == "length"


def test_a_stream_loses_nothing_when_all_comes_at_once(monkeypatch: pytest.MonkeyPatch):
    """Many tokens in one batch: a reader who is behind, or speculation."""
    next_batch = Generation.next_batch

    async def whole_batch(self: Generation) -> Any:
        samples: dict[int, list[Any]] = {}
        while batch := await next_batch(self):
            for sample in batch:
                samples.setdefault(sample.choice, []).append(sample.output)
        return [Sample(choice, join_deltas(outputs)) for choice, outputs in samples.items()]

    monkeypatch.setattr(Generation, "next_batch", whole_batch)
    with serving(says("<think>Hm.</think>See. " + CALL, "THiA"), template=HERMES_TEMPLATE + "{# <think> #}") as rig:
        fields = {**GREEDY, "max_tokens": 200, "tools": [WEATHER], "logprobs": True}
        whole = rig.client().chat.completions.create(**fields).choices[0]
        deltas = [c.choices[0] for c in rig.client().chat.completions.create(**fields, stream=True)]
        calls = [call for d in deltas for call in d.delta.tool_calls or ()]
        assert deltas[0].delta.role == "assistant"
        assert "".join(d.delta.content or "" for d in deltas) == whole.message.content == "See."
        assert "".join((d.delta.model_extra or {}).get("reasoning_content") or "" for d in deltas) == "Hm."
        assert [c.function.name for c in calls if c.function.name] == ["weather"]
        assert "".join(c.function.arguments or "" for c in calls) == '{"city": "Oslo"}'
        assert calls[0].id
        assert sum(len(d.logprobs.content) for d in deltas if d.logprobs) == len(whole.logprobs.content)
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["tool_calls"]


def test_a_conversation_with_tools_goes_on():
    with serving(says("Cold.", "THi1A"), template=HERMES_TEMPLATE) as rig:
        first = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        messages: list[Any] = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [first]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ]
        assert called(rig, messages=messages).choices[0].message.content == "Cold."


def test_without_tools_a_call_is_text():
    with serving(says(CALL, "HiA"), template=HERMES_TEMPLATE) as rig:
        assert called(rig, tools=openai.omit).choices[0].message.content == CALL
        assert called(rig, tool_choice="none").choices[0].message.content == CALL


def test_a_template_without_tools_is_told_of_them():
    told = serving(template=TEMPLATE_WITH_SYSTEM)
    with told as rig:
        body = {"messages": USER, "tools": [WEATHER]}
        ids = rig.post("/tokenize", {"model": NAME, **body}).json()["tokens"]
        prompt = rig.post("/detokenize", {"tokens": ids}).json()["prompt"]
        assert prompt.startswith("[system]You can call functions.")
        assert '"name": "weather"' in prompt
        assert prompt.endswith("[user]Hi>")


TEMPLATE_WITH_SYSTEM = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"


THINKING = "{{ messages[0].content }}{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"


def test_reasoning_is_split_from_the_answer():
    with serving(says("Hmm.</think>\n\nYes.", "Hi<think>"), template=THINKING) as rig:
        answer = rig.client().chat.completions.create(**{**GREEDY, "max_tokens": 100})
        message = answer.choices[0].message
        assert message.content == "Yes."
        assert message.model_extra is not None
        assert message.model_extra["reasoning_content"] == "Hmm."
        assert answer.usage.completion_tokens_details.reasoning_tokens == len("Hmm.</think>")
        chunks = list(rig.client().chat.completions.create(**{**GREEDY, "max_tokens": 100}, stream=True))
        deltas = [c.choices[0].delta for c in chunks]
        assert "".join((d.model_extra or {}).get("reasoning_content") or "" for d in deltas) == "Hmm."
        assert "".join(d.content or "" for d in deltas) == "Yes."
        hidden = rig.post("/v1/chat/completions", {**GREEDY, "max_tokens": 100, "include_reasoning": False}).json()
        assert "reasoning_content" not in hidden["choices"][0]["message"]
    with serving(says("Hmm.</think>\n\nYes.", "Hi<think>"), template=THINKING, reasoning="off") as rig:
        message = rig.client().chat.completions.create(**{**GREEDY, "max_tokens": 100}).choices[0].message
        assert message.content == "Hmm.</think>\n\nYes."
