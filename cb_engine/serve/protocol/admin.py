"""Bodies of admin routes."""

from __future__ import annotations

from cb_engine.serve.protocol.base import RequestModel


class UpdateWeightsRequest(RequestModel):
    """New weights."""

    path: str  # of a safetensors file, or of a folder of them, below --weights-dir
