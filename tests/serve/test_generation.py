"""Requests that end otherwise than with an answer: clients that leave, time limits, full queues, failures."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from server_rig import NAME, USER, Gate, ServerRig, says, serving

from cb_engine import EngineConfig

LONG: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 400, "temperature": 0}


@pytest.fixture
def gated() -> Iterator[tuple[ServerRig, Gate]]:
    model = says("x" * 450)
    gate = Gate(model)
    with serving(model, config=EngineConfig(block_size=16, num_blocks=256, max_num_seqs=2)) as rig:
        yield rig, gate
        gate.open.set()


def send(rig: ServerRig, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
    """A client that has sent its request and reads nothing."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", rig.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_takes_its_work_along(gated: tuple[ServerRig, Gate], stream: bool, path: str):
    rig, gate = gated
    body: dict[str, Any] = {"model": NAME, "stream": stream, "ignore_eos": True}
    body |= {
        "/v1/chat/completions": {"messages": USER, "max_tokens": 400, "n": 2},
        "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 400},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 400},
    }[path]
    gate.open.clear()  # it stands in its first step
    client = send(rig, body, path)
    rig.wait_until(lambda: rig.stats().num_running > 0)
    client.close()
    rig.wait_until(lambda: not rig.context.under_way)
    gate.open.set()
    rig.wait_until_idle()
    assert rig.stats().generated_tokens < 20
    figures = rig.get("/metrics").text
    count = 1 if path == "/v1/responses" else 2
    assert f'vllm:request_success_total{{engine="0",finished_reason="abort",model_name="tiny"}} {count}.0' in figures
    assert 'cb_engine:clients_gone_total{engine="0",model_name="tiny"} 1.0' in figures


def test_a_client_that_leaves_a_stream_half_way(gated: tuple[ServerRig, Gate]):
    rig, _ = gated
    with rig.client().chat.completions.create(**LONG, stream=True) as stream:
        for _, _chunk in zip(range(5), stream, strict=False):
            pass
    rig.wait_until_idle()
    assert rig.stats().generated_tokens < 400
    assert rig.client().chat.completions.create(**{**LONG, "max_tokens": 3}).choices[0].message.content == "xxx"


def test_a_client_that_leaves_while_it_waits(gated: tuple[ServerRig, Gate]):
    rig, gate = gated
    gate.open.clear()
    clients = [send(rig, LONG) for _ in range(2)]
    rig.wait_until(lambda: len(rig.context.under_way) == 2)
    waiting = send(rig, {**LONG, "stream": True})
    rig.wait_until(lambda: len(rig.context.under_way) == 3)
    waiting.close()
    rig.wait_until(lambda: len(rig.context.under_way) == 2)
    for client in clients:
        client.close()
    gate.open.set()
    rig.wait_until_idle()


def test_a_full_queue_says_so():
    model = says("x" * 450)
    gate = Gate(model)
    config = EngineConfig(block_size=16, num_blocks=256, max_num_seqs=1, max_queue_size=2)
    with serving(model, config=config, retry_after=7) as rig:
        gate.open.clear()
        clients = [send(rig, LONG)]
        rig.wait_until(lambda: rig.stats().num_running == 1)
        for count in (1, 2):
            clients.append(send(rig, LONG))
            rig.wait_until(lambda n=count: rig.context.host.manager.engine.num_queued == n)
        for stream in (True, False):
            answer = rig.post("/v1/chat/completions", {**LONG, "stream": stream})
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "7"
            assert answer.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            rig.client().chat.completions.create(**LONG)
        assert (
            'admission_rejections_total{engine="0",model_name="tiny",reason="queue_full"} 3.0'
            in rig.get("/metrics").text
        )
        for client in clients:
            client.close()
        gate.open.set()
        rig.wait_until_idle()


def test_tokens_in_the_queue_are_limited():
    model = says("x" * 450)
    gate = Gate(model)
    config = EngineConfig(block_size=16, num_blocks=256, max_num_seqs=1, max_queued_tokens=15)
    with serving(model, config=config) as rig:
        gate.open.clear()
        clients = [send(rig, LONG)]
        rig.wait_until(lambda: rig.stats().num_running == 1)
        clients.append(send(rig, LONG))
        rig.wait_until(lambda: rig.context.host.manager.engine.num_queued == 1)
        assert rig.post("/v1/chat/completions", LONG).status_code == 429
        for client in clients:
            client.close()
        gate.open.set()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_who_waits_too_long_is_told(stream: bool):
    model = says("x" * 450)
    gate = Gate(model)
    config = EngineConfig(block_size=16, num_blocks=256, max_num_seqs=1)
    with serving(model, config=config, max_waiting_time=0.2) as rig:
        gate.open.clear()
        first = send(rig, LONG)
        rig.wait_until(lambda: rig.stats().num_running == 1)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            late = pool.submit(rig.post, "/v1/chat/completions", {**LONG, "stream": stream})
            rig.wait_until(lambda: len(rig.context.under_way) == 2)
            threading.Timer(0.4, gate.open.set).start()  # an abort takes effect at a step's edge
            answer = late.result(20)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "waiting_timeout"
        assert "retry-after" in answer.headers
        first.close()
        rig.wait_until_idle()


