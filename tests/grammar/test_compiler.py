"""What compiles, what does not and how it is said, and that no constraint is compiled twice."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import byte_tokenizer
import pytest
from byte_tokenizer import EOS, ids_of
from structured_rig import VOCAB, after, next_tokens, start

from cb_engine import StructuredOutput
from cb_engine.grammar import compiler as module
from cb_engine.grammar.compiler import GrammarCompiler

ENDS: dict[str, frozenset[int]] = {"stop_token_ids": frozenset([EOS]), "eos_token_ids": frozenset([EOS])}


def chars(token_ids: list[int]) -> str:
    return "".join(chr(t - byte_tokenizer.OFFSET) if t >= byte_tokenizer.OFFSET else "$" for t in token_ids)


@pytest.mark.parametrize(
    ("structured", "text", "following"),
    [
        ({"json_object": True}, "", "{"),
        ({"json_object": True}, "{", '\t\n\r "}'),
        ({"json_object": True, "compact": True}, "{", '"}'),
        ({"json_object": True, "compact": True}, '{"a"', ":"),
        ({"json_schema": {"type": "boolean"}}, "", "ft"),
        ({"json_schema": {"type": "array", "items": {"const": 1}}}, "[1", "\t\n\r ,]"),
        ({"json_schema": {"type": "array", "items": {"const": 1}}, "compact": True}, "[1", ",]"),
        ({"regex": "[ab]c?"}, "a", "$c"),
        ({"regex": "x|yz"}, "", "xy"),
        ({"choice": ["a", "ab", "c"]}, "", "ac"),
        ({"choice": ["a", "ab", "c"]}, "a", "$b"),
        ({"grammar": 'start: "n" digit+\ndigit: /[12]/'}, "n", "12"),
        ({"grammar": 'start: "n" digit+\ndigit: /[12]/'}, "n1", "$12"),
    ],
)
def test_what_may_follow(structured: dict[str, Any], text: str, following: str) -> None:
    assert chars(next_tokens(after(structured, text))) == following


@pytest.mark.parametrize("text", ["a/b", 'q"\\\n', "é", "日本", "<|x|>", "</s>", "a.b*c[d](e){2}^$|?+", "#&~-_%", "🙂"])
def test_a_choice_is_taken_literally(text: str) -> None:
    state = after({"choice": [text, "other"]}, text)
    assert state.error is None
    assert state.is_complete


@pytest.mark.parametrize("text", ["a/b", "a\nb", 'x/\ny: "z"\n', '"q"', "#x y", "日"])
def test_an_expression_cannot_break_out_of_the_grammar_around_it(text: str) -> None:
    assert after({"regex": text}, text).is_complete
    assert after({"regex": text}, text[:-1] + "!").error is not None


def test_a_schema_may_say_what_whitespace_it_wants() -> None:
    schema = {"type": "array", "items": {"const": 1}, "x-guidance": {"whitespace_pattern": " "}}
    assert chars(next_tokens(after({"json_schema": schema}, "["))) == " 1]"
    assert chars(next_tokens(after({"json_schema": schema, "compact": True}, "["))) == "1]"


def test_whitespace_has_an_end() -> None:
    for blank in " \n":
        state = after({"json_object": True}, "{" + blank * 64)
        assert chars(next_tokens(state)) == '"}'
    text = '{"a"' + " " * 30 + ":\n" + "\t" * 64
    assert after({"json_object": True}, text).error is not None
    assert after({"json_object": True}, text[:-1]).error is None


def test_properties_come_in_the_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["a", "b"], "additionalProperties": False}
    assert after({"json_schema": schema}, '{"b":1,"a":2}').is_complete
    assert after({"json_schema": schema}, '{"a"').error is not None


def test_tokens_beyond_the_tokenizers_are_never_allowed() -> None:
    following = next_tokens(start({"regex": "(?s:.)*"}))
    assert max(following) == 0xF4 + byte_tokenizer.OFFSET, "no byte above begins a character"
    assert EOS in following
    assert byte_tokenizer.PAD not in following
    assert byte_tokenizer.BOS not in following


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"json_schema": {"type": "foo"}}, "structured.json_schema cannot be used: Invalid type: foo"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, r'Unimplemented keys: \["uniqueItems"\]'),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum .5. is greater than maximum"),
        ({"json_schema": {"$ref": "#"}}, "json_schema cannot be used: no token can continue it"),
        ({"json_schema": {"$ref": "http://localhost/x"}}, "json_schema cannot be used: .*http://localhost/x"),
        ({"json_schema": '{"items":' * 200 + "{}" + "}" * 200}, "structured.json_schema: recursion limit exceeded"),
        (
            {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(900)}}},
            "json_schema cannot be used: .*row has .* items; max is 2000",
        ),
        ({"regex": "a("}, "structured.regex cannot be used: unclosed group$"),
        ({"regex": "a(?=b)"}, "regex cannot be used: look-around"),
        ({"regex": "(" * 4000}, "regex cannot be used: "),
        ({"regex": "a{0}"}, "structured.regex allows nothing but the empty text"),
        ({"regex": r"[^\x00-\x{10FFFF}]"}, "regex cannot be used: no token can continue it"),
        ({"grammar": "start: foo"}, 'structured.grammar cannot be used: .*unknown name: "foo"$'),
        ({"grammar": "a b"}, "grammar cannot be used: .*Expected token ':'"),
        ({"grammar": "start: " + "(" * 2000 + '"a"' + ")" * 2000}, "grammar cannot be used: .*too deeply nested"),
    ],
    ids=lambda value: None,
)
def test_what_does_not_compile_is_refused_in_a_line(structured: dict[str, Any], message: str) -> None:
    for _ in range(2):  # a failure is not kept
        with pytest.raises(ValueError, match=message) as caught:
            start(structured)
        text = str(caught.value)
        assert "\n" not in text
        assert len(text) < 400


def chain_of_refs() -> str:
    """A schema of the largest size, as deep as can be."""
    parts = [f'"{i}":{{"anyOf":[{{"$ref":"#/$defs/{i + 1}"}},{{"const":1}}]}}' for i in range(2400)]
    return '{"$ref":"#/$defs/0","$defs":{' + ",".join([*parts, '"2400":{"const":2}']) + "}}"


def chain_of_rules(first: str, rest: str) -> str:
    lines = [f'{first}{i}: {first}{i + 1} "x"' for i in range(1000)]
    return "\n".join(["start: " + first + "0", *lines, f'{first}1000: "{rest}"'])[:16384]


@pytest.mark.parametrize(
    "structured",
    [
        {"json_schema": chain_of_refs()},
        {"grammar": chain_of_rules("r", "a")},
        {"grammar": chain_of_rules("R", "a")},
        {"json_schema": '{"items":' * 10000 + "{}" + "}" * 10000},
    ],
    ids=["refs", "rules", "terminals", "items"],
)
def test_no_depth_brings_the_process_down(structured: dict[str, Any]) -> None:
    """Whether it compiles does not matter; on an ordinary stack some of these would end in a segmentation fault."""

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: next_tokens(start(structured)))
        error = future.exception()
        assert isinstance(error, ValueError) if error is not None else future.result()


def test_without_a_tokenizer_the_error_names_the_fix() -> None:
    with pytest.raises(ValueError, match="structured output needs a tokenizer: pass tokenizer= to attach"):
        GrammarCompiler(None, 10).start(StructuredOutput(regex="a"), 1, **ENDS)
    with pytest.raises(ValueError, match=r"needs a fast tokenizer, .* and object is none"):
        GrammarCompiler(object(), 10).start(StructuredOutput(regex="a"), 1, **ENDS)


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(byte_tokenizer.make_tokenizer(), VOCAB)
    with pytest.raises(ImportError, match=r"pip install cb-engine\[structured\]"):
        compiler.start(StructuredOutput(regex="a"), 1, **ENDS)


def test_samples_and_requests_have_places_of_their_own() -> None:
    compiler = GrammarCompiler(byte_tokenizer.make_tokenizer(), VOCAB)
    states = [*compiler.start(StructuredOutput(regex="ab|c"), 2, **ENDS)]
    states += compiler.start(StructuredOutput(regex="ab|c"), 1, **ENDS)
    states[0].advance(ids_of("a")[0])
    assert [chars(next_tokens(state)) for state in states] == ["b", "ac", "ac"]


# ---- what is kept --------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[StructuredOutput]:
    """What has been compiled, in order."""
    seen: list[StructuredOutput] = []
    compile_it = module._compile

    def noting(structured: StructuredOutput, vocabulary: Any) -> Any:
        seen.append(structured)
        return compile_it(structured, vocabulary)

    monkeypatch.setattr(module, "_compile", noting)
    return seen


def test_many_requests_at_once_compile_a_schema_once(compiled: list[StructuredOutput]) -> None:
    compiler = GrammarCompiler(byte_tokenizer.make_tokenizer(), VOCAB)
    together = threading.Barrier(8)

    def ask(_: int) -> int:
        together.wait()
        value = StructuredOutput(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}})
        return sum(len(compiler.start(value, 2, **ENDS)) for _ in range(125))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(8))) == 2000
    assert len(compiled) == 1


def test_errors_reach_everyone_who_waits(compiled: list[StructuredOutput]) -> None:
    compiler = GrammarCompiler(byte_tokenizer.make_tokenizer(), VOCAB)

    def ask(_: int) -> str:
        with pytest.raises(ValueError, match="unclosed group") as caught:
            compiler.start(StructuredOutput(regex="a("), 1, **ENDS)
        return str(caught.value)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(40)))) == 1
    assert not compiler._kept


def test_no_more_is_kept_than_the_limits_say(compiled: list[StructuredOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(byte_tokenizer.make_tokenizer(), VOCAB)
    monkeypatch.setattr(module, "_MAX_KEPT", 3)
    values = [StructuredOutput(regex="abcd"[i] * 10) for i in range(4)]
    for i in (0, 1, 2, 0, 3):  # 1 is the longest unused
        compiler.start(values[i], 1, **ENDS)
    assert list(compiler._kept) == [values[2], values[0], values[3]]
    monkeypatch.setattr(module, "_MAX_KEPT_CHARS", 25)
    compiler.start(values[1], 1, **ENDS)
    assert list(compiler._kept) == [values[3], values[1]]
    compiler.start(StructuredOutput(regex="e" * 30), 1, **ENDS)
    assert [kept.num_chars for kept in compiler._kept] == [30], "the latest is kept whatever its size"
    assert compiled == [values[0], values[1], values[2], values[3], values[1], StructuredOutput(regex="e" * 30)]


@pytest.mark.parametrize("name", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
@pytest.mark.parametrize("bound", [2**53 + 1, -(2**63), 10**30, 1e20], ids=["2**53", "2**63", "10**30", "1e20"])
def test_bounds_that_would_be_kept_to_only_roughly_are_refused(name: str, bound: float) -> None:
    schema = {"type": "object", "properties": {"x": {"anyOf": [{"type": "integer", name: bound}]}}}
    with pytest.raises(ValueError, match=f"{name}=.* is beyond 2"):
        GrammarCompiler(byte_tokenizer.make_tokenizer(), VOCAB).start(
            StructuredOutput(json_schema=schema), 1, stop_token_ids=frozenset(), eos_token_ids=frozenset()
        )
