"""Text comes out complete, once, and nothing of a stop string with it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cb_engine.detokenizer import _BYTE_OF_CHAR, IncrementalDetokenizer, StopChecker

TEXTS = [
    "plain words, then more words.",
    "déjà vu, naïve façade, Ünïcödé",
    "smile 😀 and 👩‍👩‍👧‍👦 family 🏳️‍🌈!",
    "안녕하세요 세계, 한글",
    "  two spaces\n\n\ttabs \r\n end ",
    "mixé 😀한😀 end",
]


@pytest.fixture(scope="module")
def byte_tokenizer() -> Any:
    """One token per byte, as case 11 asks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    return _byte_level(inner)


@pytest.fixture(scope="module")
def bpe_tokenizer() -> Any:
    """Byte-level BPE whose merges cross the edges of characters."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(TEXTS * 3, trainer)
    return _byte_level(inner)


def _byte_level(inner: Any) -> Any:
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|end|>", special=True)])
    inner.add_tokens([AddedToken("<tool call>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


@pytest.fixture(scope="module")
def sentencepiece_tokenizer() -> Any:
    """As Llama 2's: U+2581 for a space, dropped at the beginning of a text, and bytes as own tokens."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for piece in ("▁", "▁hello", "▁world", "▁new", "s", "ed", "\ufffd"):
        vocab[piece] = len(vocab)
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner)


