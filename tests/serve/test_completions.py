"""/v1/completions through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import byte_tokenizer
import openai
import pytest
from server_rig import NAME, ServerRig, says, serving

GREEDY: dict[str, Any] = {"model": NAME, "prompt": "Once", "temperature": 0, "max_tokens": 10}


@pytest.fixture(scope="module")
def rig() -> Iterator[ServerRig]:
    with serving() as made:
        yield made


def complete(rig: ServerRig, **fields: Any) -> Any:
    return rig.client().completions.create(**{**GREEDY, **fields})


def test_a_prompt_is_text_or_ids_or_several_of_either(rig: ServerRig):
    ids = byte_tokenizer.ids_of("Once")
    other = byte_tokenizer.ids_of("Twice")
    text = complete(rig).choices[0].text
    assert complete(rig, prompt=ids).choices[0].text == text
    several = complete(rig, prompt=["Once", "Twice"])
    assert [c.index for c in several.choices] == [0, 1]
    assert several.choices[0].text == text
    assert several.usage.prompt_tokens == 9
    assert [c.text for c in complete(rig, prompt=[ids, other]).choices] == [c.text for c in several.choices]


def test_samples_stand_by_their_prompt(rig: ServerRig):
    fields = {"prompt": ["Once", "Twice"], "n": 2, "temperature": 1.5, "seed": 3}
    together = complete(rig, **fields)
    assert [c.index for c in together.choices] == [0, 1, 2, 3]
    alone = [complete(rig, **{**fields, "prompt": p}).choices for p in ("Once", "Twice")]
    assert [c.text for c in together.choices] == [c.text for group in alone for c in group]
    assert together.usage.prompt_tokens == 9, "a prompt counts once, however many samples it has"
    assert together.usage.completion_tokens == 40


def test_a_stream_says_what_the_whole_answer_says(rig: ServerRig):
    whole = complete(rig, prompt=["Once", "Twice"], logprobs=2, echo=True)
    texts: list[str] = ["", ""]
    tokens: list[list[str]] = [[], []]
    offsets: list[list[int]] = [[], []]
    ends: list[Any] = [None, None]
    for chunk in complete(rig, prompt=["Once", "Twice"], logprobs=2, echo=True, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens
        offsets[choice.index] += choice.logprobs.text_offset
        ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [c.text for c in whole.choices]
    assert tokens == [c.logprobs.tokens for c in whole.choices]
    assert offsets == [c.logprobs.text_offset for c in whole.choices]
    assert ends == ["length", "length"]


def test_a_prompt_can_be_scored(rig: ServerRig):
    """What evaluation harnesses do: echo, log-probabilities, nothing generated."""
    scored = complete(rig, max_tokens=0, echo=True, logprobs=1)
    (choice,) = scored.choices
    assert choice.text == "Once"
    assert choice.logprobs.tokens == ["O", "n", "c", "e"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert choice.finish_reason == "length"
    one_more = complete(rig, max_tokens=1, echo=True, logprobs=1).choices[0].logprobs
    assert one_more.token_logprobs[:4] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    assert len(one_more.tokens) == 5
    assert one_more.token_logprobs[4] == max(one_more.top_logprobs[4].values())


def test_openais_default_length_is_kept(rig: ServerRig):
    assert complete(rig, max_tokens=openai.omit).usage.completion_tokens == 16


def test_what_cannot_be_done_is_refused(rig: ServerRig):
    for fields, message in [
        ({"suffix": "the end"}, "suffix is not supported"),
        ({"best_of": 3}, "best_of must be n"),
        ({"prompt": []}, "the list is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": [10**6]}, "outside the vocabulary"),
        ({"max_tokens": 0}, "asks for nothing"),
        ({"logprobs": 21}, "limit of 20"),
    ]:
        with pytest.raises(openai.BadRequestError, match=message):
            complete(rig, **fields)


def test_candidates_that_are_no_characters_do_not_hide_each_other(rig: ServerRig):
    choice = complete(rig, logprobs=5, max_tokens=20).choices[0]
    assert {len(top) for top in choice.logprobs.top_logprobs} <= {5, 6}
    keys = [key for top in choice.logprobs.top_logprobs for key in top]
    assert any(key.startswith("bytes:\\x") for key in keys)
    assert "\ufffd" not in keys


def test_log_probabilities_of_a_known_answer():
    with serving(says("ab", "p")) as rig:
        choice = complete(rig, prompt="p", logprobs=0).choices[0]
        assert choice.text == "ab"
        assert choice.logprobs.tokens == ["a", "b", "</s>"]
        assert choice.logprobs.top_logprobs is None
        assert choice.finish_reason == "stop"
