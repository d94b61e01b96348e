"""What a line of input may be, and what is wrong with the others."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cb_engine.cli.prompts import PromptLine, PromptSource


def read(path: Path, given_format: Any = "auto") -> list[PromptLine]:
    return list(PromptSource(path, given_format))


def error_of(tmp_path: Path, line: bytes) -> str:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(line + b"\n")
    [prompt] = read(path)
    assert prompt.error is not None
    return prompt.error


def test_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes('\ufeffone\r\n\n  two  \n{"prompt": 3}'.encode())
    assert [(p.index, p.id, p.prompt, p.error) for p in read(path)] == [
        (0, 0, "one", None),
        (2, 2, "  two  ", None),
        (3, 3, '{"prompt": 3}', None),
    ]


def test_json_lines_have_one_kind_of_prompt(write_lines: Callable[..., Path]) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = write_lines(
        "prompts.jsonl",
        {"prompt": "a", "id": "first"},
        {"prompt": [1, 2], "id": 7},
        {"messages": chat, "prompt": None},
        {"question": "why?", "answer": "so"},
        {"prompt": "b", "sampling_params": {"top_k": 3, "logit_bias": {"5": 1.0}}},
    )
    assert read(path) == [
        PromptLine(index=0, id="first", prompt="a"),
        PromptLine(index=1, id=7, prompt=[1, 2]),
        PromptLine(index=2, id=2, messages=chat),
        PromptLine(index=3, id=3, prompt="why?"),
        PromptLine(index=4, id=4, prompt="b", changes={"top_k": 3, "logit_bias": {5: 1.0}}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "the line is not JSON"),
        (b"[1]", "the line must be a JSON object"),
        (b"\xff\xfe", "the line is not UTF-8 text"),
        (b"{}", "the line must have one of prompt, messages or question; its fields are none"),
        (b'{"text": "a"}', "the line must have one of prompt, messages or question; its fields are text"),
        (
            b'{"prompt": "a", "question": "b"}',
            "the line must have one of prompt, messages or question; it has prompt and",
        ),
        (b'{"prompt": ""}', "prompt must be text or a list of token ids, and not empty"),
        (b'{"prompt": [1, "a"]}', "prompt must be text or a list of token ids"),
        (b'{"prompt": [true]}', "prompt must be text or a list of token ids"),
        (b'{"question": [1]}', "question must be text, and not empty"),
        (b'{"messages": []}', "messages must be a list of messages"),
        (b'{"messages": ["a"]}', 'a message must be like {"role": "user"'),
        (b'{"prompt": "a", "id": 1.5}', "id must be a string or an integer, got 1.5"),
        (b'{"prompt": "a", "sampling_params": [1]}', "sampling_params must be a JSON object"),
        (b'{"prompt": "a", "sampling_params": {"topk": 1}}', "sampling_params has no field 'topk'"),
        (b'{"prompt": "a", "sampling_params": {"logit_bias": {"a": 1}}}', "logit_bias must have token ids for keys"),
        (b"[" * 100_000, "the line is not JSON"),
    ],
    ids=range(17),
)
def test_a_bad_line_says_what_is_wrong(line: bytes, message: str, tmp_path: Path) -> None:
    assert error_of(tmp_path, line).startswith(message)


def test_a_bad_line_keeps_its_id_and_leaves_the_others_alone(write_lines: Callable[..., Path]) -> None:
    path = write_lines("p.jsonl", {"prompt": "a"}, {"id": "x"}, {"prompt": "b"})
    assert [(p.id, p.prompt, p.error is None) for p in read(path)] == [
        (0, "a", True),
        ("x", None, False),
        (2, "b", True),
    ]


@pytest.mark.parametrize(
    ("name", "given", "content", "expected"),
    [
        ("p.txt", "auto", '{"prompt": "a"}', '{"prompt": "a"}'),
        ("p.txt", "jsonl", '{"prompt": "a"}', "a"),
        ("p.jsonl", "text", '{"prompt": "a"}', '{"prompt": "a"}'),
        ("p.data", "auto", '\n  {"prompt": "a"}', "a"),
        ("p.data", "auto", "a", "a"),
        ("p.JSON", "auto", '{"prompt": "a"}', "a"),
    ],
)
def test_the_format_goes_by_option_then_suffix_then_first_line(
    name: str, given: Any, content: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    [line] = read(tmp_path / name, given)
    assert line.prompt == expected


def test_a_file_can_be_read_twice_and_counted(write_lines: Callable[..., Path]) -> None:
    source = PromptSource(write_lines("p.jsonl", {"prompt": "a"}, "", {"prompt": "b"}))
    assert list(source) == list(source)
    assert list(source.indexes()) == [0, 2]
    assert source.is_rewindable


def test_nothing_is_read_ahead(tmp_path: Path) -> None:
    """A pipe's lines come one at a time."""
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(3)) + "not JSON\n")
    lines = iter(PromptSource(path))
    assert next(lines).prompt == "0"


@pytest.mark.parametrize("rewindable", [False, True])
def test_a_named_pipe_is_read_once_or_copied(rewindable: bool, tmp_path: Path) -> None:
    """As in `cb-engine generate demo <(zcat prompts.gz)`."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("one\ntwo\n",))
    writer.start()
    source = PromptSource(path, rewindable=rewindable)
    assert source.is_rewindable is rewindable
    assert source.file is None
    for _ in range(1 + rewindable):
        assert [line.prompt for line in source] == ["one", "two"]
    writer.join()
