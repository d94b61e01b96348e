"""What the tests of the command line share: a model folder with its right answers, and what a command has left."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import byte_tokenizer
import tiny


@dataclass(frozen=True)
class TinyModel:
    """A model folder and what plain `generate` makes of a prompt with it."""

    folder: Path
    model: Any

    def text_of(self, prompt: str, num_tokens: int) -> str:
        """The greedy continuation of a text."""
        return byte_tokenizer.make_tokenizer().decode(self.ids_of(byte_tokenizer.ids_of(prompt), num_tokens))

    def ids_of(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The greedy continuation of token ids."""
        ids, gap = tiny.generate_with_gap(self.model, prompt, num_tokens)
        assert gap > tiny.MIN_GAP, "two tokens are too close to tell which is right; choose another prompt"
        return ids


@dataclass(frozen=True)
class Done:
    """What a command has left."""

    code: int
    stdout: str
    stderr: str

    @property
    def answers(self) -> list[dict[str, Any]]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def error(self) -> str:
        """The one line on stderr."""
        lines = self.stderr.splitlines()
        assert len(lines) == 1, f"not one line: {self.stderr!r}"
        return lines[0]


Command = Callable[..., Done]
