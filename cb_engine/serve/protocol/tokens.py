"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from cb_engine.serve.protocol.base import Entries, RequestModel, SomeEntries, TokenIds
from cb_engine.serve.protocol.chat import Message, Tool


class TokenizeRequest(RequestModel):
    """A text, or a conversation as the chat interface would render it."""

    model: str | None = None
    prompt: str | None = None
    messages: SomeEntries[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Entries[Tool] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        of_chat = {"add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools"}
        foreign = of_chat if self.prompt is not None else {"add_special_tokens"}
        given = sorted(name for name in foreign if getattr(self, name) is not None)
        if given:
            raise ValueError(f"{given[0]} is not for {'prompt' if self.prompt is not None else 'messages'}")
        return self


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: str | None = None
    tokens: TokenIds
