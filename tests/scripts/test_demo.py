"""The demo script, on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import demo


def test_there_are_enough_questions_and_none_twice() -> None:
    assert len(demo.QUESTIONS) == len(set(demo.QUESTIONS)) >= 16


@pytest.mark.parametrize("stream", [False, True], ids=["listed", "streamed"])
def test_every_prompt_gets_an_answer(tiny_model: Path, capsys: pytest.CaptureFixture[str], stream: bool) -> None:
    args = ["--model", str(tiny_model), "--prompt", "w1 w2", "--prompt", "w3", "--max-new-tokens", "5"]
    assert demo.main([*args, "--stream"] if stream else args) == 0
    printed = capsys.readouterr().out
    first, second = re.findall(r"^\[\d\] (.*)\n    (.+)$", printed, re.MULTILINE)
    assert (first[0], second[0]) == ("w1 w2", "w3")
    assert re.fullmatch(r"(\S+ ?)+( \[\.\.\.\])?", first[1].strip())
    assert re.search(r"2 requests, 9 prompt tokens, \d+ new tokens in [\d.]+ s: [\d.]+ tok/s", printed)
    assert "0 preemptions" in printed


def test_streaming_prints_what_listing_prints(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answers(*more: str) -> list[str]:
        demo.main(["--model", str(tiny_model), "--prompt", "w1 w2 w3", "--max-new-tokens", "8", *more])
        return [a.split(" [...]")[0].strip() for a in re.findall(r"^    (.+)$", capsys.readouterr().out, re.MULTILINE)]

    assert answers() == answers("--stream")


def test_speculation_changes_no_answer_and_is_summed_up(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", str(tiny_model), "--prompt", "w1 w2 w3 w1 w2 w3", "--max-new-tokens", "24"]
    # A model that drafts for itself is always right.
    speculative = json.dumps({"method": "draft_model", "model": str(tiny_model), "adaptive": False})

    def answer(*more: str) -> str:
        assert demo.main([*args, *more]) == 0
        return capsys.readouterr().out

    plain, drafted = answer(), answer("--speculative", speculative)
    assert re.findall(r"^    (.+)$", plain, re.MULTILINE) == re.findall(r"^    (.+)$", drafted, re.MULTILINE)
    right, tried = re.findall(r"speculation: (\d+) of (\d+) drafted tokens were right", drafted)[0]
    assert int(right) == int(tried) > 0
    assert "speculation" not in plain


def test_wrong_speculative_settings_are_an_error_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--speculative", "guessing"])
    assert "speculative method='guessing' must be one of" in capsys.readouterr().err
