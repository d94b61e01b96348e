"""The benchmark of speculation from its command line to its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import spec_decode


def run(model: Path, questions: Path, *more: str) -> int:
    common = ("--model", str(model), "--dataset", str(questions), "--osl", "24", "--rounds", "2", "--ignore_eos")
    return spec_decode.main([*common, "--batch_size", "2", *more])


@pytest.mark.parametrize(
    ("task", "more"),
    [("ngram", ()), ("suffix", ()), ("draft_model", ("--num_draft_layers", "1")), ("draft_model", ("--draft_model",))],
)
def test_figures_of_a_run(
    task: str,
    more: tuple[str, ...],
    tiny_model: Path,
    questions_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if more == ("--draft_model",):
        more = (*more, str(tiny_model))
    file = tmp_path / "figures.json"
    options = ("--task", task, *more, "--num_prompts", "3", "--always", "--pad", "--coverage", "--json", str(file))
    assert run(tiny_model, questions_file, *options) == 0
    printed = capsys.readouterr().out
    assert f"{task}, gsm8k, float32: 3 prompts, 2 at once, k=2" in printed
    assert "captured" in printed
    figures = json.loads(file.read_text())
    assert figures["output_equal"] is True
    assert figures["shapes_missed"] == 0
    assert figures["shapes_captured"] >= figures["shapes_used"] > 0
    assert 1.0 <= figures["mean_acceptance_length"] <= 3.0
    assert len(figures["acceptance_per_position"]) == 2
    assert figures["tok_per_s"] > 0 < figures["tok_per_s_baseline"]
    if more[:1] == ("--draft_model",):
        assert figures["mean_acceptance_length"] > 2.5, "a model agrees with itself"
        assert figures["num_steps"] < figures["num_steps_baseline"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "eagle3"), "--task eagle3 needs --head DIR"),
        (("--task", "ngram", "--head", "x"), "--head is for --task eagle3"),
        (("--task", "draft_model"), "needs either --draft_model MODEL or --num_draft_layers N"),
        (("--task", "suffix", "--num_draft_layers", "2"), "are for --task draft_model"),
        (("--task", "ngram", "--rounds", "0"), "--rounds must be at least 1"),
        (("--task", "ngram", "--num_prompts", "0"), "--num_prompts must be at least 1"),
        (("--task", "ngram", "--skip", "-1"), "--skip must be 0 or more"),
        (("--task", "guess"), "invalid choice: 'guess'"),
    ],
)
def test_options_that_do_not_go_together(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        spec_decode.main(list(options))
    assert message in capsys.readouterr().err


def test_too_few_prompts_are_an_error_without_a_trace(
    tiny_model: Path, questions_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny_model, questions_file, "--task", "ngram", "--num_prompts", "9") == 2
    assert "9 prompts of 'gsm8k' after the first 0 were asked for" in capsys.readouterr().err


def test_a_head_that_is_none_is_an_error_without_a_trace(
    tiny_model: Path, questions_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny_model, questions_file, "--task", "eagle3", "--head", str(tmp_path)) == 2
    assert (
        f"error: speculative model='{tmp_path}': {tmp_path} holds neither model.safetensors nor"
        in capsys.readouterr().err
    )
