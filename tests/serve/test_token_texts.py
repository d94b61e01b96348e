"""Token ids as clients read them."""

from __future__ import annotations

import json

import byte_tokenizer
import pytest
from transformers import AutoTokenizer

from cb_engine.detokenizer import token_bytes
from cb_engine.models import resolve_model
from cb_engine.outputs import GenerationOutput, TokenLogprob
from cb_engine.serve.parsers import ReasoningFormat
from cb_engine.serve.reasoning_tokens import ReasoningTokens
from cb_engine.serve.token_texts import CompletionLogprobs, TokenTexts, best, chat_logprobs, prompt_logprobs

TEXTS = TokenTexts(byte_tokenizer.make_tokenizer())


def output(text: str, logprob: float = -1.0) -> GenerationOutput:
    ids = byte_tokenizer.ids_of(text)
    return GenerationOutput(
        "r",
        prompt_ids=ids,
        generated_tokens=ids,
        logprobs=[logprob] * len(ids),
        top_logprobs=[[TokenLogprob(i, logprob, 1), TokenLogprob(9, -3.0, 2)] for i in ids],
        prompt_logprobs=[None, *([TokenLogprob(i, logprob, 1)] for i in ids[1:])],
    )


def test_single_tokens_have_bytes_and_texts():
    assert [TEXTS.data(i) for i in byte_tokenizer.ids_of("é")] == [b"\xc3", b"\xa9"]
    assert TEXTS.text(byte_tokenizer.ids_of("é")[0]) == "\ufffd"
    assert TEXTS.text(byte_tokenizer.EOS) == "</s>"
    assert TEXTS.text(5, as_id=True) == "token_id:5"
    assert TEXTS.data(10**6) == b""


def test_the_bytes_of_tokens_come_to_the_bytes_of_the_text():
    pytest.importorskip("gguf")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("demo"))
    text = " Hello, wörld!\n\t日本語 🙂 12 345"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(token_bytes(tokenizer, i) for i in ids) == text.encode()


def test_infinities_are_numbers_in_json():
    table = chat_logprobs(TEXTS, output("ab", float("-inf")), 2, as_ids=False)
    assert json.loads(json.dumps(table, allow_nan=False))["content"][0]["logprob"] == -9999.0
    rows = prompt_logprobs(TEXTS, output("ab", float("-inf")))
    assert rows is not None
    assert rows[1] is not None
    assert rows[0] is None
    assert rows[1]["101"] == {"logprob": -9999.0, "rank": 1, "decoded_token": "b"}


def test_no_more_candidates_than_asked_for():
    candidates = [TokenLogprob(1, -5.0, None), TokenLogprob(2, -1.0, 1), TokenLogprob(3, -2.0, 2)]
    assert [c.token_id for c in best(candidates, 2)] == [2, 3]
    assert chat_logprobs(TEXTS, output("a"), 0, as_ids=False)["content"][0]["top_logprobs"] == []


def test_offsets_go_on_from_piece_to_piece():
    table = CompletionLogprobs(TEXTS, 1, as_ids=False)
    assert table.of_prompt(output("abc"))["text_offset"] == [0, 1, 2]
    assert table.of_output(output("de"))["text_offset"] == [3, 4]
    as_ids = CompletionLogprobs(TEXTS, 0, as_ids=True).of_output(output("ab"))
    assert (as_ids["tokens"], as_ids["text_offset"], as_ids["top_logprobs"]) == (
        ["token_id:100", "token_id:101"],
        [0, 1],
        None,
    )


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("hm</think>yes", True, len("hm</think>")),
        ("hm", True, 2),
        ("<think>hm</think>yes", False, len("<think>hm</think>")),
        ("\n<think>hm", False, len("\n<think>hm")),
        ("yes <think>no</think>", False, 0),
        (" " * 63 + "<think>hm", False, 63 + len("<think>hm")),
        (" " * 64 + "<think>hm", False, 0),
        ("<thin", False, 0),
        ("", True, 0),
    ],
    ids=["open", "to the end", "opened", "after a line", "in the text", "blanks", "more blanks", "nearly", "nothing"],
)
def test_reasoning_tokens_are_counted_however_they_come(text: str, is_open: bool, expected: int, size: int):
    counter = ReasoningTokens(ReasoningFormat.THINK, TEXTS, is_open=is_open)
    ids = byte_tokenizer.ids_of(text)
    assert sum(counter.add(ids[i : i + size]) for i in range(0, len(ids), size)) == expected
    assert ReasoningTokens(None, TEXTS, is_open=False).add(ids) == 0


def test_characters_of_several_tokens_are_one_place_in_the_text():
    text = "aé日b"
    table = CompletionLogprobs(TEXTS, 1, as_ids=False)
    made = table.of_output(output(text))
    assert made["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5", "b"]
    assert made["text_offset"] == [0, 1, 1, 2, 2, 2, 3]
    assert all(token in top for token, top in zip(made["tokens"], made["top_logprobs"], strict=True))
    assert table.of_output(output("c"))["text_offset"] == [4]


@pytest.mark.parametrize(
    ("data", "text", "offsets"),
    [
        (b"\xe6ab", "\ufffdab", [0, 1, 2]),
        (b"a\xe6\x97ab", "a\ufffdab", [0, 1, 1, 2, 3]),
        (b"\xe0\x80b", "\ufffd\ufffdb", [0, 1, 2]),
        (b"\xe6\xe6\x97\xa5", "\ufffd日", [0, 1, 1, 1]),
        ("\ufffdx".encode(), "\ufffdx", [0, 0, 0, 1]),
    ],
    ids=repr,
)
def test_bytes_that_are_no_characters_have_places_too(data: bytes, text: str, offsets: list[int]):
    assert data.decode("utf-8", "replace") == text
    ids = [byte + 3 for byte in data]
    made = GenerationOutput("r", prompt_ids=[], generated_tokens=ids, logprobs=[0.0] * len(ids))
    assert CompletionLogprobs(TEXTS, 0, as_ids=False).of_output(made)["text_offset"] == offsets
