"""The grammar allows what its format's parser reads as a call of the tools, and nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import pytest
from parsing import calls, stream
from transformers import AutoTokenizer

from cb_engine.models import resolve_model
from cb_engine.serve.parsers import (
    ReasoningFormat,
    Tool,
    ToolFormat,
    collect,
    make_response_parser,
    structured_for_tools,
)

CITY: dict[str, Any] = {"type": "string", "enum": ["Oslo", "Rome"]}
WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": CITY},
    },
)
NOTE = Tool("note", parameters={"properties": {"text": {"type": "string"}}, "required": ["text"]})
ANY, EMPTY = Tool("any"), Tool("empty", parameters={})
TOOLS = (WEATHER, NOTE, ANY, EMPTY)
NAMED = {"type": "function", "function": {"name": "get_weather"}}

GOOD_CALLS = [
    ("get_weather", {"city": "Oslo"}),
    ("get_weather", {"city": "Rome", "days": 3}),
    ("note", {"text": 'say "hi"\nand <tool_call> {]'}),
    ("any", {"x": [1, {"y": None}]}),
    ("empty", {}),
]
BAD_CALLS = [
    ("get_weather", {"city": "Paris"}),
    ("get_weather", {"days": 3}),
    ("get_weather", {"city": "Oslo", "days": "3"}),
    ("get_weather", {"city": "Oslo", "hours": 3}),
    ("note", {}),
    ("other", {}),
]
JSON_FORMATS = [form for form in ToolFormat if form is not ToolFormat.QWEN_XML]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model("demo"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any) -> Any:
    return llguidance.hf.from_tokenizer(tokenizer)


def accepts(vocabulary: Any, structured: dict[str, str], text: str, spelled: bool = False) -> bool:
    """Whether the grammar compiles and allows the text, and the text to end there.

    A text that is spelled comes one character a token, so that it holds no special token.
    """
    [(field, grammar)] = structured.items()
    assert field == "grammar"
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    token_ids = [i for piece in (text if spelled else [text]) for i in vocabulary.tokenize_str(piece)]
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def written(form: ToolFormat, made: list[tuple[str, Any]], as_list: bool = True) -> str:
    """Calls as the format has them."""
    texts = [_call(form, name, arguments) for name, arguments in made]
    if form in (ToolFormat.HERMES, ToolFormat.QWEN_XML):
        return "\n".join(texts)
    if form is ToolFormat.LLAMA3_JSON:
        return "; ".join(texts)
    if form is ToolFormat.MISTRAL_ARGS:
        return "".join(texts)
    row = ", ".join(texts)
    return f"[TOOL_CALLS][{row}]" if form is ToolFormat.MISTRAL else f"[{row}]" if as_list else row


def _call(form: ToolFormat, name: str, arguments: Any) -> str:
    if form is ToolFormat.MISTRAL_ARGS:
        return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"
    if form is ToolFormat.QWEN_XML:
        values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"
    key = "parameters" if form is ToolFormat.LLAMA3_JSON else "arguments"
    text = f'{{"name": "{name}", "{key}": {json.dumps(arguments)}}}'
    return f"<tool_call>\n{text}\n</tool_call>" if form is ToolFormat.HERMES else text


def read_back(form: ToolFormat, text: str, tools: tuple[Tool, ...] = TOOLS) -> list[tuple[str, Any]]:
    """The calls that the format's parser finds in a text that is nothing else."""
    message = collect(stream(make_response_parser(tools=form, reasoning=None, functions=tools), list(text)))
    assert message.content is None
    assert not message.is_truncated
    return [(name, json.loads(arguments)) for name, arguments in calls(message)]


@pytest.mark.parametrize("form", JSON_FORMATS)
def test_required_allows_every_right_call_and_no_wrong_one(form, vocabulary):
    structured = structured_for_tools(TOOLS, "required", form, parallel_tool_calls=False)
    for call in GOOD_CALLS:
        text = written(form, [call], as_list=False)
        assert accepts(vocabulary, structured, text), text
        assert read_back(form, text) == [call]
    for call in BAD_CALLS:
        assert not accepts(vocabulary, structured, written(form, [call], as_list=False)), call


@pytest.mark.parametrize("form", list(ToolFormat))
def test_several_calls_come_only_in_parallel(form, vocabulary):
    good = [("empty", {}), ("note", {"text": "a"})]
    text = written(form, good)
    assert accepts(vocabulary, structured_for_tools(TOOLS, "required", form), text)
    assert not accepts(vocabulary, structured_for_tools(TOOLS, "required", form, parallel_tool_calls=False), text)
    assert read_back(form, text) == good


@pytest.mark.parametrize("form", JSON_FORMATS)
def test_a_named_function_is_called_once(form, vocabulary):
    structured = structured_for_tools(TOOLS, NAMED, form)
    one = written(form, [GOOD_CALLS[0]], as_list=False)
    assert accepts(vocabulary, structured, one)
    assert not accepts(vocabulary, structured, written(form, GOOD_CALLS[:2]))
    assert not accepts(vocabulary, structured, written(form, [("note", {"text": "a"})], as_list=False))


