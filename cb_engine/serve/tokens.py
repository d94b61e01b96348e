"""/tokenize and /detokenize. Both take time: for the workers."""

from __future__ import annotations

from typing import Any

from cb_engine.serve.context import ServerContext
from cb_engine.serve.conversation import conversation_of
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
        ids = model.template.render(conversation_of(request, context))
    answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
    if request.return_token_strs:
        answer["token_strs"] = [model.texts.text(token_id) for token_id in ids]
    return answer


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
