"""A model's response, read as it comes: reasoning, content and tool calls.

Owns: which parser reads what, and the ids of calls. Does not know: HTTP, tokens.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from cb_engine.serve.parsers.bare_json import PYTHON_TAG, BareJsonParser
from cb_engine.serve.parsers.events import Content, Event, Reasoning, ToolCallStart, TruncationCheck, merge
from cb_engine.serve.parsers.formats import ReasoningFormat, ToolFormat
from cb_engine.serve.parsers.hermes import HermesParser
from cb_engine.serve.parsers.mistral import MistralParser
from cb_engine.serve.parsers.qwen_xml import QwenXmlParser
from cb_engine.serve.parsers.reasoning import ReasoningSplitter
from cb_engine.serve.parsers.tool_parser import ToolParser
from cb_engine.serve.parsers.tools import Tool

_ALPHANUMERICS = string.ascii_letters + string.digits


class ResponseParser:
    """Turns the text of one response into events; the same events however the text is cut into pieces."""

    def __init__(
        self, splitter: ReasoningSplitter | None, tool_parser: ToolParser | None, *, only_calls: bool = False
    ) -> None:
        """Begin a response; see `make_response_parser`."""
        self._splitter = splitter
        self._tool_parser = tool_parser
        self._only_calls = only_calls
        self.has_called = False  # whether a call has begun; written here alone
        self._truncation = TruncationCheck()
        self._finished = False

    def feed(self, delta: str) -> list[Event]:
        """Take the next piece of text and return what is certain now.

        Args:
            delta: cut anywhere, with the text of special tokens included.

        Raises:
            RuntimeError: after `finish`.
        """
        if self._finished:
            raise RuntimeError("feed() after finish(): make a new parser for each response")
        reasoning, answer = self._splitter.feed(delta) if self._splitter else ("", delta)
        return self._events(reasoning, self._read(answer))

    def finish(self) -> list[Event]:
        """End the response, whether the model ended it or was stopped, and return what was held back."""
        if self._finished:
            return []
        self._finished = True
        reasoning, answer = self._splitter.finish() if self._splitter else ("", "")
        events = self._read(answer)
        if self._tool_parser:
            events += self._tool_parser.finish()
        return self._events(reasoning, events)

    @property
    def is_truncated(self) -> bool:
        """Whether a call has begun whose arguments have not come to their end, or one that had to come has not; final
        after `finish`."""
        return self._truncation.is_truncated or (self._only_calls and not self.has_called)

    def _read(self, answer: str) -> list[Event]:
        if not answer:
            return []
        return self._tool_parser.feed(answer) if self._tool_parser else [Content(answer)]

    def _events(self, reasoning: str, events: list[Event]) -> list[Event]:
        if self._only_calls:  # other text is the beginning of a call that was cut off
            events = [event for event in events if not isinstance(event, Content)]
        for event in events:
            self._truncation.observe(event)
            self.has_called |= isinstance(event, ToolCallStart)
        return merge([*([Reasoning(reasoning)] if reasoning else []), *events])


def make_response_parser(
    *,
    tools: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    starts_in_reasoning: bool = False,
    functions: Sequence[Tool] | None = None,
    only_calls: bool = False,
) -> ResponseParser:
    """Make the parser of one response.

    Args:
        tools: how the model writes tool calls; None if it may call none, so that all of the answer is content.
        reasoning: how the model marks reasoning; None if it does not, so that nothing of it is split off.
        starts_in_reasoning: the prompt ends with reasoning's opening marker (`ReasoningFormat.is_open_in`).
        functions: the request's tools; a call of any other function is content. None: any name will do.
        only_calls: a grammar lets the model write nothing else, but for reasoning.

    Raises:
        ValueError: if `starts_in_reasoning` comes without a `reasoning` format.
    """
    if starts_in_reasoning and reasoning is None:
        raise ValueError("starts_in_reasoning=True needs a reasoning format, got reasoning=None; name one")
    splitter = ReasoningSplitter(reasoning, starts_in_reasoning=starts_in_reasoning) if reasoning else None
    tool_parser = None if tools is None else _make_tool_parser(tools, functions)
    return ResponseParser(splitter, tool_parser, only_calls=only_calls)


def _make_tool_parser(form: ToolFormat, functions: Sequence[Tool] | None) -> ToolParser:
    names = None if functions is None else frozenset(tool.name for tool in functions)
    match form:
        case ToolFormat.HERMES:
            return HermesParser(names, _openai_id)
        case ToolFormat.QWEN_XML:
            return QwenXmlParser(functions, _openai_id)
        case ToolFormat.LLAMA3_JSON:
            return BareJsonParser(PYTHON_TAG, names, _openai_id)
        case ToolFormat.MISTRAL | ToolFormat.MISTRAL_ARGS:
            return MistralParser(names, _mistral_id)
        case ToolFormat.JSON:
            return BareJsonParser(None, names, _openai_id)


def _openai_id() -> str:
    return "call_" + secrets.token_hex(12)


def _mistral_id() -> str:
    # Mistral's chat templates refuse an id of any other form when it comes back with the next turn.
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))