class SlowBytes:
    """A slow tokenizer of bytes, which writes them as `notation` has it."""

    all_special_ids = (256,)

    def __init__(self, notation: str) -> None:
        self._notation = notation
        if notation == "byte-level":
            self.byte_decoder = _BYTE_OF_CHAR

    def convert_ids_to_tokens(self, token_id: int) -> str | bytes:
        if self._notation == "bytes":  # as the tiktoken-based ones
            return bytes([token_id])
        if self._notation == "byte-level":  # as GPT-2's
            return dict(zip(_BYTE_OF_CHAR.values(), _BYTE_OF_CHAR, strict=True))[token_id]
        return chr(token_id)  # as ByT5's; nothing tells that these are bytes

    def decode(self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return bytes(token_ids).decode(errors="replace")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def stream(
    tokenizer: Any, token_ids: Sequence[int], prompt: Sequence[int] = (), skip_special_tokens: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_tokenizer", "bpe_tokenizer"])
def test_pieces_join_to_the_decoded_text(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    token_ids = ids_of(tokenizer, text)
    pieces = stream(tokenizer, token_ids, prompt=ids_of(tokenizer, "a prompt é"))
    assert "".join(pieces) == tokenizer.decode(token_ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_tokenizer", "bpe_tokenizer"])
def test_an_incomplete_character_at_the_end_is_dropped(kind, request):
    tokenizer = request.getfixturevalue(kind)
    for text in TEXTS:
        token_ids = ids_of(tokenizer, text)
        for end in range(len(token_ids)):
            shown = "".join(stream(tokenizer, token_ids[:end]))
            assert text.startswith(shown)
            assert shown == tokenizer.decode(token_ids[:end]).removesuffix("\ufffd")


def test_a_replacement_character_that_the_model_wrote_comes_out(byte_tokenizer, sentencepiece_tokenizer):
    token_ids = ids_of(byte_tokenizer, "a\ufffdb\ufffd")
    assert "".join(stream(byte_tokenizer, token_ids)) == "a\ufffdb\ufffd"
    literal = sentencepiece_tokenizer.convert_tokens_to_ids("\ufffd")
    assert stream(sentencepiece_tokenizer, [literal]) == ["\ufffd", ""]


@pytest.mark.parametrize("kind", ["byte_tokenizer", "bpe_tokenizer"])
def test_ids_without_sense_come_out_as_decoded(kind, request):
    tokenizer = request.getfixturevalue(kind)
    rng = random.Random(0)
    for _ in range(300):
        token_ids = rng.choices(range(len(tokenizer)), k=15) + ids_of(tokenizer, "z")
        expected = tokenizer.decode(token_ids, skip_special_tokens=True)
        assert "".join(stream(tokenizer, token_ids)) == expected


def test_special_tokens_are_skipped_or_shown(byte_tokenizer):
    end = byte_tokenizer.eos_token_id
    call = byte_tokenizer.convert_tokens_to_ids("<tool call>")
    first, *rest = ids_of(byte_tokenizer, "é!")
    token_ids = [first, end, *rest, call, end]
    assert "".join(stream(byte_tokenizer, token_ids)) == "é!<tool call>"
    shown = "".join(stream(byte_tokenizer, token_ids, skip_special_tokens=False))
    assert shown == byte_tokenizer.decode(token_ids)
    assert shown.endswith("!<tool call><|end|>")


def test_a_character_begun_in_the_prompt_is_completed(byte_tokenizer):
    token_ids = ids_of(byte_tokenizer, "ab😀c")
    assert stream(byte_tokenizer, token_ids[4:], prompt=token_ids[:4]) == ["", "😀", "c", ""]


def test_an_id_without_a_token_leaves_nothing(byte_tokenizer):
    assert stream(byte_tokenizer, [*ids_of(byte_tokenizer, "a"), 5000, *ids_of(byte_tokenizer, "b")]) == [
        "a",
        "",
        "b",
        "",
    ]


def test_leading_spaces(sentencepiece_tokenizer):
    tokenizer = sentencepiece_tokenizer
    token_ids = tokenizer.convert_tokens_to_ids(["▁hello", "▁world", "s", "▁", "▁new", "ed"])
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids) == "hello worlds  newed"
    assert stream(tokenizer, token_ids[1:3], prompt=token_ids[:1]) == [" world", "s", ""]


def test_byte_fallback(sentencepiece_tokenizer):
    tokenizer = sentencepiece_tokenizer
    hello, world = tokenizer.convert_tokens_to_ids(["▁hello", "▁world"])
    spelled = [1 + byte for byte in "é😀한é".encode()]
    token_ids = [hello, *spelled, world]
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids) == "helloé😀한é world"
    for end in range(len(token_ids)):
        shown = "".join(stream(tokenizer, token_ids[:end]))
        assert "helloé😀한é world".startswith(shown)


@pytest.mark.parametrize("notation", ["bytes", "byte-level", "unknown"])
def test_slow_tokenizers(notation):
    data = list("aé😀한b한".encode())
    tokenizer = SlowBytes(notation)
    assert "".join(stream(tokenizer, [*data, 256])) == "aé😀한b한"
    for end in range(len(data)):
        shown = "".join(stream(tokenizer, data[:end]))
        assert shown == bytes(data[:end]).decode(errors="ignore")


@pytest.mark.parametrize("text", ["word ", "😀", "\ufffd"])
def test_the_cost_of_a_token_does_not_grow(byte_tokenizer, text):
    detokenizer = IncrementalDetokenizer(byte_tokenizer, [])
    for token_id in ids_of(byte_tokenizer, text) * 500:
        detokenizer.add(token_id)
        assert len(detokenizer._window) <= 16


def test_a_long_output_is_quick(bpe_tokenizer):
    token_ids = ids_of(bpe_tokenizer, " ".join(TEXTS)) * 20
    start = time.perf_counter()
    assert "".join(stream(bpe_tokenizer, token_ids)) == bpe_tokenizer.decode(token_ids)
    assert (time.perf_counter() - start) / len(token_ids) < 1e-3


def feed_all(stop: Sequence[str], pieces: Iterable[str]) -> tuple[str, str | None, list[str]]:
    checker = StopChecker(stop)
    shown: list[str] = []
    matched = None
    for piece in pieces:
        text, matched = checker.feed(piece)
        shown.append(text)
        if matched is not None:
            break
    return "".join(shown) + checker.flush(), matched, shown


def test_a_stop_string_over_token_edges(byte_tokenizer):
    token_ids = ids_of(byte_tokenizer, "alpha beta gamma delta")
    text, matched, shown = feed_all(["beta gamma"], stream(byte_tokenizer, token_ids))
    assert (text, matched) == ("alpha ", "beta gamma")
    assert "".join(shown) == "alpha "


def test_the_beginning_of_a_stop_string_is_flushed_at_the_end():
    text, matched, shown = feed_all(["beta gamma"], list("alpha beta gam"))
    assert (text, matched) == ("alpha beta gam", None)
    assert "".join(shown) == "alpha "


def test_a_false_start_comes_out_as_soon_as_it_fails():
    checker = StopChecker(["aab"])
    assert [checker.feed(char)[0] for char in "aaac"] == ["", "", "a", "aac"]


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (["world", "lo"], "hello world", ("hel", "lo")),
        (["bc", "abcd"], "xabcd", ("xa", "bc")),  # complete before the longer one is
        (["c", "bc", "abc"], "xabc", ("x", "abc")),  # complete together: the longest
        (["😀"], "a😀b", ("a", "😀")),
        ([], "anything", ("anything", None)),
    ],
)
def test_which_stop_string_wins_does_not_depend_on_the_pieces(stop, text, expected):
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces = [text[0]]
        for char, cut in zip(text[1:], cuts, strict=True):
            pieces = [*pieces, char] if cut else [*pieces[:-1], pieces[-1] + char]
        assert feed_all(stop, pieces)[:2] == expected


def test_random_texts_show_nothing_of_a_stop_string():
    rng = random.Random(1)
    for _ in range(500):
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=20))
        shown, matched, _ = feed_all(stop, list(text))
        assert text.startswith(shown)
        assert not any(s in shown for s in stop)
        assert (matched is None) == (shown == text)


def test_after_a_match_nothing_is_shown():
    checker = StopChecker(["x"])
    assert checker.feed("axb") == ("a", "x")
    assert checker.feed("more") == ("", "x")
    assert checker.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop must not hold an empty string"):
        StopChecker(["a", ""])
