"""The benchmark script from its command line to its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench.engines
import continuous_batching_overall as overall
from bench.report import COLUMNS


def run(model: Path, questions: Path, *more: str) -> int:
    return overall.main(["--model", str(model), "--dataset", str(questions), "--max-new", "4", *more])


def test_rows_table_and_result_file(
    tiny_model: Path, questions_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    options = ("--samples", "3", "--labels", "gsm8k_default,few_blocks", "--engines", "cb_engine,static")
    assert run(tiny_model, questions_file, *options, "--json", str(result)) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:9] == list(COLUMNS)
    assert [(line.split()[0], line.split()[8]) for line in table[2:]] == [
        ("gsm8k_default", "cb_engine"),
        ("gsm8k_default", "static"),
        ("few_blocks", "cb_engine"),
        ("few_blocks", "static"),
    ]
    rows = json.loads(result.read_text())["rows"]
    assert [(row["engine"], row["tokens"], row["avg_in"]) for row in rows] == [
        ("cb_engine", 12, 5.0),
        ("static", 12, 5.0),
        ("cb_engine", 12, 256.0),
    ]
    assert run(tiny_model, questions_file, *options, "--compare-to", str(result)) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("x result")


def test_a_failing_engine_fills_its_row_with_the_reason(
    tiny_model: Path, questions_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("out of blocks\nand more")

    monkeypatch.setattr(bench.engines, "run_cb_engine", broken)
    options = ("--samples", "1", "--labels", "gsm8k_default", "--engines", "cb_engine,static")
    assert run(tiny_model, questions_file, *options) == 1
    _, _, ours, static = capsys.readouterr().out.splitlines()
    assert ours.endswith("RuntimeError: out of blocks")
    assert static.split()[5] == "4"


def test_too_long_for_the_model_is_a_row_and_no_failure(
    tiny_model: Path, questions_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--model", str(tiny_model), "--rollouts-lengths", "300", "--samples", "1"]
    assert overall.main(args) == 0
    assert "556 tokens exceed the model's 512 positions" in capsys.readouterr().out


def test_missing_dataset_ends_with_the_fix(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(dataset: str) -> None:
        raise OSError(f"{dataset!r} is no file. Give --dataset FILE.jsonl")

    monkeypatch.setattr(overall, "load_questions", offline)
    assert overall.main(["--model", str(tiny_model), "--labels", "gsm8k_default"]) == 2
    assert "--dataset FILE.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--labels", "nope"], "unknown label 'nope'"),
        (["--engines", "nope"], "unknown engine 'nope'"),
        (["--samples", "0"], "0 must be at least 1"),
        (["--rollouts-lengths", "0"], "0 must be at least 1"),
        (["--compare-to", "no-such-file.json"], "no-such-file.json"),
    ],
)
def test_bad_options_are_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overall.parse_args(options)
    assert message in capsys.readouterr().err
