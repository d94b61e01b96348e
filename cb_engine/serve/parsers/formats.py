"""In which syntax a model writes tool calls and reasoning, and how to tell from its chat template.

Owns: the names of the formats (also what an operator writes on the command line) and their markers.
Does not know: how they are parsed.
"""

from __future__ import annotations

from enum import StrEnum


class ToolFormat(StrEnum):
    """How a model writes a tool call."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>; Hermes, Qwen 2.5 and 3
    QWEN_XML = "qwen_xml"  # <tool_call><function=...><parameter=...>...; Qwen3-Coder
    LLAMA3_JSON = "llama3_json"  # {"name": ..., "parameters": {...}}, behind <|python_tag|> or not
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    MISTRAL_ARGS = "mistral_args"  # [TOOL_CALLS]name[ARGS]{...}; the same parser reads both
    JSON = "json"  # an answer that is nothing but {"name": ..., "arguments": {...}}, or a list of these

    @property
    def markers(self) -> tuple[str, ...]:
        """What the parser looks for and a tokenizer may have as special tokens, which then have to be in the text."""
        return _TOOL_MARKERS[self]


_TOOL_MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.QWEN_XML: ("<tool_call>", "</tool_call>"),
    ToolFormat.LLAMA3_JSON: ("<|python_tag|>",),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]",),
    ToolFormat.MISTRAL_ARGS: ("[TOOL_CALLS]", "[ARGS]"),
    ToolFormat.JSON: (),
}


class ReasoningFormat(StrEnum):
    """How a model marks what it thinks before it answers."""

    THINK = "think"  # <think> ... </think>
    MISTRAL = "mistral"  # [THINK] ... [/THINK]

    @property
    def start(self) -> str:
        """The marker before the reasoning; in some models the prompt's last one."""
        return _REASONING_MARKERS[self][0]

    @property
    def end(self) -> str:
        """The marker behind the reasoning."""
        return _REASONING_MARKERS[self][1]

    @property
    def markers(self) -> tuple[str, str]:
        """Both."""
        return _REASONING_MARKERS[self]

    def is_open_in(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning, so that the response `starts_in_reasoning`."""
        return prompt.rstrip().endswith(self.start)


_REASONING_MARKERS = {
    ReasoningFormat.THINK: ("<think>", "</think>"),
    ReasoningFormat.MISTRAL: ("[THINK]", "[/THINK]"),
}


def detect_tool_format(chat_template: str | None) -> ToolFormat:
    """Return the format that a chat template shows; plain JSON if it shows none that is known.

    Args:
        chat_template: the Jinja text, or None if the tokenizer has none.
    """
    template = chat_template or ""
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL_ARGS if "[ARGS]" in template else ToolFormat.MISTRAL
    if "<function=" in template and "<parameter=" in template:
        return ToolFormat.QWEN_XML
    if "<tool_call>" in template and "<arg_key>" not in template:  # GLM puts no JSON between the same markers
        return ToolFormat.HERMES
    # Llama's pythonic templates have the tag, or the role, as well, but nowhere the key of a JSON call.
    if '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template):
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.JSON


def detect_reasoning_format(chat_template: str | None) -> ReasoningFormat | None:
    """Return the reasoning format that a chat template shows; None for a model that does not reason.

    Args:
        chat_template: the Jinja text, or None if the tokenizer has none.
    """
    template = chat_template or ""
    return next((form for form in ReasoningFormat if form.start in template or form.end in template), None)
