"""A real server on a free port of this machine, over a tiny model, for the length of a `with` block."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import byte_tokenizer
import httpx
import openai
import tiny
import torch
from scripted_model import ScriptedModel

from cb_engine import EngineConfig
from cb_engine.serve.app import build_app
from cb_engine.serve.context import ServerContext
from cb_engine.serve.server import Server, make_server
from cb_engine.serve.settings import ServeSettings

NAME = "tiny"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]
PROMPT = "<user>Hi\n<assistant>"  # what the template makes of USER


def tokenizer(template: str | None = TEMPLATE) -> Any:
    made = byte_tokenizer.make_tokenizer()
    made.chat_template = template
    return made


def random_model(**changes: Any) -> Any:
    """A llama with random weights over the byte vocabulary."""
    model = tiny.make_model("llama", **{"vocab_size": byte_tokenizer.VOCAB, "max_position_embeddings": 512, **changes})
    model.generation_config.eos_token_id = byte_tokenizer.EOS
    return model


def says(text: str, prompt: str = PROMPT) -> ScriptedModel:
    """A model whose greedy answer to `prompt` is `text`."""
    return ScriptedModel(byte_tokenizer.ids_of(text), prompt_length=len(prompt.encode()))


class Gate:
    """Lets the model's steps pass, or holds them."""

    def __init__(self, model: Any) -> None:
        self.open = threading.Event()
        self.open.set()
        self.failures = 0
        model.hook.append(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        return self

    def __call__(self, positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert self.open.wait(30)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the device is gone")
        return logits


class ServerRig:
    """What tests see of a running server."""

    def __init__(self, server: Server, context: ServerContext, port: int) -> None:
        self.server, self.context, self.port = server, context, port
        self.url = f"http://127.0.0.1:{port}"

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def async_client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **options)

    def stats(self) -> Any:
        assert self.context.host.manager is not None
        return self.context.host.manager.stats()

    def wait_until(self, condition: Any, seconds: float = 20.0) -> None:
        """Waits for something that another thread brings about."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it never came about"
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        """Until nothing is left in the engine."""
        self.wait_until(lambda: (s := self.stats()).num_running + s.num_waiting + s.live_blocks == 0)


@contextmanager
def serving(
    model: Any = None, *, template: str | None = TEMPLATE, config: EngineConfig | None = None, **settings: Any
) -> Iterator[ServerRig]:
    """A server that is ready."""
    loaded = random_model() if model is None else model
    with starting(lambda: (loaded, tokenizer(template)), config=config, **settings) as rig:
        rig.wait_until(lambda: rig.get("/health").status_code == 200, 120)
        yield rig


@contextmanager
def starting(load: Any, *, config: EngineConfig | None = None, **settings: Any) -> Iterator[ServerRig]:
    """A server that listens, its model on the way."""
    settings = {"model_name": NAME, **settings}
    app = build_app(load, ServeSettings(**settings), config=config or EngineConfig(block_size=16, num_blocks=256))
    server = make_server(app, host="127.0.0.1", port=0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield ServerRig(server, app.state.context, port)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"
