"""Engines in processes of their own: what they say, what is made of it, and what a failure looks like."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import compare_peers
import pytest
import tiny

from bench import peers
from bench.peers import (
    FIRST_TOKEN,
    NUM_QUESTIONS,
    Case,
    Measured,
    agreement,
    build_cases,
    pythons_of,
    run_rounds,
    to_rows,
)
from bench.report import Row, Skipped, format_peers
from bench.step_profile import _profile

CASES = [
    Case("greedy", [[5, 6, 7], [8, 9]], 6),
    Case("sampled", [[5, 6, 7]], 4, temperature=0.8, n=2, skip=("static",)),
    Case("prefill", [[5] * 40, [6] * 20], 1, counts_prompt=True),
]


def test_two_engines_in_turn(tiny_model: Path) -> None:
    """Two rounds of this engine and padded `generate`, in real processes."""
    said: list[str] = []
    engines = ("cb_engine", "static")
    results = run_rounds(str(tiny_model), CASES, dict.fromkeys(engines, sys.executable), 2, said.append)
    assert [line for line in said if line.startswith("round")] == [
        f"round {number} of 2: {engine}" for number in (1, 2) for engine in engines
    ]
    rows = to_rows(results, CASES, engines)
    measured = {(row.label, row.engine): row for row in rows if isinstance(row, Row)}
    assert set(measured) == {
        *((case.label, "cb_engine") for case in CASES),
        ("greedy", "static"),
        ("prefill", "static"),
        (FIRST_TOKEN, "cb_engine"),
        (FIRST_TOKEN, "static"),
    }
    tokens = {label: measured[label, "cb_engine"].tokens for label in ("greedy", "sampled", "prefill", FIRST_TOKEN)}
    assert tokens == {"greedy": 12, "sampled": 8, "prefill": 60, FIRST_TOKEN: 1}
    assert all(row.mem_gb > 0.1 and row.tok_per_s == row.tokens / row.time_s for row in measured.values())
    assert len(results["greedy", "cb_engine"].seconds) == 2
    (line,) = [x for x in agreement(results, CASES, engines) if x.startswith("greedy")]
    assert "2 of 2 equal to static's, first 6 of 6 tokens" in line
    assert "not the same" not in line


def test_an_engine_that_dies_fails_its_rows_and_says_why(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no such engine here' >&2\nexit 3\n")
    broken.chmod(0o755)
    results = run_rounds(str(tiny_model), CASES[:1], {"vllm": str(broken)}, 1, lambda line: None)
    rows = to_rows(results, CASES[:1], ["vllm"])
    assert [row.label for row in rows if isinstance(row, Skipped) and row.failed] == ["greedy", FIRST_TOKEN]
    assert "greedy, vllm: failed in 1 of 1 rounds: the process ended with 3: no such engine here" in format_peers(
        rows, ["vllm"]
    )


def test_medians_ratios_and_disagreement() -> None:
    case = Case("greedy", [[1, 2]], 3)
    results = {
        ("greedy", "cb_engine"): Measured([3.0, 1.0, 1.5], 0.5, [[7, 8, 9]], repeatable=False),
        ("greedy", "static"): Measured([3.0], 0.5, [[7, 8, 1]]),
        (FIRST_TOKEN, "cb_engine"): Measured([4.0], 0.5),
    }
    rows = to_rows(results, [case], ["cb_engine", "static"])
    assert isinstance(rows[0], Row)
    assert (rows[0].time_s, rows[0].tok_per_s) == (1.5, 2.0)
    table = format_peers(rows, ["cb_engine", "static"]).splitlines()
    assert table[0].split() == ["label", "samples", "avg_in", "max_new", "cb_engine", "static", "x", "static"]
    assert table[2].split() == ["greedy", "1", "2.0", "3", "2.0", "1.0", "2.00"]
    assert table[3].split() == [FIRST_TOKEN, "1", "64.0", "1", "4.0", "s", "-", "-"]
    (line,) = agreement(results, [case], ["cb_engine", "static"])
    assert line.split(maxsplit=2)[2] == (
        "0 of 1 equal to static's, first 2 of 3 tokens on average; not the same in every round"
    )


def test_outputs_are_compared_with_the_first_engine_where_padded_generate_did_not_run() -> None:
    results = {
        ("greedy", "cb_engine"): Measured([1.0], 0.5, [[7, 8, 9], [1]]),
        ("greedy", "vllm"): Measured([1.0], 0.5, [[7, 8, 9], [2]]),
    }
    (line,) = agreement(results, [Case("greedy", [[1, 2], [3]], 3)], ["cb_engine", "static", "vllm"])
    assert "vllm" in line
    assert "1 of 2 equal to cb_engine's" in line


def test_cases_are_those_of_the_comparison() -> None:
    questions = [[i] for i in range(NUM_QUESTIONS)]
    cases = {case.label: case for case in build_cases(questions, 1000, quick=False, seed=0)}
    assert [(len(c.prompts), c.n, c.max_new) for c in cases.values()] == [
        *((32, 1, 64), (64, 1, 128), (64, 1, 128), (32, 1, 512), (32, 1, 1024), (8, 8, 128), (1, 1, 128), (16, 1, 1))
    ]
    used = [prompt for case in cases.values() for prompt in case.prompts if len(prompt) == 1]
    assert used == questions, "no prompt is used twice"
    quick = build_cases(questions, 1000, quick=True, seed=0)
    assert [case.label for case in quick] == list(cases)
    assert max(case.max_new for case in quick) == 16


def test_interpreters() -> None:
    assert pythons_of(["cb_engine", "static"], None) == dict.fromkeys(["cb_engine", "static"], sys.executable)
    with pytest.raises(ValueError, match="unknown engine 'tgi'; known ones: cb_engine, transformers, static, vllm"):
        pythons_of(["tgi"], None)
    with pytest.raises(ValueError, match="needs --vllm-python"):
        pythons_of(["vllm"], None)
    with pytest.raises(ValueError, match="cannot import vllm: ModuleNotFoundError"):
        pythons_of(["vllm"], sys.executable)


@pytest.fixture
def many_questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join('{"question": "w1 w2 w3"}\n' for _ in range(NUM_QUESTIONS)))
    return path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--profile", "--labels", "single_128"], ["ceilings", "single_128", "decode", "prefill"]),
        (["--scaling"], ["at once", "host us", "tok/s; by"]),
    ],
)
def test_profile_and_scaling(
    tiny_model: Path,
    many_questions: Path,
    flags: list[str],
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bench.scaling._CONTEXTS", (32, 64))
    args = ["--model", str(tiny_model), "--dataset", str(many_questions), "--quick", *flags]
    assert compare_peers.main(args) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in expected), printed


def test_products_and_attention_are_seen_inside_an_operator_for_a_whole_layer() -> None:
    model = copy.deepcopy(tiny.family("llama")[0])
    kinds = _profile(model, Case("row", [[5, 6, 7], [8, 9]], 3))
    assert {name: kind.steps for name, kind in kinds.items()} == {"prefill": 1, "decode": 2}
    for kind in kinds.values():
        assert min(kind.parts[name] for name in ("gemm", "attn", "sample", "sched")) > 0


@pytest.mark.parametrize(
    "flags", [["--profile", "--scaling"], ["--profile", "--rounds", "2"], ["--scaling", "--labels", "single_128"]]
)
def test_flags_that_would_be_ignored_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        compare_peers.main(["--quick", *flags])


def test_one_failed_round_fails_the_row() -> None:
    results = {("greedy", "vllm"): Measured([1.0, 1.0], 0.5, [[7]], failures=["MemoryError: no room"])}
    (row, _) = to_rows(results, [Case("greedy", [[1]], 1)], ["vllm"])
    assert isinstance(row, Skipped)
    assert (row.failed, row.reason) == (True, "failed in 1 of 3 rounds: MemoryError: no room")


def test_an_engine_without_a_row_to_run_is_not_started() -> None:
    results = run_rounds("nowhere", [Case("row", [[1]], 1, skip=("vllm",))], {"vllm": "no such file"}, 1, print)
    assert results == {}


def test_the_command_line_names_what_is_wrong(
    tiny_model: Path, many_questions: Path, questions_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--model", str(tiny_model), "--quick"]
    assert compare_peers.main([*base, "--dataset", str(many_questions), "--labels", "other"]) == 2
    assert "unknown label 'other'; known ones: gsm8k_32x64" in capsys.readouterr().err
    assert compare_peers.main([*base, "--dataset", str(questions_file)]) == 2
    assert f"has 5 questions, {NUM_QUESTIONS} are needed" in capsys.readouterr().err
    assert compare_peers.main([*base, "--dataset", str(many_questions), "--engines", "vllm"]) == 2
    assert "--vllm-python" in capsys.readouterr().err


def test_a_worker_speaks_in_marked_lines() -> None:
    """The two sides of the protocol live in files that must not import each other."""
    from bench import peer_worker

    assert peer_worker._MARK == peers._MARK
    assert tuple(peer_worker.PEERS) == peers.ENGINES
