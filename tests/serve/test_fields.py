"""No field of a body is accepted and ignored: each has a check here that fails if it had no effect.

The tables are compared with the models themselves, so that a new field without a check fails too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import byte_tokenizer
import pytest
import torch
from server_rig import NAME, USER, ServerRig, serving

from cb_engine.serve.protocol.base import EngineFields, SamplingFields
from cb_engine.serve.protocol.chat import ChatRequest
from cb_engine.serve.protocol.completions import CompletionRequest
from cb_engine.serve.protocol.responses import ResponsesRequest

TEMPLATE = (
    "{% if effort is defined %}{{ effort }}{% endif %}{% if reasoning_effort is defined %}{{ reasoning_effort }}"
    "{% endif %}{% if tools %}T{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def rig() -> Iterator[ServerRig]:
    with serving(template=TEMPLATE, trust_request_chat_template=True, model_aliases=("alias",)) as made:
        yield made


class Interface:
    """One route with a body to start from; sampling is nearly flat, so that what changes it shows."""

    def __init__(self, rig: ServerRig, path: str, body: dict[str, Any]) -> None:
        self._rig, self._path, self._body = rig, path, body

    def answer(self, **fields: Any) -> Any:
        body = {name: value for name, value in {**self._body, **fields}.items() if value is not None}
        response = self._rig.post(self._path, body)
        return response.json() if response.status_code == 200 else response

    def refuses(self, text: str, **fields: Any) -> None:
        response = self.answer(**fields)
        assert getattr(response, "status_code", 200) == 400, (fields, response)
        assert text in response.json()["error"]["message"]


def same(a: object, b: object) -> None:
    assert a == b


def differ(a: object, b: object) -> None:
    assert a != b


# ---- completions: all fields of sampling are checked here, on token ids --------------------------------------------


class Completions(Interface):
    def __init__(self, rig: ServerRig) -> None:
        base = {"prompt": "Once", "temperature": 5.0, "seed": 1, "max_tokens": 8, "return_token_ids": True}
        super().__init__(rig, "/v1/completions", base)

    def ids(self, **fields: Any) -> list[int]:
        found: list[int] = self.answer(**fields)["choices"][0]["token_ids"]
        return found


def greedy_start(api: Completions) -> list[int]:
    return api.ids(temperature=0)


def check_stop_token_ids(api: Completions) -> None:
    first = greedy_start(api)
    assert len(set(first[:2])) == 2
    same(api.ids(temperature=0, stop_token_ids=[first[1]]), first[:2])


def check_min_tokens(api: Completions) -> None:
    first = greedy_start(api)[0]
    same(len(api.ids(temperature=0, stop_token_ids=[first])), 1)
    assert len(api.ids(temperature=0, stop_token_ids=[first], min_tokens=5)) > 4


def check_ignore_eos(api: Completions) -> None:
    forced = {"logit_bias": {str(byte_tokenizer.EOS): 1e6}}
    same(len(api.ids(**forced)), 1)
    same(len(api.ids(**forced, ignore_eos=True)), 8)


def check_stop(api: Completions) -> None:
    forced = {"logit_bias": {str(byte_tokenizer.ids_of("x")[0]): 1e6}}
    answer = api.answer(**forced, stop="xxx")
    same((answer["choices"][0]["text"], answer["choices"][0]["stop_reason"]), ("", "xxx"))


def check_skip_special_tokens(api: Completions) -> None:
    forced = {"logit_bias": {str(byte_tokenizer.BOS): 1e6}, "max_tokens": 2}
    texts = [api.answer(**forced, skip_special_tokens=skip)["choices"][0]["text"] for skip in (True, False)]
    same(texts, ["", "<s><s>"])


def check_cache_salt(api: Completions) -> None:
    def cached(salt: str) -> int:
        found: int = api.answer(prompt="salted " * 8, cache_salt=salt)["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        return found

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0


def check_priority(api: Completions) -> None:
    """It reaches the request; what it does there is tested with the scheduler."""
    manager = api._rig.context.host.manager
    assert manager is not None
    seen: list[int] = []
    make = manager.engine.intake.make

    def spy(prompt: Any, params: Any, options: Any) -> Any:
        seen.append(params.priority)
        return make(prompt, params, options)

    manager.engine.intake.make = spy  # type: ignore[method-assign]
    try:
        api.answer(priority=-3)
    finally:
        manager.engine.intake.make = make  # type: ignore[method-assign]
    same(seen, [-3])


def check_speculative(api: Completions) -> None:
    from cb_engine import EngineConfig

    config = EngineConfig(
        block_size=16, num_blocks=64, speculative={"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    )
    with serving(config=config) as rig:
        forced = {"prompt": "xxxx", "max_tokens": 8, "logit_bias": {str(byte_tokenizer.ids_of("x")[0]): 1e6}}
        rig.post("/v1/completions", {**forced, "speculative": False})
        assert rig.stats().num_drafts == 0
        rig.post("/v1/completions", forced)
        assert rig.stats().num_drafts > 0


def check_echo(api: Completions) -> None:
    assert api.answer(echo=True)["choices"][0]["text"].startswith("Once")


def check_stream_options(api: Completions) -> None:
    rig = api._rig
    body = {"prompt": "a", "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    assert '"total_tokens":2' in rig.post("/v1/completions", body).text
    api.refuses("stream_options is for stream=true", stream_options={"include_usage": True})


def check_add_special_tokens(api: Completions) -> None:
    with serving() as rig:
        rig.context.loaded.tokenizer.backend_tokenizer.post_processor = byte_tokenizer.make_tokenizer(
            add_bos=True
        ).backend_tokenizer.post_processor
        prompts = [
            rig.post(
                "/v1/completions", {"prompt": "a", "max_tokens": 1, "add_special_tokens": add, "return_token_ids": True}
            ).json()["choices"][0]["prompt_token_ids"]
            for add in (True, False)
        ]
    same(prompts, [[byte_tokenizer.BOS, *byte_tokenizer.ids_of("a")], byte_tokenizer.ids_of("a")])


def check_log(api: Interface, caplog: pytest.LogCaptureFixture, **fields: Any) -> None:
    with caplog.at_level(logging.INFO, "cb_engine.serve"):
        api.answer(**fields)
    for value in fields.values():
        shown = next(iter(value.values())) if isinstance(value, dict) else value
        assert str(shown) in caplog.text


X = {str(byte_tokenizer.ids_of("x")[0]): 1e6}  # nothing but this token
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def check_penalty(name: str, api: Completions) -> None:
    two = {"temperature": 0, "allowed_token_ids": [70, 71], "max_tokens": 30}
    differ(api.ids(**two), api.ids(**two, **{name: 1e5}))


COMPLETIONS: dict[str, Callable[[Completions], None]] = {
    "model": lambda api: same(api.answer(model="alias")["model"], "alias"),
    "prompt": lambda api: differ(api.ids(temperature=0), api.ids(temperature=0, prompt="Twice upon")),
    "temperature": lambda api: differ(api.ids(), greedy_start(api)),
    "top_p": lambda api: same(api.ids(top_p=1e-6), greedy_start(api)),
    "top_k": lambda api: same(api.ids(top_k=1), greedy_start(api)),
    "min_p": lambda api: same(api.ids(min_p=1.0), greedy_start(api)),
    "seed": lambda api: differ(api.ids(seed=2), api.ids(seed=1)),
    "n": lambda api: same(len(api.answer(n=3)["choices"]), 3),
    "best_of": lambda api: api.refuses("best_of must be n", best_of=2),
    "max_tokens": lambda api: same(len(api.ids(max_tokens=3)), 3),
    "min_tokens": check_min_tokens,
    "stop": check_stop,
    "stop_token_ids": check_stop_token_ids,
    "ignore_eos": check_ignore_eos,
    **{name: partial(check_penalty, name) for name in PENALTIES},
    "logit_bias": lambda api: same(set(api.ids(logit_bias={"70": 1e6})), {70}),
    "allowed_token_ids": lambda api: same(set(api.ids(allowed_token_ids=[70, 71])) - {70, 71}, set()),
    "bad_words": lambda api: differ(api.ids(logit_bias=X, bad_words=["x"]), api.ids(logit_bias=X)),
    "skip_special_tokens": check_skip_special_tokens,
    "stream": lambda api: same(
        api._rig.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}).headers["content-type"],
        "text/event-stream; charset=utf-8",
    ),
    "stream_options": check_stream_options,
    "logprobs": lambda api: same(
        len(api.answer(logprobs=2)["choices"][0]["logprobs"]["top_logprobs"][0]) in (2, 3), True
    ),
    "prompt_logprobs": lambda api: same(len(api.answer(prompt_logprobs=1)["choices"][0]["prompt_logprobs"]), 4),
    "return_token_ids": lambda api: differ(
        "token_ids" in api.answer()["choices"][0], "token_ids" in api.answer(return_token_ids=False)["choices"][0]
    ),
    "return_tokens_as_token_ids": lambda api: same(
        api.answer(logprobs=0, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["tokens"],
        [f"token_id:{i}" for i in api.ids()],
    ),
    "echo": check_echo,
    "add_special_tokens": check_add_special_tokens,
    "priority": check_priority,
    "cache_salt": check_cache_salt,
    "speculative": check_speculative,
}
ELSEWHERE = {"user", "response_format", "structured_outputs"}  # below, and in test_structured.py


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(rig: ServerRig, name: str):
    COMPLETIONS[name](Completions(rig))


def test_every_field_of_completions_is_checked():
    assert set(COMPLETIONS) | ELSEWHERE == set(CompletionRequest.model_fields)


# ---- chats and responses: what they add ------------------------------------------------------------------------------


class Chat(Interface):
    def __init__(self, rig: ServerRig) -> None:
        body = {"messages": USER, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
        super().__init__(rig, "/v1/chat/completions", body)

    def prompt(self, **fields: Any) -> str:
        ids = self.answer(**fields)["prompt_token_ids"]
        return str(byte_tokenizer.make_tokenizer().decode(ids))


def check_tool_choice(api: Chat) -> None:
    same(api.prompt(tools=[TOOL], tool_choice="none")[0], "<")
    same(api.prompt(tools=[TOOL], tool_choice="auto")[0], "T")
    api.refuses("tool_choice needs tools", tool_choice="auto")


CHAT: dict[str, Callable[[Chat], None]] = {
    "messages": lambda api: same(api.prompt(), "<user>Hi\n<assistant>"),
    "max_completion_tokens": lambda api: same(
        len(api.answer(max_tokens=None, max_completion_tokens=2)["choices"][0]["token_ids"]), 2
    ),
    "logprobs": lambda api: same(len(api.answer(logprobs=True)["choices"][0]["logprobs"]["content"]), 4),
    "top_logprobs": lambda api: same(
        len(api.answer(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]), 2
    ),
    "tools": lambda api: same(api.prompt(tools=[TOOL])[0], "T"),
    "tool_choice": check_tool_choice,
    "reasoning_effort": lambda api: same(api.prompt(reasoning_effort="high")[:4], "high"),
    "chat_template": lambda api: same(api.prompt(chat_template="!{{ messages[0].content }}"), "!Hi"),
    "chat_template_kwargs": lambda api: same(api.prompt(chat_template_kwargs={"effort": "low"})[:3], "low"),
    "add_generation_prompt": lambda api: same(api.prompt(add_generation_prompt=False), "<user>Hi\n"),
    "continue_final_message": lambda api: same(api.prompt(continue_final_message=True), "<user>Hi"),
    "prompt_cache_key": lambda api: same(
        api.answer(prompt_cache_key="k")["choices"][0]["token_ids"], api.answer()["choices"][0]["token_ids"]
    ),  # asks for what is always done
}
# test_chat.py and test_structured.py have these; `user` and its like go to the log, see below.
CHAT_ELSEWHERE = {"include_reasoning", "parallel_tool_calls", "metadata", "safety_identifier"}


@pytest.mark.parametrize("name", CHAT)
def test_chats(rig: ServerRig, name: str):
    CHAT[name](Chat(rig))


def test_every_field_of_chats_is_checked():
    assert set(CHAT) | CHAT_ELSEWHERE == set(ChatRequest.model_fields) - set(SamplingFields.model_fields) | {"logprobs"}


@pytest.mark.parametrize(
    "fields", [{"user": "u-1"}, {"safety_identifier": "s-1"}, {"metadata": {"run": "m-1"}}], ids=str
)
@pytest.mark.parametrize("path", ["chat", "responses"])
def test_labels_go_to_the_log(rig: ServerRig, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], path: str):
    check_log(Chat(rig) if path == "chat" else Responses(rig), caplog, **fields)


class Responses(Interface):
    def __init__(self, rig: ServerRig) -> None:
        super().__init__(rig, "/v1/responses", {"input": "Hi", "temperature": 5.0, "seed": 1, "max_output_tokens": 8})

    def text(self, **fields: Any) -> str:
        return "".join(part["text"] for item in self.answer(**fields)["output"] for part in item.get("content", ()))


TWO: dict[str, Any] = {
    "temperature": 0,
    "max_output_tokens": 30,
    "allowed_token_ids": byte_tokenizer.ids_of("xy"),
}


def check_response_penalty(name: str, api: Responses) -> None:
    differ(api.text(**TWO), api.text(**TWO, **{name: 1e5}))


RESPONSES: dict[str, Callable[[Responses], None]] = {
    "model": lambda api: same(api.answer(model="alias")["model"], "alias"),
    "input": lambda api: differ(api.text(temperature=0), api.text(temperature=0, input="Bye")),
    "instructions": lambda api: differ(api.text(temperature=0), api.text(temperature=0, instructions="Be")),
    "max_output_tokens": lambda api: same(api.answer(max_output_tokens=2)["usage"]["output_tokens"], 2),
    "temperature": lambda api: differ(api.text(), api.text(temperature=0)),
    "top_p": lambda api: same(api.text(top_p=1e-6), api.text(temperature=0)),
    "top_k": lambda api: same(api.text(top_k=1), api.text(temperature=0)),
    "seed": lambda api: differ(api.text(), api.text(seed=2)),
    **{name: partial(check_response_penalty, name) for name in PENALTIES[:2]},
    "logit_bias": lambda api: same(api.text(logit_bias={str(byte_tokenizer.ids_of("x")[0]): 1e6}), "x" * 8),
    "stop": lambda api: same(api.text(logit_bias={str(byte_tokenizer.ids_of("x")[0]): 1e6}, stop="xx"), ""),
    "stream": lambda api: same(
        api._rig.post("/v1/responses", {"input": "a", "max_output_tokens": 1, "stream": True}).text[:6], "event:"
    ),
    "tools": lambda api: differ(
        api.answer(tools=[{"type": "function", "name": "f"}])["usage"]["input_tokens"],
        api.answer()["usage"]["input_tokens"],
    ),
    "tool_choice": lambda api: api.refuses("tool_choice needs tools", tool_choice="auto"),
    "parallel_tool_calls": lambda api: same(
        ResponsesRequest.model_validate({"input": "x", "parallel_tool_calls": False}).as_chat().parallel_tool_calls,
        False,
    ),
    "reasoning": lambda api: differ(api.text(temperature=0), api.text(temperature=0, reasoning={"effort": "high"})),
    "top_logprobs": lambda api: same(
        len(api.answer(top_logprobs=2)["output"][0]["content"][0]["logprobs"][0]["top_logprobs"]), 2
    ),
    "include": lambda api: same(
        len(api.answer(include=["message.output_text.logprobs"])["output"][0]["content"][0]["logprobs"]), 8
    ),
    "chat_template_kwargs": lambda api: differ(
        api.text(temperature=0), api.text(temperature=0, chat_template_kwargs={"effort": "low"})
    ),
    "prompt_cache_key": lambda api: same(api.text(prompt_cache_key="k"), api.text()),
}
RESPONSES_ELSEWHERE = {"user", "metadata", "safety_identifier", "text"}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(rig: ServerRig, name: str):
    RESPONSES[name](Responses(rig))


def test_every_field_of_responses_is_checked():
    shared = set(EngineFields.model_fields) - {"top_k"}
    assert set(RESPONSES) | RESPONSES_ELSEWHERE == set(ResponsesRequest.model_fields) - shared


def test_all_shared_fields_reach_the_chat_behind_a_response():
    given: dict[str, Any] = {
        "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [3], "bad_words": ["x"], "allowed_token_ids": [3], "skip_special_tokens": False,
        "priority": 1, "cache_salt": "s", "speculative": False, "structured_outputs": {"regex": "a"},
    }  # fmt: skip
    assert set(given) == set(EngineFields.model_fields)
    request = ResponsesRequest.model_validate({"input": "Hi", **given})
    chat = request.as_chat()
    for name in given:
        assert getattr(chat, name) == getattr(request, name) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": []}, {"store": True}, {"modalities": ["audio"]}, {"prediction": {}}, {"service_tier": "flex"},
        {"web_search_options": {}}, {"audio": {}}, {"function_call": "auto"},
    ],
    ids=str,
)  # fmt: skip
def test_what_openai_has_and_this_server_has_not_is_refused(rig: ServerRig, fields: dict[str, Any]):
    Chat(rig).refuses("is not supported", **fields)


def test_what_asks_for_nothing_is_taken(rig: ServerRig):
    for fields in ({"store": False}, {"modalities": ["text"]}, {"service_tier": "auto"}, {"n": 1}):
        assert isinstance(Chat(rig).answer(**fields), dict), fields


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"])
def test_unknown_fields_are_refused_by_name(rig: ServerRig, path: str):
    answer = rig.post(path, {"model": NAME, "guided_regex": "a"})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages.0.mood"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"Top_K": 1}, "Top_K"),
        ({"top-k": 1}, "top-k"),
        ({"text": "x"}, "text"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
        ({"allowed_token_ids": [9999]}, "allowed_token_ids"),
        ({"min_tokens": 500}, "min_tokens"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ],
    ids=str,
)
def test_wrong_values_are_named(rig: ServerRig, fields: dict[str, Any], param: str):
    response = Chat(rig).answer(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_model_defaults_hold_where_a_request_says_nothing():
    from server_rig import random_model

    model = random_model()
    model.generation_config.top_k = 1
    model.generation_config.do_sample = True
    body = {"prompt": "a", "max_tokens": 6, "return_token_ids": True}

    def ids(rig: ServerRig, **fields: Any) -> list[int]:
        found: list[int] = rig.post("/v1/completions", {**body, **fields}).json()["choices"][0]["token_ids"]
        return found

    with serving(model) as rig:
        assert ids(rig) == ids(rig, temperature=0)
        assert ids(rig, top_k=0, seed=1, temperature=5.0) != ids(rig)
    with serving(model, use_generation_config=False, default_seed=3) as rig:
        assert ids(rig, temperature=5.0) == ids(rig, seed=3, temperature=5.0) != ids(rig, temperature=0)


def test_torch_is_not_what_decides():
    """The tables above would be idle on a model with flat logits."""
    with serving() as rig:
        model = rig.context.host.model
        with torch.no_grad():
            assert model.lm_head.weight.std() > 0.1
