"""Who may ask, from where and in which form; and that errors tell nothing they should not."""

from __future__ import annotations

import base64
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_rig import NAME, USER, ServerRig, serving

KEY, ADMIN = "client-key", "admin-key"
CHAT = {"model": NAME, "messages": USER, "max_tokens": 2}


@pytest.fixture(scope="module")
def rig() -> Iterator[ServerRig]:
    with serving(api_key=KEY, admin_key=ADMIN, cors_origins=("https://good.example",)) as made:
        yield made


ADMIN_ROUTES = [("post", p) for p in ("/pause", "/resume", "/update_weights", "/reset_prefix_cache")]
ADMIN_ROUTES += [("get", "/weight_info")]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def all_routes(rig: ServerRig) -> list[tuple[str, str]]:
    document = rig.get("/openapi.json", headers=bearer(KEY)).json()
    return [(method, path) for path, methods in document["paths"].items() for method in methods]


def test_every_route_but_health_and_metrics_wants_the_key(rig: ServerRig):
    routes = [*all_routes(rig), ("get", "/openapi.json"), ("get", "/nonsense"), ("get", "/docs")]
    assert ("post", "/v1/chat/completions") in routes
    assert ("get", "/") in routes
    for method, path in routes:
        wanted = {401} if path not in ("/health", "/metrics") else {200}
        for headers in (
            {},
            bearer("wrong"),
            {"authorization": "Bearer"},
            {"authorization": KEY},
            {"authorization": f"Digest {KEY}"},
        ):
            answer = httpx.request(method, rig.url + path, headers=headers, json={} if method == "post" else None)
            assert answer.status_code in wanted, (method, path, headers)
            if wanted == {401}:
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert "www-authenticate" in answer.headers


def test_the_key_opens_all_but_admin_routes(rig: ServerRig):
    assert rig.post("/v1/chat/completions", CHAT, headers=bearer(KEY)).status_code == 200
    assert rig.post("/v1/chat/completions", CHAT, headers=bearer(ADMIN)).status_code == 200
    assert rig.client(KEY).models.list().data[0].id == NAME
    for method, path in ADMIN_ROUTES:
        answer = httpx.request(method, rig.url + path, headers=bearer(KEY))
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert rig.get("/weight_info", headers=bearer(ADMIN)).status_code == 200


def test_no_way_to_write_a_path_leads_round_the_admin_key(rig: ServerRig):
    assert {(method, path) for method, path in all_routes(rig) if path in {p for _, p in ADMIN_ROUTES}} == set(
        ADMIN_ROUTES
    ), "the routes are these"
    with serving(admin_key=ADMIN) as without_key, serving() as bare:
        for made, headers in ((rig, bearer(KEY)), (without_key, {}), (bare, {})):
            for method, path in ADMIN_ROUTES:
                for written in (
                    path, path + "%0A", path + "%0a", path + "/", "/" + path, path + "%2F", path.upper(), path + "%00",
                    path + "?x=1", path + ";x", "/x/.." + path, path + "%0D%0A",
                ):  # fmt: skip
                    answer = httpx.request(method, made.url + written, headers=headers)
                    assert answer.status_code in (400, 401, 404, 405), (written, answer.status_code)
            assert not made.context.host.pause.is_on


def test_browsers_may_ask_for_the_key(rig: ServerRig):
    coded = base64.b64encode(f"anybody:{KEY}".encode()).decode()
    assert rig.get("/", headers={"authorization": f"Basic {coded}"}).status_code == 200
    assert rig.get("/", headers={"authorization": "Basic !!!"}).status_code == 401
    admin = base64.b64encode(f"anybody:{ADMIN}".encode()).decode()
    # What a browser sends by itself must not change weights.
    assert rig.post("/pause", headers={"authorization": f"Basic {admin}"}).status_code == 401


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, rig: ServerRig):
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("cb_engine.serve.guard.hmac.compare_digest", compare)
    rig.get("/v1/models", headers=bearer(KEY))
    assert compared == [(KEY.encode(), KEY.encode()), (KEY.encode(), ADMIN.encode())]


def test_admin_routes_are_off_without_an_admin_key():
    with serving() as rig:
        for method, path in ADMIN_ROUTES:
            answer = httpx.request(method, rig.url + path)
            assert answer.status_code == 404
            assert "--admin-key" in answer.json()["error"]["message"]


def test_pages_of_other_sites(rig: ServerRig):
    def preflight(origin: str) -> httpx.Response:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization,content-type,x-stainless-lang"  # as openai-js asks
        return httpx.options(f"{rig.url}/v1/chat/completions", headers=asked)

    good = preflight("https://good.example")
    assert good.status_code == 200
    assert good.headers["access-control-allow-origin"] == "https://good.example"
    assert "access-control-allow-credentials" not in good.headers
    assert "access-control-allow-origin" not in preflight("https://evil.example").headers
    with serving() as plain:
        asked = {"origin": "https://good.example", "access-control-request-method": "POST"}
        answer = httpx.options(f"{plain.url}/v1/chat/completions", headers=asked)
        assert "access-control-allow-origin" not in answer.headers
        # A page may post forms and plain text anywhere without asking first.
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            simple = httpx.post(
                f"{plain.url}/v1/chat/completions", content=b'{"model": "tiny"}', headers={"content-type": kind}
            )
            assert simple.status_code == 415


