"""The prompts on which speculation is measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench.spec_workloads import make_prompts, misspell, texts_to_edit

TEXT = " ".join(["several", "different", "words", "of", "a", "$1,000", "question,", "repeated"] * 40)


def test_mistakes_swap_letters_of_some_words_and_change_nothing_else() -> None:
    wrong = misspell(TEXT, seed=3)
    pairs = list(zip(TEXT.split(" "), wrong.split(" "), strict=True))
    changed = [(word, other) for word, other in pairs if word != other]
    assert 5 < len(changed) < 40
    for word, other in changed:
        assert word.isalpha()
        assert Counter(word) == Counter(other)
        assert (word[0], word[-1]) == (other[0], other[-1])
    assert misspell(TEXT, seed=3) == wrong
    assert misspell(TEXT, seed=4) != wrong


def test_texts_are_made_of_whole_groups_of_questions() -> None:
    texts = texts_to_edit(["one", "two", "six", "ten", "all", "any", "odd", "end"])
    assert [text.split("\n\n") for text in texts] == [
        ["Correct the spelling mistakes in this text and keep everything else as it is:", "one two six"],
        ["Correct the spelling mistakes in this text and keep everything else as it is:", "ten all any"],
    ]


def test_prompts_do_not_depend_on_how_many_are_asked_for(tiny_model: Path, questions_file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    everything = make_prompts("gsm8k", tokenizer, str(questions_file), 5)
    assert make_prompts("gsm8k", tokenizer, str(questions_file), 2, skip=1) == everything[1:3]
    assert tokenizer.decode(everything[1]) == "user w0 w1 <end> assistant"
    assert len(make_prompts("copy", tokenizer, str(questions_file), 1)) == 1


def test_too_few_questions_are_an_error_with_the_numbers(tiny_model: Path, questions_file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    with pytest.raises(ValueError, match=r"2 prompts of 'copy' after the first 1 .* makes 1; ask for fewer"):
        make_prompts("copy", tokenizer, str(questions_file), 2, skip=1)
