"""The grammar that makes a model call a tool, in the very syntax that its parser reads.

Owns: what `tool_choice` allows, as a Lark grammar in llguidance's dialect. Does not know: how a grammar is
compiled or applied, nor the tokenizer, but for the ids of special tokens that it is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cb_engine.serve.parsers import hermes, mistral, qwen_xml
from cb_engine.serve.parsers.formats import ReasoningFormat, ToolFormat
from cb_engine.serve.parsers.tools import Tool

# Of JSON, between its parts: enough for any indentation, and no model can fill its output with it.
_WHITESPACE = r"[ \n\r\t]{1,64}"
_PROSE = ("description", "title", "$comment")
_XML_KEY = re.compile(r"[^>\s]([^>\n]*[^>\s])?")


def structured_for_tools(
    tools: Sequence[Tool],
    tool_choice: str | Mapping[str, Any],
    format: ToolFormat,
    *,
    parallel_tool_calls: bool = True,
    reasoning: ReasoningFormat | None = None,
    starts_in_reasoning: bool = False,
    special_tokens: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Return the constraint that enforces a `tool_choice`, as fields of the engine's structured output.

    The arguments follow the tool's schema; where there is none, they are any object. Between XML tags strings
    are free text, of which a schema's `enum` and `const` are enforced; a `pattern`, length or `format` is refused.

    Args:
        tools: the request's tools.
        tool_choice: "required", or `{"type": "function", "function": {"name": ...}}`.
        format: how the model writes calls.
        parallel_tool_calls: with "required", more than one call may come. A named function is called once.
        reasoning: if given, the model may reason before it calls.
        starts_in_reasoning: the prompt has opened the reasoning, so that the response has to close it.
        special_tokens: ids of the tokenizer's special tokens by their text. Markers among them are asked for
            as these tokens; others, and all if None, as text.

    Raises:
        ValueError: if there are no tools, `tool_choice` is none of the above or names none of them, a parameter's
            name cannot be written in the format, a schema is nested too deeply, or `starts_in_reasoning` comes
            without a `reasoning` format.
    """
    if starts_in_reasoning and reasoning is None:
        raise ValueError("starts_in_reasoning=True needs a reasoning format, got reasoning=None; name one")
    chosen = _chosen(tools, tool_choice)
    lark = _Lark(special_tokens or {})
    several = parallel_tool_calls and tool_choice == "required"
    for index, tool in enumerate(chosen):
        lark.rule(f"call_{index}", _call(lark, f"call_{index}", tool, format))
    lark.rule("call", " | ".join(f"call_{index}" for index in range(len(chosen))))
    lark.rule("calls", _calls(lark, format, several))
    lark.rule("start", _reasoning(lark, reasoning, starts_in_reasoning) + "calls")
    return {"grammar": lark.text()}


def structured_after_reasoning(
    form: Mapping[str, Any],
    reasoning: ReasoningFormat,
    *,
    starts_in_reasoning: bool = False,
    special_tokens: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Return the constraint of an answer that may have reasoning before it, which stays free.

    Args:
        form: fields of the engine's structured output, for the answer alone.
        starts_in_reasoning, special_tokens: see `structured_for_tools`.

    Raises:
        ValueError: the form is a grammar, which cannot be put into another one.
    """
    lark = _Lark(special_tokens or {})
    lark.rule("answer", _answer(form))
    lark.rule("start", _reasoning(lark, reasoning, starts_in_reasoning) + "answer")
    return {"grammar": lark.text()}


def _answer(form: Mapping[str, Any]) -> str:
    match dict(form):
        case {"json_object": True}:
            return _json({"type": "object"})
        case {"json_schema": schema}:
            return _json(json.loads(schema) if isinstance(schema, str) else schema)
        case {"choice": choices}:
            return " | ".join(map(_quoted, choices))
        case {"regex": regex}:
            escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], regex, flags=re.DOTALL)
            return f"/{escaped}/"
    raise ValueError("structured_outputs: a grammar and reasoning do not go together; turn the reasoning off")


def _chosen(tools: Sequence[Tool], tool_choice: str | Mapping[str, Any]) -> Sequence[Tool]:
    if not tools:
        raise ValueError(f"tool_choice: {tool_choice!r} needs tools, got none; give tools or leave tool_choice out")
    if tool_choice == "required":
        return tools
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise ValueError(
            'tool_choice: a grammar is for "required" or {"type": "function", "function": {"name": ...}}, '
            f"got {tool_choice!r}"
        )
    chosen = [tool for tool in tools if tool.name == function["name"]]
    if not chosen:
        names = ", ".join(tool.name for tool in tools)
        raise ValueError(f"tool_choice: there is no function {function['name']!r}; name one of tools: {names}")
    return chosen


class _Lark:
    """Collects the rules of a grammar."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self._rules: dict[str, str] = {}

    def rule(self, name: str, body: str) -> None:
        self._rules[name] = body

    def text(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in reversed(self._rules.items()))

    def literal(self, text: str, *markers: str) -> str:
        """Text as it is, with those of the markers that are special tokens as tokens."""
        special = [marker for marker in markers if marker in self._special_tokens]
        if not special:
            return _quoted(text)
        pieces = re.split(f"({'|'.join(map(re.escape, special))})", text)
        return " ".join(self._piece(piece, piece in special) for piece in pieces if piece)

    def up_to(self, name: str, marker: str) -> str:
        """Any text and the first marker behind it; `name` is for the rule that this may take."""
        if marker in self._special_tokens:
            return f"/(?s:.*)/ {self._piece(marker, is_special=True)}"
        pattern = re.escape(marker).replace("/", r"\/")
        self.rule(f"{name}[lazy]", f"/(?s:.*){pattern}/")
        return name

    def _piece(self, piece: str, is_special: bool) -> str:
        return f"<[{self._special_tokens[piece]}]>" if is_special else _quoted(piece)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any) -> str:
    try:
        if isinstance(schema, Mapping):
            schema = {"x-guidance": {"whitespace_pattern": _WHITESPACE}, **_without_prose(schema)}
        return "%json " + json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("tools: the schema of a function's parameters is nested too deeply; flatten it") from None