@pytest.mark.parametrize("form", list(ToolFormat))
def test_plain_text_and_nothing_are_no_call(form, vocabulary):
    structured = structured_for_tools(TOOLS, "required", form)
    for text in ("", "I will not.", "{}", "<think>\n", "[]"):
        assert not accepts(vocabulary, structured, text)


def random_text(vocabulary: Any, structured: dict[str, str], rng: random.Random) -> str | None:
    """What a model that knows nothing writes under the grammar, if it comes to an end."""
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(structured["grammar"]))
    closings = [vocabulary.tokenize_str(text) for text in ("</parameter>\n", '"', "}", "]")]
    token_ids: list[int] = []
    while len(token_ids) < 300:
        if matcher.is_accepting() and rng.random() < 0.5:
            return str(vocabulary.decode_str(token_ids))
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [i for i in np.flatnonzero(mask).tolist() if i < vocabulary.vocab_size and i != vocabulary.eos_token]
        if not allowed:
            return str(vocabulary.decode_str(token_ids))
        # By chance alone a string would hardly ever end.
        legal = [ids for ids in closings if matcher.validate_tokens(ids) == len(ids)]
        chosen = rng.choice(legal) if legal and rng.random() < 0.3 else [rng.choice(allowed)]
        assert matcher.consume_tokens(chosen)
        token_ids += chosen
    return None


@pytest.mark.parametrize("form", list(ToolFormat))
def test_whatever_the_grammar_lets_a_model_write_is_read_as_calls(form, vocabulary):
    structured = structured_for_tools(TOOLS, "required", form)
    rng = random.Random(form.value)
    texts = [text for _ in range(12) if (text := random_text(vocabulary, structured, rng)) is not None]
    assert len(texts) >= 6
    for text in texts:
        made = read_back(form, text)
        assert made
        for name, arguments in made:
            assert name in {tool.name for tool in TOOLS}
            assert name != "get_weather" or arguments["city"] in CITY["enum"]
            assert name != "note" or isinstance(arguments["text"], str)


XML_TOOL = Tool(
    "f",
    parameters={
        "type": "object",
        "properties": {
            "city": CITY,
            "text": {"type": "string"},
            "days": {"$ref": "#/$defs/Days"},
            "kind": {"const": "k"},
            "level": {"enum": ["low", 5]},
            "any": True,
        },
        "required": ["city", "extra"],
        "$defs": {"Days": {"type": "integer"}},
    },
)


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"city": "Oslo", "extra": "e"}, True),
        ({"city": "Oslo", "text": 'a "b"\n<parameter=x> \\ é', "days": 3, "kind": "k", "extra": ""}, True),
        ({"city": "Oslo", "level": 5, "any": {"x": [1]}, "extra": "e"}, True),
        ({"city": "Oslo", "level": 6, "extra": "e"}, False),
        ({"city": "Paris", "extra": "e"}, False),
        ({"city": "Oslo"}, False),
        ({"city": "Oslo", "days": "three", "extra": "e"}, False),
        ({"city": "Oslo", "kind": "l", "extra": "e"}, False),
        ({"city": "Oslo", "extra": "e", "more": 1}, False),
        ({"city": "Oslo", "extra": "e</parameter>e"}, False),
    ],
)
def test_xml_parameters_follow_their_schemas(arguments, is_right, vocabulary):
    structured = structured_for_tools([XML_TOOL, ANY], "required", ToolFormat.QWEN_XML)
    text = written(ToolFormat.QWEN_XML, [("f", arguments)])
    assert accepts(vocabulary, structured, text) is is_right
    if is_right:
        assert read_back(ToolFormat.QWEN_XML, text, (XML_TOOL,)) == [("f", arguments)]


def test_reasoning_may_come_first(vocabulary):
    form, think = ToolFormat.HERMES, ReasoningFormat.THINK
    call = written(form, [("empty", {})])
    free = structured_for_tools(TOOLS, "required", form, reasoning=think)
    assert accepts(vocabulary, free, call)
    assert accepts(vocabulary, free, f"<think>\nHm, <tool_call>?\n</think>\n\n{call}")
    assert not accepts(vocabulary, free, f"Hm\n</think>\n\n{call}")
    opened = structured_for_tools(TOOLS, "required", form, reasoning=think, starts_in_reasoning=True)
    assert accepts(vocabulary, opened, f"Hm\n</think>\n\n{call}")
    assert not accepts(vocabulary, opened, call)
    closed = structured_for_tools(TOOLS, "required", form)
    assert not accepts(vocabulary, closed, f"<think>\nHm\n</think>\n\n{call}")