def test_who_runs_too_long_is_ended():
    model = says("x" * 450)
    gate = Gate(model)
    with serving(model, max_running_time=0.3) as rig:
        whole = threading.Timer(0.5, gate.open.set)
        gate.open.clear()
        whole.start()
        answer = rig.post("/v1/chat/completions", LONG)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "running_timeout"

        with httpx.stream("POST", f"{rig.url}/v1/chat/completions", json={**LONG, "stream": True}) as response:
            events = response.iter_lines()
            assert next(events).startswith("data: ")  # it has begun
            gate.open.clear()
            threading.Timer(0.5, gate.open.set).start()
            rest = [line for line in events if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "running_timeout"
        rig.wait_until_idle()


def test_a_client_that_takes_nothing_is_taken_to_be_gone():
    with serving(says("x" * 450), send_timeout=0.3, config=EngineConfig(block_size=16, num_blocks=256)) as rig:
        # Each chunk is made large, so that the connection's buffers are full soon.
        body = {**LONG, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 40}
        lazy = send(rig, body)
        quick = rig.post("/v1/chat/completions", {**LONG, "max_tokens": 20})
        assert quick.json()["choices"][0]["message"]["content"] == "x" * 20
        rig.wait_until(lambda: not rig.context.under_way, 60)
        rig.wait_until_idle()
        assert 'cb_engine:clients_gone_total{engine="0",model_name="tiny"} 1.0' in rig.get("/metrics").text
        lazy.close()


def test_one_request_that_fails_leaves_its_neighbours_alone():
    model = says("x" * 450)

    def spoil(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[positions == 60] = float("nan")  # only the long one gets there
        return logits

    model.hook.append(spoil)
    with serving(model) as rig, concurrent.futures.ThreadPoolExecutor() as pool:
        short = [pool.submit(rig.post, "/v1/chat/completions", {**LONG, "max_tokens": 20}) for _ in range(3)]
        failed = rig.post("/v1/chat/completions", LONG)
        assert failed.status_code == 500
        assert failed.json()["error"]["code"] == "request_failed"
        assert 'vllm:corrupted_requests_total{engine="0",model_name="tiny"} 1.0' in rig.get("/metrics").text
        assert [a.result(20).json()["choices"][0]["message"]["content"] for a in short] == ["x" * 20] * 3
        assert rig.get("/health").status_code == 200
        rig.wait_until_idle()


@pytest.mark.parametrize("failure", ["nan", "raised"])
def test_a_models_fault_is_not_taken_for_the_clients(failure: str):
    """Whatever is wished for: these wishes could leave no token, but do not."""
    model = says("x" * 450)

    def spoil(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if bool((positions == 60).any()):
            if failure == "raised":
                raise IndexError("index out of range")
            logits = torch.full_like(logits, float("nan"))
        return logits

    model.hook.append(spoil)
    wishes = {"bad_words": ["zz"], "min_tokens": 2, "structured_outputs": {"regex": "x+"}}
    with serving(model) as rig:
        failed = rig.post("/v1/chat/completions", {**LONG, **wishes})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "request_failed")
        assert 'vllm:corrupted_requests_total{engine="0",model_name="tiny"} 1.0' in rig.get("/metrics").text


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e39}, {"temperature": 10**400}, {"top_k": 2**63}, {"top_k": 2**31}, {"min_tokens": 2**40},
        {"logit_bias": {"5": 1e300}}, {"repetition_penalty": 1e39}, {"presence_penalty": -1e300}, {"max_tokens": 2**40},
        {"seed": 2**70}, {"n": 2**40}, {"top_p": 1e-400}, {"min_p": 1e-320}, {"priority": 2**70},
    ],
    ids=str,
)  # fmt: skip
def test_no_number_fails_a_step(fields: dict[str, Any]):
    body = {"prompt": "abc", "max_tokens": 3, "return_token_ids": True, **fields}
    with serving() as rig:
        for _ in range(4):
            answer = rig.post("/v1/completions", body)
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 200:
                assert all(0 <= i < 259 for i in answer.json()["choices"][0]["token_ids"])
        assert rig.context.host.num_restarts == 0
        assert rig.get("/health").status_code == 200


def test_requests_that_fail_together_leave_the_engine_alone():
    """All of a step fail, one by one, and still it is they, as a step of nobody's shows."""
    model = says("x" * 450)

    def spoil(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if bool((positions == 60).any()):
            raise IndexError("index out of range")
        return logits

    model.hook.append(spoil)
    with serving(model) as rig, concurrent.futures.ThreadPoolExecutor() as pool:
        for _ in range(3):
            failed = [pool.submit(rig.post, "/v1/chat/completions", LONG) for _ in range(4)]
            assert {answer.result(30).status_code for answer in failed} == {500}
        assert failed[0].result().headers["x-should-retry"] == "false"
        assert rig.context.host.num_restarts == 0
        assert rig.post("/v1/chat/completions", {**LONG, "max_tokens": 5}).status_code == 200
        rig.wait_until_idle()


def test_a_stream_that_fails_ends_with_an_error_and_done():
    model = says("x" * 450)

    def spoil(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[positions == 60] = float("nan")
        return logits

    model.hook.append(spoil)
    with serving(model) as rig:
        for path, body in (
            ("/v1/chat/completions", LONG),
            ("/v1/completions", {"model": NAME, "prompt": "Hi", "max_tokens": 300, "ignore_eos": True}),
        ):
            lines = [x for x in rig.post(path, {**body, "stream": True}).text.split("\n\n") if x]
            assert lines[-1] == "data: [DONE]"
            error = json.loads(lines[-2].removeprefix("data: "))["error"]
            assert (error["code"], error["type"]) == ("request_failed", "server_error")
        with pytest.raises(openai.APIError, match="the request failed"):
            list(rig.client().chat.completions.create(**LONG, stream=True))
        body = {"model": NAME, "input": "Hi", "max_output_tokens": 300, "ignore_eos": True, "stream": True}
        events = rig.post("/v1/responses", body).text.split("\n\n")
        assert events[-2].startswith("event: response.failed")
        rig.wait_until_idle()
