"""The output file: order, cuts, and going on."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from cb_engine.cli.answers import AnswerFile, AnswerWriter

SETTINGS = {"model": "m", "sampling": {"stop": ("a",)}}


def indexes(data: bytes) -> list[int]:
    return [json.loads(line)["index"] for line in data.splitlines()]


def file_with(path: Path, *lines: Any, tail: str = "", settings: Any = SETTINGS) -> AnswerFile:
    """A file as an earlier run has left it."""
    with AnswerFile(path, settings, overwrite=True).open() as stream:
        for line in lines:
            stream.write(json.dumps(line).encode() + b"\n")
        stream.write(tail.encode())
    return AnswerFile(path, SETTINGS, overwrite=False)


class TestWriter:
    def test_unordered_answers_are_written_as_they_come(self) -> None:
        stream = io.BytesIO()
        writer = AnswerWriter(stream, ordered=False)
        assert [writer.write(position, {"index": position}) for position in (2, 0, 1)] == [1, 1, 1]
        assert indexes(stream.getvalue()) == [2, 0, 1]

    def test_ordered_answers_wait_for_those_before_them(self) -> None:
        stream = io.BytesIO()
        writer = AnswerWriter(stream, ordered=True)
        assert writer.write(1, {"index": 10}) == 0
        assert writer.write(2, {"index": 20}) == 0
        assert stream.getvalue() == b""
        assert writer.write(0, {"index": 5}) == 3
        assert indexes(stream.getvalue()) == [5, 10, 20]

    def test_a_run_that_was_cut_off_loses_nothing(self) -> None:
        stream = io.BytesIO()
        writer = AnswerWriter(stream, ordered=True)
        writer.write(3, {"index": 3})
        writer.write(1, {"index": 1})
        writer.write_held()
        assert indexes(stream.getvalue()) == [1, 3]

    def test_text_is_readable_and_always_utf8(self) -> None:
        stream = io.BytesIO()
        AnswerWriter(stream, ordered=False).write(0, {"text": "é\n\ud800"})
        assert stream.getvalue() == '{"text": "é\\n\\ud800"}\n'.encode()
        assert json.loads(stream.getvalue()) == {"text": "é\n\ud800"}

    def test_a_line_is_flushed_at_once(self, tmp_path: Path) -> None:
        with (tmp_path / "a").open("wb") as stream:
            AnswerWriter(stream, ordered=False).write(0, {"index": 0})
            assert (tmp_path / "a").read_bytes() == b'{"index": 0}\n'


class TestFile:
    def test_a_new_file_has_its_settings_beside_it(self, tmp_path: Path) -> None:
        file = AnswerFile(tmp_path / "a.jsonl", SETTINGS, overwrite=False)
        assert file.answered() == {}
        file.open().close()
        assert (tmp_path / "a.jsonl").read_bytes() == b""
        assert json.loads((tmp_path / "a.jsonl.settings.json").read_text()) == {
            "model": "m",
            "sampling": {"stop": ["a"]},
        }

    def test_an_empty_file_is_new(self, tmp_path: Path) -> None:
        (tmp_path / "a").touch()
        assert AnswerFile(tmp_path / "a", SETTINGS, overwrite=False).answered() == {}

    def test_what_is_answered_is_known_and_kept(self, tmp_path: Path) -> None:
        file = file_with(tmp_path / "a", {"index": 4, "id": "x"}, {"index": 0, "id": 0})
        assert file.answered() == {4: "x", 0: 0}
        with file.open() as stream:
            stream.write(b'{"index": 1}\n')
        assert indexes((tmp_path / "a").read_bytes()) == [4, 0, 1]

    def test_a_torn_last_line_is_dropped(self, tmp_path: Path) -> None:
        file = file_with(tmp_path / "a", {"index": 0}, tail='{"index": 1, "te')
        assert file.answered() == {0: None}
        assert (tmp_path / "a").read_bytes().endswith(b"te")  # looking changes nothing
        file.open().close()
        assert (tmp_path / "a").read_bytes() == b'{"index": 0}\n'

    def test_a_last_line_that_only_lacks_its_end_is_torn_too(self, tmp_path: Path) -> None:
        file = file_with(tmp_path / "a", {"index": 0}, tail='{"index": 1}')
        assert file.answered() == {0: None}
        file.open().close()
        assert (tmp_path / "a").read_bytes() == b'{"index": 0}\n'

    def test_failed_lines_are_tried_again(self, tmp_path: Path) -> None:
        file = file_with(tmp_path / "a", {"index": 0}, {"index": 1, "error": "no"}, {"index": 2}, tail="{")
        assert file.answered() == {0: None, 2: None}
        file.open().close()
        assert indexes((tmp_path / "a").read_bytes()) == [0, 2]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.settings.json"]

    def test_other_settings_are_refused_by_name(self, tmp_path: Path) -> None:
        file = file_with(tmp_path / "a", {"index": 0}, settings={**SETTINGS, "seed": 3})
        with pytest.raises(ValueError, match=r"other settings \(seed was 3 and is null\); .*--overwrite"):
            file.answered()

    def test_a_file_without_settings_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("notes\n")
        with pytest.raises(ValueError, match=r"a\.settings\.json.*--overwrite"):
            AnswerFile(tmp_path / "a", SETTINGS, overwrite=False).answered()

    @pytest.mark.parametrize("line", ["notes", "[1]", '{"id": 1}'], ids=["text", "list", "no-index"])
    def test_a_line_that_is_no_answer_is_refused(self, tmp_path: Path, line: str) -> None:
        file = file_with(tmp_path / "a", {"index": 0}, tail=line + "\n")
        with pytest.raises(ValueError, match=r"line 2 of .* is no answer; .*--overwrite"):
            file.answered()

    def test_overwriting_forgets_all(self, tmp_path: Path) -> None:
        file_with(tmp_path / "a", {"index": 0}, settings={"model": "other"})
        file = AnswerFile(tmp_path / "a", SETTINGS, overwrite=True)
        assert file.answered() == {}
        assert (tmp_path / "a").read_bytes() != b""  # until it is opened
        file.open().close()
        assert (tmp_path / "a").read_bytes() == b""
        assert AnswerFile(tmp_path / "a", SETTINGS, overwrite=False).answered() == {}

    def test_lines_are_brought_into_order(self, tmp_path: Path) -> None:
        file = file_with(tmp_path / "a", {"index": 2}, {"index": 0, "text": "é"}, {"index": 10}, {"index": 1})
        file.sort()
        assert indexes((tmp_path / "a").read_bytes()) == [0, 1, 2, 10]
