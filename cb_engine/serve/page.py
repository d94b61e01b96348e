"""The page at `/`: one file, without a build step, and the figures that it plots."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from cb_engine.metrics import EngineStats
from cb_engine.serve.context import ServerContext

# The page's own script and style are in it; nothing comes from elsewhere, and nobody else may frame it.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_page_router(context: ServerContext) -> APIRouter:
    """The page and its figures."""
    router = APIRouter()
    text = files("cb_engine.serve").joinpath("page.html").read_text(encoding="utf-8")

    @router.get("/", summary="A status page.", response_class=HTMLResponse)
    async def page() -> Response:
        return HTMLResponse(text, headers={"content-security-policy": _POLICY, "cache-control": "no-cache"})

    @router.get("/status", summary="What the status page plots.")
    async def status() -> dict[str, Any]:
        health = context.host.health()
        manager = context.host.manager
        stats = manager.stats() if manager is not None and manager.is_running() else None
        return {
            "model": context.settings.model_name,
            "state": health.state,
            "reason": health.reason,
            "restarts": context.host.num_restarts,
            "stats": None if stats is None else _figures(stats),
        }

    return router


def _figures(stats: EngineStats) -> dict[str, float]:
    """Of the engine's figures those that the page reads: its script has to name each."""
    blocks = stats.live_blocks + stats.cached_blocks + stats.free_blocks
    return {
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "kv_live": stats.live_blocks / max(1, blocks),
        "kv_cached": stats.cached_blocks / max(1, blocks),
        "generated_tokens": stats.generated_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "step_time_ms": stats.step_time_ms,
        "num_steps": stats.num_steps,
        "num_drafts": stats.num_drafts,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_preemptions": stats.num_preemptions,
        "weight_version": stats.weight_version,
    }
