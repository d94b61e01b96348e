"""Where a JSON value ends, and what a string says, whatever the cuts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import pieces

from cb_engine.serve.parsers.json_scanner import JsonValueScanner, StringUnescaper

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@settings(derandomize=True, deadline=None)
@given(JSON, st.sampled_from([",", "}", "]", " ", "\n"]), st.booleans(), st.data())
def test_a_value_ends_where_json_says(value, behind, ascii_only, data):
    text = json.dumps(value, ensure_ascii=ascii_only) + behind + '{"more": 1}'
    scanner, taken = JsonValueScanner(), 0
    for piece in pieces(text, data.draw(st.lists(st.integers(0, len(text)), max_size=5))):
        taken += scanner.feed(piece, 0, len(piece))
        if scanner.done:
            break
    assert scanner.done
    assert json.loads(text[:taken]) == value


@pytest.mark.parametrize(("text", "taken"), [('{"a": 1]', 7), ("[1}", 2), ("{<", 1), (",", 0), ("}", 0), ("[(1)]", 1)])
def test_what_cannot_be_json_fails_in_its_place(text, taken):
    scanner = JsonValueScanner()
    assert scanner.feed(text, 0, len(text)) == taken
    assert scanner.failed
    assert not scanner.done
    assert scanner.feed(text, 0, len(text)) == 0


@pytest.mark.parametrize("text", ["{", '{"a', '"a\\"', "[[1]", '{"a": "}"'])
def test_an_open_value_may_not_end(text):
    scanner = JsonValueScanner()
    scanner.feed(text, 0, len(text))
    assert not scanner.may_end


def test_only_the_given_range_is_read():
    scanner = JsonValueScanner()
    assert scanner.feed('xx{"a":1}', 2, 6) == 6
    assert not scanner.done
    assert scanner.feed('xx{"a":1}', 6, 9) == 9
    assert scanner.done


@settings(derandomize=True, deadline=None)
@given(st.text(), st.booleans(), st.data())
def test_unescaping_gives_what_json_gives(value, ascii_only, data):
    inside = json.dumps(value, ensure_ascii=ascii_only)[1:-1]
    unescaper = StringUnescaper()
    cuts = data.draw(st.lists(st.integers(0, len(inside)), max_size=8))
    assert "".join(map(unescaper.feed, pieces(inside, cuts))) + unescaper.finish() == value


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.sampled_from(["\\", "u", "d83d", "de00", "0041", "n", "x", "\\u", "\\ud83d", "\\ude00", "é"])),
    st.data(),
)
def test_broken_escapes_do_not_depend_on_cuts(fragments, data):
    text = "".join(fragments)
    whole, cut = StringUnescaper(), StringUnescaper()
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    expected = whole.feed(text) + whole.finish()
    assert "".join(map(cut.feed, pieces(text, cuts))) + cut.finish() == expected
    expected.encode()  # no half of a surrogate pair


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (r"\x", r"\x"),
        (r"\u12zz", r"\u12zz"),
        (r"\ud83d!", "\ufffd!"),
        (r"\ude00", "\ufffd"),
        (r"\ud83d\n", "\ufffd\n"),
        (r"\ud83d", "\ufffd"),
        (r"\ud83dA", "\ufffdA"),
        ("\\", "\\"),
    ],
)
def test_what_json_does_not_know_is_left_or_replaced(inside, said):
    unescaper = StringUnescaper()
    assert unescaper.feed(inside) + unescaper.finish() == said