def _without_prose(schema: Any) -> Any:
    """A schema less what is for readers, and most of its length; grammars may not be long."""
    if isinstance(schema, list):
        return [_without_prose(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    # A property may have one of these names as well, but then stands a schema behind it, no string.
    kept = {key: value for key, value in schema.items() if not (key in _PROSE and isinstance(value, str))}
    return {key: value if key in ("enum", "const") else _without_prose(value) for key, value in kept.items()}


def _arguments(tool: Tool) -> str:
    return _json({"type": "object", **(tool.parameters or {})})


def _call(lark: _Lark, name: str, tool: Tool, form: ToolFormat) -> str:
    """One call of one tool; `name` may begin the names of further rules."""
    match form:
        case ToolFormat.QWEN_XML:
            return _xml_call(lark, name, tool)
        case ToolFormat.MISTRAL_ARGS:
            head = f"{mistral.MARKER}{tool.name}{mistral.ARGS}"
            return f"{lark.literal(head, mistral.MARKER, mistral.ARGS)} {_arguments(tool)}"
        case ToolFormat.HERMES:
            opening = lark.literal(hermes.OPEN + "\n", hermes.OPEN)
            closing = lark.literal("\n" + hermes.CLOSE, hermes.CLOSE)
            return f"{opening} {_object(tool, 'arguments')} {closing}"
        case ToolFormat.LLAMA3_JSON:
            return _object(tool, "parameters")
        case ToolFormat.MISTRAL | ToolFormat.JSON:
            return _object(tool, "arguments")


def _object(tool: Tool, key: str) -> str:
    # Not one JSON schema: the tool's own may refer to its parts from its root.
    head = f'{{"name": "{tool.name}", "{key}": '
    return f"{_quoted(head)} {_arguments(tool)} {_quoted('}')}"


def _calls(lark: _Lark, form: ToolFormat, several: bool) -> str:
    separators = {ToolFormat.HERMES: "\n", ToolFormat.QWEN_XML: "\n", ToolFormat.LLAMA3_JSON: "; "}
    separator = separators.get(form, "" if form is ToolFormat.MISTRAL_ARGS else ", ")
    row = "call" + (f" ({_quoted(separator) if separator else ''} call)*" if several else "")
    if form is ToolFormat.MISTRAL:
        return f'{lark.literal(mistral.MARKER, mistral.MARKER)} " "? "[" {row} "]"'
    if form is ToolFormat.JSON and several:
        return f'call | "[" {row} "]"'
    return row


_UNKEPT_IN_XML = frozenset({"pattern", "minLength", "maxLength", "format"})


def _xml_call(lark: _Lark, name: str, tool: Tool) -> str:
    schema = tool.parameters or {}
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    head = f"{qwen_xml.OPEN}\n{qwen_xml.FUNCTION}{tool.name}>\n"
    parts = [lark.literal(head, qwen_xml.OPEN)]
    for index, key in enumerate(dict.fromkeys([*properties, *required])):
        if not _XML_KEY.fullmatch(key):
            raise ValueError(
                f"tools: parameter {key!r} of {tool.name!r} cannot stand in <parameter=...>; name it without '>', "
                "line breaks and outer spaces"
            )
        rule, opening = f"{name}_{index}", f"{qwen_xml.PARAMETER}{key}>\n"
        value = _xml_value(lark, properties.get(key, {"type": "string"}), schema)
        lark.rule(rule, f"{_quoted(opening)} {value}")
        parts.append(rule if key in required else f"{rule}?")
    parts.append(lark.literal(f"{qwen_xml.FUNCTION_END}\n{qwen_xml.CLOSE}", qwen_xml.CLOSE))
    return " ".join(parts)


def _xml_value(lark: _Lark, schema: Any, root: Mapping[str, Any]) -> str:
    lark.rule("value_end", _quoted(f"\n{qwen_xml.PARAMETER_END}\n"))
    if not qwen_xml.is_string(schema):
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        whole = {**definitions, **schema} if isinstance(schema, Mapping) else schema
        return f"{_json(whole)} value_end"
    choices = qwen_xml.string_choices(schema)
    if choices is None:
        unkept = sorted(_UNKEPT_IN_XML & schema.keys()) if isinstance(schema, Mapping) else []
        if unkept:
            raise ValueError(
                f"tools: {unkept[0]!r} of a string parameter cannot be enforced between XML tags; leave it out, use an "
                'enum, or tool_choice="auto"'
            )
        return lark.up_to("value_text", qwen_xml.PARAMETER_END) + r' "\n"'
    return f"({' | '.join(map(_quoted, choices))}) value_end"


def _reasoning(lark: _Lark, form: ReasoningFormat | None, is_open: bool) -> str:
    if form is None:
        return ""
    lark.rule("reasoning", f"{lark.up_to('thought', form.end)} /\\n{{0,2}}/")
    return "reasoning " if is_open else f"({lark.literal(form.start, form.start)} reasoning)? "
