"""The benchmark's table and its result file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report import Reference, Row, Skipped, format_table, write_json

OURS = Row("few_blocks", "cb_engine", 20, 256.0, 256, 10.0, 5120, 512.0, 0.5)
THEIRS = Row("few_blocks", "transformers", 20, 256.0, 256, 40.0, 5120, 128.0, 1.25)
STATIC = Skipped("few_blocks", "static", 20, 256.0, 256, "padded generate has no block pool")


def test_columns_and_ratios_of_each_engine() -> None:
    lines = format_table([OURS, THEIRS, STATIC], ["cb_engine", "transformers", "static"]).splitlines()
    header = "label samples avg_in max_new time(s) tokens tok/s mem(GB) engine x cb_engine x transformers x static"
    assert " ".join(lines[0].split()) == header
    assert " ".join(lines[2].split()) == "few_blocks 20 256.0 256 10.00 5120 512.0 0.50 cb_engine 1.00 4.00 -"
    assert lines[3].split()[-4:] == ["transformers", "0.25", "1.00", "-"]
    assert lines[4].split()[4:9] == ["-", "-", "-", "-", "static"]
    assert lines[4].endswith("padded generate has no block pool")


def test_one_engine_alone_has_no_ratio() -> None:
    header, _, row = format_table([OURS], ["cb_engine"]).splitlines()
    assert header.split()[-1] == "engine"
    assert row.split()[-1] == "cb_engine"


def test_result_file_and_comparison(tmp_path: Path) -> None:
    path = tmp_path / "results" / "before.json"
    write_json(path, [OURS, STATIC], {"cpu": "some"})
    written = json.loads(path.read_text())
    assert written["rows"] == [
        {
            "label": "few_blocks",
            "engine": "cb_engine",
            "samples": 20,
            "avg_in": 256.0,
            "max_new": 256,
            "time_s": 10.0,
            "tokens": 5120,
            "tok_per_s": 512.0,
            "mem_gb": 0.5,
        }
    ]
    assert written["skipped"][0]["reason"] == STATIC.reason
    assert written["machine"] == {"cpu": "some"}
    faster = Row("few_blocks", "cb_engine", 20, 256.0, 256, 5.0, 5120, 1024.0, 0.5)
    lines = format_table([faster, THEIRS], ["cb_engine", "transformers"], Reference(path)).splitlines()
    assert lines[0].endswith("x before")
    assert lines[2].split()[-1] == "2.00"
    assert lines[3].split()[-1] == "-"


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{"label": "a"}]}', '{"rows": 1}'])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no result file of this script"):
        Reference(path)
