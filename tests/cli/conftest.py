"""A tiny model in a folder, and the command line run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import byte_tokenizer
import pytest
import tiny
from cli_rig import Command, Done, TinyModel
from typer.testing import CliRunner

from cb_engine.cli.main import build_app

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A two-layer Llama over bytes, without an EOS, whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny.make_model("llama", vocab_size=byte_tokenizer.VOCAB, max_position_embeddings=512)
    silent = [i for i in range(byte_tokenizer.VOCAB) if not 32 <= i - byte_tokenizer.OFFSET < 127]
    model.lm_head.weight.data[silent] = 0  # it says nothing but printable characters
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer.make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return TinyModel(folder, model)


@pytest.fixture
def command() -> Command:
    """Runs `cb-engine` with arguments; `stdin` is text."""

    def run(*arguments: object, stdin: str | bytes = "") -> Done:
        result = CliRunner().invoke(build_app(), [str(a) for a in arguments], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Writes objects as JSON lines, and strings as they are, to a file."""

    def write(name: str, *lines: Any) -> Path:
        path = tmp_path / name
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return path

    return write
