"""/tokenize, /detokenize, /v1/models and /version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import byte_tokenizer
import pytest
from server_rig import NAME, PROMPT, USER, ServerRig, serving

import cb_engine
from cb_engine import EngineConfig


@pytest.fixture(scope="module")
def rig() -> Iterator[ServerRig]:
    with serving(model_aliases=("other",)) as made:
        yield made


def test_texts_become_ids_and_texts_again(rig: ServerRig):
    answer = rig.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    ids = byte_tokenizer.ids_of("hé")
    assert answer == {"count": 3, "max_model_len": 512, "tokens": ids, "token_strs": ["h", "\ufffd", "\ufffd"]}
    assert rig.post("/detokenize", {"tokens": ids}).json() == {"prompt": "hé"}
    assert rig.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_conversations_are_rendered_as_the_chat_does(rig: ServerRig):
    assert rig.post("/tokenize", {"messages": USER}).json()["tokens"] == byte_tokenizer.ids_of(PROMPT)
    without = rig.post("/tokenize", {"messages": USER, "add_generation_prompt": False}).json()
    assert without["tokens"] == byte_tokenizer.ids_of("<user>Hi\n")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages: List should have at least 1 item"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools is not for prompt"),
        ("/tokenize", {"messages": USER, "add_special_tokens": True}, "add_special_tokens is not for messages"),
        ("/tokenize", {"messages": USER, "chat_template": "x"}, "takes no templates"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, "is not served here"),
        ("/detokenize", {"tokens": [99999]}, "outside the tokenizer's vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1], "x": 1}, "unknown field 'x'"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(rig: ServerRig, path: str, body: dict[str, Any], message: str):
    answer = rig.post(path, body)
    assert answer.status_code in (400, 404)
    assert message in answer.json()["error"]["message"]


def test_the_model_is_listed_with_its_length(rig: ServerRig):
    models = rig.get("/v1/models").json()["data"]
    assert [m["id"] for m in models] == [NAME, "other"]
    assert models[0]["max_model_len"] == 512
    assert rig.get(f"/v1/models/{NAME}").json() == models[0]
    missing = rig.get("/v1/models/org/nope")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_a_small_pool_is_told_as_the_models_length():
    with serving(config=EngineConfig(block_size=16, num_blocks=9)) as rig:
        longest = rig.get("/v1/models").json()["data"][0]["max_model_len"]
        assert longest == 9 * 16 + 1
        body = {"model": NAME, "prompt": [5] * (longest - 1), "max_tokens": 1, "ignore_eos": True}
        assert rig.post("/v1/completions", body).json()["usage"]["total_tokens"] == longest
        assert rig.post("/v1/completions", {**body, "prompt": [5] * longest}).status_code == 400
        body = {**body, "prompt": [5] * 100, "max_tokens": 400}
        assert rig.post("/v1/completions", body).json()["usage"]["total_tokens"] == longest
        assert rig.post("/v1/completions", {**body, "min_tokens": 46}).json()["error"]["param"] == "min_tokens"


def test_another_model_is_not_served(rig: ServerRig):
    body = {"model": "other", "messages": USER, "max_tokens": 1}
    assert rig.post("/v1/chat/completions", body).json()["model"] == "other"
    answer = rig.post("/v1/chat/completions", {**body, "model": "gpt-5"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_the_version(rig: ServerRig):
    assert rig.get("/version").json() == {"version": cb_engine.__version__}


def test_without_a_template_there_are_no_chats():
    with serving(template=None) as rig:
        answer = rig.post("/v1/chat/completions", {"messages": USER})
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]
        assert rig.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    with serving(template=None, chat_template="{{ messages[0].content }}!") as rig:
        tokens = rig.post("/tokenize", {"messages": USER}).json()["tokens"]
        assert tokens == byte_tokenizer.ids_of("Hi!")
