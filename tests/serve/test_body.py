"""Bodies: what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from server_rig import USER, ServerRig, serving


@pytest.fixture(scope="module")
def rig() -> Iterator[ServerRig]:
    with serving() as made:
        yield made


def post(rig: ServerRig, content: bytes) -> httpx.Response:
    headers = {"content-type": "application/json; charset=utf-8"}
    return httpx.post(f"{rig.url}/v1/chat/completions", content=content, headers=headers, timeout=30)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is no JSON"),
        (b"{", "the body is no JSON"),
        (b"\xff\xfe", "the body is no JSON"),
        (b"[]", "should be an object"),
        (b"null", "should be an object"),
        (b'{"messages": NaN}', ""),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', ""),
        (b"[" * 100_000, ""),
        (b'{"messages": [{"role": "user", "content": {"a": 1}}]}', "messages.0.content"),
    ],
    ids=["nothing", "half", "no text", "a list", "null", "NaN", "a surrogate", "deep", "content"],
)
def test_what_is_no_body_is_said_so(rig: ServerRig, content: bytes, message: str):
    answer = post(rig, content)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert rig.get("/health").status_code == 200


def test_a_compressed_body_is_refused(rig: ServerRig):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = httpx.post(f"{rig.url}/v1/chat/completions", content=b"{}", headers=headers, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "encoded")


@pytest.mark.parametrize(
    ("path", "field", "value", "param"),
    [
        ("/v1/completions", "prompt", [0] * 200_000 + ["x"], "prompt.200000"),
        ("/v1/completions", "prompt", [[0] * 200_000 + ["x"]], "prompt.0.200000"),
        ("/v1/completions", "prompt", ["x"] * 10_000 + [0], "prompt.10000"),
        ("/v1/completions", "stop_token_ids", ["x"] * 200_000, "stop_token_ids.0"),
        ("/v1/chat/completions", "messages", [{}] * 100_000, "messages.0.role"),
        ("/v1/chat/completions", "stop", [0] * 200_000, "stop.0"),
        ("/v1/responses", "input", [0] * 200_000, "input"),
        ("/detokenize", "tokens", [-1] * 200_000, "tokens.0"),
    ],
    ids=["ids", "lists", "texts", "stop ids", "messages", "stop", "input", "tokens"],
)
def test_a_wrong_list_costs_one_error(rig: ServerRig, path: str, field: str, value: Any, param: str):
    before = psutil.Process().memory_info().rss
    answer = rig.post(path, {"prompt": "x", field: value} if path == "/v1/completions" else {field: value})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"] or "").startswith(param)
    assert psutil.Process().memory_info().rss - before < 200 << 20


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": x}}]}]}
        for x in ('{"a":' * 100_000, "[" * 100_000, '{"a": 1e999}', "nul")
    ]
    + [
        {"messages": USER, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}]},
        {"messages": USER, "logit_bias": {"9" * 5000: 1}},
        {"messages": USER, "model": "m" * 100_000},
        {"messages": USER, "stop": "\x00" * 10_000 and ["\x00"] * 17},
        {"messages": [{"role": "user", "content": "x" * 2_000_000}]},
    ],
    ids=["deep object", "deep list", "infinite", "no JSON", "schema", "bias", "name", "stops", "long"],
)
def test_hostile_bodies_are_refused_and_short_to_answer(rig: ServerRig, body: dict[str, Any]):
    answer = rig.post("/v1/chat/completions", {"max_tokens": 1, **body})
    assert answer.status_code in (400, 404) or '"a": 1e999' in str(body)
    assert len(answer.content) < 2000
    assert rig.get("/health").status_code == 200


def test_a_large_body_is_read_off_the_loop(rig: ServerRig, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    run = rig.context.workers.run

    async def spy(work: Any, *args: Any) -> Any:
        seen.append(work.__name__)
        return await run(work, *args)

    monkeypatch.setattr(rig.context.workers, "run", spy)
    post(rig, b'{"messages": [{"role": "user", "content": "' + b"x" * 100_000 + b'"}]}')
    assert "_parse" in seen
    seen.clear()
    rig.post("/v1/chat/completions", {"messages": USER, "max_tokens": 1})
    assert "_parse" not in seen
