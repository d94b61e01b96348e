"""Labels and prompts of the benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench import workloads
from bench.workloads import ALL_LABELS, build_workload, choose_labels, encode_questions, load_questions


@pytest.mark.parametrize(
    ("labels", "lengths", "expected"),
    [
        (None, None, list(ALL_LABELS)),
        ([], [1024], ["rollouts_1024"]),
        (["few_blocks"], None, ["few_blocks"]),
        (["few_blocks", "rollouts_7"], [7, 9], ["few_blocks", "rollouts_7", "rollouts_9"]),
    ],
)
def test_choose_labels(labels: list[str] | None, lengths: list[int] | None, expected: list[str]) -> None:
    assert choose_labels(labels, lengths) == expected


@pytest.mark.parametrize("label", ["gsm8k", "rollouts_", "rollouts_0", "rollouts_x"])
def test_an_unknown_label_lists_the_known_ones(label: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown label '{label}'.*gsm8k_default.*multi_return_seq"):
        choose_labels([label], None)


@pytest.mark.parametrize(
    ("label", "prompts", "max_new", "expected_tokens"),
    [
        ("gsm8k_default", 3, 256, 3 * 256),
        ("rollouts_1024", 32, 1024, 32 * 1024),
        ("rollouts_16384", 32, 16384, 32 * 16384),
        ("few_blocks", 20, 256, 20 * 256),
        ("multi_return_seq", 50, 256, 50 * 8 * 256),
    ],
)
def test_sizes(label: str, prompts: int, max_new: int, expected_tokens: int) -> None:
    work = build_workload(label, [[1, 2], [3], [4, 5, 6]], 49152)
    assert (len(work.prompts), work.max_new, work.expected_tokens) == (prompts, max_new, expected_tokens)
    assert work.avg_in == (2 if label == "gsm8k_default" else 256)


def test_what_each_label_changes() -> None:
    def differs(label: str) -> dict[str, object]:
        work, plain = (build_workload(name, [[1]], 100) for name in (label, "gsm8k_default"))
        names = ("temperature", "top_p", "n", "compile", "fast_decode", "pool_tokens")
        return {n: getattr(work, n) for n in names if getattr(work, n) != getattr(plain, n)}

    assert differs("gsm8k_sampling") == {"temperature": 0.6, "top_p": 0.9}
    assert differs("gsm8k_compile") == {"compile": True}
    assert differs("gsm8k_no_fast_decode") == {"fast_decode": False}
    assert differs("rollouts_1024") == {"compile": None}
    assert differs("few_blocks") == {"pool_tokens": 4096}
    assert differs("multi_return_seq") == {"temperature": 1.0, "n": 8}


def test_samples_and_max_new_cut_every_label() -> None:
    for label in ALL_LABELS:
        work = build_workload(label, [[1]] * 9, 100, samples=4, max_new=5)
        assert (len(work.prompts), work.max_new) == (4, 5)


def test_random_prompts_depend_on_the_seed_alone() -> None:
    few = workloads.random_prompts(2, 49152, seed=0)
    assert workloads.random_prompts(20, 49152, seed=0)[:2] == few
    assert workloads.random_prompts(2, 49152, seed=1) != few
    assert all(len(prompt) == 256 and max(prompt) < 16000 for prompt in few)
    assert max(map(max, workloads.random_prompts(2, 64, seed=0))) < 64


def test_questions_from_a_file_become_chat_turns(tiny_model: Path, questions_file: Path) -> None:
    questions = load_questions(str(questions_file))
    assert questions[1] == "w0 w1"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    encoded = encode_questions(tokenizer, questions)
    assert tokenizer.decode(encoded[1]) == "user w0 w1 <end> assistant"
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_questions(tokenizer, questions)[1]) == "w0 w1"


def test_a_record_without_a_question_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"question": "a"}) + "\n" + json.dumps({"prompt": "b"}) + "\n")
    with pytest.raises(ValueError, match="record 2 has no string field 'question'"):
        load_questions(str(path))
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no questions"):
        load_questions(str(path))


@pytest.mark.parametrize("name", ["nope.jsonl", "nope.json", "data/nope.jsonl", "./nope", "~/nope", "/a/b", "a/b/c"])
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OSError, match=rf"'{name}' does not exist\. Give --dataset FILE\.jsonl"):
        load_questions(name)


def test_an_unreachable_hub_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    class Offline:
        @staticmethod
        def load_dataset(*args: object, **kwargs: object) -> None:
            raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", Offline)
    with pytest.raises(OSError, match=r"'openai/gsm8k' is no file.*--dataset FILE\.jsonl"):
        load_questions("openai/gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OSError, match=r"pip install cb-engine\[demo\].*--dataset FILE\.jsonl"):
        load_questions("openai/gsm8k")
