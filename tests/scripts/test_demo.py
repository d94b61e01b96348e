"""The demo script, on a tiny model."""

from __future__ import annotations

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