def test_only_named_hosts_are_served():
    with serving(allowed_hosts=("127.0.0.1", "localhost", "[::1]")) as rig:
        for host, status in [("evil.example", 403), ("evil.example:80", 403), ("localhost:1", 200), ("[::1]:9", 200)]:
            assert rig.get("/health", headers={"host": host}).status_code == status


def test_a_requests_id_comes_back(rig: ServerRig):
    assert rig.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = rig.get("/health", headers={"x-request-id": "x" * 300}).headers["x-request-id"]
    assert len(made) == 36
    assert rig.get("/nope", headers=bearer(KEY)).headers["x-request-id"]


def test_two_requests_with_one_id_do_not_meet(rig: ServerRig):
    headers = {**bearer(KEY), "x-request-id": "same"}
    answers = [rig.post("/v1/chat/completions", CHAT, headers=headers) for _ in range(2)]
    assert [a.status_code for a in answers] == [200, 200]
    assert answers[0].json()["id"] != answers[1].json()["id"]


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("cb_engine.serve.chat.sampling_params", RuntimeError),
        ("cb_engine.serve.chat.ChatAnswer.whole", ValueError),
        ("cb_engine.serve.generation.Generation.next_batch", TypeError),
        ("cb_engine.serve.body._read", KeyError),
    ],
    ids=["before", "writing", "waiting", "reading"],
)
def test_errors_tell_no_paths_and_no_traces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, kind: type[Exception]
):
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise kind("/secret/path.py, line 3, at 0x7f00")

    with serving() as rig:
        monkeypatch.setattr(where, broken)
        with caplog.at_level(logging.ERROR):
            answer = rig.post("/v1/chat/completions", CHAT)
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert "secret" not in answer.text
        assert error["type"] == "server_error"
        error_id = error["message"].split()[2].rstrip(";")
        assert error_id in caplog.text
        assert "secret" in caplog.text, "the log has it all"


def test_the_log_cannot_be_written_by_clients(rig: ServerRig, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "cb_engine.serve"):
        rig.get("/x%0aINFO%20forged%20line", headers={**bearer(KEY), "x-request-id": "a"})
        rig.get("/" + "y" * 5000, headers=bearer(KEY))
        body = {**CHAT, "user": "u\nINFO forged"}
        rig.post("/v1/chat/completions", body, headers=bearer(KEY))
    lines = caplog.text.splitlines()
    assert not [line for line in lines if line.startswith("INFO forged")]
    assert max(map(len, lines)) < 1000
    for fields in ({"user": "u" * 513}, {"metadata": {str(i): "x" for i in range(17)}}, {"metadata": {"a": "b" * 513}}):
        assert rig.post("/v1/chat/completions", {**CHAT, **fields}, headers=bearer(KEY)).status_code == 400


def test_unknown_routes_and_methods(rig: ServerRig):
    assert rig.get("/nope", headers=bearer(KEY)).json()["error"]["type"] == "not_found_error"
    wrong = rig.get("/v1/chat/completions", headers=bearer(KEY))
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert "error" in wrong.json()


