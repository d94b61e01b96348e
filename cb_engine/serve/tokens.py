"""/tokenize and /detokenize. Both take time: for the workers."""

from __future__ import annotations

from typing import Any

from cb_engine.serve.chat_template import Conversation
from cb_engine.serve.context import ServerContext
from cb_engine.serve.errors import bad_request
from cb_engine.serve.protocol.tokens import DetokenizeRequest, TokenizeRequest


def tokenize(request: TokenizeRequest, context: ServerContext) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the chat interface renders it.

    Raises:
        APIError: something is wrong with the request.
    """
    context.check_model(request.model)
    model = context.loaded
    if request.messages is None:
        ids = context.token_ids(request.prompt or "", request.add_special_tokens is not False)
    else:
        ids = _render(request, context)
    answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
    if request.return_token_strs:
        answer["token_strs"] = [model.texts.text(token_id) for token_id in ids]
    return answer


def _render(request: TokenizeRequest, context: ServerContext) -> list[int]:
    if request.chat_template is not None and not context.settings.trust_request_chat_template:
        raise bad_request("chat_template: this server takes no templates from requests", "chat_template")
    return context.loaded.template.render(
        Conversation(
            messages=request.messages or (),
            tools=[tool.model_dump(exclude_none=True) for tool in request.tools or ()],
            template=request.chat_template,
            variables=request.chat_template_kwargs or {},
            add_generation_prompt=(
                not request.continue_final_message
                if request.add_generation_prompt is None
                else request.add_generation_prompt
            ),
            continue_final_message=bool(request.continue_final_message),
        )
    )


def detokenize(request: DetokenizeRequest, context: ServerContext) -> dict[str, Any]:
    """The text of token ids.

    Raises:
        APIError: there are ids that the tokenizer does not know.
    """
    context.check_model(request.model)
    tokenizer = context.loaded.tokenizer
    unknown = next((i for i in request.tokens if i >= len(tokenizer)), None)
    if unknown is not None:
        raise bad_request(f"tokens: {unknown} is outside the tokenizer's vocabulary of {len(tokenizer)}", "tokens")
    return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}
