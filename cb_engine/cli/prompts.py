"""Prompts from files and pipes, a line at a time.

Owns the formats (text, JSONL), what a JSONL line may hold, and which lines are bad. Does not know tokenizers or
models, and never holds more than a line.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from cb_engine.cli.options import changes_from_json

InputFormat = Literal["auto", "text", "jsonl"]

_BY_SUFFIX: dict[str, InputFormat] = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
_PROMPT_FIELDS = ("prompt", "messages", "question")


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One line of the input; a bad one has an `error` and nothing to run.

    Attributes:
        index: the number of the line in the input, from 0, blank lines counted.
        id: the line's own id, else the index.
        prompt: text or token ids; None if there are messages.
        messages: a chat, for the tokenizer's template.
        changes: fields of SamplingParams for this line.
        error: what is wrong with the line.
    """

    index: int
    id: str | int
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


class PromptSource:
    """The input. A file can be read again and again; a pipe once, unless it was made `rewindable`.

    Args:
        path: a file or a named pipe; None is stdin.
        given_format: "auto" goes by the file's suffix, else by whether its first line begins with `{`.
        rewindable: keep a copy of a pipe on disk, to read it more than once.
    """

    def __init__(self, path: Path | None, given_format: InputFormat = "auto", *, rewindable: bool = False) -> None:
        self._path = path
        self.file = path if path is not None and path.is_file() else None
        self._format: InputFormat = given_format
        if path is not None and given_format == "auto":
            self._format = _BY_SUFFIX.get(path.suffix.lower(), "auto")
        self._copy = self._copy_of_pipe() if self.file is None and rewindable else None

    @property
    def is_rewindable(self) -> bool:
        """Whether the input can be read more than once."""
        return self.file is not None or self._copy is not None

    def __iter__(self) -> Iterator[PromptLine]:
        """Every line that is not blank, good or bad."""
        form = self._format
        for index, raw in self._raw_lines():
            if form == "auto":
                form = "jsonl" if raw.lstrip().startswith(b"{") else "text"
            yield _parse(index, raw, form)

    def indexes(self) -> Iterator[int]:
        """The indexes of those lines, without a look at what they hold."""
        return (index for index, _ in self._raw_lines())

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        if self._copy is not None:
            self._copy.seek(0)
            yield from _numbered(self._copy)
        else:
            with self._open() as stream:
                yield from _numbered(stream)

    def _open(self) -> IO[bytes]:
        return _stdin() if self._path is None else self._path.open("rb")

    def _copy_of_pipe(self) -> IO[bytes]:
        copy = tempfile.TemporaryFile()  # noqa: SIM115 # lives as long as the source
        with self._open() as stream:
            shutil.copyfileobj(stream, copy)
        return copy


def _numbered(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    for index, raw in enumerate(stream):
        line = raw.removeprefix(b"\xef\xbb\xbf") if index == 0 else raw  # editors on Windows put a mark there
        if line.strip():
            yield index, line


def _stdin() -> IO[bytes]:
    # A stream of our own: a thread that still waits for input must not hold the interpreter's at its end.
    try:
        return open(os.dup(sys.stdin.fileno()), "rb")  # read to its end by its caller
    except OSError:  # there is no real stdin, in a test for one
        return sys.stdin.buffer


def _parse(index: int, raw: bytes, form: InputFormat) -> PromptLine:
    """A line as a prompt; what is wrong with it becomes its error."""
    try:
        text = raw.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        return PromptLine(index=index, id=index, error=f"the line is not UTF-8 text: {error}")
    if form == "text":
        return PromptLine(index=index, id=index, prompt=text)
    try:
        given = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        return PromptLine(index=index, id=index, error=f"the line is not JSON: {error}")
    if not isinstance(given, dict):
        return PromptLine(index=index, id=index, error='the line must be a JSON object like {"prompt": "..."}')
    own_id = given.get("id")
    if own_id is not None and (isinstance(own_id, bool) or not isinstance(own_id, str | int)):
        return PromptLine(index=index, id=index, error=f"id must be a string or an integer, got {own_id!r}")
    try:
        return _from_object(index, index if own_id is None else own_id, given)
    except (ValueError, TypeError) as error:
        return PromptLine(index=index, id=index if own_id is None else own_id, error=str(error))


def _from_object(index: int, own_id: str | int, given: Mapping[str, Any]) -> PromptLine:
    """Fields that are not ours, an answer to compare with for example, are passed over."""
    present = [name for name in _PROMPT_FIELDS if given.get(name) is not None]
    if len(present) != 1:
        found = f"it has {' and '.join(present)}" if present else f"its fields are {', '.join(given) or 'none'}"
        raise ValueError(f"the line must have one of prompt, messages or question; {found}")
    params = given.get("sampling_params") or {}
    if not isinstance(params, Mapping):
        raise TypeError(f"sampling_params must be a JSON object, got {params!r}")
    changes = changes_from_json(params)
    if "messages" in present:
        return PromptLine(index=index, id=own_id, messages=_messages(given["messages"]), changes=changes)
    return PromptLine(index=index, id=own_id, prompt=_prompt(present[0], given[present[0]]), changes=changes)


def _prompt(name: str, value: object) -> str | list[int]:
    if isinstance(value, str) and value:
        return value
    if (
        isinstance(value, list)
        and value
        and name == "prompt"
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    ):
        return value
    kinds = "text or a list of token ids" if name == "prompt" else "text"
    raise TypeError(f"{name} must be {kinds}, and not empty; got {str(value)[:60]!r}")


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise TypeError(f"messages must be a list of messages, and not empty; got {str(value)[:60]!r}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(f'a message must be like {{"role": "user", "content": "..."}}; got {str(message)[:60]!r}')
    return value
