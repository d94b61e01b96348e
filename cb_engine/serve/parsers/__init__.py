"""A model's text in, content, reasoning and tool calls out; and the grammar that makes a model call a tool.

Pure text: no tokens, no network, no torch. The server makes one parser for each response and feeds it.
"""

from cb_engine.serve.parsers.events import (
    Content,
    Event,
    ParsedMessage,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    collect,
)
from cb_engine.serve.parsers.formats import ReasoningFormat, ToolFormat, detect_reasoning_format, detect_tool_format
from cb_engine.serve.parsers.grammar import structured_after_reasoning, structured_for_tools
from cb_engine.serve.parsers.response import ResponseParser, make_response_parser
from cb_engine.serve.parsers.tools import Tool, validate_tools

__all__ = [
    "Content",
    "Event",
    "ParsedMessage",
    "Reasoning",
    "ReasoningFormat",
    "ResponseParser",
    "Tool",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolFormat",
    "collect",
    "detect_reasoning_format",
    "detect_tool_format",
    "make_response_parser",
    "structured_after_reasoning",
    "structured_for_tools",
    "validate_tools",
]
