"""The engine's life in a server, and that /health tells the truth about it."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import pytest
from server_rig import NAME, USER, Gate, ServerRig, random_model, says, serving, starting, tokenizer

from cb_engine import EngineConfig, EngineError
from cb_engine.engine import Engine
from cb_engine.serve.host import State

CHAT: dict[str, Any] = {"model": NAME, "messages": USER, "temperature": 0, "max_tokens": 5}


def state(rig: ServerRig) -> tuple[int, str]:
    answer = rig.get("/health")
    return answer.status_code, answer.json()["state"]


def test_health_says_that_the_model_is_being_loaded():
    loaded = threading.Event()

    def load() -> Any:
        assert loaded.wait(30)
        return random_model(), tokenizer()

    with starting(load) as rig:
        assert state(rig) == (503, "loading")
        answer = rig.post("/v1/chat/completions", CHAT)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the model is being loaded"
        assert "retry-after" in answer.headers
        for path in ("/v1/models", "/metrics", "/status", "/"):
            assert rig.get(path).status_code in (200, 503)
        assert rig.post("/tokenize", {"prompt": "a"}).status_code == 503
        loaded.set()
        rig.wait_until(lambda: state(rig) == (200, "ready"))
        assert rig.post("/v1/chat/completions", CHAT).status_code == 200


def test_a_model_that_cannot_be_loaded_ends_the_server():
    def load() -> Any:
        raise OSError("no such model")

    with starting(load) as rig:
        rig.wait_until(lambda: rig.server.should_exit)
        assert isinstance(rig.context.host.load_error, OSError)


def break_once(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The next step after the event is set raises."""
    broken, step = threading.Event(), Engine.step

    def failing(self: Engine) -> Any:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("the device is gone")
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)
    return broken


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_failed_engine_is_made_anew(monkeypatch: pytest.MonkeyPatch, stream: bool):
    broken = break_once(monkeypatch)
    model = says("x" * 450)
    gate = Gate(model)
    with serving(model) as rig, concurrent.futures.ThreadPoolExecutor() as pool:
        body = {**CHAT, "max_tokens": 400, "ignore_eos": True, "stream": stream}
        gate.open.clear()
        asked = [pool.submit(rig.post, "/v1/chat/completions", body) for _ in range(3)]
        rig.wait_until(lambda: len(rig.context.under_way) == 3 and rig.stats().num_running)
        broken.set()
        gate.open.set()
        for future in asked:
            answer = future.result(20)
            if answer.status_code == 503:
                assert answer.json()["error"]["code"] in ("engine_failed", "restarting")
            else:
                assert stream
                assert '"code":"engine_failed"' in answer.text
                assert answer.text.endswith("data: [DONE]\n\n")
        rig.wait_until(lambda: state(rig) == (200, "ready"))
        assert rig.context.host.num_restarts == 1
        assert rig.post("/v1/chat/completions", CHAT).json()["choices"][0]["message"]["content"] == "xxxxx"
        rig.wait_until_idle()
        text = rig.get("/metrics").text
        assert 'cb_engine:engine_restarts_total{engine="0",model_name="tiny"} 1.0' in text


def test_counters_never_fall_when_an_engine_is_made_anew(monkeypatch: pytest.MonkeyPatch):
    broken = break_once(monkeypatch)

    def generated() -> float:
        lines = rig.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("vllm:generation_tokens_total")).split()[-1])

    with serving(says("x" * 450)) as rig:
        rig.post("/v1/chat/completions", CHAT)
        before = generated()
        assert before == 5
        broken.set()
        rig.post("/v1/chat/completions", CHAT)
        rig.wait_until(lambda: rig.context.host.num_restarts == 1 and state(rig) == (200, "ready"))
        assert generated() >= before
        rig.post("/v1/chat/completions", CHAT)
        assert generated() >= before + 5


def test_an_engine_that_fails_too_often_is_dead(monkeypatch: pytest.MonkeyPatch):
    broken = break_once(monkeypatch)
    with serving(says("x" * 450), engine_restarts=1) as rig:
        for restarts in (1, 1):
            broken.set()
            assert rig.post("/v1/chat/completions", CHAT).status_code == 503
            rig.wait_until(lambda n=restarts: rig.context.host.num_restarts == n)
            rig.wait_until(lambda: rig.context.host.state is not State.RESTARTING)
        rig.wait_until(lambda: state(rig) == (503, "dead"))
        answer = rig.post("/v1/chat/completions", CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "dead")
        assert rig.get("/metrics").status_code == 200


def test_health_knows_a_failed_engine_before_anybody_has_dealt_with_it():
    with serving(says("x"), engine_restarts=0) as rig:
        manager = rig.context.host.manager
        assert manager is not None
        manager._thread._failure = EngineError("just now")
        health = rig.context.host.health()
        assert not health.is_ok
        assert health.state is State.DEAD
        manager._thread._failure = None


def test_a_step_that_does_not_end_is_told():
    model = says("x" * 450)
    gate = Gate(model)
    with serving(model, hang_timeout=0.3) as rig, concurrent.futures.ThreadPoolExecutor() as pool:
        gate.open.clear()
        asked = pool.submit(rig.post, "/v1/chat/completions", CHAT)
        rig.wait_until(lambda: rig.get("/health").status_code == 503)
        assert "busy with one step" in rig.get("/health").json()["reason"]
        gate.open.set()
        assert asked.result(20).status_code == 200
        assert rig.get("/health").status_code == 200


def test_health_answers_while_the_engine_is_busy():
    """It must not stand in line behind work, on whichever thread."""
    model = says("x" * 450)
    gate = Gate(model)
    config = EngineConfig(block_size=16, num_blocks=256, max_num_seqs=1)
    with serving(model, config=config) as rig, concurrent.futures.ThreadPoolExecutor(40) as pool:
        gate.open.clear()
        asked = [pool.submit(rig.post, "/v1/chat/completions", CHAT) for _ in range(30)]
        rig.wait_until(lambda: len(rig.context.under_way) == 30)
        assert state(rig) == (200, "ready")
        assert rig.get("/metrics").status_code == 200
        gate.open.set()
        assert {future.result(30).status_code for future in asked} == {200}


def test_no_request_is_taken_while_the_server_drains():
    with serving(says("x")) as rig:
        rig.context.host.begin_drain()
        assert state(rig) == (503, "draining")
        answer = rig.post("/v1/chat/completions", CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