def test_mistrals_reasoning_markers(vocabulary):
    structured = structured_for_tools(TOOLS, "required", ToolFormat.MISTRAL_ARGS, reasoning=ReasoningFormat.MISTRAL)
    assert accepts(vocabulary, structured, "[THINK]Hm[/THINK][TOOL_CALLS]empty[ARGS]{}")


def test_markers_that_are_special_tokens_are_asked_for_as_tokens():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("demo"))
    markers = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    vocabulary = llguidance.hf.from_tokenizer(tokenizer)
    special = {marker: tokenizer.convert_tokens_to_ids(marker) for marker in markers}
    texts = {
        ToolFormat.MISTRAL: '[THINK]Hm[/THINK][TOOL_CALLS][{"name": "empty", "arguments": {}}]',
        ToolFormat.MISTRAL_ARGS: "[THINK]Hm[/THINK][TOOL_CALLS]empty[ARGS]{}[TOOL_CALLS]any[ARGS]{}",
    }
    for form, text in texts.items():
        as_tokens = structured_for_tools(
            TOOLS, "required", form, reasoning=ReasoningFormat.MISTRAL, special_tokens=special
        )
        assert accepts(vocabulary, as_tokens, text)
        assert not accepts(vocabulary, as_tokens, text, spelled=True)
        as_text = structured_for_tools(TOOLS, "required", form, reasoning=ReasoningFormat.MISTRAL)
        assert accepts(vocabulary, as_text, text, spelled=True)
        assert not accepts(vocabulary, as_text, text)


@pytest.mark.parametrize(
    ("tools", "tool_choice", "message"),
    [
        ((), "required", "tool_choice: 'required' needs tools, got none"),
        (TOOLS, "auto", "tool_choice: a grammar is for \"required\" or .*, got 'auto'"),
        (TOOLS, {"type": "function"}, "tool_choice: a grammar is for"),
        (TOOLS, {"type": "function", "function": {}}, "tool_choice: a grammar is for"),
        (
            TOOLS,
            {"type": "function", "function": {"name": "launch"}},
            "there is no function 'launch'; name one of tools: get_weather, note, any, empty",
        ),
    ],
)
def test_a_tool_choice_that_cannot_be_enforced_is_refused(tools, tool_choice, message):
    with pytest.raises(ValueError, match=message):
        structured_for_tools(tools, tool_choice, ToolFormat.HERMES)


def test_a_key_that_cannot_stand_in_a_tag_is_refused():
    for key in ("a>b", "a\nb", " a", ""):
        tool = Tool("f", parameters={"properties": {key: {}}})
        with pytest.raises(ValueError, match=r"parameter .* of 'f' cannot stand in <parameter=...>"):
            structured_for_tools([tool], "required", ToolFormat.QWEN_XML)


def test_open_reasoning_needs_a_format():
    with pytest.raises(ValueError, match="starts_in_reasoning=True needs a reasoning format"):
        structured_for_tools(TOOLS, "required", ToolFormat.HERMES, starts_in_reasoning=True)


def test_prose_is_left_out_and_properties_of_such_names_stay(vocabulary):
    properties = {"title": {"type": "string", "title": "T"}, "kind": {"enum": [{"title": "x"}], "description": "D"}}
    tool = Tool("f", parameters={"description": "D", "properties": properties, "required": ["title"]})
    structured = structured_for_tools([tool], "required", ToolFormat.JSON)
    assert '"D"' not in structured["grammar"]
    assert '"T"' not in structured["grammar"]
    for arguments, is_right in [
        ({"title": "a", "kind": {"title": "x"}}, True),
        ({"title": "a", "kind": {}}, False),
        ({}, False),
    ]:
        assert accepts(vocabulary, structured, written(ToolFormat.JSON, [("f", arguments)])) is is_right


def test_space_inside_arguments_has_an_end(vocabulary):
    structured = structured_for_tools(TOOLS, "required", ToolFormat.MISTRAL_ARGS)
    for length, is_right in [(0, True), (64, True), (65, False)]:
        assert accepts(vocabulary, structured, '[TOOL_CALLS]any[ARGS]{"a":' + "\n" * length + "1}") is is_right


def test_a_schema_too_deep_to_be_written_is_refused():
    schema: dict[str, Any] = {}
    for _ in range(2000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(ValueError, match="nested too deeply"):
        structured_for_tools([Tool("f", parameters=schema)], "required", ToolFormat.HERMES)


@pytest.mark.parametrize("rule", [{"pattern": "^a$"}, {"maxLength": 3}, {"minLength": 1}, {"format": "date"}], ids=str)
def test_what_cannot_be_enforced_between_tags_is_refused(rule: dict[str, Any]) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"x": {"type": "string", **rule}}})
    with pytest.raises(ValueError, match="cannot be enforced between XML tags"):
        structured_for_tools([tool], "required", ToolFormat.QWEN_XML)
    assert structured_for_tools([tool], "required", ToolFormat.HERMES)
