"""A server in a process of its own: signals, drain, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).parents[1]
# The model's 300 tokens take about 3 s, so there is time to end the server while it speaks.
PROGRAM = """
import sys, time
sys.path[:0] = [{tests!r}, {root!r}]
from server_rig import NAME, says, tokenizer
from cb_engine import EngineConfig
from cb_engine.serve.app import build_app
from cb_engine.serve.server import make_server
from cb_engine.serve.settings import ServeSettings

def slowly(positions, logits):
    time.sleep(0.01)
    return logits

def load():
    if {fails!r}:
        raise OSError("there is no such model")
    time.sleep({load_s})
    model = says("x" * 450)
    model.hook.append(slowly)
    return model, tokenizer()

settings = ServeSettings(model_name=NAME, shutdown_timeout={timeout})
app = build_app(load, settings, config=EngineConfig(block_size=16, num_blocks=256))
from cb_engine.serve import server as module
made = make_server(app, host="127.0.0.1", port=0)
module.make_server = lambda *a, **k: made
startup = made.startup
async def told(sockets=None):
    await startup(sockets)
    print(made.servers[0].sockets[0].getsockname()[1], flush=True)
made.startup = told
sys.exit(module.run_server(app, host="127.0.0.1", port=0))
"""


@contextmanager
def process(
    timeout: float = 20.0, fails: bool = False, load_s: float = 0.0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its address."""
    text = PROGRAM.format(tests=str(HERE), root=str(HERE.parent), timeout=timeout, fails=fails, load_s=load_s)
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None
            url = f"http://127.0.0.1:{int(made.stdout.readline())}"
            yield made, url
        finally:
            made.kill()


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 30
    while httpx.get(f"{url}/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)


CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 100,
    "temperature": 0,
    "stream": True,
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_a_server_that_is_told_to_end_finishes_what_it_has_begun(number: signal.Signals):
    with process() as (server, url):
        wait_until_ready(url)
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(number)
            deadline = time.monotonic() + 10
            while (health := httpx.get(f"{url}/health")).status_code == 200:
                assert time.monotonic() < deadline
            assert health.json()["state"] == "draining"
            refused = httpx.post(f"{url}/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.wait(20) == 0


def test_what_takes_too_long_is_cut_off_with_an_error():
    with process(timeout=0.2) as (server, url):
        wait_until_ready(url)
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json={**CHAT, "max_tokens": 400}, timeout=30
        ) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert "error" in json.loads(rest[-2].removeprefix("data: "))
        assert server.wait(20) == 0


def test_a_second_signal_ends_it_at_once():
    with process(timeout=60) as (server, url):
        wait_until_ready(url)
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json={**CHAT, "max_tokens": 400, "n": 64}, timeout=30
        ) as response:
            next(response.iter_lines())
            server.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 10
            while httpx.get(f"{url}/health").status_code == 200:
                assert time.monotonic() < deadline
            server.send_signal(signal.SIGTERM)
            assert server.wait(5) == 1


def test_a_server_that_is_told_to_end_while_it_loads_ends():
    with process(load_s=60.0) as (server, url):
        assert httpx.get(f"{url}/health").json()["state"] == "loading"
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0


def test_a_server_without_a_model_ends_with_an_error():
    with process(fails=True) as (server, _):
        assert server.wait(20) == 1
