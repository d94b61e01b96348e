"""The masks of a batch: each row's own, whatever the others are, and the ends that a request has."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import EOS, ids_of
from structured_rig import PERSON, VOCAB, after, allowed, next_tokens, start

from cb_engine.grammar.masks import MaskAsk, MaskMaker

A, B, C = ids_of("abc")


def test_rows_of_a_batch_are_those_of_each_alone() -> None:
    """With drafts and without: the mask behind a draft is that of a request which has the draft in its output."""
    texts = ["", "{", '{"name": "ab', '{"name": "ab", "age": 12', '{"name":"", "age":7, "tags": ["x", "y']
    drafts = ["", '"na', "cd", ', "t', 'y", "zzz"']
    for order in itertools.permutations(range(5), 3):
        asks, expected, row = [], [], 2
        for i in order:
            asks.append(MaskAsk(after({"json_schema": PERSON}, texts[i]), row, tuple(ids_of(drafts[i]))))
            for length in range(len(drafts[i]) + 1):
                expected.append(next_tokens(after({"json_schema": PERSON}, texts[i] + drafts[i][:length])))
            row += len(drafts[i]) + 2  # a row of somebody else's lies between
        for threads in (1, 2):
            masks = MaskMaker(threads).make(asks)
            assert [allowed(masks, place) for place in range(len(masks.rows))] == expected
            assert masks.rows == tuple(a.row + i for a in asks for i in range(len(a.draft_token_ids) + 1))
    assert all(expected)


def test_a_grammar_stays_where_it_was() -> None:
    state = after({"json_schema": PERSON}, '{"name": "a')
    before = next_tokens(state)
    maker = MaskMaker(1)
    rng = random.Random(0)
    for _ in range(20):
        drafts = tuple(ids_of('bcd", "age": 1, "tags": []}')[: rng.randrange(27)])
        assert state.num_legal(drafts) == len(drafts)
        maker.make([MaskAsk(state, 0, drafts)])
        assert next_tokens(state) == before
    for token_id in ids_of('b","age":1,"tags":[]}'):
        assert not state.is_complete
        state.advance(token_id)
    assert state.is_complete
    assert state.error is None


def test_ends_are_legal_where_the_grammar_can_end_and_nowhere_else() -> None:
    value = {"regex": "ab?"}
    for stops, eos, ends in [
        ({EOS}, {EOS}, [EOS]),
        ({EOS, 40, 263}, {EOS}, [EOS, 40, 263]),  # also a token beyond the tokenizer's
        ({40}, {EOS}, [40]),  # EOS is ignored
        ((), {EOS}, []),
        ((), (), []),
        ({EOS, 41}, {EOS, 41}, [EOS, 41]),
        ({99999}, {99999}, []),  # of another vocabulary
    ]:
        assert next_tokens(start(value, stops, eos)) == [A]
        state = after(value, "a", stops=stops, eos=eos)
        assert next_tokens(state) == sorted([*ends, B])
        assert not state.is_complete


def test_a_stop_token_is_no_text() -> None:
    """It would end an output in the middle of a text."""
    value = {"regex": "abc"}
    assert next_tokens(start(value, stops=[A, EOS])) == []
    assert next_tokens(after({"regex": "[ab]+"}, "b", stops=[A])) == [A, B]
    state = start({"regex": "[ab]+"}, stops=[A])
    assert next_tokens(state) == [B]
    assert state.num_legal([B, B, A, B]) == 2
    assert start({"regex": "[ab]+"}, stops=[], eos=[A]).num_legal([B, A]) == 1, (
        "an EOS that is ignored is no text either"
    )


def test_a_grammar_that_turns_out_to_be_over_is_told() -> None:
    """That nothing fits both b and c shows in a mask only."""
    value = {"grammar": 'start: "a" B?\nB: /b/ & /c/'}
    for stops, following in (((), []), ((EOS,), [EOS])):
        state = after(value, "a", stops=stops)
        assert not state.is_complete
        assert next_tokens(state) == following
        assert state.is_complete
    behind = after({"grammar": 'start: "a"+ "b" B?\nB: /b/ & /c/'}, "a", stops=())
    masks = MaskMaker(1).make([MaskAsk(behind, 0, (A, B))])
    assert [allowed(masks, place) for place in range(3)] == [[A, B], [A, B], []]
    assert not behind.is_complete, "it is only behind a draft that it would be over"


def test_a_grammar_that_fails_allows_nothing_and_spoils_nothing() -> None:
    dear = after({"regex": "(ab|cd)*" * 500}, "")
    rng = random.Random(0)
    steps = 0
    while dear.error is None and steps < 20:
        healthy = after({"regex": "[ab]+"}, "b")
        masks = MaskMaker(1).make([MaskAsk(dear, 0), MaskAsk(healthy, 1)])
        assert allowed(masks, 1) == [EOS, A, B]
        steps += 1
        if following := allowed(masks, 0):
            dear.advance(rng.choice([t for t in following if t != EOS]))
    assert dear.error == "the grammar failed: lexer error: too many expressions constructed"
    assert not dear.is_complete
    assert next_tokens(dear) == []
    masks = MaskMaker(1).make([MaskAsk(dear, 0, (A, B)), MaskAsk(healthy, 3)])
    assert [allowed(masks, place) for place in range(4)] == [[], [], [], [EOS, A, B]]


@pytest.mark.parametrize("rule", ["x[max_tokens=3]", 'x[stop="q"]'])
def test_a_grammar_that_cannot_go_back_has_no_drafts(rule: str) -> None:
    state = start({"grammar": f'start: x "!"\n{rule}: /[a-c]+/'})
    assert state.num_legal([A, B]) == 0
    assert next_tokens(state)[:3] == [A, B, C]
    assert start({"grammar": 'start: x "!"\nx: /[a-c]+/'}).num_legal([A, B]) == 2


@pytest.mark.parametrize("size", [0, 1, 5])
def test_drafts_are_legal_up_to_the_first_that_is_not(size: int) -> None:
    state = after({"json_object": True}, "{")
    drafts = ids_of('"abcde')[:size]
    for tail, legal in (([], 0), ([EOS], 0), ([VOCAB - 1], 0), ([999999], 0), (ids_of("\n"), size == 0)):
        assert state.num_legal([*drafts, *tail]) == size + legal
    assert state.error is None


def test_masks_have_a_bit_for_every_token_of_the_model() -> None:
    masks = MaskMaker(1).make([MaskAsk(start({"regex": "a"}), 0)])
    assert masks.bits.dtype == np.uint8
    assert masks.bits.shape[1] * 8 >= VOCAB


def test_the_tokenizers_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer without any EOS will do, and one with a thousand tokens at its end."""
    import byte_tokenizer

    from cb_engine import StructuredOutput
    from cb_engine.grammar.compiler import GrammarCompiler

    tokenizer: Any = byte_tokenizer.make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.add_tokens([f"<extra {i}>" for i in range(1000)], special_tokens=True)
    for vocab_size in (VOCAB, 1259, 2000):
        compiler = GrammarCompiler(tokenizer, vocab_size)
        value = StructuredOutput(regex="ab?")
        (state,) = compiler.start(value, 1, stop_token_ids=frozenset(), eos_token_ids=frozenset())
        assert next_tokens(state) == [A]
        state.advance(A)
        assert next_tokens(state) == [B]
