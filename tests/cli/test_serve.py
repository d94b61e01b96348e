"""`cb-engine serve`: every option reaches the server."""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import byte_tokenizer
import httpx
import pytest
import tiny
from typer.testing import CliRunner

from cb_engine.cli import serve
from cb_engine.cli.main import build_app
from cb_engine.serve.settings import Limits, ServeSettings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command without a server; returns what it would have served."""
    seen: dict[str, Any] = {}

    def fake_app(load: Any, settings: ServeSettings, *, config: Any, hints: Any) -> Any:
        seen.update(load=load, settings=settings, config=config, hints=hints)
        return SimpleNamespace(state=SimpleNamespace(context=SimpleNamespace(host=SimpleNamespace(load_error=None))))

    def fake_run(app: Any, *, host: str, port: int) -> int:
        seen.update(host=host, port=port)
        return 0

    monkeypatch.setattr("cb_engine.serve.app.build_app", fake_app)
    monkeypatch.setattr("cb_engine.serve.server.run_server", fake_run)
    monkeypatch.setattr(serve, "_begin_logging", lambda level: seen.update(log_level=level))

    def run(*options: str, code: int = 0) -> Any:
        seen.clear()
        result = CliRunner().invoke(build_app(), ["serve", "demo", *options])
        assert result.exit_code == code, result.output
        return SimpleNamespace(**seen, output=result.output)

    return run


OPTIONS: dict[str, tuple[tuple[str, ...], Any]] = {  # field of ServeSettings: options, and the value that they give
    "model_name": (("--served-model-name", "a"), "a"),
    "model_aliases": (("--served-model-name", "a", "--served-model-name", "b"), ("b",)),
    "api_key": (("--api-key", "k"), "k"),
    "admin_key": (("--admin-key", "k"), "k"),
    "cors_origins": (("--enable-cors",), ("*",)),
    "allowed_hosts": (("--allowed-host", "Me.example"), ("me.example",)),
    "max_waiting_time": (("--max-waiting-time", "1.5"), 1.5),
    "max_running_time": (("--max-running-time", "2.5"), 2.5),
    "shutdown_timeout": (("--shutdown-timeout", "3"), 3.0),
    "text_timeout": (("--text-timeout", "4"), 4.0),
    "body_timeout": (("--body-timeout", "5"), 5.0),
    "send_timeout": (("--send-timeout", "5.5"), 5.5),
    "hang_timeout": (("--hang-timeout", "6"), 6.0),
    "engine_restarts": (("--engine-restarts", "7"), 7),
    "chat_template": (("--chat-template", "{{ 1 }}"), "{{ 1 }}"),
    "chat_template_kwargs": (("--chat-template-kwargs", '{"a": 1}'), {"a": 1}),
    "trust_request_chat_template": (("--trust-request-chat-template",), True),
    "tool_format": (("--tool-format", "hermes"), "hermes"),
    "reasoning": (("--reasoning", "off"), "off"),
    "use_generation_config": (("--no-generation-config",), False),
    "weights_dir": (("--weights-dir", "/"), "/"),
    "default_seed": (("--seed", "7"), 7),
}
FIXED = {"limits", "retry_after"}  # limits: below; retry_after: the same for all


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_reaches_the_server(served: Any, name: str):
    options, value = OPTIONS[name]
    assert getattr(served(*options).settings, name) == value
    assert getattr(served().settings, name) != value


def test_every_setting_has_an_option():
    assert set(OPTIONS) | FIXED == {f.name for f in dataclasses.fields(ServeSettings)}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Limits)])
def test_every_limit_has_an_option(served: Any, name: str):
    assert served().settings.limits == Limits()
    assert getattr(served("--" + name.replace("_", "-"), "3").settings.limits, name) == 3


def test_settings_of_the_engine_and_the_model(served: Any):
    run = served(
        *("--max-queued-requests", "5", "--max-queued-tokens", "6", "--cb-block-size", "32", "--default-seed", "7"),
        *("--num-requests", "9", "--host", "0.0.0.0", "--port", "1234", "--log-level", "error"),
    )
    assert (run.config.max_queue_size, run.config.max_queued_tokens) == (5, 6)
    assert (run.config.block_size, run.config.seed, run.settings.default_seed) == (32, None, 7)
    assert run.hints == {"num_requests": 9}
    assert (run.host, run.port, run.log_level) == ("0.0.0.0", 1234, "error")
    assert "no --api-key is set" in run.output


def test_a_server_for_this_machine_alone_answers_to_its_names(served: Any):
    assert set(served().settings.allowed_hosts) == {"localhost", "127.0.0.1", "[::1]"}
    assert served("--host", "0.0.0.0").settings.allowed_hosts == ()
    assert served("--allowed-host", "*").settings.allowed_hosts == ()
    assert "no --api-key" not in served().output


def test_a_template_may_be_a_file(served: Any, tmp_path: Path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert served("--chat-template", str(tmp_path / "t.jinja")).settings.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--api-key", ""), "--api-key must be"),
        (("--api-key", "k", "--admin-key", "k"), "--admin-key and --api-key are the same"),
        (("--max-waiting-time", "0"), "--max-waiting-time=0"),
        (("--max-stop", "0"), "--max-stop=0 must be a positive integer"),
        (("--enable-cors", "--cors-origin", "https://a"), "--enable-cors means all origins"),
        (("--chat-template", "nope.jinja"), "no template, and no file"),
        (("--chat-template-kwargs", "[]"), "must be a JSON object"),
        (("--block-size", "0"), "--block-size=0"),
        (("--port", "70000"), "--port"),
        (("--reasoning", "maybe"), "--reasoning"),
        (("--weights-dir", "/nope"), "--weights-dir"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_options_are_one_line(served: Any, options: tuple[str, ...], message: str):
    assert message in served(*options, code=2).output


def test_keys_may_come_from_the_environment(served: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CB_ENGINE_API_KEY", "one")
    monkeypatch.setenv("CB_ENGINE_ADMIN_KEY", "two")
    settings = served().settings
    assert (settings.api_key, settings.admin_key) == ("one", "two")


def test_the_command_serves_and_ends(tmp_path: Path):
    model = tiny.make_model("llama", vocab_size=byte_tokenizer.VOCAB)
    model.save_pretrained(tmp_path)
    byte_tokenizer.make_tokenizer().save_pretrained(tmp_path)
    command = [sys.executable, "-m", "cb_engine", "serve", str(tmp_path), "--port", "0", "--num-blocks", "64"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(m[0] for line in process.stderr if (m := re.search(r"http://\S+:\d+", line)))
            deadline = time.monotonic() + 60
            while httpx.get(f"{url}/health").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=30)
            assert answer.json()["usage"]["completion_tokens"] == 3
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(30) == 0
            assert "POST /v1/completions 200" in rest
        finally:
            process.kill()


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "cb_engine", "serve", str(tmp_path / "empty"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("cb-engine: cannot load model")
