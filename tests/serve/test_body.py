"""Bodies: what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
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
