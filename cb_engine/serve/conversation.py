"""What a request says of a conversation, checked and on its way to the template; one for chats and for /tokenize."""

from __future__ import annotations

from cb_engine.serve.chat_template import Conversation
from cb_engine.serve.context import ServerContext
from cb_engine.serve.errors import bad_request
from cb_engine.serve.protocol.chat import ChatRequest, Message
from cb_engine.serve.protocol.tokens import TokenizeRequest


def conversation_of(request: ChatRequest | TokenizeRequest, context: ServerContext) -> Conversation:
    """The conversation of a request.

    Raises:
        APIError: it has more than this server allows.
    """
    tools = request.tools or ()
    most = context.settings.limits.max_tools
    if len(tools) > most:
        raise bad_request(f"tools: {len(tools)} are more than this server's limit of {most}", "tools")
    if request.chat_template is not None and not context.settings.trust_request_chat_template:
        raise bad_request("chat_template: this server takes no templates from requests", "chat_template")
    messages = request.messages or ()
    context.check_length(sum(map(_num_chars, messages)))
    continues = bool(request.continue_final_message)
    return Conversation(
        messages=messages,
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        template=request.chat_template,
        variables=request.chat_template_kwargs or {},
        reasoning_effort=request.reasoning_effort if isinstance(request, ChatRequest) else None,
        add_generation_prompt=not continues if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=continues,
    )


def _num_chars(message: Message) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
