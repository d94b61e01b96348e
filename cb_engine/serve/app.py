"""The application: routes, guard and errors put together. Owns nothing that lives longer than it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from cb_engine.config import EngineConfig
from cb_engine.hints import WorkloadHints
from cb_engine.serve.admin import make_admin_router
from cb_engine.serve.context import ServerContext
from cb_engine.serve.errors import APIError
from cb_engine.serve.guard import Guard
from cb_engine.serve.host import EngineHost
from cb_engine.serve.openapi import publish
from cb_engine.serve.page import make_page_router
from cb_engine.serve.routes import BODIES, make_router
from cb_engine.serve.settings import ServeSettings
from cb_engine.version import __version__


def build_app(
    load: Callable[[], tuple[Any, Any]],
    settings: ServeSettings,
    *,
    config: EngineConfig | None = None,
    hints: WorkloadHints | None = None,
) -> FastAPI:
    """A server as an ASGI application. It begins to load the model when it starts.

    Args:
        load: returns a causal LM and its tokenizer; runs in a thread of its own.
        config, hints: of the engine.

    Returns:
        the application; `app.state.context` is what its routes share.
    """
    context = ServerContext(EngineHost(load, settings, config=config, hints=hints), settings)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        context.host.start(context.model_is_there)
        try:
            yield
        finally:
            await context.host.stop()
            context.close()

    app = FastAPI(
        title="cb_engine",
        summary="An OpenAI-compatible server.",
        version=__version__,
        lifespan=life,
        redirect_slashes=False,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.context = context
    for router in (make_router(context), make_admin_router(context), make_page_router(context)):
        app.include_router(router)
    app.add_exception_handler(HTTPException, _say_what_starlette_means)
    publish(app, BODIES)
    app.add_middleware(Guard, settings=settings, metrics=context.metrics)
    if settings.cors_origins:
        # Keys travel in a header, so no credentials of the browser's are wanted.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients have headers of their own
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


async def _say_what_starlette_means(request: Request, error: Exception) -> Response:
    """Routes and methods that there are not, as error objects. All other errors are the guard's."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = {404: "there is no such route", 405: "the route has no such method"}.get(status, "the request failed")
    response = APIError(status, text).response()
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response