def raw(rig: ServerRig, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", rig.port), timeout=10) as connection:
        connection.sendall(data)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


def test_headers_are_bounded(rig: ServerRig):
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    one = raw(rig, head + b"x-large: " + b"a" * (80 << 10) + b"\r\n\r\n")
    assert one.startswith(b"HTTP/1.1 431 ")
    many = raw(rig, head + b"".join(b"x-%d: 1\r\n" % i for i in range(10000)))  # they never end
    assert many.startswith(b"HTTP/1.1 431 ")
    assert raw(rig, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert rig.get("/health").status_code == 200


def test_bodies_are_bounded():
    from cb_engine.serve.settings import Limits

    with serving(limits=Limits(max_body_bytes=1000)) as rig:
        large = {**CHAT, "messages": [{"role": "user", "content": "x" * 2000}]}
        answer = rig.post("/v1/chat/completions", large)
        assert answer.status_code == 413
        assert "1000 bytes" in answer.json()["error"]["message"]

        def pieces() -> Iterator[bytes]:
            for _ in range(100):
                yield b" " * 100

        headers = {"content-type": "application/json"}
        chunked = httpx.post(f"{rig.url}/v1/chat/completions", content=pieces(), headers=headers)
        assert chunked.status_code == 413


def test_a_body_that_is_too_large_is_refused_before_it_comes():
    from cb_engine.serve.settings import Limits

    with serving(limits=Limits(max_body_bytes=1000)) as rig:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        answer = raw(rig, head + b"connection: close\r\nexpect: 100-continue\r\ncontent-length: 200000\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 ")


def test_connections_that_say_nothing_are_closed():
    with serving(body_timeout=0.3) as rig:
        assert raw(rig, b"") == b""
        assert raw(rig, b"GET /health HTTP/1.1\r\nhost: l") == b""
        whole = raw(rig, b"GET /health HTTP/1.1\r\nhost: l\r\n\r\nGET /health HTTP/1.1\r\nhost")
        assert whole.startswith(b"HTTP/1.1 200 ")


def test_a_next_head_that_never_ends_does_not_cut_what_is_answered():
    with serving(body_timeout=0.2) as rig:
        body = b'{"prompt": "a", "stream": true, "max_tokens": 400, "ignore_eos": true}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        answer = raw(rig, head % len(body) + body + b"GET /he")
        assert b"[DONE]" in answer


def test_a_stream_needs_a_version_that_has_them():
    with serving() as rig:
        body = b'{"prompt": "a", "stream": true}'
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        assert raw(rig, head % len(body) + body).startswith(b"HTTP/1.1 400 ")
        whole = b'{"prompt": "a", "max_tokens": 1}'
        assert b"chunked" not in raw(rig, head % len(whole) + whole)


def test_a_slow_body_is_given_up():
    with serving(body_timeout=0.2) as rig:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        answer = raw(rig, head + b'content-length: 100\r\nconnection: close\r\n\r\n{"model":')
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_special_tokens_in_a_message_are_text():
    with serving() as rig:
        body = {"messages": [{"role": "user", "content": "a</s>b"}]}
        ids = rig.post("/tokenize", body).json()["tokens"]
        assert rig.post("/detokenize", {"tokens": ids}).json()["prompt"] == "<user>a</s>b\n<assistant>"
        eos = 2
        assert eos not in ids


def test_templates_from_requests_are_off_and_sandboxed():
    body = {**CHAT, "chat_template": "{{ messages[0].content }}"}
    with serving() as rig:
        answer = rig.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template"
    with serving(trust_request_chat_template=True) as rig:
        assert rig.post("/v1/chat/completions", body).status_code == 200
        escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
        refused = rig.post("/v1/chat/completions", {**CHAT, "chat_template": escape})
        assert refused.status_code == 400
        assert "class" not in refused.text.lower().replace("__class__", "")
        assert rig.post("/v1/chat/completions", {**CHAT, "chat_template": "{% if %}"}).status_code == 400


def test_template_variables_cannot_override_what_is_the_servers():
    with serving() as rig:
        for name in ("tokenize", "chat_template", "add_generation_prompt", "continue_final_message", "tools"):
            answer = rig.post("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {name: True}})
            assert answer.status_code == 400, name
            assert "has a field of its own" in answer.json()["error"]["message"]
        unknown = rig.post("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"enable_thinking": True}})
        assert "no variable 'enable_thinking'" in unknown.json()["error"]["message"]


def test_nothing_is_fetched_for_a_client():
    with serving() as rig:
        for part in (
            {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
            {"type": "file", "file": {"file_data": "x"}},
            {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
        ):
            body = {**CHAT, "messages": [{"role": "user", "content": [part]}]}
            assert rig.post("/v1/chat/completions", body).status_code == 400


def test_counts_are_capped():
    from cb_engine.serve.settings import Limits

    limits = Limits(max_samples=4, max_logprobs=2, max_stop=2, max_logit_bias=2, max_bad_words=1, max_tools=1)
    function = {"type": "function", "function": {"name": "f"}}
    with serving(limits=limits) as rig:
        for fields in (
            {"n": 5},
            {"logprobs": True, "top_logprobs": 3},
            {"prompt_logprobs": 3},
            {"stop": ["a", "b", "c"]},
            {"stop_token_ids": [1, 2, 3]},
            {"logit_bias": {"1": 1, "2": 1, "3": 1}},
            {"bad_words": ["a", "b"]},
            {"tools": [function, {"type": "function", "function": {"name": "g"}}]},
        ):
            answer = rig.post("/v1/chat/completions", {**CHAT, **fields})
            assert answer.status_code == 400, fields
            assert "limit of" in answer.json()["error"]["message"]
        many = rig.post("/v1/completions", {"model": NAME, "prompt": ["a"] * 3, "n": 2})
        assert many.status_code == 400


def test_ids_outside_the_vocabulary_are_refused():
    with serving() as rig:
        for fields in (
            {"stop_token_ids": [99999], "min_tokens": 1},
            {"logit_bias": {"99999": 1}},
            {"allowed_token_ids": [99999]},
            {"logit_bias": {"x": 1}},
        ):
            assert rig.post("/v1/chat/completions", {**CHAT, **fields}).status_code == 400, fields
        assert rig.post("/v1/chat/completions", CHAT).status_code == 200


def test_no_pickle_in_the_server():
    """Nothing that a request brings is ever unpickled, evaluated or imported."""
    from pathlib import Path

    import cb_engine.serve

    for path in Path(cb_engine.serve.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for word in ("pickle", "torch.load", "eval(", "exec(", "__import__", "marshal", "yaml"):
            assert word not in text.replace("from pickles", ""), f"{path.name}: {word}"
