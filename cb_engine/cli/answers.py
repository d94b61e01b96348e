"""Answers as JSON lines: where they are written, in which order, and how a run that was cut off goes on.

Owns the output file and, beside it, `FILE.settings.json`: the settings the answers were made with, so that the answers
themselves are nothing but JSON lines. A file is continued only with the same settings. Does not know engines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

Answer = dict[str, Any]


class AnswerWriter:
    """Writes each answer as one line, whole, and flushes it.

    Args:
        ordered: hold answers back until those before them are written; else they are written as they come.
    """

    def __init__(self, stream: IO[bytes], *, ordered: bool) -> None:
        self._stream = stream
        self._ordered = ordered
        self._next = 0
        self._held: dict[int, Answer] = {}

    def write(self, position: int, answer: Answer) -> int:
        """Takes the answer of the `position`-th prompt of this run; returns how many lines were written."""
        if not self._ordered:
            self._put(answer)
            return 1
        self._held[position] = answer
        written = 0
        while self._next in self._held:
            self._put(self._held.pop(self._next))
            self._next += 1
            written += 1
        return written

    def write_held(self) -> None:
        """Writes what is held back, with gaps: the run was cut off."""
        for position in sorted(self._held):
            self._put(self._held.pop(position))

    def _put(self, answer: Answer) -> None:
        # A lone surrogate, which UTF-8 has no bytes for, becomes the escape that JSON has for it.
        line = json.dumps(answer, ensure_ascii=False, allow_nan=False) + "\n"
        self._stream.write(line.encode("utf-8", "backslashreplace"))
        self._stream.flush()


class AnswerFile:
    """The output file of a run, new or continued.

    Args:
        settings: what the answers depend on.
        overwrite: write an existing file anew.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, overwrite: bool) -> None:
        self.path = path
        self.settings_path = path.with_name(path.name + ".settings.json")
        self._settings = json.loads(json.dumps(settings))  # as it will be read back
        self._is_new = overwrite or not path.exists() or not path.stat().st_size

    def answered(self) -> dict[int, Any]:
        """The index of every prompt that has an answer, and its id. Changes nothing.

        Raises:
            ValueError: the file cannot be continued, with the way out.
        """
        if self._is_new:
            return {}
        self._check_settings()
        return {answer["index"]: answer.get("id") for _, _, answer in self._lines() if not _is_failure(answer)}

    def open(self) -> IO[bytes]:
        """The file, ready for more answers: a torn last line and the lines of failed prompts go."""
        if self._is_new:
            self.path.write_bytes(b"")
            self.settings_path.write_text(json.dumps(self._settings, indent=2) + "\n")
        else:
            self._clean()
        return self.path.open("ab")

    def _clean(self) -> None:
        end = 0
        has_failures = False
        for offset, line, answer in self._lines():
            end = offset + len(line)
            has_failures = has_failures or _is_failure(answer)
        if has_failures:
            self._rewrite(line for _, line, answer in self._lines() if not _is_failure(answer))
        elif end < self.path.stat().st_size:
            os.truncate(self.path, end)

    def sort(self) -> None:
        """Brings the lines into the order of the input; holds an index of them, not the lines."""
        places = [(answer["index"], offset, len(line)) for offset, line, answer in self._lines()]
        if places == sorted(places):
            return
        with self.path.open("rb") as source:

            def in_order() -> Iterator[bytes]:
                for _, offset, length in sorted(places):
                    source.seek(offset)
                    yield source.read(length)

            self._rewrite(in_order())

    def _lines(self) -> Iterator[tuple[int, bytes, Answer]]:
        """(offset, line, answer) of every whole line."""
        offset = 0
        with self.path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                answer = _answer_of(line)
                if answer is None:
                    if not line.endswith(b"\n"):
                        return  # torn: the run was killed while it wrote
                    raise ValueError(f"line {number} of {self.path} is no answer; start again with --overwrite")
                yield offset, line, answer
                offset += len(line)

    def _check_settings(self) -> None:
        if not self.settings_path.exists():
            raise ValueError(
                f"{self.path} exists, and {self.settings_path.name}, which would tell how it was made, does not; give "
                "another file, or --overwrite to write it anew"
            )
        try:
            before = json.loads(self.settings_path.read_bytes())
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise ValueError(f"{self.settings_path} cannot be read; write {self.path} anew with --overwrite")
        for name in sorted(before.keys() | self._settings.keys()):
            if before.get(name) != self._settings.get(name):
                raise ValueError(
                    f"{self.path} was written with other settings ({name} was {json.dumps(before.get(name))} and is "
                    f"{json.dumps(self._settings.get(name))}); use the same ones to continue, or --overwrite to write "
                    "it anew"
                )

    def _rewrite(self, lines: Iterator[bytes]) -> None:
        scratch = self.path.with_name(self.path.name + ".partial")
        with scratch.open("wb") as stream:
            stream.writelines(lines)
        os.replace(scratch, self.path)


def _is_failure(answer: Answer) -> bool:
    return answer.get("error") is not None


def _answer_of(line: bytes) -> Answer | None:
    if not line.endswith(b"\n"):
        return None
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and isinstance(answer.get("index"), int) else None
