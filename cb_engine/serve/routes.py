"""Which path leads where, and what the two generating interfaces have in common: prepare, submit, answer."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from cb_engine.api.async_engine import AsyncEngine
from cb_engine.outputs import GenerationOutput
from cb_engine.request import Request
from cb_engine.serve.body import read_body
from cb_engine.serve.chat import prepare_chat
from cb_engine.serve.completions import prepare_completion
from cb_engine.serve.context import ServerContext
from cb_engine.serve.errors import APIError, refusal
from cb_engine.serve.generation import Generation, Sample, Usage
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
from cb_engine.version import __version__

BODIES = (  # for the published description
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    UpdateWeightsRequest,
)

logger = logging.getLogger(__name__)

_SHORT_ANSWER = 512  # tokens

B = TypeVar("B", bound=Any)


class Answer(Protocol):
    """How one interface writes its answers."""

    def whole(self, outputs: Sequence[GenerationOutput], usage: Usage) -> dict[str, Any]:
        """The answer to a request that does not stream, of the terminal outputs of all samples."""

    def chunks(self, generation: Generation, first: Sequence[Sample]) -> AsyncGenerator[bytes, None]:
        """The events of one that does; `first` is the batch that was waited for."""


Prepare = Callable[[B, AsyncEngine, ServerContext, str], Awaitable[tuple[Answer, list[list[Request]]]]]


async def answer(http: HTTPRequest, context: ServerContext, body: B, prepare: Prepare[B], answer_id: str) -> Response:
    """Runs a request through the engine; leaving early, in whatever way, leaves nothing of it there.

    Raises:
        APIError and others: nothing has been sent yet. ClientGoneError: nobody waits any more.
    """
    context.check_model(body.model)
    if body.stream and http.scope["http_version"] == "1.0":
        raise APIError(400, "stream: HTTP/1.0 has no way to send a stream; use HTTP/1.1", param="stream")
    labels = {name: getattr(body, name, None) for name in ("user", "safety_identifier", "metadata")}
    if any(labels.values()):
        logger.info("%s %s", answer_id, {name: value for name, value in labels.items() if value})

    async def before_first_byte() -> Response:
        engine = context.engine()
        try:
            writer, groups = await prepare(body, engine, context, answer_id)
        except (ValueError, TypeError) as error:
            raise refusal(error, body) from error
        generation = Generation(engine, groups, context.settings, context.metrics, context.under_way)
        generation.submit()
        try:
            if not body.stream:
                response = await _whole(writer, generation)
                generation.close()
                return response
            first = await generation.next_batch()  # what fails before the first token gets a status of its own
        except BaseException:
            generation.close()
            raise
        events = writer.chunks(generation, first)
        return EventStream(events, on_end=generation.close, send_timeout=context.settings.send_timeout)

    return await while_connected(http, before_first_byte())


async def _whole(writer: Answer, generation: Generation) -> Response:
    outputs = await generation.all()

    def write() -> Response:
        return JSONResponse(writer.whole(outputs, generation.usage))

    # A long answer takes longer to write than the loop may stand still.
    num_tokens = sum(len(output.generated_tokens) + len(output.prompt_logprobs or ()) for output in outputs)
    return write() if num_tokens <= _SHORT_ANSWER else await asyncio.to_thread(write)


def make_router(context: ServerContext) -> APIRouter:
    """All routes for clients."""
    router = APIRouter()
    _add_generation(router, context)
    _add_texts(router, context)
    _add_reports(router, context)
    return router


def _add_generation(router: APIRouter, context: ServerContext) -> None:
    settings, workers = context.settings, context.workers

    @json_route(router, "/v1/chat/completions", ChatRequest, "Answers a conversation.", streams=True)
    async def chat_completions(http: HTTPRequest) -> Response:
        body = await read_body(http, ChatRequest, settings, workers)
        return await answer(http, context, body, prepare_chat, f"chatcmpl-{uuid.uuid4().hex}")

    @json_route(router, "/v1/completions", CompletionRequest, "Continues prompts.", streams=True)
    async def completions(http: HTTPRequest) -> Response:
        body = await read_body(http, CompletionRequest, settings, workers)
        return await answer(http, context, body, prepare_completion, f"cmpl-{uuid.uuid4().hex}")

    @json_route(router, "/v1/responses", ResponsesRequest, "Answers a conversation, in items.", streams=True)
    async def responses(http: HTTPRequest) -> Response:
        body = await read_body(http, ResponsesRequest, settings, workers)
        return await answer(http, context, body, prepare_response, f"resp_{uuid.uuid4().hex}")


def _add_texts(router: APIRouter, context: ServerContext) -> None:
    settings, workers = context.settings, context.workers

    @json_route(router, "/tokenize", TokenizeRequest, "Text, or a conversation, into token ids.")
    async def tokenize_(http: HTTPRequest) -> Response:
        body = await read_body(http, TokenizeRequest, settings, workers)
        return await workers.run(lambda: JSONResponse(tokenize(body, context)))

    @json_route(router, "/detokenize", DetokenizeRequest, "Token ids into text.")
    async def detokenize_(http: HTTPRequest) -> Response:
        body = await read_body(http, DetokenizeRequest, settings, workers)
        return await workers.run(lambda: JSONResponse(detokenize(body, context)))


def _add_reports(router: APIRouter, context: ServerContext) -> None:
    settings = context.settings

    @router.get("/v1/models", summary="The model that is served.")
    async def models() -> dict[str, Any]:
        names = (settings.model_name, *settings.model_aliases)
        return {"object": "list", "data": [_model_card(name, context) for name in names]}

    @router.get("/v1/models/{name:path}", summary="The same, by its name.", responses=error_responses(404))
    async def model(name: str) -> dict[str, Any]:
        context.check_model(name)
        return _model_card(name, context)

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="200 if requests are taken and answered, else 503 and why.")
    async def health() -> Response:
        found = context.host.health()
        status = {
            "status": "ok" if found.is_ok else "unhealthy",
            "state": found.state,
            "reason": found.reason,
            "paused": context.host.pause.is_on,
        }
        return JSONResponse(status, status_code=200 if found.is_ok else 503)

    @router.get("/metrics", summary="Figures for Prometheus.", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(context.metrics.text(), media_type=CONTENT_TYPE)

    @router.get("/version", summary="The version of cb_engine.")
    async def version() -> dict[str, str]:
        return {"version": __version__}


def _model_card(name: str, context: ServerContext) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(context.host.started_at),
        "owned_by": "cb_engine",
        "root": context.settings.model_name,
        "max_model_len": context.loaded.max_model_len,
    }
