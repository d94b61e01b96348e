"""What the benchmark runs: the labels, their prompts and their settings. Knows no engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEFAULT_DATASET = "openai/gsm8k"
ROLLOUT_LENGTHS = (1024, 2048, 4096, 8192, 16384)
GSM8K_LABELS = ("gsm8k_default", "gsm8k_sampling", "gsm8k_compile", "gsm8k_no_fast_decode")
ALL_LABELS = (
    *GSM8K_LABELS,
    *(f"rollouts_{length}" for length in ROLLOUT_LENGTHS),
    "few_blocks",
    "multi_return_seq",
)

_RANDOM_PROMPT_TOKENS = 256
_RANDOM_VOCAB = 16000


@dataclass(frozen=True)
class Workload:
    """One row's work. EOS is off everywhere: each sample gets exactly `max_new` tokens.

    Attributes:
        temperature, top_p: 0 and 1 mean greedy.
        n: samples of each prompt.
        compile: run under `torch.compile` where the engine can; None: where it is the engine's faster way.
        fast_decode: False sends decode steps through the engine's general path.
        pool_tokens: tokens the KV pool holds; None lets the engine size it.
    """

    label: str
    prompts: list[list[int]]
    max_new: int
    temperature: float = 0.0
    top_p: float = 1.0
    n: int = 1
    compile: bool | None = False
    fast_decode: bool = True
    pool_tokens: int | None = None

    @property
    def avg_in(self) -> float:
        """Mean prompt length in tokens."""
        return sum(map(len, self.prompts)) / len(self.prompts)

    @property
    def expected_tokens(self) -> int:
        """Tokens that all samples generate together."""
        return len(self.prompts) * self.n * self.max_new


def choose_labels(labels: Sequence[str] | None, rollouts_lengths: Sequence[int] | None) -> list[str]:
    """The labels to run: all; those named; only the rollouts, if only their lengths are given; or both."""
    rollouts = [f"rollouts_{length}" for length in rollouts_lengths or ()]
    if not labels:
        return rollouts or list(ALL_LABELS)
    for label in labels:
        if label not in ALL_LABELS and not re.fullmatch(r"rollouts_[1-9]\d*", label):
            raise ValueError(f"unknown label {label!r}; known ones: {', '.join(ALL_LABELS)}")
    return list(dict.fromkeys([*labels, *rollouts]))


def build_workload(
    label: str,
    questions: list[list[int]],
    vocab_size: int,
    *,
    samples: int | None = None,
    max_new: int | None = None,
    seed: int = 0,
) -> Workload:
    """Builds the work of one label.

    Args:
        label: one that `choose_labels` has let through.
        questions: token ids of the GSM8K prompts; only the gsm8k labels need them.
        vocab_size: bounds the ids of random prompts.
        samples: at most so many prompts.
        max_new: new tokens per sample instead of the label's own.
        seed: of the random prompts.
    """
    if label in GSM8K_LABELS:
        settings = {
            "gsm8k_default": {},
            "gsm8k_sampling": {"temperature": 0.6, "top_p": 0.9},
            "gsm8k_compile": {"compile": True},
            "gsm8k_no_fast_decode": {"fast_decode": False},
        }[label]
        return Workload(label, questions[:samples], max_new or 256, **settings)  # type: ignore[arg-type]

    def random(count: int) -> list[list[int]]:
        return random_prompts(min(count, samples or count), vocab_size, seed)

    if label == "few_blocks":
        return Workload(label, random(20), max_new or 256, pool_tokens=16 * 256)
    if label == "multi_return_seq":
        return Workload(label, random(50), max_new or 256, temperature=1.0, n=8)
    length = int(label.removeprefix("rollouts_"))
    return Workload(label, random(32), max_new or length, compile=None)


def random_prompts(count: int, vocab_size: int, seed: int, length: int = _RANDOM_PROMPT_TOKENS) -> list[list[int]]:
    """Prompts of `length` random token ids; the first ones do not depend on `count`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, length)
    ids: list[list[int]] = torch.randint(min(_RANDOM_VOCAB, vocab_size), shape, generator=generator).tolist()
    return ids


def load_questions(dataset: str) -> list[str]:
    """The questions of a local jsonl file, or of a hub dataset's test split.

    Raises:
        ValueError: a line of the file, or the dataset, has no `question`.
        OSError: neither a file nor in reach.
    """
    path = Path(dataset).expanduser()
    if path.is_file():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        records = [json.loads(line) for line in lines]
    else:
        records = _load_from_hub(dataset)
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not isinstance(record.get("question"), str):
            raise ValueError(f"{dataset}: record {number} has no string field 'question'")
    if not records:
        raise ValueError(f"{dataset} holds no questions")
    return [record["question"] for record in records]


def _is_path(dataset: str) -> bool:
    """Whether a name can be no hub id, which is `name` or `owner/name`: the hub's client would try for a minute."""
    return dataset.endswith((".jsonl", ".json")) or dataset.startswith((".", "~", "/")) or dataset.count("/") > 1


def _load_from_hub(dataset: str) -> list[dict[str, Any]]:
    fix = 'Give --dataset FILE.jsonl, one {"question": "..."} per line.'
    if _is_path(dataset) and not Path(dataset).expanduser().exists():
        raise OSError(f"{dataset!r} does not exist. {fix}")
    try:
        import datasets
    except ImportError as error:
        raise OSError(f"{dataset!r} is no file, and a hub needs `pip install cb-engine[demo]`. {fix}") from error
    config = "main" if dataset == DEFAULT_DATASET else None
    try:
        return list(datasets.load_dataset(dataset, config, split="test"))
    except Exception as error:  # the hub's client raises a wide zoo of its own
        raise OSError(f"{dataset!r} is no file, and the hub did not deliver it. {fix}") from error


def encode_questions(tokenizer: Any, questions: list[str]) -> list[list[int]]:
    """Token ids: the question alone as a user's turn, or as plain text if the model has no chat template."""
    if tokenizer.chat_template is None:
        return [tokenizer.encode(question) for question in questions]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
