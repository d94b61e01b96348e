"""Conversations into token ids, by the tokenizer's chat template.

Owns the template, what it takes (tools, reasoning effort, variables) and the prompt for tools where it takes none.
Rendering takes time: it is done by the text workers. Templates run in the tokenizer's own sandbox. Special tokens
within what clients say are text and no special tokens, so nobody can begin a turn of somebody else's; that needs a
transformers version whose `apply_chat_template` has `sanitize_control_tokens`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cb_engine.serve.errors import bad_request
from cb_engine.serve.protocol.chat import Message, TextPart

# Arguments of `apply_chat_template`, and what this server itself gives to templates: not for `chat_template_kwargs`.
_RESERVED = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"}
    | {"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}
)
# What a template can meet in messages that its author did not think of.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True)
class Conversation:
    """What a template is to render."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template: str | None = None  # a request's own
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """See the module docstring.

    Args:
        template: in place of the tokenizer's own.
        variables: for the template, unless a conversation brings its own.
    """

    def __init__(self, tokenizer: Any, template: str | None, variables: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self.text = template or _own_template(tokenizer)
        self._known = _variables_of(self.text) if self.text else frozenset()
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._sanitizes = {"sanitize_control_tokens": True} if "sanitize_control_tokens" in parameters else {}
        self._check_variables(self._variables, self._known)

    def render(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation.

        Raises:
            APIError: there is no template, it does not take what is given, or refuses the conversation.
        """
        template = conversation.template or self.text
        if template is None:
            raise bad_request("this model has no chat template; use /v1/completions, or start with --chat-template")
        known = _variables_of(template) if conversation.template else self._known
        self._check_variables(conversation.variables, known)
        variables = {**self._variables, **conversation.variables}
        if conversation.reasoning_effort is not None:
            if "reasoning_effort" not in known:
                raise bad_request("reasoning_effort: the chat template of this model knows none", "reasoning_effort")
            variables["reasoning_effort"] = conversation.reasoning_effort
        messages = _as_dicts(conversation.messages)
        tools = list(conversation.tools) or None
        if tools is not None and "tools" not in known:
            messages, tools = _with_tools_told(messages, tools), None
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                tokenize=True,
                return_dict=True,
                **self._sanitizes,
                **variables,
            )
        except _TEMPLATE_FAULTS as error:
            # What a template says by `raise_exception` is meant for whoever wrote the messages.
            reason = str(error) if isinstance(error, jinja2.TemplateError) else type(error).__name__
            raise bad_request(f"the chat template refuses these messages: {reason}", "messages") from error
        return [int(token_id) for token_id in rendered["input_ids"]]

    @staticmethod
    def _check_variables(variables: Mapping[str, Any], known: frozenset[str]) -> None:
        for name in variables:
            if name in _RESERVED:
                raise bad_request(f"chat_template_kwargs: {name!r} has a field of its own", "chat_template_kwargs")
            if name not in known:
                raise bad_request(
                    f"chat_template_kwargs: the chat template has no variable {name!r}", "chat_template_kwargs"
                )


def _own_template(tokenizer: Any) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):  # named ones, for tools and retrieval for example
        template = template.get("default")
    return template


def _variables_of(template: str) -> frozenset[str]:
    """Names that a template reads from outside.

    Raises:
        APIError: it is no template.
    """
    # Parsed only, never run here; the extensions are those that model templates use.
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_without_generation_marks(template))
    except jinja2.TemplateSyntaxError as error:
        raise bad_request(f"chat_template: line {error.lineno}: {error.message}", "chat_template") from error
    return frozenset(meta.find_undeclared_variables(tree))


def _without_generation_marks(template: str) -> str:
    """transformers' own block tag, which plain Jinja does not know, says nothing about variables."""
    for mark in ("generation", "endgeneration"):
        for opening in ("{%", "{%-"):
            for closing in ("%}", "-%}"):
                template = template.replace(f"{opening} {mark} {closing}", "")
    return template


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content as one text, arguments of calls as objects."""
    return [_as_dict(index, message) for index, message in enumerate(messages)]


def _as_dict(index: int, message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text_of(message.content),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            turn[name] = getattr(message, name)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(index, call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return turn


def _text_of(content: str | list[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _arguments(index: int, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(f"messages[{index}].tool_calls: arguments must be the JSON text of an object", "messages")
    return arguments


_TOOLS_PROMPT = (
    "You can call functions. To call one, answer with a JSON object and nothing else: "
    '{"name": <name of the function>, "arguments": <object of its arguments>}. '
    "To call several, answer with a list of such objects. These are the functions:\n"
)


def _with_tools_told(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: they are told in the system's message, and calls and their
    results are texts."""
    told = _TOOLS_PROMPT + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    plain = [_without_calls(message) for message in messages]
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"The function's result is:\n{message['content']}"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    written = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    return {"role": message["role"], "content": f"{message['content']}\n{written}".strip()}
