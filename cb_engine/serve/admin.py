"""Routes for whoever runs the server, or trains the model that it serves; all of them ask for the admin key.

Weights come from safetensors files below one folder, never from the request or from pickles.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from fastapi import APIRouter, Depends
from safetensors import SafetensorError
from safetensors.torch import load_file
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cb_engine.api.manager import ContinuousBatchingManager
from cb_engine.errors import EngineError, EngineStoppedError
from cb_engine.serve.body import read_body
from cb_engine.serve.context import ServerContext
from cb_engine.serve.errors import APIError, bad_request, refusal
from cb_engine.serve.guard import require_admin
from cb_engine.serve.openapi import error_responses, json_route
from cb_engine.serve.pause import Pause
from cb_engine.serve.protocol.admin import UpdateWeightsRequest


def make_admin_router(context: ServerContext) -> APIRouter:
    """All routes for the operator. Whoever asks for any of them has to have the admin key."""

    async def operator(http: Request) -> None:
        require_admin(dict(http.scope["headers"]), context.settings)

    router = APIRouter(dependencies=[Depends(operator)], responses=error_responses(401, 404, 503))
    pause = context.host.pause

    def manager() -> ContinuousBatchingManager:
        return context.host.engine().manager

    @router.post("/pause", summary="Holds the engine; requests wait.")
    async def pause_() -> dict[str, Any]:
        await asyncio.to_thread(_pause, pause, manager(), context.settings.retry_after)
        return {"paused": True}

    @router.post("/resume", summary="Lets it go on.")
    async def resume() -> dict[str, Any]:
        pause.end()
        return {"paused": False}

    @router.post("/reset_prefix_cache", summary="Forgets all cached prefixes.")
    async def reset_prefix_cache() -> dict[str, Any]:
        await asyncio.to_thread(pause.call, manager().reset_prefix_cache)
        return {"reset": True}

    @router.get("/weight_info", summary="Version and shapes of the weights.")
    async def weight_info() -> dict[str, Any]:
        return await asyncio.to_thread(_weight_info, manager(), context.host.model)

    @json_route(router, "/update_weights", UpdateWeightsRequest, "Takes new weights over, between two steps.")
    async def update_weights(http: Request) -> Response:
        body = await read_body(http, UpdateWeightsRequest, context.settings, context.workers)
        engine = manager()
        version = await asyncio.to_thread(_update, engine, pause, context.settings.weights_dir, body)
        return JSONResponse({"weight_version": version})

    return router


def _pause(pause: Pause, manager: ContinuousBatchingManager, retry_after: int) -> None:
    try:
        pause.begin(manager)
    except (EngineError, EngineStoppedError, RuntimeError) as error:  # it has ended since it was asked for
        raise APIError(503, "there is no engine to pause", code="engine_stopped", retry_after=retry_after) from error


def _weight_info(manager: ContinuousBatchingManager, model: torch.nn.Module) -> dict[str, Any]:
    parameters = {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in model.named_parameters()
    }
    return {"weight_version": manager.engine.weight_version, "parameters": parameters}


def _update(manager: ContinuousBatchingManager, pause: Pause, folder: str | None, body: UpdateWeightsRequest) -> int:
    tensors: dict[str, torch.Tensor] = {}
    for file in _files(folder, body.path):
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise bad_request(f"path: {body.path!r} holds a file that is no safetensors file", "path") from error
    try:
        pause.call(lambda: manager.update_weights(tensors))
    except (ValueError, TypeError) as error:
        raise refusal(error, body) from error
    return manager.engine.weight_version


def _files(folder: str | None, path: str) -> list[Path]:
    """The safetensors files that a client means.

    Raises:
        APIError: there are none, or they are not below the folder that the operator has opened.
    """
    if folder is None:
        raise APIError(404, "weights cannot be updated; start the server with --weights-dir", code="no_weights_dir")
    root = Path(folder).resolve()
    try:
        target = (root / path).resolve()
        target.stat()
    except FileNotFoundError:
        pass  # said below
    except (OSError, ValueError) as error:  # too long, or with a NUL
        raise bad_request(f"path: {path!r:.100} is no path", "path") from error
    if not target.is_relative_to(root):
        raise bad_request("path: it leads out of the folder for weights", "path")
    found = sorted(target.glob("*.safetensors")) if target.is_dir() else [target] if target.is_file() else []
    files = [file.resolve() for file in found]  # what was checked is what will be opened
    if any(not file.is_relative_to(root) for file in files):
        raise bad_request("path: it leads out of the folder for weights", "path")
    if not files:
        raise bad_request(f"path: {path!r} holds no safetensors files", "path")
    return files
