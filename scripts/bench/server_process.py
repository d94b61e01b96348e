"""Servers in processes of their own: how each is started, when it is ready, and how it ends.

Knows the command lines of this project's server, transformers' and vLLM's. Knows no request but the one that asks
whether a server is there.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

from bench.http_client import Address

ENGINES = ("cb_engine", "transformers", "vllm")

_HOST = "127.0.0.1"
_POLL_S = 0.1
_LAUNCHER = Path(__file__).with_name("cb_server.py")
# vLLM's pool in GB, and all cores for its computation: by itself it keeps one free for its scheduler, which on two
# cores costs it half of its speed.
_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class ServerFailedError(Exception):
    """A server did not come up, or did not end."""


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started.

    Attributes:
        command: a port is put in where it says `{port}`.
        model_name: what requests call the model.
    """

    name: str
    command: Sequence[str]
    model_name: str
    environment: Mapping[str, str] = field(default_factory=dict)


def cb_engine_command(model: str, *, python: str = sys.executable, options: Sequence[str] = ()) -> ServerCommand:
    """This project's server.

    Args:
        options: for `cb_server.py`.
    """
    command = [python, str(_LAUNCHER), "--model", model, "--port", "{port}", *options]
    return ServerCommand("cb_engine", command, model)


def peer_command(engine: str, model: str, python: str, max_model_len: int) -> ServerCommand:
    """The server of an engine, with the settings that it would have by itself.

    Args:
        engine: one of ENGINES.
        model: a folder that it can load.
        max_model_len: what vLLM sizes its batches by; the others follow the model.
    """
    if engine == "cb_engine":
        return cb_engine_command(model, python=python)
    if engine == "transformers":
        serve = ["-c", "from transformers.cli.transformers import main; main()", "serve", model]
        command = [python, *serve, "--continuous-batching", "--host", _HOST, "--port", "{port}"]
        return ServerCommand(engine, command, model)
    serve = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", _HOST, "--port", "{port}"]
    limits = ["--dtype", "bfloat16", "--max-model-len", str(max_model_len), "--seed", "0"]
    return ServerCommand(engine, [python, *serve, *limits], model, _VLLM_ENVIRONMENT)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A server from its start to its end; a context manager that leaves no process behind."""

    def __init__(self, command: ServerCommand) -> None:
        self.command = command
        self.address = Address(_HOST, free_port())
        self._log = tempfile.NamedTemporaryFile(prefix="server-", suffix=".log")  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> ServerProcess:
        self._process = subprocess.Popen(
            [part.replace("{port}", str(self.address.port)) for part in self.command.command],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(self.command.environment),
            start_new_session=True,  # whatever it forks off ends with it
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has printed."""
        return Path(self._log.name).read_text(errors="replace")

    def wait_ready(self, timeout: float, path: str = "/health") -> float:
        """Waits until `path` is answered with 200.

        Returns:
            seconds that it took.

        Raises:
            ServerFailedError: it ended, or took too long.
        """
        began = time.monotonic()
        while time.monotonic() - began < timeout:
            if self._process.poll() is not None:
                raise ServerFailedError(f"{self.command.name} ended with {self._process.returncode}: {self._last()}")
            try:
                with urllib.request.urlopen(f"http://{_HOST}:{self.address.port}{path}", timeout=5) as answer:
                    if answer.status == 200:
                        return time.monotonic() - began
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(_POLL_S)
        raise ServerFailedError(f"{self.command.name} was not ready after {timeout:g} s: {self._last()}")

    def signal(self, number: int) -> None:
        """Sends a signal to the process that was started."""
        self._process.send_signal(number)

    def wait(self, timeout: float) -> int | None:
        """The exit code, None if it has not ended in time."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def rss(self) -> int:
        """Resident bytes of the process and its children."""
        process = psutil.Process(self.pid)
        return sum(member.memory_info().rss for member in (process, *process.children(recursive=True)))

    def cpu_seconds(self) -> float:
        """Processor time of the same."""
        process = psutil.Process(self.pid)
        times = [member.cpu_times() for member in (process, *process.children(recursive=True))]
        return float(sum(t.user + t.system for t in times))

    def _last(self) -> str:
        return (self.log.strip().splitlines() or ["it printed nothing"])[-1]
