"""Which path leads where, and what the two generating interfaces have in common: prepare, submit, answer."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

import cb_engine
from cb_engine.api.async_engine import AsyncEngine
from cb_engine.request import Request
from cb_engine.serve.body import read_body
from cb_engine.serve.chat import prepare_chat
from cb_engine.serve.completions import prepare_completion
from cb_engine.serve.context import ServerContext
from cb_engine.serve.generation import Generation, Sample
from cb_engine.serve.metrics import CONTENT_TYPE
from cb_engine.serve.openapi import error_responses, json_route
from cb_engine.serve.protocol.admin import UpdateWeightsRequest
from cb_engine.serve.protocol.chat import ChatRequest
from cb_engine.serve.protocol.completions import CompletionRequest
from cb_engine.serve.protocol.responses import ResponsesRequest
from cb_engine.serve.protocol.tokens import DetokenizeRequest, TokenizeRequest
from cb_engine.serve.responses import prepare_response
from cb_engine.serve.sse import EventStream, while_connected
from cb_engine.serve.tokens import detokenize, tokenize

BODIES = (  # for the published description
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    UpdateWeightsRequest,
)

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Any)


class Answer(Protocol):
    """How one interface writes its answers."""

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer to a request that does not stream."""

    def chunks(self, generation: Generation, first: Sequence[Sample]) -> AsyncGenerator[bytes, None]:
        """The events of one that does; `first` is the batch that was waited for."""


Prepare = Callable[[B, AsyncEngine, ServerContext, str], Awaitable[tuple[Answer, list[list[Request]]]]]


async def answer(http: HTTPRequest, context: ServerContext, body: B, prepare: Prepare[B], answer_id: str) -> Response:
    """Runs a request through the engine; leaving early, in whatever way, leaves nothing of it there.

    Raises:
        APIError and others: nothing has been sent yet. ClientGoneError: nobody waits any more.
    """

    labels = {name: getattr(body, name, None) for name in ("user", "safety_identifier", "metadata")}
    if any(labels.values()):
        logger.info("%s %s", answer_id, {name: value for name, value in labels.items() if value})

    async def before_first_byte() -> Response:
        engine = context.host.engine()
        writer, groups = await prepare(body, engine, context, answer_id)
        generation = Generation(engine, groups, context.settings, context.metrics, context.under_way)
        generation.submit()
        try:
            if not body.stream:
                whole = await writer.whole(generation)
                generation.close()
                return JSONResponse(whole)
            first = await generation.next_batch()  # what fails before the first token gets a status of its own
        except BaseException:
            generation.close()
            raise
        return EventStream(writer.chunks(generation, first), on_end=generation.close)

    return await while_connected(http, before_first_byte())


def make_router(context: ServerContext) -> APIRouter:
    """All routes for clients."""
    router = APIRouter()
    settings = context.settings

    @json_route(router, "/v1/chat/completions", ChatRequest, "Answers a conversation.", streams=True)
    async def chat_completions(http: HTTPRequest) -> Response:
        body = await read_body(http, ChatRequest, settings, context.workers)
        return await answer(http, context, body, prepare_chat, f"chatcmpl-{uuid.uuid4().hex}")

    @json_route(router, "/v1/completions", CompletionRequest, "Continues prompts.", streams=True)
    async def completions(http: HTTPRequest) -> Response:
        body = await read_body(http, CompletionRequest, settings, context.workers)
        return await answer(http, context, body, prepare_completion, f"cmpl-{uuid.uuid4().hex}")

    @json_route(router, "/v1/responses", ResponsesRequest, "Answers a conversation, in items.", streams=True)
    async def responses(http: HTTPRequest) -> Response:
        body = await read_body(http, ResponsesRequest, settings, context.workers)
        return await answer(http, context, body, prepare_response, f"resp_{uuid.uuid4().hex}")

    @json_route(router, "/tokenize", TokenizeRequest, "Text, or a conversation, into token ids.")
    async def tokenize_(http: HTTPRequest) -> Response:
        body = await read_body(http, TokenizeRequest, settings, context.workers)
        return JSONResponse(await context.workers.run(tokenize, body, context))

    @json_route(router, "/detokenize", DetokenizeRequest, "Token ids into text.")
    async def detokenize_(http: HTTPRequest) -> Response:
        body = await read_body(http, DetokenizeRequest, settings, context.workers)
        return JSONResponse(await context.workers.run(detokenize, body, context))

    @router.get("/v1/models", summary="The model that is served.")
    async def models() -> dict[str, Any]:
        names = (settings.model_name, *settings.model_aliases)
        return {"object": "list", "data": [_model_card(name, context) for name in names]}

    @router.get("/v1/models/{name:path}", summary="The same, by its name.", responses=error_responses(404))
    async def model(name: str) -> dict[str, Any]:
        context.check_model(name)
        return _model_card(name, context)

    @router.get("/health", summary="200 if requests are taken and answered, else 503 and why.")
    async def health() -> Response:
        found = context.host.health()
        status = {"status": "ok" if found.is_ok else "unhealthy", "state": found.state, "reason": found.reason}
        return JSONResponse(status, status_code=200 if found.is_ok else 503)

    @router.get("/metrics", summary="Figures for Prometheus.", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(context.metrics.text(), media_type=CONTENT_TYPE)

    @router.get("/version", summary="The version of cb_engine.")
    async def version() -> dict[str, str]:
        return {"version": cb_engine.__version__}

    return router


def _model_card(name: str, context: ServerContext) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(context.host.started_at),
        "owned_by": "cb_engine",
        "root": context.settings.model_name,
        "max_model_len": context.loaded.max_model_len,
    }
