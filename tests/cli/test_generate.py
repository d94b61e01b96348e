"""`cb-engine generate` on a tiny model: what goes in, what comes out, cuts and errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import byte_tokenizer
import pytest
import torch
from cli_rig import Command, Done, TinyModel

from cb_engine.cli import generate as module
from cb_engine.errors import UnsupportedModelError

Lines = Callable[..., Path]


@pytest.fixture
def generate(command: Command, tiny_model: TinyModel) -> Command:
    """Runs `cb-engine generate` on the tiny model, greedily, for four tokens unless told otherwise."""

    def run(*arguments: object, stdin: str | bytes = "") -> Done:
        fixed = ["--temperature", 0, "--device", "cpu"]
        length = [] if "--max-tokens" in arguments else ["--max-tokens", 4]
        return command("generate", tiny_model.folder, *arguments, *fixed, *length, stdin=stdin)

    return run


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_of_text_is_continued(generate: Command, tiny_model: TinyModel, write_lines: Lines) -> None:
    done = generate(write_lines("p.txt", "hello", "", "some more"))
    assert (done.code, done.stderr) == (0, "")
    first, second = sorted(done.answers, key=lambda answer: answer["index"])
    assert first == {
        "id": 0,
        "index": 0,
        "text": tiny_model.text_of("hello", 4),
        "finish_reason": "length",
        "stop_reason": "max_tokens",
        "usage": {"prompt_tokens": 5, "completion_tokens": 4, "cached_tokens": 0},
    }
    assert second["index"] == 2
    assert second["text"] == tiny_model.text_of("some more", 4)


def test_every_kind_of_json_line(generate: Command, tiny_model: TinyModel, write_lines: Lines) -> None:
    path = write_lines(
        "p.jsonl",
        {"prompt": "hello", "id": "a"},
        {"prompt": byte_tokenizer.ids_of("hello")},
        {"question": "hello", "answer": "?"},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt": "hello", "sampling_params": {"max_tokens": 2}},
    )
    answers = {answer["index"]: answer for answer in generate(path, "--return-token-ids").answers}
    plain = tiny_model.ids_of(byte_tokenizer.ids_of("hello"), 4)
    assert [answers[i]["token_ids"] for i in range(3)] == [plain] * 3
    assert answers[0]["id"] == "a"
    assert answers[3]["token_ids"] == tiny_model.ids_of(byte_tokenizer.ids_of("<user>hello<assistant>"), 4)
    assert answers[4]["token_ids"] == plain[:2]


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        (["--no-chat"], "hi"),
        (["--chat"], "<user>hi<assistant>"),
        (["--system", "be"], "<system>be<user>hi<assistant>"),
    ],
    ids=["plain", "chat", "system"],
)
def test_text_goes_through_the_template_if_asked(
    options: list[str], prompt: str, generate: Command, tiny_model: TinyModel
) -> None:
    [answer] = generate(*options, stdin="hi\n").answers
    assert answer["text"] == tiny_model.text_of(prompt, 4)


def test_a_chats_own_system_message_stays(generate: Command, tiny_model: TinyModel) -> None:
    line = json.dumps({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]})
    [answer] = generate("--system", "be", stdin=line).answers
    assert answer["text"] == tiny_model.text_of("<system>x<user>hi<assistant>", 4)


@pytest.mark.parametrize("dash", [[], ["-"]], ids=["left-out", "dash"])
def test_stdin(dash: list[str], generate: Command, tiny_model: TinyModel) -> None:
    [answer] = generate(*dash, stdin='{"prompt": "hello"}\n').answers
    assert answer["text"] == tiny_model.text_of("hello", 4)


def test_log_probabilities(generate: Command, tiny_model: TinyModel) -> None:
    [answer] = generate("--logprobs", 2, "--prompt-logprobs", 0, stdin="hello\n").answers
    prompt = byte_tokenizer.ids_of("hello")
    ids = tiny_model.ids_of(prompt, 4)
    with torch.no_grad():
        logprobs = tiny_model.model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    for position, (token_id, told) in enumerate(zip(ids, answer["logprobs"], strict=True), start=len(prompt) - 1):
        best = logprobs[position].topk(2)
        assert told["token_id"] == token_id
        assert told["token"] == byte_tokenizer.make_tokenizer().decode([token_id])
        assert told["logprob"] == pytest.approx(float(logprobs[position, token_id]), abs=1e-4)
        assert [entry["token_id"] for entry in told["top_logprobs"]] == best.indices.tolist()
        assert [entry["logprob"] for entry in told["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert answer["prompt_logprobs"][0] is None
    for position, (token_id, told) in enumerate(zip(prompt[1:], answer["prompt_logprobs"][1:], strict=True)):
        assert told["token_id"] == token_id
        assert told["logprob"] == pytest.approx(float(logprobs[position, token_id]), abs=1e-4)
        assert "top_logprobs" not in told


def test_several_answers_to_a_prompt(generate: Command, tiny_model: TinyModel) -> None:
    [answer] = generate("-n", 2, stdin="hello\n").answers
    assert [choice["text"] for choice in answer["choices"]] == [tiny_model.text_of("hello", 4)] * 2
    assert answer["usage"]["completion_tokens"] == 8


def test_a_stop_string_ends_an_answer(generate: Command, tiny_model: TinyModel) -> None:
    text = tiny_model.text_of("hello", 4)
    [answer] = generate("--stop", text[1], stdin="hello\n").answers
    assert answer["text"] == text[:1]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", text[1])


def test_a_seed_reproduces_a_run_whatever_is_in_it(command: Command, tiny_model: TinyModel) -> None:
    def texts(stdin: str, seed: int) -> dict[int, str]:
        options = ["-t", 2, "--max-tokens", 8, "--seed", seed]
        answers = command("generate", tiny_model.folder, *options, stdin=stdin).answers
        return {answer["index"]: answer["text"] for answer in answers}

    both = texts("hello\nhello\n", 1)
    assert both[0] != both[1]
    assert texts("\nhello\nother\n", 1)[1] == both[1]
    assert texts("hello\n", 2)[0] != both[0]


# ---- bad lines -------------------------------------------------------------------------------------------------------


def test_a_bad_line_has_its_error_and_the_exit_code_says_so(generate: Command, write_lines: Lines) -> None:
    path = write_lines("p.jsonl", {"prompt": "a"}, "{", {"prompt": "b", "id": "x", "sampling_params": {"top_p": 9}})
    done = generate(path, "--ordered")
    assert done.code == 1
    good, broken, wrong = done.answers
    assert good["finish_reason"] == "length"
    assert broken["error"].startswith("the line is not JSON")
    assert wrong == {
        "id": "x",
        "index": 2,
        "error": "top_p must be above 0 and at most 1, got 9.0; use 1 to turn it off",
    }
    assert done.error.startswith("cb-engine: 2 of 3 prompts failed; the first, line 2: the line is not JSON")


def test_strict_runs_nothing_where_a_line_is_bad(
    generate: Command, write_lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_attached", lambda *_, **__: pytest.fail("the model was loaded"))
    done = generate(write_lines("p.jsonl", {"prompt": "a"}, "{"), "--strict", "-o", tmp_path / "out")
    assert (done.code, done.stdout) == (1, "")
    assert done.error.startswith("cb-engine: line 2: the line is not JSON")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("through", ["file", "stdin"])
def test_strict_finds_what_only_the_model_can_tell(
    through: str, generate: Command, write_lines: Lines, tmp_path: Path
) -> None:
    path = write_lines("p.jsonl", {"prompt": "a"}, {"prompt": [9999]})
    where: dict[str, Any] = {"stdin": path.read_bytes()} if through == "stdin" else {}
    done = generate(*([] if where else [path]), "--strict", "-o", tmp_path / "out", **where)
    assert done.code == 1
    assert done.error == (
        "cb-engine: line 2: token id 9999 is outside the vocabulary of 259; nothing was run (--strict)"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("through", ["file", "stdin"])
def test_strict_runs_good_lines(through: str, generate: Command, write_lines: Lines, tiny_model: TinyModel) -> None:
    path = write_lines("p.jsonl", {"prompt": "hello"})
    done = generate("--strict", stdin=path.read_bytes()) if through == "stdin" else generate(path, "--strict")
    assert done.code == 0
    assert [answer["text"] for answer in done.answers] == [tiny_model.text_of("hello", 4)]


# ---- order, files, going on ------------------------------------------------------------------------------------------


def uneven(write_lines: Lines) -> Path:
    """The first answer is the last to come."""
    lengths = (40, 1, 2, 1)
    return write_lines("p.jsonl", *({"prompt": f"p{n}", "sampling_params": {"max_tokens": n}} for n in lengths))


def test_answers_come_as_they_are_done_or_in_order(generate: Command, write_lines: Lines) -> None:
    path = uneven(write_lines)
    assert generate(path).answers[-1]["index"] == 0
    assert [answer["index"] for answer in generate(path, "--ordered").answers] == [0, 1, 2, 3]


def test_a_file_is_continued(generate: Command, write_lines: Lines, tmp_path: Path, tiny_model: TinyModel) -> None:
    out = tmp_path / "out.jsonl"
    path = write_lines("p.jsonl", {"prompt": "one"}, {"prompt": ""}, {"prompt": "three"})
    assert generate(path, "-o", out).code == 1
    kept = next(line for line in out.read_text().splitlines() if '"index": 0' in line)
    out.write_text(kept.replace('"finish_reason"', '"mark": 1, "finish_reason"') + '\n{"id": 2, "index": 2, "te')

    write_lines("p.jsonl", {"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}, {"prompt": "four"})
    done = generate(path, "-o", out)
    assert (done.code, done.stdout, done.stderr) == (0, "", "")
    answers = read(out)
    assert answers[0]["mark"] == 1  # as it was
    assert sorted(answer["index"] for answer in answers) == [0, 1, 2, 3]
    texts = {answer["index"]: answer["text"] for answer in answers[1:]}
    assert texts == {i: tiny_model.text_of(word, 4) for i, word in ((1, "two"), (2, "three"), (3, "four"))}


def test_a_complete_file_needs_no_model(
    generate: Command, write_lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = write_lines("p.txt", "one", "two"), tmp_path / "out"
    generate(path, "-o", out)
    before = out.read_bytes()
    monkeypatch.setattr(module, "load_attached", lambda *_, **__: pytest.fail("the model was loaded"))
    done = generate(path, "-o", out)
    assert (done.code, done.error) == (0, "cb-engine: all 2 prompts have their answers")
    assert out.read_bytes() == before


def test_an_ordered_run_that_goes_on_ends_in_order(generate: Command, write_lines: Lines, tmp_path: Path) -> None:
    path, out = uneven(write_lines), tmp_path / "out"
    generate(path, "-o", out)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(line for line in lines if '"index": 1' not in line))
    assert generate(path, "-o", out, "--ordered").code == 0
    assert [answer["index"] for answer in read(out)] == [0, 1, 2, 3]


def test_other_settings_need_overwrite(generate: Command, write_lines: Lines, tmp_path: Path) -> None:
    path, out = write_lines("p.txt", "one"), tmp_path / "out"
    generate(path, "-o", out)
    before = out.read_bytes()
    done = generate(path, "-o", out, "--max-tokens", 2)
    assert done.code == 2
    assert "written with other settings (sampling was" in done.error
    assert "--overwrite" in done.error
    assert out.read_bytes() == before
    assert generate(path, "-o", out, "--max-tokens", 2, "--overwrite").code == 0
    assert [answer["usage"]["completion_tokens"] for answer in read(out)] == [2]


def test_an_input_whose_ids_have_moved_is_refused(generate: Command, write_lines: Lines, tmp_path: Path) -> None:
    out = tmp_path / "out"
    generate(write_lines("p.jsonl", {"prompt": "one", "id": "a"}), "-o", out)
    before = out.read_bytes()
    moved = write_lines("p.jsonl", {"prompt": "zero", "id": "b"}, {"prompt": "one", "id": "a"})
    done = generate(moved, "-o", out)
    assert done.code == 2
    assert done.error.startswith("cb-engine: line 1 has the id 'b', and its answer 'a': the input has changed")
    assert out.read_bytes() == before


@pytest.mark.slow
def test_ctrl_c_on_an_open_pipe_and_going_on(generate: Command, tiny_model: TinyModel, tmp_path: Path) -> None:
    """In a process of its own, whose input stays open: nothing but the signal can end it."""
    out = tmp_path / "out"
    options = ["-o", str(out), "--max-tokens", "4", "--temperature", "0", "--device", "cpu"]
    arguments = [sys.executable, "-m", "cb_engine", "generate", str(tiny_model.folder), *options]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"one\ntwo\n")
        process.stdin.flush()
        deadline = time.monotonic() + 90
        while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") == 2):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        assert process.stdout is not None
        assert process.stderr is not None
        stdout, stderr = process.stdout.read(), process.stderr.read().decode()
    assert (process.returncode, stdout) == (130, b"")
    assert stderr.splitlines() == [
        f"cb-engine: interrupted after 2 answers; run the same command again to go on (answers are in {out})"
    ]
    before = out.read_bytes()
    assert generate("-o", out, stdin="one\ntwo\nthree\n").code == 0
    assert out.read_bytes().startswith(before)
    assert [answer["index"] for answer in read(out)[2:]] == [2]


# ---- wrong use -------------------------------------------------------------------------------------------------------


def test_a_terminal_is_not_waited_for(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cb_engine.cli.generate._sits_at_stdin", lambda: True)
    assert command("generate", "demo").error.startswith("cb-engine generate: INPUT is missing: give a file of prompts")


def test_wrong_paths(generate: Command, write_lines: Lines, tmp_path: Path) -> None:
    path = write_lines("p.txt", "one")
    cases = {
        ("nowhere",): "INPUT must be a file of prompts, and nowhere is missing",
        (tmp_path,): f"INPUT must be a file of prompts, and {tmp_path} is none",
        (path, "-o", tmp_path): f"--output must be a file in a folder that exists, got {tmp_path}",
        (path, "-o", tmp_path / "no" / "out"): "--output must be a file in a folder that exists",
        (path, "-o", path): "--output must not be the input",
        (path, "--overwrite"): "--overwrite is for --output FILE",
        (path, "--system", "x", "--no-chat"): "--system needs the chat template",
    }
    for arguments, message in cases.items():
        done = generate(*arguments)
        assert done.code == 2
        assert done.error.startswith(f"cb-engine generate: {message}")


def test_settings_that_do_not_suit_the_model(generate: Command) -> None:
    done = generate("--max-model-len", 100_000, stdin="a\n")
    assert done.code == 2
    assert done.error.startswith("cb-engine generate: --max-model-len=100000 exceeds 512")


def test_a_model_that_cannot_be_loaded(command: Command, tmp_path: Path) -> None:
    done = command("generate", tmp_path, stdin="a\n")
    assert done.code == 2
    assert done.error.startswith(f"cb-engine: cannot load model '{tmp_path}': ")


def test_a_model_that_the_engine_cannot_run(command: Command, tiny_model: TinyModel, monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedModelError("layer 0 is recurrent")

    monkeypatch.setattr("cb_engine.api.attach.attach", refuse)
    done = command("generate", tiny_model.folder, stdin="a\n")
    assert done.code == 2
    assert done.error == f"cb-engine: the engine cannot run model '{tiny_model.folder}': layer 0 is recurrent"


def test_a_models_own_sampling_is_followed_or_left_out(command: Command, tiny_model: TinyModel, tmp_path: Path) -> None:
    for file in tiny_model.folder.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    config = tmp_path / "generation_config.json"
    config.write_text('{"max_new_tokens": 3}')  # and no do_sample: greedy
    [answer] = command("generate", tmp_path, "--device", "cpu", stdin="hello\n").answers
    assert answer["text"] == tiny_model.text_of("hello", 3)
    config.write_text('{"guidance_scale": 2.0}')
    done = command("generate", tmp_path, stdin="hello\n")
    assert done.code == 2
    assert done.error == (
        "cb-engine generate: the model's generation_config: guidance_scale=2.0 is not supported by cb_engine; unset "
        "it, or give sampling_params instead, or --no-generation-config"
    )
    options = ["--no-generation-config", "-t", 0, "--max-tokens", 2, "--device", "cpu"]
    [answer] = command("generate", tmp_path, *options, stdin="hello\n").answers
    assert answer["text"] == tiny_model.text_of("hello", 2)


def test_an_answer_that_cannot_be_written_is_one_line(
    generate: Command, write_lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("cb_engine.cli.answers.AnswerWriter._put", full)
    done = generate(write_lines("p.txt", "one"), "-o", tmp_path / "out")
    assert done.code == 1
    assert done.error == "cb-engine: the answers cannot be written: [Errno 28] No space left on device"


def test_progress_is_shown_on_request(generate: Command) -> None:
    done = generate("--progress", stdin="one\n")
    assert len(done.answers) == 1
    assert "1prompt" in done.stderr.replace(" ", "")
    assert "tok/s" in done.stderr
