"""Prompts on which speculation is measured: one task that repeats its prompt, one that does not. Knows no engine.

`copy` is the editing of a given text: three GSM8K questions in which letters of some words have changed places are to
be corrected. `gsm8k` is the questions themselves, to be answered.
"""

from __future__ import annotations

import random
from typing import Any

from bench.workloads import encode_questions, load_questions

WORKLOADS = ("gsm8k", "copy")

_EDIT = "Correct the spelling mistakes in this text and keep everything else as it is:\n\n"
_QUESTIONS_PER_TEXT = 3
_WORDS_PER_MISTAKE = 12
_SHORTEST_MISSPELT = 5  # letters


def make_prompts(workload: str, tokenizer: Any, dataset: str, count: int, *, skip: int = 0) -> list[list[int]]:
    """Token ids of `count` prompts, as a user's turn where the model has a chat template.

    Args:
        workload: one of `WORKLOADS`.
        dataset: see `load_questions`.
        skip: prompts to pass over; those behind them are what they are without it.

    Raises:
        ValueError: the dataset has too few questions.
        OSError: it is out of reach.
    """
    questions = load_questions(dataset)
    texts = questions if workload == "gsm8k" else texts_to_edit(questions)
    if len(texts) < skip + count:
        raise ValueError(
            f"{count} prompts of {workload!r} after the first {skip} were asked for, and {dataset} makes {len(texts)}; "
            f"ask for fewer"
        )
    return encode_questions(tokenizer, texts[skip : skip + count])


def texts_to_edit(questions: list[str]) -> list[str]:
    """Texts of a few questions each, with mistakes, and what is to be done with them."""
    size = _QUESTIONS_PER_TEXT
    starts = range(0, len(questions) - size + 1, size)
    return [_EDIT + misspell(" ".join(questions[i : i + size]), seed=i) for i in starts]


def misspell(text: str, seed: int) -> str:
    """The text with two inner letters swapped in about one of `_WORDS_PER_MISTAKE` words; nothing else changes."""
    chance, words = random.Random(seed), text.split(" ")
    for index, word in enumerate(words):
        if len(word) < _SHORTEST_MISSPELT or not word.isalpha() or chance.random() >= 1 / _WORDS_PER_MISTAKE:
            continue
        at = chance.randrange(1, len(word) - 2)
        words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)
